//! The loop over optimizer steps.

use std::collections::BTreeMap;
use std::time::Instant;

use super::Ending;
use super::session::Session;
use crate::interrupt::Interrupt;
use crate::progress::Steps;

impl Session {
    /// Steps from where the learner stands to the last, with evaluations and checkpoints on the way.
    pub(super) fn steps(&mut self, interrupt: &Interrupt) -> anyhow::Result<Ending> {
        let what = if self.rollouts.is_some() { "reward" } else { "loss" };
        let mut progress = Steps::start(what, self.steps_done(), self.total);
        while self.steps_done() < self.total {
            let (value, tokens_per_second) =
                if self.rollouts.is_some() { self.rollout()? } else { self.step()? };
            let step = self.steps_done();
            progress.done(step, value, tokens_per_second);
            let last = step == self.total;
            let config = &self.run.config.run;
            let save = due(step, config.save_every);
            // Every planned checkpoint is measured, else the best could be one that is not there.
            let measured = save && config.eval_every > 0;
            if due(step, config.eval_every) || measured || last {
                self.evaluate()?;
            }
            // Read once: a signal between two readings would stop a run that has saved nothing.
            let asked = interrupt.asked();
            if save || last || asked {
                self.save()?;
            }
            if asked && !last {
                return Ok(Ending::Interrupted(step));
            }
        }
        Ok(Ending::Finished)
    }

    /// One step; returns its loss and its tokens a second.
    fn step(&mut self) -> anyhow::Result<(f64, f64)> {
        let started = Instant::now();
        let mut groups = self.loader.next(self.run.config.run.batch_size)?;
        if let Some(reference) = &mut self.reference {
            reference.fill(&mut groups)?;
        }
        let metrics = self.learner.step(self.run.algorithm.as_ref(), groups)?;
        let mut values: BTreeMap<String, f64> =
            metrics.iter().map(|(name, value)| (name.to_string(), value)).collect();
        let tokens = values.get("num_tokens").map_or(0, |tokens| *tokens as u64);
        let seconds = started.elapsed().as_secs_f64();
        let tokens_per_second = tokens.saturating_sub(self.tokens) as f64 / seconds;
        self.tokens = tokens;
        values.insert("step_time".into(), seconds);
        values.insert("tokens_per_second".into(), tokens_per_second);
        values.insert("epoch".into(), self.loader.progress());
        let loss = values.get("loss").copied().unwrap_or(f64::NAN);
        self.write_record(self.learner.steps(), values)?;
        Ok((loss, tokens_per_second))
    }
}

/// Whether something that happens every `every` steps happens now; 0 is never.
fn due(step: u64, every: usize) -> bool {
    every > 0 && step.is_multiple_of(every as u64)
}
