//! Group relative policy optimization: an answer's advantage is its place among its siblings.

mod config;

use aligner_core::{
    Algorithm, Batch, Forward, LossOutput, Metrics, Needs, Per, Result, StepBatch, Tensor, constant,
};

use crate::ops::advantage::{ScaleRewards, group_advantages};
use crate::ops::filter::log_scores;
use crate::ops::kl::bias_corrected;
use crate::ops::ratio::{
    Clip, RatioLevel, cispo_loss, clipped_loss, log_cispo_clip_ratio, log_clip_ratios, log_ratio,
    log_ratio_stats, on_targets, sequence_log_ratio,
};
use crate::ops::reduce::{Moments, agreed, log_moments, sequence_shares};
use crate::rloo::give;

pub use config::{GrpoConfig, GrpoLoss};

/// Group relative policy optimization (Shao et al. 2024, arXiv:2402.03300) and its kin.
///
/// | `loss_type` | surrogate | divided by |
/// |---|---|---|
/// | `grpo` | clipped | each answer's length, then the answers |
/// | `bnpo`, `dapo` | clipped | the targets of the step |
/// | `dr_grpo` | clipped | the answers, and the longest possible one |
/// | `cispo` | truncated importance weights | the targets of the step |
///
/// `bnpo` and `dapo` are two things in TRL, where the one counts the targets of a micro-batch; here every
/// count is over the whole step. With `level = "sequence"` it is GSPO (arXiv:2507.18071).
#[derive(Debug, Clone, Copy)]
pub struct Grpo {
    config: GrpoConfig,
    clip: Clip,
    /// What `dr_grpo` divides by, in tokens.
    longest: f64,
}

/// Ratios of a batch, and what they are of.
struct Ratios {
    /// Logarithms, `[targets]` or `[sequences]`.
    log: Tensor<1>,
    /// The ratio on each target, `[targets]`.
    on_targets: Tensor<1>,
    /// Advantage of each unit of `log`.
    advantages: Vec<f32>,
}

impl Grpo {
    /// The algorithm with these settings.
    ///
    /// # Errors
    /// [`aligner_core::Error::Setting`] names a setting that is out of range or does not go with another.
    pub fn new(config: GrpoConfig) -> Result<Self> {
        config.check()?;
        let longest = config.max_completion_length.unwrap_or(1) as f64;
        Ok(Self { config, clip: config.clip(), longest })
    }

    fn ratios(&self, logps: &Tensor<1>, batch: &Batch) -> Result<Ratios> {
        let log = log_ratio(logps, batch)?;
        Ok(match self.config.level {
            RatioLevel::Token => {
                Ratios { on_targets: log.clone().exp(), log, advantages: batch.weights.clone() }
            }
            RatioLevel::Sequence => {
                let log = sequence_log_ratio(log, batch);
                let first = |sequence: &aligner_core::Sequence| {
                    batch.weights[sequence.targets.clone()].first().copied().unwrap_or(0.0)
                };
                let advantages = batch.sequences.iter().map(first).collect();
                Ratios { on_targets: on_targets(log.clone().exp(), batch), log, advantages }
            }
        })
    }

    /// The surrogate's loss at each target, `[targets]`.
    fn surrogate(
        &self,
        logps: &Tensor<1>,
        ratios: &Ratios,
        batch: &Batch,
        metrics: &mut Metrics,
    ) -> Tensor<1> {
        let advantages = batch.weights(logps);
        log_ratio_stats(metrics, &ratios.log);
        if self.config.loss_type == GrpoLoss::Cispo {
            let cap = self.config.clip_high;
            log_cispo_clip_ratio(metrics, &ratios.on_targets, &ratios.advantages, cap);
            return cispo_loss(&ratios.on_targets, &advantages, logps, cap);
        }
        log_clip_ratios(metrics, &ratios.log.clone().exp(), &ratios.advantages, &self.clip);
        clipped_loss(&ratios.on_targets, &advantages, &self.clip)
    }

    /// The sum of losses that the learner's count turns into the loss's own mean.
    fn normalised(&self, losses: Tensor<1>, batch: &Batch) -> Tensor<1> {
        match self.config.loss_type {
            GrpoLoss::Grpo => {
                let shares = constant(&sequence_shares(batch), &losses);
                (losses * shares).sum()
            }
            GrpoLoss::Bnpo | GrpoLoss::Dapo | GrpoLoss::Cispo => losses.sum(),
            GrpoLoss::DrGrpo => losses.sum() / self.longest,
        }
    }
}

impl Algorithm for Grpo {
    /// Sum over targets or samples, as the loss type says, of the surrogate and β times the divergence from
    /// the reference.
    fn loss(&self, out: &Forward, batch: &Batch) -> Result<LossOutput> {
        let logps = out.logps()?;
        let mut metrics = Metrics::default();
        let ratios = self.ratios(logps, batch)?;
        let mut losses = self.surrogate(logps, &ratios, batch, &mut metrics);
        if self.config.beta > 0.0 {
            let mut kl = self.config.kl_estimator.tensor(logps.clone(), batch.ref_logps(logps)?);
            if self.config.use_bias_correction_kl {
                kl = bias_corrected(kl, ratios.on_targets);
            }
            metrics.add_all("kl", &kl);
            losses = losses + kl * self.config.beta;
        }
        if let Some(entropy) = &out.entropy {
            metrics.add_all("entropy", entropy);
        }
        Ok(LossOutput { sum: self.normalised(losses, batch), metrics })
    }

    /// Writes each sample's advantage on all of its `weights`: its reward less its group's mean, scaled.
    fn credit(&self, step: &mut StepBatch) -> Result<()> {
        let scores = self.config.filter.scores(&step.groups);
        let scores = agreed(step, scores)?;
        log_scores(&mut step.metrics, &scores);
        let of_step = match self.config.scale_rewards {
            ScaleRewards::Batch => Some(Moments::over_ranks(step, &scores.concat())?.std()),
            ScaleRewards::Group | ScaleRewards::None => None,
        };
        let scale = |rewards: &Vec<f32>| match self.config.scale_rewards {
            ScaleRewards::Group => Some(Moments::of(rewards).std()),
            ScaleRewards::Batch | ScaleRewards::None => of_step,
        };
        let advantages: Vec<Vec<f32>> =
            scores.iter().map(|rewards| group_advantages(rewards, scale(rewards))).collect();
        log_moments(&mut step.metrics, "advantages", &advantages.concat());
        self.config.filter.mask(&mut step.groups);
        give(step, &advantages);
        Ok(())
    }

    fn needs(&self) -> Needs {
        let needs = Needs::OLD_LOGPS | Needs::ENTROPY;
        if self.config.beta > 0.0 { needs | Needs::REF_LOGPS } else { needs }
    }

    fn per(&self) -> Per {
        match self.config.loss_type {
            GrpoLoss::Grpo | GrpoLoss::DrGrpo => Per::Sequence,
            GrpoLoss::Bnpo | GrpoLoss::Dapo | GrpoLoss::Cispo => Per::Token,
        }
    }
}

#[cfg(test)]
mod tests;
