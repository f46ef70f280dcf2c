//! Direct preference optimization: the chosen answer's log-ratio to the reference is raised over
//! the rejected one's.

use aligner_core::ops::host::to_vec;
use aligner_core::{
    Algorithm, Batch, Error, Forward, LossOutput, Needs, Per, Result, StepBatch, Tensor, constant,
};
use serde::{Deserialize, Serialize};

use crate::ops::preference::{Pairs, add_accuracy, add_mean, check_pair, robust_loss, smoothed_sigmoid_loss};

/// Which function of the difference of log-ratios is minimised; names as in TRL.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DpoLoss {
    /// The logistic loss; with label smoothing cDPO.
    #[default]
    Sigmoid,
    /// The logistic loss, unbiased under a known share of flipped labels.
    Robust,
}

/// Settings of [`Dpo`]; names and defaults as in TRL's `DPOConfig`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DpoConfig {
    /// How strongly the policy is held to its reference.
    pub beta: f64,
    /// Share of labels taken to be flipped, from 0 up to (not including) one half.
    pub label_smoothing: f64,
    /// The loss.
    pub loss_type: DpoLoss,
}

impl Default for DpoConfig {
    fn default() -> Self {
        Self { beta: 0.1, label_smoothing: 0.0, loss_type: DpoLoss::Sigmoid }
    }
}

/// Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290).
#[derive(Debug, Clone, Copy, Default)]
pub struct Dpo {
    config: DpoConfig,
}

impl Dpo {
    /// The loss of a policy that equals its reference, in nats, whatever the settings.
    pub const LOSS_AT_REFERENCE: f64 = std::f64::consts::LN_2;

    /// The algorithm with these settings.
    ///
    /// # Errors
    /// [`Error::Setting`] for a `beta` that is not positive, a `label_smoothing` outside of 0..½.
    pub fn new(config: DpoConfig) -> Result<Self> {
        let DpoConfig { beta, label_smoothing, .. } = config;
        if !(beta.is_finite() && beta > 0.0) {
            return Err(Error::setting("beta", format!("must be above 0, got {beta}")));
        }
        if !(0.0..0.5).contains(&label_smoothing) {
            let message = format!("must be at least 0 and below 0.5, got {label_smoothing}");
            return Err(Error::setting("label_smoothing", message));
        }
        Ok(Self { config })
    }

    fn pair_losses(&self, logits: Tensor<1>) -> Tensor<1> {
        match self.config.loss_type {
            DpoLoss::Sigmoid => smoothed_sigmoid_loss(logits, self.config.label_smoothing),
            DpoLoss::Robust => robust_loss(logits, self.config.label_smoothing),
        }
    }
}

impl Algorithm for Dpo {
    /// Sum over pairs of the loss at β·(difference of log-ratios), in nats.
    fn loss(&self, out: &Forward, batch: &Batch) -> Result<LossOutput> {
        let logps = out.logps()?;
        let policy = batch.sum_per_sequence(logps.clone());
        let reference = batch.sum_per_sequence(batch.ref_logps(logps)?);
        let rewards = Pairs::split(&((policy.clone() - reference) * self.config.beta), batch)?;
        let losses = self.pair_losses(rewards.difference());
        let comparable: Vec<f32> =
            batch.sequences.chunks(2).map(|pair| f32::from(u8::from(is_comparable(pair)))).collect();
        let losses =
            if comparable.contains(&0.0) { losses.clone() * constant(&comparable, &losses) } else { losses };
        let mut loss = LossOutput::new(losses.sum());
        let metrics = &mut loss.metrics;
        let (chosen, rejected) = (to_vec(&rewards.chosen), to_vec(&rewards.rejected));
        let margins: Vec<f32> = chosen.iter().zip(&rejected).map(|(chosen, other)| chosen - other).collect();
        add_mean(metrics, "rewards/chosen", &chosen);
        add_mean(metrics, "rewards/rejected", &rejected);
        add_mean(metrics, "rewards/margins", &margins);
        add_accuracy(metrics, "rewards/accuracies", &chosen, &rejected);
        let logps = Pairs::split(&policy, batch)?;
        add_mean(metrics, "logps/chosen", &to_vec(&logps.chosen));
        add_mean(metrics, "logps/rejected", &to_vec(&logps.rejected));
        Ok(loss)
    }

    /// Takes out the pairs in which one side has no target: there is nothing to compare, so they
    /// contribute exactly 0 and are not counted.
    fn credit(&self, step: &mut StepBatch) -> Result<()> {
        for group in &step.groups {
            check_pair(&group.id, group.samples.len())?;
        }
        step.groups.retain(|pair| pair.samples.iter().all(|sample| sample.targets() > 0));
        Ok(())
    }

