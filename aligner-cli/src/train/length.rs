//! How long a run is, and whether that goes with its rows and its warmup.

use aligner_core::Error;
use aligner_core::optim::Schedule;

use crate::Run;

/// Optimizer steps of the whole run on `rows` usable rows.
///
/// # Errors
/// [`crate::Usage`] where a step asks for more rows than there are, or where the warmup takes all steps.
pub(crate) fn total_steps(run: &Run, rows: usize) -> anyhow::Result<u64> {
    let section = &run.config.run;
    let batch = section.batch_size;
    if batch > rows {
        let message = format!("{batch} rows a step, but only {rows} rows to train on");
        return Err(run.blame(Error::setting("run.batch_size", message)));
    }
    let by_epochs = || (section.epochs.unwrap_or(1.0) * rows as f64 / batch as f64).ceil() as u64;
    let total = section.steps.map_or_else(by_epochs, |steps| steps as u64);
    warmup(run, total)?;
    Ok(total)
}

/// A warmup in steps that does not end is a mistake. A share of a few steps is rounded up: that is said.
fn warmup(run: &Run, total: u64) -> anyhow::Result<()> {
    let learner = &run.config.learner;
    let warmup = learner.warmup(total);
    if warmup < total || warmup == 0 || learner.schedule == Schedule::Constant {
        return Ok(());
    }
    let message =
        format!("{warmup} steps of warmup in a run of {total}: the learning rate never gets to its peak");
    if learner.warmup_steps > 0 {
        return Err(run.blame(Error::setting("learner.warmup_steps", message)));
    }
    tracing::warn!("learner.warmup_ratio = {}: {message}", learner.warmup_ratio);
    Ok(())
}
