//! This process as one rank of several, which a launcher has started.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use aligner_core::Communicator;
use aligner_parallel::{Rendezvous, TcpComm, local_rank, with_device};

use crate::interrupt::Interrupt;
use crate::progress::{self, say};
use crate::{Registry, RunConfig, Usage, train};

/// Trains as one of the processes that a launcher has started, if one has: as `MASTER_ADDR` and its like say,
/// or MPI's variables.
pub(crate) fn as_one_of_many(
    train: &train::Arguments,
    config: &RunConfig,
    registry: &Registry,
) -> anyhow::Result<Option<ExitCode>> {
    let mesh = config.mesh.as_ref();
    #[cfg(feature = "mpi")]
    if mesh.is_some() && is_under_mpi() && std::env::var_os("MASTER_ADDR").is_none() {
        let all = aligner_parallel::MpiComm::start()?;
        let local = local_rank()?.unwrap_or(all.rank());
        let all = with_device(all, config.cuda_of_rank(local))?;
        return Ok(Some(run(&all, local, train, registry)));
    }
    let found = Rendezvous::of_environment().map_err(|error| Usage(error.to_string()))?;
    let Some(rendezvous) = found else { return Ok(None) };
    let deadline = Duration::from_secs_f64(mesh.cloned().unwrap_or_default().deadline_secs);
    let all = TcpComm::join(&Rendezvous { deadline, ..rendezvous })?;
    let local = local_rank()?.unwrap_or(all.rank());
    let all = with_device(all, config.cuda_of_rank(local))?;
    Ok(Some(run(&all, local, train, registry)))
}

/// Whether MPI has started this process: as its launchers, Slurm's PMIx and the MPI operator say.
#[cfg(feature = "mpi")]
fn is_under_mpi() -> bool {
    ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"].iter().any(|name| std::env::var_os(name).is_some())
}

fn run(all: &Arc<dyn Communicator>, local: usize, train: &train::Arguments, registry: &Registry) -> ExitCode {
    let (rank, size) = (all.rank(), all.size());
    progress::hush(!all.is_main());
    let listen = || Interrupt::listen().map_err(anyhow::Error::from);
    let ended = train
        .check(size, registry)
        .and_then(|_| listen())
        .and_then(|interrupt| train.run_rank(all.clone(), local, &interrupt, registry));
    progress::hush(false);
    ended.unwrap_or_else(|error| {
        let is_usage = error.is::<Usage>();
        if rank == 0 || !is_usage {
            // Before the others hear that this rank leaves: their launcher may end it then.
            say(&format!("error: rank {rank} of {size}: {error:#}"));
        }
        ExitCode::from(if is_usage { 2 } else { 1 })
    })
}
