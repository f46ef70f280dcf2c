//! `cargo xtask cube`: the accelerator kernels on `CubeCL`'s runtime for processors, and the engine on them.
//!
//! A slow check: it compiles `CubeCL` and links LLVM, in a target directory of its own.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::workspace;

#[derive(Args)]
pub(crate) struct Options {
    /// Threads of the compiler.
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Where LLVM stands, for those who have it there: a directory as `XDG_DATA_HOME` names it.
    #[arg(long)]
    data_home: Option<PathBuf>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let llvm = llvm(options.data_home.as_deref())?;
    let cargo = |task: &str, chosen: &[&str]| {
        let mut command = cargo(task, &llvm, options.jobs);
        command.args(chosen);
        command
    };
    succeed(cargo("test", &["--lib"]).args(["--", "cube::"]))?;
    succeed(&mut cargo("test", &["--test=accelerator"]))?;
    succeed(&mut cargo("build", &["--example=check_accelerator"]))?;
    succeed(Command::new(target().join("release/examples/check_accelerator")).arg("cpu"))
}

/// Where `CubeCL` and what stands on it is compiled.
pub(crate) fn target() -> PathBuf {
    workspace::root().join("target/cube")
}

/// Cargo with this LLVM, for the crates that use accelerators and with the features for all of them each time: other
/// choices would compile their dependencies again.
pub(crate) fn cargo(task: &str, llvm: &Path, jobs: usize) -> Command {
    let mut command = Command::new("cargo");
    command.args([task, "--release", "-paligner-core", "-paligner-infer", "-paligner-algos"]);
    command.arg("--features=aligner-algos/cube-cpu,aligner-algos/nccl").arg(format!("-j{jobs}"));
    command.current_dir(workspace::root()).env("XDG_DATA_HOME", llvm).env("CARGO_TARGET_DIR", target());
    command
}

/// A directory as `XDG_DATA_HOME` names it, in which `CubeCL`'s build finds an LLVM.
///
/// # Errors
/// None is there, and none can be unpacked.
pub(crate) fn llvm(given: Option<&Path>) -> Result<PathBuf> {
    if let Some(given) = given {
        return Ok(given.to_path_buf());
    }
    let place = workspace::root().join("target/llvm");
    let mut script = Command::new("sh");
    succeed(script.arg(workspace::root().join("xtask/llvm_standin.sh")).arg(&place))?;
    Ok(place)
}

/// Runs a program to its end.
///
/// # Errors
/// One that does not start, or that fails.
pub(crate) fn succeed(command: &mut Command) -> Result<()> {
    let program = format!("{command:?}");
    let status = command.status().with_context(|| format!("cannot start {program}"))?;
    if !status.success() {
        bail!("{program}: {status}");
    }
    Ok(())
}
