//! The critic's loss: its values are drawn to the returns of a rollout.

use aligner_core::ops::host::to_vec;
use aligner_core::{Algorithm, Batch, Error, Forward, LossOutput, Needs, Per, Result};
use serde::{Deserialize, Serialize};

/// Settings of [`ValueLoss`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ValueLossConfig {
    /// How far from its value at the rollout a prediction earns anything by moving; 0 lets it move freely.
    /// TRL and NeMo-Aligner take 0.2, `OpenRLHF` 0.5.
    pub clip: f64,
}

impl Default for ValueLossConfig {
    fn default() -> Self {
        Self { clip: 0.2 }
    }
}

/// Squared error of a critic, `½ max((V − R)², (clip(V, V_old ± c) − R)²)`, mean over targets.
///
/// The clipped form is PPO2's (`OpenAI` baselines), `½ (V − R)²` the plain one. Trains a policy with a scalar
/// head on groups to which [`Ppo`](crate::Ppo) has given credit: they carry `returns` and `values`.
#[derive(Debug, Clone, Copy, Default)]
pub struct ValueLoss {
    config: ValueLossConfig,
}

impl ValueLoss {
    /// The algorithm with these settings.
    ///
    /// # Errors
    /// [`Error::Setting`] for a `clip` that is negative or not finite.
    pub fn new(config: ValueLossConfig) -> Result<Self> {
        crate::ops::kl::check_coef("clip", config.clip)?;
        Ok(Self { config })
    }
}

impl Algorithm for ValueLoss {
    /// Sum over targets.
    fn loss(&self, out: &Forward, batch: &Batch) -> Result<LossOutput> {
        let values = out.values()?;
        if batch.returns.len() != batch.targets.len() {
            return Err(Error::Invalid(format!(
                "the critic's batch has no `returns`; the policy's algorithm gives credit first; samples: {}",
                batch.sample_ids().join(", ")
            )));
        }
        let returns = batch.returns(values)?;
        let plain = (values.clone() - returns.clone()).square();
        let count = batch.targets.len() as f64;
        let (errors, clipped) = if self.config.clip > 0.0 {
            let old = batch.values(values)?;
            let moved = (values.clone() - old.clone()).clamp(-self.config.clip, self.config.clip);
            let bounded = (old + moved - returns).square();
            let counts = to_vec(&bounded).into_iter().zip(to_vec(&plain)).filter(|(b, p)| b > p).count();
            (plain.max_pair(bounded), counts)
        } else {
            (plain, 0)
        };
        let losses = errors * 0.5;
        let mut loss = LossOutput::new(losses.clone().sum()).mean("loss/value_avg", &losses);
        loss.metrics.add("val/clipfrac_avg", clipped as f64, count);
        Ok(loss)
    }

    fn needs(&self) -> Needs {
        Needs::VALUES
    }

    fn per(&self) -> Per {
        Per::Token
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::check_algorithm;
    use aligner_core::{Device, Group, Sample, Tensor};

    fn groups() -> Vec<Group> {
        let sample = |at: u32| {
            let mut sample = Sample::response(&[1, 2], &[3 + at, 4]);
            sample.returns = vec![0.0, 0.0, 1.0 - at as f32, 0.5 * at as f32];
            sample.values = vec![0.0, 0.0, 0.25, -0.5];
            sample
        };
        (0..4).map(|at| Group::single(format!("row {at}"), sample(at))).collect()
    }

    #[test]
    fn a_prediction_earns_nothing_beyond_its_range() {
        let batch = Batch::collate(&groups()[..1]).expect("valid");
        let values = Tensor::<1>::from_floats([0.75, 0.5], &Device::flex().autodiff()).require_grad();
        let out = Forward { values: Some(values.clone()), ..Forward::default() };
        let loss = ValueLoss::default().loss(&out, &batch).expect("complete");
        // Targets 1 and 0: the first goes from 0.25 to 0.75, which counts as 0.45; the second moves away.
        let expected = 0.5 * (0.55_f32.powi(2) + 0.5_f32.powi(2));
        assert!((loss.sum.clone().into_scalar::<f32>() - expected).abs() < 1e-6);
        assert!((loss.metrics.get("val/clipfrac_avg").expect("logged") - 0.5).abs() < 1e-9);
        let slopes = to_vec(&values.grad(&loss.sum.backward()).expect("tracked"));
        assert!(slopes[0].abs() < 1e-9 && (slopes[1] - 0.5).abs() < 1e-6, "{slopes:?}");
    }

    #[test]
    fn the_check_of_algorithms_passes() {
        for clip in [0.0, 0.2, 0.5] {
            check_algorithm(&ValueLoss::new(ValueLossConfig { clip }).expect("valid"), &groups())
                .expect("sound");
        }
    }

    #[test]
    fn what_is_missing_is_named() {
        let mut groups = groups();
        groups[2].samples[0].returns.clear();
        let batch = Batch::collate(&groups[2..3]).expect("valid");
        let values = Tensor::<1>::zeros([2], &Device::flex());
        let out = Forward { values: Some(values), ..Forward::default() };
        let message = ValueLoss::default().loss(&out, &batch).expect_err("no returns").to_string();
        assert!(message.contains("row 2#0") && message.contains("returns"), "{message}");
        let message =
            ValueLoss::default().loss(&Forward::default(), &batch).expect_err("no head").to_string();
        assert!(message.contains("scalar head"), "{message}");
        assert!(ValueLoss::new(ValueLossConfig { clip: -0.1 }).is_err());
    }
}
