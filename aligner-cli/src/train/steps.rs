//! The loop over optimizer steps.

use std::collections::BTreeMap;
use std::time::Instant;

use super::Ending;
use super::session::Session;
use crate::interrupt::Interrupt;
use crate::progress::Steps;

/// What a step gave.
#[derive(Debug, Clone, Default)]
pub(super) struct Done {
    /// Its loss or its reward.
    pub(super) value: f64,
    pub(super) tokens_per_second: f64,
    /// Why the run is to end with it.
    pub(super) stop: Option<String>,
}

impl Session {
    /// Steps from where the learner stands to the last, with evaluations and checkpoints on the way.
    pub(super) fn steps(&mut self, interrupt: &Interrupt) -> anyhow::Result<Ending> {
        let what = if self.rollouts.is_some() { "reward" } else { "loss" };
        let mut progress = Steps::start(what, self.steps_done(), self.total);
        while self.steps_done() < self.total {
            let done = if self.rollouts.is_some() { self.rollout()? } else { self.step()? };
            let step = self.steps_done();
            progress.done(step, done.value, done.tokens_per_second);
            let last = step == self.total;
            let config = &self.run.config.run;
            let save = due(step, config.save_every);
            // Every planned checkpoint is measured, else the best could be one that is not there.
            let measured = save && config.eval_every > 0;
            if due(step, config.eval_every) || measured || last {
                self.evaluate()?;
            }
            // Read once: a signal between two readings would stop a run that has saved nothing.
            let asked = self.ranks.any(interrupt.asked())?;
            let stopped = self.ranks.any(done.stop.is_some())?;
            if save || last || asked || stopped {
                self.save()?;
            }
            if stopped {
                anyhow::bail!(done.stop.unwrap_or_else(|| "another rank has stopped the run".into()));
            }
            if asked && !last {
                return Ok(Ending::Interrupted(step));
            }
        }
        Ok(Ending::Finished)
    }

    /// One step on rows.
    fn step(&mut self) -> anyhow::Result<Done> {
        let started = Instant::now();
        let mut groups = self.ranks.of_batches(self.loader.next(self.run.config.run.batch_size)?);
        if let Some(reference) = &mut self.reference {
            reference.fill(&mut groups)?;
        }
        let algorithm = self.run.guarded(format!("step {}", self.learner.steps() + 1));
        let metrics = self.learner.step(&algorithm, groups)?;
        let mut values: BTreeMap<String, f64> =
            metrics.iter().map(|(name, value)| (name.to_string(), value)).collect();
        let tokens = values.get("num_tokens").map_or(0, |tokens| *tokens as u64);
        let seconds = started.elapsed().as_secs_f64();
        let tokens_per_second = tokens.saturating_sub(self.tokens) as f64 / seconds;
        self.tokens = tokens;
        values.insert("step_time".into(), seconds);
        values.insert("tokens_per_second".into(), tokens_per_second);
        values.insert("epoch".into(), self.loader.progress());
        let value = values.get("loss").copied().unwrap_or(f64::NAN);
        self.write_record(self.learner.steps(), values)?;
        Ok(Done { value, tokens_per_second, stop: None })
    }
}

/// Whether something that happens every `every` steps happens now; 0 is never.
fn due(step: u64, every: usize) -> bool {
    every > 0 && step.is_multiple_of(every as u64)
}
