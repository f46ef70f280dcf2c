//! `cargo xtask bench train`: training steps beside `PyTorch`'s, alternating in one run.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, ensure};
use clap::Args;
use serde_json::Value;

use super::{figure, json_line, median, succeed};
use crate::workspace;

const MODES: [&str; 4] = ["full", "variable", "dpo-live", "dpo-cached"];

/// What to measure with.
#[derive(Args)]
pub(crate) struct Options {
    /// A Python with torch, transformers and numpy.
    #[arg(long, default_value = "python3")]
    python: PathBuf,
    /// How often both sides run, alternating.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Timed repeats of all steps within one run of a side.
    #[arg(long, default_value_t = 2)]
    repeats: usize,
    /// Only this mode: full, variable, dpo-live or dpo-cached.
    #[arg(long)]
    mode: Option<String>,
}

/// One side's figures over the rounds.
#[derive(Default)]
struct Side {
    step_secs: Vec<f64>,
    tokens_per_second: Vec<f64>,
    cpu_secs: Vec<f64>,
    peak_mib: Vec<f64>,
}

impl Side {
    fn add(&mut self, line: &Value) -> Result<()> {
        self.step_secs.push(figure(line, "s_per_step")?);
        self.tokens_per_second.push(figure(line, "tok_s")?);
        self.cpu_secs.push(figure(line, "cpu_median_s")?);
        self.peak_mib.push(figure(line, "peak_rss_mib")?);
        Ok(())
    }
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let root = workspace::root();
    let work = root.join("target/bench");
    let scripts = root.join("xtask/bench");
    let python = |script: &str| {
        let mut command = Command::new(&options.python);
        command.arg(scripts.join(script)).env("HF_HUB_OFFLINE", "1");
        command
    };
    succeed(Command::new("cargo").args(["build", "--release", "--workspace", "--example", "bench_train"]))?;
    succeed(python("data.py").arg(&work))?;
    let (model, data) = (work.join("model"), work.join("data.json"));
    let modes: Vec<&str> =
        MODES.into_iter().filter(|mode| options.mode.as_deref().is_none_or(|m| m == *mode)).collect();
    ensure!(!modes.is_empty(), "no such mode; there are {}", MODES.join(", "));
    println!("| rows | side | s a step | tokens/s | CPU seconds | peak MiB | times faster |");
    println!("|---|---|---|---|---|---|---|");
    for mode in modes {
        let (mut torch, mut ours) = (Side::default(), Side::default());
        for _ in 0..options.rounds {
            let arguments = |command: &mut Command| {
                command.arg(&model).arg(&data).arg(mode).arg(options.repeats.to_string());
            };
            let mut command = Command::new(root.join("target/release/examples/bench_train"));
            arguments(&mut command);
            ours.add(&json_line(&mut command)?)?;
            let mut command = python("torch_train.py");
            arguments(&mut command);
            torch.add(&json_line(&mut command)?)?;
        }
        let faster = median(&torch.step_secs) / median(&ours.step_secs);
        print(mode, "torch", &torch, None);
        print(mode, "aligner", &ours, Some(faster));
    }
    Ok(())
}

fn print(mode: &str, name: &str, side: &Side, faster: Option<f64>) {
    let faster = faster.map_or(String::new(), |ratio| format!("{ratio:.2}"));
    println!(
        "| {mode} | {name} | {:.3} | {:.0} | {:.1} | {:.0} | {faster} |",
        median(&side.step_secs),
        median(&side.tokens_per_second),
        median(&side.cpu_secs),
        median(&side.peak_mib)
    );
}
