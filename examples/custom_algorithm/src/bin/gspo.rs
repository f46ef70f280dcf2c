//! Reinforcement learning of one's own: GSPO (Zheng et al. 2025, arXiv:2507.18071), from its config to its command line.

use std::process::ExitCode;

use aligner_algos::ops::advantage::group_advantages;
use aligner_algos::ops::ratio::{log_ratio, sequence_log_ratio};
use aligner_algos::ops::reduce::Moments;
use aligner_algos::ops::targets::scatter;
use aligner_cli::Registry;
use aligner_core::{Algorithm, Batch, Error, Forward, LossOutput, Needs, Per, Result, StepBatch, constant};
use serde::{Deserialize, Serialize};

/// `[algorithm.gspo]`
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct GspoConfig {
    /// How far a sequence's ratio may move from 1 before it is clipped.
    clip: f64,
}

struct Gspo(GspoConfig);

impl Algorithm for Gspo {
    /// Equation 5: `−min(s·A, clip(s, 1 ± ε)·A)` with s the length-normalised ratio of the sequence.
    fn loss(&self, out: &Forward, batch: &Batch) -> Result<LossOutput> {
        let ratio = sequence_log_ratio(log_ratio(out.logps()?, batch)?, batch).exp();
        let first = |s: &aligner_core::Sequence| batch.weights.get(s.targets.start).copied().unwrap_or(0.0);
        let advantages: Vec<f32> = batch.sequences.iter().map(first).collect();
        let advantages = constant(&advantages, &ratio);
        let clipped = ratio.clone().clamp(1.0 - self.0.clip, 1.0 + self.0.clip);
        let loss = -(ratio.clone() * advantages.clone()).min_pair(clipped * advantages);
        Ok(LossOutput::new(loss.sum()).mean("ratio", &ratio))
    }

    /// Equation 6: a response's reward against the mean and standard deviation of its group's.
    fn credit(&self, step: &mut StepBatch) -> Result<()> {
        for group in &mut step.groups {
            let rewards: Option<Vec<f32>> = group.samples.iter().map(|sample| sample.reward).collect();
            let rewards = rewards.ok_or_else(|| Error::Invalid(format!("group {}: no reward", group.id)))?;
            let advantages = group_advantages(&rewards, Some(Moments::of(&rewards).std()));
            for (sample, advantage) in group.samples.iter_mut().zip(advantages) {
                sample.weights = scatter(sample, &vec![advantage; sample.targets()]);
            }
        }
        Ok(())
    }

    fn needs(&self) -> Needs {
        Needs::OLD_LOGPS
    }

    fn per(&self) -> Per {
        Per::Sequence
    }
}

fn main() -> ExitCode {
    aligner_cli::run(&Registry::built_in().with("gspo", |config| Ok(Gspo(config))).online())
}
