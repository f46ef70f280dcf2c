//! `cargo xtask ci`: everything that a change must pass, each step timed and named.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use toml::{Table, Value};

use crate::{tidy, workspace};

#[derive(Args)]
pub(crate) struct Options {
    /// Steps to leave out, as `test,doctest`.
    #[arg(long, value_delimiter = ',', value_enum)]
    skip: Vec<Step>,
    /// The only steps to run.
    #[arg(long, value_delimiter = ',', value_enum)]
    only: Vec<Step>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Step {
    /// rustfmt agrees with every file.
    Fmt,
    /// The house rules.
    Tidy,
    /// No lint is violated, in tests and benches either.
    Clippy,
    /// Unit and integration tests, under nextest where it is installed.
    Test,
    /// Ranks as processes, under `mpirun`.
    Mpi,
    /// The examples in the documentation compile and run.
    Doctest,
    /// The documentation builds without a warning.
    Doc,
    /// Licences, duplicate bans and sources of the dependency tree.
    Deny,
    /// The optional features type-check.
    Features,
    /// The package outside the workspace passes its test and trains.
    Example,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let mut times = Vec::new();
    for &step in Step::value_variants() {
        let asked = options.only.is_empty() || options.only.contains(&step);
        if !asked || options.skip.contains(&step) {
            continue;
        }
        println!("==> {}", name(step));
        let start = Instant::now();
        let result = step.run();
        let took = start.elapsed();
        times.push((step, took));
        if let Err(error) = result {
            print_times(&times);
            return Err(error.context(format!("step `{}` failed", name(step))));
        }
    }
    print_times(&times);
    println!("all steps passed");
    Ok(())
}

impl Step {
    fn run(self) -> Result<()> {
        match self {
            Self::Fmt => cargo(&["fmt", "--all", "--check"]),
            Self::Tidy => tidy::run(),
            Self::Clippy => {
                cargo(&["clippy", "--release", "--workspace", "--all-targets", "--", "-D", "warnings"])
            }
            Self::Test if installed("nextest") => cargo(&["nextest", "run", "--release", "--workspace"]),
            Self::Test => cargo(&["test", "--release", "--workspace", "--lib", "--bins", "--tests"]),
            Self::Mpi => cargo(&[
                "test",
                "--release",
                "--workspace",
                "--features",
                "aligner-parallel/mpi",
                "--test",
                "mpi",
            ]),
            Self::Doctest => cargo(&["test", "--release", "--workspace", "--doc"]),
            Self::Doc => documentation(),
            Self::Deny => deny(),
            Self::Features => features(),
            Self::Example => example(),
        }
    }
}

fn documentation() -> Result<()> {
    let mut command = cargo_command(&["doc", "--release", "--no-deps", "--workspace"]);
    run_command(command.env("RUSTDOCFLAGS", "-D warnings"))
}

fn deny() -> Result<()> {
    if !installed("deny") {
        bail!("cargo-deny is not installed; `cargo install cargo-deny --locked` brings it");
    }
    cargo(&["deny", "check", "bans", "licenses", "sources"])
}

/// Parts of `cuda`, or of use with LLVM only: `cargo xtask cube` builds and runs them; and what `cargo xtask nccl` does.
const CHECKED_ELSEWHERE: [&str; 3] = ["cube", "cube-cpu", "nccl-host"];

/// Type-checks the workspace with all optional features, each switched on in every crate that has it; it
/// is never linked.
///
/// `DOCS_RS` makes the build script below `burn/cuda` skip its download of LLVM, which a type check
/// does not need.
fn features() -> Result<()> {
    let mut full_names = Vec::new();
    for member in workspace::members()? {
        let own = member.features.iter().filter(|name| !CHECKED_ELSEWHERE.contains(&name.as_str()));
        full_names.extend(own.map(|feature| format!("{}/{feature}", member.name)));
    }
    let features = full_names.join(",");
    println!("    --features {features}");
    let mut command = cargo_command(&["check", "--release", "--workspace", "--features", &features]);
    run_command(command.env("DOCS_RS", "1"))
}

/// Tests and runs the package outside the workspace, from its own directory, as its author would; but what
/// it depends on is not compiled again where the workspace has compiled it.
fn example() -> Result<()> {
    let directory = workspace::root().join("examples/custom_algorithm");
    let target = workspace::root().join("target");
    let profile = profile_outside(&target)?;
    for arguments in [
        &["test", "--release", "--locked"][..],
        &["run", "--release", "--locked", "--", "train", "run.toml", "--overwrite"],
        &["run", "--release", "--locked", "--bin", "gspo", "--", "check-algorithm", "gspo.toml"],
        &["run", "--release", "--locked", "--bin", "gspo", "--", "train", "gspo.toml", "--overwrite"],
    ] {
        let mut command = Command::new("cargo");
        command.arg("--config").arg(&profile).args(arguments).current_dir(&directory);
        run_command(command.env("CARGO_TARGET_DIR", &target))?;
    }
    Ok(())
}

/// Writes the workspace's profile as a configuration for a package outside of it, to which the workspace's
/// members are dependencies like any other.
fn profile_outside(target: &Path) -> Result<PathBuf> {
    let manifest = workspace::root().join("Cargo.toml");
    let text = fs::read_to_string(&manifest).with_context(|| manifest.display().to_string())?;
    let mut table: Table = toml::from_str(&text).with_context(|| manifest.display().to_string())?;
    let mut profile = table.remove("profile").context("the workspace has no profile")?;
    let packages = profile.get_mut("release").and_then(|release| release.get_mut("package"));
    let packages = packages.and_then(Value::as_table_mut).context("the release profile has no packages")?;
    for member in workspace::members()? {
        let own = packages.entry(member.name).or_insert_with(|| Value::Table(Table::new()));
        if let Some(own) = own.as_table_mut() {
            own.entry("opt-level").or_insert(Value::Integer(3));
        }
    }
    let path = target.join("profile.toml");
    let config = Table::from_iter([("profile".to_owned(), profile)]);
    fs::write(&path, toml::to_string(&config)?).with_context(|| path.display().to_string())?;
    Ok(path)
}

fn cargo_command(arguments: &[&str]) -> Command {
    let mut command = Command::new("cargo");
    command.args(arguments).current_dir(workspace::root());
    command
}

fn cargo(arguments: &[&str]) -> Result<()> {
    run_command(&mut cargo_command(arguments))
}

fn run_command(command: &mut Command) -> Result<()> {
    let program = format!("{command:?}");
    let status = command.status().with_context(|| format!("cannot start {program}"))?;
    if !status.success() {
        bail!("{program}: {status}");
    }
    Ok(())
}

/// Whether `cargo <subcommand>` is there.
fn installed(subcommand: &str) -> bool {
    let output = cargo_command(&[subcommand, "--version"]).output();
    output.is_ok_and(|output| output.status.success())
}

fn name(step: Step) -> String {
    step.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

fn print_times(times: &[(Step, Duration)]) {
    for (step, took) in times {
        println!("{:>10}  {:>7.1} s", name(*step), took.as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_command_is_named() {
        let message = run_command(&mut Command::new("false")).unwrap_err().to_string();
        assert!(message.contains("false") && message.contains('1'), "{message}");
    }

    #[test]
    fn every_step_has_a_name_for_skip() {
        for &step in Step::value_variants() {
            assert_eq!(Step::from_str(&name(step), false), Ok(step));
        }
    }
}
