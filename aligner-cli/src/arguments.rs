//! The arguments of the program; each command's own stand in its file.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::{
    Registry, chat, check_algorithm, completions, convert, eval, fetch, generate, inspect, launch, merge,
    plan, serve, simulate, train,
};

/// Aligns language models: supervised fine-tuning, reward models, preference optimisation, reinforcement learning.
#[derive(Debug, Parser)]
#[command(name = "aligner", version, propagate_version = false, max_term_width = 100)]
pub(crate) struct Arguments {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
    /// Say more on standard error; twice for everything. `RUST_LOG` does the same more finely.
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Train(train::Arguments),
    Launch(launch::Arguments),
    Eval(eval::Arguments),
    Generate(generate::Arguments),
    Chat(chat::Arguments),
    Serve(serve::Arguments),
    Inspect(inspect::Arguments),
    Plan(plan::Arguments),
    Simulate(simulate::Arguments),
    CheckAlgorithm(check_algorithm::Arguments),
    Merge(merge::Arguments),
    Convert(convert::Arguments),
    Fetch(fetch::Arguments),
    Completions(completions::Arguments),
}

impl Command {
    pub(crate) fn run(self, registry: &Registry) -> anyhow::Result<ExitCode> {
        match self {
            Self::Train(arguments) => train::run(&arguments, registry),
            Self::Launch(arguments) => launch::run(&arguments, registry),
            Self::Eval(arguments) => eval::run(&arguments, registry).map(done),
            Self::Generate(arguments) => generate::run(&arguments).map(done),
            Self::Chat(arguments) => chat::run(&arguments).map(done),
            Self::Serve(arguments) => serve::run(&arguments).map(done),
            Self::Inspect(arguments) => inspect::run(&arguments, registry).map(done),
            Self::Plan(arguments) => plan::run(&arguments, registry).map(done),
            Self::Simulate(arguments) => simulate::run(&arguments).map(done),
            Self::CheckAlgorithm(arguments) => check_algorithm::run(&arguments, registry).map(done),
            Self::Merge(arguments) => merge::run(&arguments).map(done),
            Self::Convert(arguments) => convert::run(&arguments).map(done),
            Self::Fetch(arguments) => fetch::run(&arguments).map(done),
            Self::Completions(arguments) => {
                completions::run(&arguments);
                Ok(ExitCode::SUCCESS)
            }
        }
    }
}

fn done((): ()) -> ExitCode {
    ExitCode::SUCCESS
}

/// Parses the arguments, the program's name first.
pub(crate) fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Arguments, clap::Error> {
    Arguments::try_parse_from(arguments)
}

/// The run file and its overrides: shared by the commands that read one.
#[derive(Debug, clap::Args)]
pub(crate) struct RunFile {
    /// The run file.
    #[arg(value_name = "RUN.TOML")]
    pub(crate) path: std::path::PathBuf,
    /// Override a key of the run file, as in `--set algorithm.dpo.beta=0.1`; may be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(crate) overrides: Vec<String>,
}

impl RunFile {
    /// Reads the file.
    pub(crate) fn load(&self, registry: &Registry) -> anyhow::Result<crate::Run> {
        crate::Run::load(&self.path, &self.overrides, registry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commands_are_consistent() {
        <Arguments as clap::CommandFactory>::command().debug_assert();
    }
}
