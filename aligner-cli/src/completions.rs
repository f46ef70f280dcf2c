//! `aligner completions`: completion scripts for shells.

use clap::CommandFactory as _;

/// Print a completion script for a shell.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The shell.
    shell: clap_complete::Shell,
}

pub(crate) fn run(arguments: &Arguments) {
    let mut command = crate::arguments::Arguments::command();
    // The generator panics where its writer fails, as a closed pipe does.
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut command, "aligner", &mut script);
    crate::progress::result(String::from_utf8_lossy(&script).trim_end());
}
