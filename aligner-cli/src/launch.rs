//! `aligner launch`: a run on several ranks of one machine, a thread each.

use std::process::ExitCode;
use std::sync::Arc;

use aligner_core::{Communicator, Error};
use aligner_parallel::ThreadComm;
use anyhow::ensure;

use crate::interrupt::Interrupt;
use crate::progress::{self, say};
use crate::{Registry, Usage, train};

/// Run a command on several ranks of this machine.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// How many ranks: the product of the sizes in the run file's `[mesh]`.
    #[arg(long)]
    ranks: usize,
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
    train.check(arguments.ranks, registry)?;
    let interrupt = Interrupt::listen()?;
    let ended = ThreadComm::run(arguments.ranks, |comm| {
        progress::hush(!comm.is_main());
        Ok(train.run_rank(Arc::new(comm), &interrupt, registry))
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

/// Whether MPI has started this process: as its launchers, Slurm's PMIx and the MPI operator say.
#[cfg(feature = "mpi")]
pub(crate) fn is_under_mpi() -> bool {
    ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"].iter().any(|name| std::env::var_os(name).is_some())
}

/// Trains as one of the processes that MPI has started.
#[cfg(feature = "mpi")]
pub(crate) fn under_mpi(train: &train::Arguments, registry: &Registry) -> anyhow::Result<ExitCode> {
    let all: Arc<dyn Communicator> = Arc::new(aligner_parallel::MpiComm::start()?);
    let (rank, size) = (all.rank(), all.size());
    progress::hush(!all.is_main());
    let ended = train
        .check(size, registry)
        .and_then(|()| train.run_rank(all.clone(), &Interrupt::listen()?, registry));
    progress::hush(false);
    Ok(ended.unwrap_or_else(|error| {
        let is_usage = error.is::<Usage>();
        if rank == 0 || !is_usage {
            // Before the others hear that this rank leaves: MPI's launcher may end it then.
            say(&format!("error: rank {rank} of {size}: {error:#}"));
        }
        ExitCode::from(if is_usage { 2 } else { 1 })
    }))
}