    fn needs(&self) -> Needs {
        Needs::REF_LOGPS
    }

    fn per(&self) -> Per {
        Per::Group
    }
}

/// Whether both answers have a target.
fn is_comparable(pair: &[aligner_core::Sequence]) -> bool {
    pair.iter().all(|sequence| !sequence.targets.is_empty())
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "a loss of exactly 0")]
mod tests {
    use super::*;
    use aligner_core::{Device, Group, Sample};

    fn answer(tokens: &[u32], ref_logps: &[f32]) -> Sample {
        let mut sample = Sample::response(&[1, 2], tokens);
        sample.ref_logps = [&[0.0; 2], ref_logps].concat();
        sample
    }

    fn pair() -> Group {
        Group::pair("row 1", answer(&[3, 4], &[-1.0, -2.0]), answer(&[5], &[-0.5]))
    }

    fn forward(logps: &[f32]) -> Forward {
        let logps = Tensor::<1>::from_floats(logps, &Device::flex());
        Forward { logps: Some(logps), ..Forward::default() }
    }

    fn dpo(config: DpoConfig) -> Dpo {
        Dpo::new(config).expect("valid settings")
    }

    #[test]
    fn a_pair_has_its_hand_computed_loss_and_rewards() {
        let batch = Batch::collate([&pair()]).expect("valid");
        let config = DpoConfig { beta: 0.5, ..DpoConfig::default() };
        // Log-ratios: (-0.5 - 1.5) - (-3) = 1 chosen, -1.5 - (-0.5) = -1 rejected.
        let out = dpo(config).loss(&forward(&[-0.5, -1.5, -1.5]), &batch).expect("complete");
        let sum: f32 = out.sum.into_scalar();
        assert!((f64::from(sum) - (1.0 + (-1.0_f64).exp()).ln()).abs() < 1e-6, "{sum}");
        assert_eq!(out.metrics.get("rewards/chosen"), Some(0.5));
        assert_eq!(out.metrics.get("rewards/margins"), Some(1.0));
        assert_eq!(out.metrics.get("logps/rejected"), Some(-1.5));
        assert_eq!(out.metrics.get("rewards/accuracies"), Some(1.0));
    }

    #[test]
    fn at_the_reference_the_loss_is_ln_2_and_the_accuracy_one_half() {
        let batch = Batch::collate([&pair()]).expect("valid");
        for loss_type in [DpoLoss::Sigmoid, DpoLoss::Robust] {
            let config = DpoConfig { loss_type, label_smoothing: 0.2, ..DpoConfig::default() };
            let out = dpo(config).loss(&forward(&[-1.0, -2.0, -0.5]), &batch).expect("complete");
            let sum: f32 = out.sum.into_scalar();
            assert!((f64::from(sum) - Dpo::LOSS_AT_REFERENCE).abs() < 1e-6, "{loss_type:?}: {sum}");
            assert_eq!(out.metrics.get("rewards/accuracies"), Some(0.5));
        }
    }

    #[test]
    fn a_pair_with_an_empty_side_contributes_exactly_zero() {
        let mut silent = pair();
        silent.samples[1].mask = vec![false; 3];
        let batch = Batch::collate([&silent]).expect("valid");
        let sum: f32 =
            dpo(DpoConfig::default()).loss(&forward(&[-1.0, -9.0]), &batch).expect("ok").sum.into_scalar();
        assert_eq!(sum, 0.0);
        let mut step = StepBatch::new(vec![silent, pair()]);
        dpo(DpoConfig::default()).credit(&mut step).expect("pairs");
        assert_eq!(step.groups.len(), 1);
    }

    #[test]
    fn settings_out_of_range_are_refused_by_name() {
        for (config, key) in [
            (DpoConfig { beta: 0.0, ..DpoConfig::default() }, "beta"),
            (DpoConfig { label_smoothing: 0.5, ..DpoConfig::default() }, "label_smoothing"),
        ] {
            let message = Dpo::new(config).expect_err("out of range").to_string();
            assert!(message.starts_with(key), "{message}");
        }
    }

    #[test]
    fn a_missing_reference_says_what_brings_it() {
        let plain = Group::pair("p", Sample::response(&[1], &[2]), Sample::response(&[1], &[3]));
        let batch = Batch::collate([&plain]).expect("valid");
        let message =
            dpo(DpoConfig::default()).loss(&forward(&[-1.0, -1.0]), &batch).expect_err("no reference");
        assert!(message.to_string().contains("Needs::REF_LOGPS"), "{message}");
    }
}
