//! `cargo xtask bench moe`: a mixture of experts beside a dense model with as many parameters for a token.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;
use clap::Args;

use super::succeed;
use crate::workspace;

#[derive(Args)]
pub(crate) struct Options {
    /// Rounds of each model, in turns.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    succeed(Command::new("cargo").args(["build", "--release", "--workspace", "--example", "bench_moe"]))?;
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace::root().join("target"), PathBuf::from);
    succeed(Command::new(target.join("release/examples/bench_moe")).arg(options.rounds.to_string()))
}
