//! Rejection sampling: supervised fine-tuning on the best of several answers.

use aligner_core::{Algorithm, Batch, Error, Forward, LossOutput, Needs, Per, Result, StepBatch};
use serde::{Deserialize, Serialize};

use crate::ops::advantage::mean;
use crate::ops::filter::{FilterConfig, log_scores};
use crate::{Average, Sft, SftConfig};

/// Settings of [`Rejection`]; names and defaults as in NeMo-Aligner's `gpt_rs_actor`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RejectionConfig {
    /// How many of a prompt's answers are kept, the best first.
    pub top_n_rollouts: usize,
    /// What the loss is averaged over: `token` or `sample`.
    pub average: Average,
    /// What happens to answers that are too long or never ended.
    pub filter: FilterConfig,
}

impl Default for RejectionConfig {
    fn default() -> Self {
        Self { top_n_rollouts: 1, average: Average::Token, filter: FilterConfig::default() }
    }
}

/// Best of n: the likelihood of the answers with the highest rewards is raised.
///
/// The rejection sampling of Llama 2 (arXiv:2307.09288, section 3.2.3) and of RAFT (arXiv:2304.06767).
#[derive(Debug, Clone, Copy)]
pub struct Rejection {
    config: RejectionConfig,
    sft: Sft,
}

impl Rejection {
    /// The algorithm with these settings.
    ///
    /// # Errors
    /// [`Error::Setting`] for a `top_n_rollouts` of 0, or a filter that is out of range.
    pub fn new(config: RejectionConfig) -> Result<Self> {
        if config.top_n_rollouts == 0 {
            return Err(Error::setting("top_n_rollouts", "must be at least 1, got 0"));
        }
        config.filter.check()?;
        Ok(Self { config, sft: Sft::new(SftConfig { average: config.average }) })
    }
}

impl Algorithm for Rejection {
    /// `−Σ log p(target)` in nats, as [`Sft`].
    fn loss(&self, out: &Forward, batch: &Batch) -> Result<LossOutput> {
        self.sft.loss(out, batch)
    }

    /// Takes out all but the best answers of each group; of equal ones the earlier is better. Logs the mean
    /// score of those that are kept as `rewards/selected`.
    fn credit(&self, step: &mut StepBatch) -> Result<()> {
        let scores = self.config.filter.scores(&step.groups)?;
        log_scores(&mut step.metrics, &scores);
        self.config.filter.mask(&mut step.groups);
        for (group, scores) in step.groups.iter_mut().zip(&scores) {
            let best = best_first(scores).into_iter().take(self.config.top_n_rollouts);
            let best: Vec<usize> = best.collect();
            let kept: Vec<f32> = best.iter().map(|&at| scores[at]).collect();
            let count = kept.len() as f64;
            step.metrics.add("rewards/selected", mean(&kept) * count, count);
            group.samples = best.iter().map(|&at| group.samples[at].clone()).collect();
            // Nothing but likelihood counts from here on.
            group.samples.iter_mut().for_each(|sample| sample.weights.clear());
        }
        self.sft.credit(step)
    }

    fn needs(&self) -> Needs {
        Needs::ENTROPY
    }

    fn per(&self) -> Per {
        self.sft.per()
    }
}

/// Places of the scores, from the highest on; of equal scores the earlier comes first.
pub(crate) fn best_first(scores: &[f32]) -> Vec<usize> {
    let mut places: Vec<usize> = (0..scores.len()).collect();
    places.sort_by(|&one, &other| scores[other].total_cmp(&scores[one]));
    places
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::check_algorithm;
    use crate::fixture::siblings;
    use aligner_core::Group;

    fn rejection(top_n_rollouts: usize) -> Rejection {
        Rejection::new(RejectionConfig { top_n_rollouts, ..RejectionConfig::default() }).expect("valid")
    }

    #[test]
    fn the_best_answers_stay_the_best_first() {
        let groups = siblings(1, &[0.5, 2.0, -1.0, 2.0]);
        let answers: Vec<Vec<u32>> = groups[0].samples.iter().map(|sample| sample.tokens.clone()).collect();
        for (top_n, expected) in [(1, vec![1]), (3, vec![1, 3, 0]), (9, vec![1, 3, 0, 2])] {
            let mut step = StepBatch::new(groups.clone());
            rejection(top_n).credit(&mut step).expect("rewards");
            let kept = step.groups[0].samples.iter().map(|sample| sample.tokens.clone());
            let expected: Vec<Vec<u32>> = expected.into_iter().map(|at: usize| answers[at].clone()).collect();
            assert_eq!(kept.collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn scores_of_all_and_of_the_kept_are_logged() {
        let mut step = StepBatch::new(siblings(2, &[1.0, 3.0]));
        rejection(1).credit(&mut step).expect("rewards");
        for (name, value) in [("reward", 2.0), ("rewards/selected", 3.0), ("frac_reward_zero_std", 0.0)] {
            assert_eq!(step.metrics.get(name), Some(value), "{name}");
        }
    }

    #[test]
    fn the_check_of_algorithms_passes() {
        for average in [Average::Token, Average::Sample] {
            let config = RejectionConfig { top_n_rollouts: 2, average, ..RejectionConfig::default() };
            check_algorithm(&Rejection::new(config).expect("valid"), &siblings(4, &[0.5, 2.0, -1.0]))
                .expect("sound");
        }
    }

    #[test]
    fn bad_input_is_named() {
        let config = RejectionConfig { top_n_rollouts: 0, ..RejectionConfig::default() };
        assert!(Rejection::new(config).expect_err("none").to_string().starts_with("top_n_rollouts"));
        let mut groups: Vec<Group> = siblings(1, &[1.0, 2.0]);
        groups[0].samples[1].reward = None;
        let message = rejection(1).credit(&mut StepBatch::new(groups)).expect_err("no reward").to_string();
        assert!(message.contains("prompt 0, sample 1"), "{message}");
    }
}
