//! `cargo xtask bench`: what our steps take, beside `PyTorch`'s and beside slower forms of themselves.

mod balance;
mod moe;
mod rlhf;
mod train;

use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Subcommand};
use serde_json::Value;

#[derive(Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Options {
    #[command(subcommand)]
    task: Option<Task>,
    #[command(flatten)]
    train: train::Options,
}

#[derive(Subcommand)]
enum Task {
    /// Training steps beside `PyTorch`'s, alternating in one run: what `bench` alone does too.
    Train(train::Options),
    /// One step of PPO, from a naive form to ours, one optimisation after the other; writes docs/pictures.
    Rlhf(rlhf::Options),
    /// How long ranks wait for each other while they draw, prompts split in advance or taken; writes docs/pictures.
    Balance(balance::Options),
    /// What a token takes in a mixture of experts, beside a dense model with as many parameters for it.
    Moe(moe::Options),
}

pub(crate) fn run(options: &Options) -> Result<()> {
    match &options.task {
        None => train::run(&options.train),
        Some(Task::Train(options)) => train::run(options),
        Some(Task::Rlhf(options)) => rlhf::run(options),
        Some(Task::Balance(options)) => balance::run(options),
        Some(Task::Moe(options)) => moe::run(options),
    }
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn succeed(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(status.success(), "{command:?} ended with {status}");
    Ok(())
}

/// The last line of a command's output, as JSON.
fn json_line(command: &mut Command) -> Result<Value> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    if !output.status.success() {
        bail!("{command:?} ended with {}:\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    let text = String::from_utf8(output.stdout)?;
    let line = text.lines().last().with_context(|| format!("{command:?} printed nothing"))?;
    serde_json::from_str(line).with_context(|| format!("not JSON: {line}"))
}

/// The number called `name` of a line.
fn figure(line: &Value, name: &str) -> Result<f64> {
    line[name].as_f64().with_context(|| format!("no number `{name}` in {line}"))
}
