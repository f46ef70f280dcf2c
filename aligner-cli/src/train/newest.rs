//! What to do where the newest checkpoint is damaged.

use aligner_core::weights::{AdapterCheckpoint, Checkpoint, read_metadata};
use aligner_data::LoaderState;

use crate::Usage;
use crate::rundir::{Checkpoints, RunDir};

/// An error of reading the newest checkpoint, with the way out; other errors as they are.
pub(super) fn blamed(dir: &RunDir, error: impl Into<anyhow::Error>) -> anyhow::Error {
    let error = error.into();
    let Some(newest) = dir.newest_step() else { return error };
    let checkpoints = dir.checkpoints();
    if error.is::<Usage>() || is_whole(&checkpoints, newest) {
        return error;
    }
    let older = checkpoints.steps().into_iter().rev().skip(1).find(|step| is_whole(&checkpoints, *step));
    let path = checkpoints.path(newest);
    let advice = match older {
        Some(step) => format!(
            "that of step {step} is whole: move {} away and `--resume` goes on from there",
            path.display()
        ),
        None => "no other one is whole: `--overwrite` starts the run anew".to_string(),
    };
    anyhow::anyhow!("{error:#}\nthe newest checkpoint is damaged; {advice}")
}

/// Whether all parts of a checkpoint can be read, as far as lengths and headers tell.
fn is_whole(checkpoints: &Checkpoints, step: u64) -> bool {
    let path = checkpoints.path(step);
    checkpoints.state::<LoaderState>(step).is_ok()
        && (Checkpoint::open(&path).is_ok() || AdapterCheckpoint::open(&path).is_ok())
        && read_metadata(&Checkpoints::learner(&path).join("optimizer.safetensors")).is_ok()
}
