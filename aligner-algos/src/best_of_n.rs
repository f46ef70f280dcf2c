//! Online preference optimization: the best and the worst of several answers make a pair.

use aligner_core::{Algorithm, Batch, Forward, Group, LossOutput, Needs, Per, Result, StepBatch};
use serde::{Deserialize, Serialize};

use crate::ops::advantage::all_equal;
use crate::ops::filter::{FilterConfig, log_scores};
use crate::rejection::best_first;
use crate::{Dpo, DpoConfig, DpoLoss};

/// Settings of [`BestOfN`]: those of [`DpoConfig`], and a filter.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BestOfNConfig {
    /// How strongly the policy is held to its reference.
    pub beta: f64,
    /// Share of pairs taken to be ranked wrongly, from 0 up to (not including) one half.
    pub label_smoothing: f64,
    /// The loss.
    pub loss_type: DpoLoss,
    /// What happens to answers that are too long or never ended.
    pub filter: FilterConfig,
}

impl Default for BestOfNConfig {
    fn default() -> Self {
        let DpoConfig { beta, label_smoothing, loss_type } = DpoConfig::default();
        Self { beta, label_smoothing, loss_type, filter: FilterConfig::default() }
    }
}

/// DPO on the policy's own answers: each group's best is preferred over its worst.
///
/// Online DPO as in Guo et al. 2024 (arXiv:2402.04792), with the extremes of n answers in place of two.
#[derive(Debug, Clone, Copy)]
pub struct BestOfN {
    dpo: Dpo,
    filter: FilterConfig,
}

impl BestOfN {
    /// The algorithm with these settings.
    ///
    /// # Errors
    /// [`aligner_core::Error::Setting`] as for [`Dpo`], or for a filter that is out of range.
    pub fn new(config: BestOfNConfig) -> Result<Self> {
        let BestOfNConfig { beta, label_smoothing, loss_type, filter } = config;
        filter.check()?;
        Ok(Self { dpo: Dpo::new(DpoConfig { beta, label_smoothing, loss_type })?, filter })
    }
}

impl Algorithm for BestOfN {
    /// Sum over pairs, as [`Dpo`].
    fn loss(&self, out: &Forward, batch: &Batch) -> Result<LossOutput> {
        self.dpo.loss(out, batch)
    }

    /// Turns each group into a pair: its best answer, then its worst. Of equal ones the earlier is taken.
    ///
    /// A group whose rewards are all equal has nothing to prefer and is taken out; `frac_reward_zero_std`
    /// counts them. A step may be left without any.
    fn credit(&self, step: &mut StepBatch) -> Result<()> {
        let scores = self.filter.scores(&step.groups)?;
        log_scores(&mut step.metrics, &scores);
        self.filter.mask(&mut step.groups);
        let groups = std::mem::take(&mut step.groups).into_iter().zip(&scores);
        step.groups = groups.filter_map(|(group, scores)| pair(group, scores)).collect();
        self.dpo.credit(step)
    }

    fn needs(&self) -> Needs {
        self.dpo.needs()
    }

    fn per(&self) -> Per {
        self.dpo.per()
    }
}

/// The group's best and worst answer; none where all are equal.
fn pair(mut group: Group, scores: &[f32]) -> Option<Group> {
    if all_equal(scores) {
        return None;
    }
    let best = *best_first(scores).first()?;
    // From the lowest on, the earlier of equal ones first.
    let negated: Vec<f32> = scores.iter().map(|score| -score).collect();
    let worst = *best_first(&negated).first()?;
    let chosen = std::mem::take(&mut group.samples[best]);
    let rejected = std::mem::take(&mut group.samples[worst]);
    group.samples = vec![chosen, rejected];
    Some(group)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::check_algorithm;
    use crate::fixture::siblings;

    fn best_of_n() -> BestOfN {
        BestOfN::new(BestOfNConfig::default()).expect("valid")
    }

    #[test]
    fn a_group_becomes_its_best_and_its_worst() {
        let groups = siblings(1, &[0.5, 2.0, -1.0, 2.0, -1.0]);
        let mut step = StepBatch::new(groups.clone());
        best_of_n().credit(&mut step).expect("rewards");
        let [pair] = step.groups.as_slice() else { panic!("one pair") };
        assert_eq!(pair.id, groups[0].id);
        let tokens: Vec<_> = pair.samples.iter().map(|sample| &sample.tokens).collect();
        assert_eq!(tokens, [&groups[0].samples[1].tokens, &groups[0].samples[2].tokens]);
    }

    #[test]
    fn a_group_of_one_mind_is_taken_out_and_counted() {
        let mut groups = siblings(1, &[1.0, 1.0, 1.0]);
        groups.extend(siblings(1, &[0.0, 1.0, 1.0]));
        let mut step = StepBatch::new(groups);
        best_of_n().credit(&mut step).expect("rewards");
        assert_eq!(step.groups.len(), 1);
        assert_eq!(step.metrics.get("frac_reward_zero_std"), Some(0.5));
    }

    #[test]
    fn the_check_of_algorithms_passes() {
        for loss_type in [DpoLoss::Sigmoid, DpoLoss::Robust] {
            let config = BestOfNConfig { beta: 0.5, label_smoothing: 0.1, loss_type, ..Default::default() };
            check_algorithm(&BestOfN::new(config).expect("valid"), &siblings(4, &[0.5, 2.0, -1.0]))
                .expect("sound");
        }
    }

    #[test]
    fn bad_input_is_named() {
        let mut groups = siblings(1, &[1.0, 2.0]);
        groups[0].samples[0].reward = None;
        let message = best_of_n().credit(&mut StepBatch::new(groups)).expect_err("no reward").to_string();
        assert!(message.contains("prompt 0, sample 0"), "{message}");
        let config = BestOfNConfig { beta: 0.0, ..BestOfNConfig::default() };
        assert!(BestOfN::new(config).expect_err("no beta").to_string().starts_with("beta"));
    }
}
