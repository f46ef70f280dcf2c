//! `aligner launch`: a run on several ranks of one machine, a thread or a process each.

mod process;
mod processes;

use std::process::ExitCode;

use aligner_core::{Communicator, Error};
use aligner_parallel::{ThreadComm, with_device};
use anyhow::ensure;

use crate::interrupt::Interrupt;
use crate::progress::{self, say};
use crate::{Registry, Usage, train};
pub(crate) use process::as_one_of_many;

/// Run a command on several ranks of this machine.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// How many ranks: the product of the sizes in the run file's `[mesh]`.
    #[arg(long)]
    ranks: usize,
    /// Give each rank a process of its own, in place of a thread; they talk over TCP, within this machine.
    #[arg(long)]
    processes: bool,
    /// The command.
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Train(train::Arguments),
}

pub(crate) fn run(arguments: &Arguments, registry: &Registry) -> anyhow::Result<ExitCode> {
    let Command::Train(train) = &arguments.command;
    ensure!(arguments.ranks > 0, Usage("--ranks: expected at least 1, got 0".into()));
    // What is wrong with the file is said once.
    let checked = train.check(arguments.ranks, registry)?;
    if arguments.processes && arguments.ranks > 1 {
        return processes::run(arguments.ranks, train);
    }
    let interrupt = Interrupt::listen()?;
    let ended = ThreadComm::run(arguments.ranks, |comm| {
        progress::hush(!comm.is_main());
        let local = comm.rank();
        let all = with_device(comm, checked.config.cuda_of_rank(local))?;
        Ok(train.run_rank(all, local, &interrupt, registry))
    });
    let ended =
        ended.into_iter().enumerate().map(|(rank, ended)| (rank, ended.map_err(Into::into).flatten()));
    let mut failures = Vec::new();
    let mut code = ExitCode::SUCCESS;
    for (rank, ended) in ended {
        match ended {
            Ok(of_rank) if rank == 0 => code = of_rank,
            Ok(_) => {}
            Err(error) => failures.push((rank, error)),
        }
    }
    // A rank that failed by itself is why the others did not meet it.
    let is_cause =
        |error: &anyhow::Error| !matches!(error.downcast_ref::<Error>(), Some(Error::Collective(_)));
    failures.sort_by_key(|(rank, error)| (!is_cause(error), *rank));
    let mut failures = failures.into_iter();
    let Some((rank, first)) = failures.next() else { return Ok(code) };
    let said = format!("{first:#}");
    let mut alike = 1;
    for (other, error) in failures.filter(|(_, error)| is_cause(error)) {
        let text = format!("{error:#}");
        if text == said {
            alike += 1;
        } else {
            say(&format!("rank {other}: {text}"));
        }
    }
    // What every rank says is not a rank's own.
    Err(if alike == arguments.ranks { first } else { first.context(format!("rank {rank}")) })
}
