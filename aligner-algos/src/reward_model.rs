//! Reward modelling: a scalar head learns to score chosen answers above rejected ones.

use aligner_core::ops::host::to_vec;
use aligner_core::{
    Algorithm, Batch, Error, Forward, LossOutput, Needs, Per, Result, StepBatch, Tensor, constant,
};
use serde::{Deserialize, Serialize};

use crate::ops::preference::{Pairs, add_accuracy, add_mean, check_pair, log_sigmoid};

/// Settings of [`RewardModel`]; the coefficient's name is TRL's.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RewardModelConfig {
    /// Weight of the squared sum of a pair's scores, which keeps scores near 0; 0 turns it off, 0.01
    /// is customary.
    pub center_rewards_coefficient: f64,
    /// Whether a pair's margin, where the data have one, is demanded of the difference of scores.
    pub margin: bool,
}

impl Default for RewardModelConfig {
    fn default() -> Self {
        Self { center_rewards_coefficient: 0.0, margin: true }
    }
}

/// The Bradley–Terry model of preferences: `−log σ(r_chosen − r_rejected − margin)`.
///
/// The margin is Llama 2's (arXiv:2307.09288, equation 2), the centering term that of Eisenstein et
/// al. 2023 (arXiv:2312.09244).
#[derive(Debug, Clone, Copy, Default)]
pub struct RewardModel {
    config: RewardModelConfig,
}

impl RewardModel {
    /// The algorithm with these settings.
    ///
    /// # Errors
    /// [`Error::Setting`] for a coefficient that is negative or not finite.
    pub fn new(config: RewardModelConfig) -> Result<Self> {
        let coefficient = config.center_rewards_coefficient;
        if !(coefficient.is_finite() && coefficient >= 0.0) {
            let message = format!("must be finite and not negative, got {coefficient}");
            return Err(Error::setting("center_rewards_coefficient", message));
        }
        Ok(Self { config })
    }

    /// What the difference of scores has to exceed, `[pairs]`; a pair without a margin has 0.
    fn margins(&self, batch: &Batch) -> Option<Vec<f32>> {
        if !self.config.margin || batch.rewards.iter().all(Option::is_none) {
            return None;
        }
        let margin = |pair: &[Option<f32>]| match pair {
            [Some(chosen), Some(rejected)] => chosen - rejected,
            _ => 0.0,
        };
        Some(batch.rewards.chunks(2).map(margin).collect())
    }
}

impl Algorithm for RewardModel {
    /// Sum over pairs, in nats.
    fn loss(&self, out: &Forward, batch: &Batch) -> Result<LossOutput> {
        let scores = single_output(out.scores()?)?;
        let pairs = Pairs::split(&scores, batch)?;
        let mut difference = pairs.difference();
        if let Some(margins) = self.margins(batch) {
            difference = difference.clone() - constant(&margins, &difference);
        }
        let mut losses = log_sigmoid(difference).neg();
        if self.config.center_rewards_coefficient > 0.0 {
            let both = pairs.chosen.clone() + pairs.rejected.clone();
            losses = losses + both.square() * self.config.center_rewards_coefficient;
        }
        let mut loss = LossOutput::new(losses.sum());
        let metrics = &mut loss.metrics;
        let (chosen, rejected) = (to_vec(&pairs.chosen), to_vec(&pairs.rejected));
        let margins: Vec<f32> = chosen.iter().zip(&rejected).map(|(chosen, other)| chosen - other).collect();
        let all = [chosen.as_slice(), rejected.as_slice()].concat();
        add_mean(metrics, "rewards/chosen", &chosen);
        add_mean(metrics, "rewards/rejected", &rejected);
        add_mean(metrics, "margin", &margins);
        add_accuracy(metrics, "accuracy", &chosen, &rejected);
        add_mean(metrics, "mean_reward", &all);
        for score in all {
            metrics.add_min("min_reward", f64::from(score));
            metrics.add_max("max_reward", f64::from(score));
        }
        Ok(loss)
    }

    fn credit(&self, step: &mut StepBatch) -> Result<()> {
        step.groups.iter().try_for_each(|group| check_pair(&group.id, group.samples.len()))
    }

    fn needs(&self) -> Needs {
        Needs::SCORES
    }

    fn per(&self) -> Per {
        Per::Group
    }
}

/// Scores `[sequences, 1]` as `[sequences]`.
fn single_output(scores: &Tensor<2>) -> Result<Tensor<1>> {
    let [sequences, outputs] = scores.dims();
    if outputs != 1 {
        return Err(Error::shape("scores of the reward model", "[sequences, 1]", &[sequences, outputs]));
    }
    Ok(scores.clone().reshape([sequences]))
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "bitwise the same computation")]
mod tests {
    use super::*;
    use aligner_core::{Device, Group, Sample};

    fn batch(margin: Option<f32>) -> Batch {
        let mut pair = Group::pair("row 1", Sample::response(&[1], &[2]), Sample::response(&[1], &[3]));
        pair.samples[0].reward = margin;
        pair.samples[1].reward = margin.map(|_| 0.0);
        Batch::collate([&pair]).expect("valid")
    }

    fn forward(scores: [f32; 2]) -> Forward {
        let scores = Tensor::<1>::from_floats(scores, &Device::flex()).reshape([2, 1]);
        Forward { scores: Some(scores), ..Forward::default() }
    }

    fn loss(config: RewardModelConfig, scores: [f32; 2], margin: Option<f32>) -> LossOutput {
        let model = RewardModel::new(config).expect("valid settings");
        model.loss(&forward(scores), &batch(margin)).expect("complete")
    }

    #[test]
    fn a_pair_has_its_hand_computed_loss() {
        let config = RewardModelConfig { center_rewards_coefficient: 0.01, margin: true };
        let sum: f32 = loss(config, [2.0, 1.0], Some(0.25)).sum.into_scalar();
        let expected = (1.0 + (-0.75_f64).exp()).ln() + 0.01 * 9.0;
        assert!((f64::from(sum) - expected).abs() < 1e-6, "{sum} for {expected}");
    }

    #[test]
    fn a_margin_can_be_left_aside() {
        let config = RewardModelConfig { margin: false, ..RewardModelConfig::default() };
        let without: f32 = loss(config, [2.0, 1.0], Some(5.0)).sum.into_scalar();
        let plain: f32 = loss(config, [2.0, 1.0], None).sum.into_scalar();
        assert_eq!(without, plain);
    }

    #[test]
    fn metrics_describe_the_scores() {
        let metrics = loss(RewardModelConfig::default(), [2.0, -1.0], None).metrics;
        let expected = [
            ("accuracy", 1.0),
            ("margin", 3.0),
            ("mean_reward", 0.5),
            ("min_reward", -1.0),
            ("max_reward", 2.0),
        ];
        for (name, value) in expected {
            assert_eq!(metrics.get(name), Some(value), "{name}");
        }
    }

    #[test]
    fn several_outputs_are_refused() {
        let scores = Tensor::<2>::zeros([2, 3], &Device::flex());
        let out = Forward { scores: Some(scores), ..Forward::default() };
        let message = RewardModel::default().loss(&out, &batch(None)).expect_err("3 outputs").to_string();
        assert!(message.contains("[2, 3]"), "{message}");
    }
}
