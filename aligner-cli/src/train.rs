//! `aligner train`: a run from its file to its report.

mod answers;
mod length;
mod newest;
mod rollouts;
mod session;
mod steps;
mod summary;
mod warnings;

use std::path::Path;
use std::process::ExitCode;

use crate::arguments::RunFile;
use crate::interrupt::{EXIT_CODE, Interrupt};
use crate::progress::{result, say};
use crate::rundir::Existing;
use crate::{Registry, Run};
pub(crate) use answers::engine_config;
pub(crate) use length::total_steps;
pub(crate) use rollouts::rewards_of;
use session::Session;
pub use summary::Outcome;

/// Train the model of a run file.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    file: RunFile,
    /// Go on from the newest checkpoint of the run's directory; start where there is none.
    #[arg(long)]
    resume: bool,
    /// Remove the files of a run that the directory holds, and start.
    #[arg(long, conflicts_with = "resume")]
    overwrite: bool,
}

impl Arguments {
    fn existing(&self) -> Existing {
        match (self.resume, self.overwrite) {
            (true, _) => Existing::Resume,
            (_, true) => Existing::Overwrite,
            _ => Existing::Refuse,
        }
    }
}

/// How a run ended.
enum Ending {
    /// All steps are done.
    Finished,
    /// A signal came; a checkpoint of this step is written.
    Interrupted(u64),
}

pub(crate) fn run(arguments: &Arguments, registry: &Registry) -> anyhow::Result<ExitCode> {
    let run = arguments.file.load(registry)?;
    if !run.online {
        // A rollout loop computes on several threads: with a pool of this one alone, they would wait for each other.
        crate::join_thread_pool();
    }
    let interrupt = Interrupt::listen()?;
    let mut session = Session::open(run, arguments.existing())?;
    match session.run(&interrupt)? {
        Ending::Finished => {
            let text = session.summary()?;
            result(&text);
            Ok(ExitCode::SUCCESS)
        }
        Ending::Interrupted(step) => {
            say(&format!("interrupted: step {step} is saved; `aligner train … --resume` goes on from there"));
            Ok(ExitCode::from(EXIT_CODE))
        }
    }
}

/// Trains the run of a file from its start, or from its newest checkpoint, to its end, and returns
/// its held-out numbers. The program's `train` does the same and prints them.
///
/// A call of the algorithm, or of a reward, that takes longer than the file's `run.call_timeout_secs` ends the process: nothing
/// else can end such a call.
///
/// # Errors
/// [`crate::Usage`] for mistakes in the file; whatever stops a run.
pub fn train(path: &Path, overrides: &[String], registry: &Registry) -> anyhow::Result<Outcome> {
    let run = Run::load(path, overrides, registry)?;
    let mut session = Session::open(run, Existing::Resume)?;
    session.run(&Interrupt::default())?;
    session.outcome()
}
