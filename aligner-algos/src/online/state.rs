//! What a killed run needs to go on, beside weights, optimizers and data cursor.

use std::collections::VecDeque;

use aligner_core::{Group, ParamSet, Result};
use serde::{Deserialize, Serialize};

use super::Online;
use super::generate::Open;
use crate::ops::kl::KlController;

/// The state of a rollout loop between two steps: counts, the adaptive coefficient, samples that wait (scored
/// already: no reward is asked for them again) and responses on the way.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OnlineState {
    step: u64,
    born: u64,
    kl: Option<KlController>,
    waiting: VecDeque<Vec<Group>>,
    carried: Vec<Open>,
}

impl Online {
    /// The state after the last step.
    pub fn state(&self) -> OnlineState {
        OnlineState {
            step: self.teacher.step,
            born: self.born,
            kl: self.teacher.kl,
            waiting: self.waiting.clone(),
            carried: self.collector.carried.clone(),
        }
    }

    /// To be called when a checkpoint holds [`Self::state`]: scores that were kept apart until then go.
    ///
    /// # Errors
    /// A log of scores that cannot be written.
    pub fn saved(&mut self) -> Result<()> {
        self.collector.rewards.forget_log()
    }

    /// Goes on from `state`, with the weights `params` of the same step, which are version `version`.
    ///
    /// # Errors
    /// Parameters that are not the engine's model's.
    pub fn restore(&mut self, state: OnlineState, params: &ParamSet, version: u64) -> Result<()> {
        let OnlineState { step, born, kl, waiting, carried } = state;
        self.collector.engine.refit(params, version)?;
        (self.teacher.step, self.born) = (step, born);
        (self.teacher.kl, self.waiting, self.collector.carried) = (kl, waiting, carried);
        Ok(())
    }
}
