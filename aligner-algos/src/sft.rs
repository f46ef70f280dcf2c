//! Supervised fine-tuning: the answers' log-likelihood is raised.

use aligner_core::ops::host::to_vec;
use aligner_core::{Algorithm, Batch, Forward, LossOutput, Per, Result, StepBatch};
use serde::{Deserialize, Serialize};

/// What one unit of the loss's mean is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Average {
    /// Every target token weighs the same, so long answers weigh more.
    #[default]
    Token,
    /// Every sample weighs the same, its tokens share its weight.
    Sample,
}

/// Settings of [`Sft`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SftConfig {
    /// What the loss is averaged over: `token` (as in the peers) or `sample`.
    pub average: Average,
}

/// Supervised fine-tuning on the tokens that the mask marks.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sft {
    config: SftConfig,
}

impl Sft {
    /// The algorithm with these settings.
    pub fn new(config: SftConfig) -> Self {
        Self { config }
    }
}

impl Algorithm for Sft {
    /// `−Σ weight · log p(target)` in nats.
    fn loss(&self, out: &Forward, batch: &Batch) -> Result<LossOutput> {
        let logps = out.logps()?;
        let weighted = if batch.weights.iter().all(|weight| weight.to_bits() == 1.0_f32.to_bits()) {
            logps.clone()
        } else {
            logps.clone() * batch.weights(logps)
        };
        let mut loss = LossOutput::new(weighted.sum().neg());
        let nll: f64 = to_vec(logps).iter().map(|logp| -f64::from(*logp)).sum();
        loss.metrics.add("nll", nll, batch.targets.len() as f64);
        if let Some(correct) = &out.correct {
            loss = loss.mean("mean_token_accuracy", correct);
        }
        if let Some(entropy) = &out.entropy {
            loss = loss.mean("entropy", entropy);
        }
        Ok(loss)
    }

    /// For the mean over samples: each target weighs one over its sample's targets.
    fn credit(&self, step: &mut StepBatch) -> Result<()> {
        if self.config.average == Average::Token {
            return Ok(());
        }
        for sample in step.groups.iter_mut().flat_map(|group| &mut group.samples) {
            let share = 1.0 / sample.targets().max(1) as f32;
            if sample.weights.is_empty() {
                sample.weights = vec![1.0; sample.tokens.len()];
            }
            sample.weights.iter_mut().for_each(|weight| *weight *= share);
        }
        Ok(())
    }

    fn per(&self) -> Per {
        match self.config.average {
            Average::Token => Per::Token,
            Average::Sample => Per::Sequence,
        }
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "a mean of small integers is exact")]
mod tests {
    use super::*;
    use aligner_core::{Device, Group, Sample, Tensor};

    /// Two answers of 1 and 3 tokens, and their loss divided as the learner does.
    fn mean_loss(average: Average, logps: [f32; 4]) -> f32 {
        let sft = Sft::new(SftConfig { average });
        let sample = |response: &[u32]| Sample::response(&[1, 2], response);
        let groups = vec![Group::single("a", sample(&[3])), Group::single("b", sample(&[4, 5, 6]))];
        let mut step = StepBatch::new(groups);
        sft.credit(&mut step).expect("any samples");
        let batch = Batch::collate(&step.groups).expect("valid groups");
        let logps = Tensor::<1>::from_floats(logps, &Device::flex());
        let out = Forward { logps: Some(logps), ..Forward::default() };
        let sum: f32 = sft.loss(&out, &batch).expect("log-probabilities").sum.into_scalar();
        sum / sft.per().count(&step.groups) as f32
    }

    #[test]
    fn the_token_mean_weighs_tokens_alike() {
        assert_eq!(mean_loss(Average::Token, [-1.0, -2.0, -3.0, -6.0]), 3.0);
    }

    #[test]
    fn the_sample_mean_weighs_samples_alike() {
        let mean = mean_loss(Average::Sample, [-1.0, -2.0, -3.0, -7.0]);
        assert!((mean - 2.5).abs() < 1e-6, "{mean}");
    }

    #[test]
    fn settings_are_closed() {
        assert!(serde_json::from_str::<SftConfig>(r#"{"average": "sample"}"#).is_ok());
        assert!(serde_json::from_str::<SftConfig>(r#"{"averag": "sample"}"#).is_err());
    }
}
