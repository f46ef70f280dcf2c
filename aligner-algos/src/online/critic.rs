//! The critic: a second policy with a value head, trained by a learner of its own.

use aligner_core::{Forward, Group, Metrics, Needs, Result};

use crate::learner::Learner;
use crate::ops::targets::scatter;
use crate::per_target::{Answer, Question};
use crate::value::ValueLoss;

/// Says what each state of a response is worth, and learns it from the returns.
pub struct Critic {
    learner: Learner,
    loss: ValueLoss,
}

impl Critic {
    /// A critic that `learner` trains: its policy has a scalar head.
    pub fn new(learner: Learner, loss: ValueLoss) -> Self {
        Self { learner, loss }
    }

    /// The learner, for its state.
    pub fn learner(&self) -> &Learner {
        &self.learner
    }

    /// Sets every sample's `values` `[tokens]`; 0 where the token is no target.
    pub(super) fn fill(&self, groups: &mut [Group]) -> Result<()> {
        let question = Question {
            policy: self.learner.policy(),
            micro_batch_tokens: self.learner.config().micro_batch_tokens,
            needs: Needs::VALUES,
            pick: Forward::values,
        };
        let asked = groups.to_vec();
        question.ask(&asked, &mut |answers| {
            for Answer { group, sample, values } in answers {
                let sample = &mut groups[group].samples[sample];
                sample.values = scatter(sample, &values);
            }
            Ok(())
        })
    }

    /// One update on groups with `returns`; its metrics carry the prefix `critic/` unless they have one.
    pub(super) fn update(&mut self, groups: &[Group]) -> Result<Metrics> {
        Ok(self.learner.update(&self.loss, groups.to_vec())?.prefixed("critic/"))
    }
}
