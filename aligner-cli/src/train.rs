//! `aligner train`: a run from its file to its report.

mod answers;
mod length;
mod newest;
mod rollouts;
mod session;
mod steps;
mod summary;
mod warnings;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use aligner_core::Communicator;

use crate::arguments::RunFile;
use crate::interrupt::{EXIT_CODE, Interrupt};
use crate::progress::{result, say};
use crate::ranks::Ranks;
use crate::rundir::Existing;
use crate::{Registry, Run, launch};
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
    /// The arguments that say the same to another process.
    pub(crate) fn to_words(&self) -> Vec<OsString> {
        let mut words = vec!["train".into(), self.file.path.clone().into_os_string()];
        for setting in &self.file.overrides {
            words.extend(["--set".into(), setting.into()]);
        }
        let flags = [("--resume", self.resume), ("--overwrite", self.overwrite)];
        words.extend(flags.into_iter().filter(|(_, is_set)| *is_set).map(|(flag, _)| flag.into()));
        words
    }

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

impl Arguments {
    /// The run, if its file is without mistakes and for so many ranks.
    pub(crate) fn check(&self, ranks: usize, registry: &Registry) -> anyhow::Result<Run> {
        let run = self.file.load(registry)?;
        let mesh = run.config.mesh.clone().unwrap_or_default();
        mesh.mesh(ranks).map_err(|error| run.blame(error))?;
        Ok(run)
    }

    /// One of several ranks, number `local` on its machine, from the start to the end of the run.
    pub(crate) fn run_rank(
        &self,
        all: Arc<dyn Communicator>,
        local: usize,
        interrupt: &Interrupt,
        registry: &Registry,
    ) -> anyhow::Result<ExitCode> {
        let run = self.file.load(registry)?;
        let mesh = run.config.mesh.clone().unwrap_or_default();
        let ranks = Ranks::on(&mesh, all, local).map_err(|error| run.blame(error))?;
        drive(run, self.existing(), ranks, interrupt)
    }
}

pub(crate) fn run(arguments: &Arguments, registry: &Registry) -> anyhow::Result<ExitCode> {
    let run = arguments.file.load(registry)?;
    if let Some(code) = launch::as_one_of_many(arguments, &run.config, registry)? {
        return Ok(code);
    }
    if let Some(mesh) = &run.config.mesh {
        mesh.mesh(1).map_err(|error| run.blame(error))?;
    }
    if !run.online {
        // A rollout loop computes on several threads: with a pool of this one alone, they would wait for each other.
        crate::join_thread_pool();
    }
    drive(run, arguments.existing(), Ranks::one(), &Interrupt::listen()?)
}

fn drive(run: Run, existing: Existing, ranks: Ranks, interrupt: &Interrupt) -> anyhow::Result<ExitCode> {
    let is_main = ranks.is_main();
    let mut session = Session::open(run, existing, ranks)?;
    match session.run(interrupt)? {
        _ if !is_main => Ok(ExitCode::SUCCESS),
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
    let mut session = Session::open(run, Existing::Resume, Ranks::one())?;
    session.run(&Interrupt::default())?;
    session.outcome()
}
