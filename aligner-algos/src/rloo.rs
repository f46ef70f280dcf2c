//! REINFORCE leave-one-out with a clipped ratio of whole sequences.

use aligner_core::{
    Algorithm, Batch, Error, Forward, Group, LossOutput, Metrics, Needs, Per, Result, StepBatch, constant,
};
use serde::{Deserialize, Serialize};

use crate::ops::advantage::{SCALE_EPSILON, leave_one_out};
use crate::ops::filter::{FilterConfig, check_reward_clip, clip_scores, log_scores};
use crate::ops::kl::{KlEstimator, check_coef};
use crate::ops::penalty::Penalty;
use crate::ops::ratio::{Clip, clipped_loss, log_clip_ratios, log_ratio, log_ratio_stats};
use crate::ops::reduce::{Moments, agreed, log_moments};
use crate::ops::targets::{places, scatter};

/// Settings of [`Rloo`]; defaults as in TRL's `RLOOConfig`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RlooConfig {
    /// Factor of the divergence from the reference (k1, summed over the answer), which is taken off the
    /// reward; 0 turns it off, and no reference is needed.
    pub beta: f64,
    /// Below `1 − clip_low` a sequence's ratio is clipped.
    pub clip_low: f64,
    /// Above `1 + clip_high` a sequence's ratio is clipped.
    pub clip_high: f64,
    /// Whether advantages are shifted and scaled to mean 0 and standard deviation 1 over the step.
    pub normalize_advantages: bool,
    /// Scores are clipped to this magnitude.
    pub reward_clip: Option<f64>,
    /// What happens to answers that are too long or never ended.
    pub filter: FilterConfig,
}

impl Default for RlooConfig {
    fn default() -> Self {
        Self {
            beta: 0.05,
            clip_low: 0.2,
            clip_high: 0.2,
            normalize_advantages: false,
            reward_clip: None,
            filter: FilterConfig::default(),
        }
    }
}

/// RLOO (Ahmadian et al. 2024, arXiv:2402.14740): an answer's advantage is its reward less the mean of its
/// siblings'.
///
/// The loss is that of TRL's `RLOOTrainer`: the clipped surrogate of the whole answer's probability ratio,
/// mean over answers.
#[derive(Debug, Clone, Copy)]
pub struct Rloo {
    config: RlooConfig,
    clip: Clip,
}

impl Rloo {
    /// The algorithm with these settings.
    ///
    /// # Errors
    /// [`Error::Setting`] names a setting that is out of range.
    pub fn new(config: RlooConfig) -> Result<Self> {
        let clip = Clip::new(config.clip_low, config.clip_high);
        clip.check()?;
        check_coef("beta", config.beta)?;
        check_reward_clip(config.reward_clip)?;
        config.filter.check()?;
        Ok(Self { config, clip })
    }

    /// Each sample's reward less the penalty, `[groups][samples]`.
    fn rewards(&self, step: &mut StepBatch) -> Result<Vec<Vec<f32>>> {
        step.groups.iter().try_for_each(check_siblings)?;
        let mut scores = self.config.filter.scores(&step.groups)?;
        log_scores(&mut step.metrics, &scores);
        clip_scores(&mut scores, self.config.reward_clip);
        let coef = step.kl_coef.unwrap_or(self.config.beta);
        let penalty = Penalty { estimator: KlEstimator::K1, coef };
        let shaped = penalty.shape(&step.groups, &scores)?;
        penalty.log(&mut step.metrics, &shaped);
        for sample in shaped.into_iter().filter(|sample| !sample.rewards.is_empty()) {
            let total: f64 = sample.rewards.iter().map(|&reward| f64::from(reward)).sum();
            scores[sample.group][sample.sample] = total as f32;
        }
        Ok(scores)
    }
}

impl Algorithm for Rloo {
    /// Sum over samples of the clipped surrogate.
    fn loss(&self, out: &Forward, batch: &Batch) -> Result<LossOutput> {
        let logps = out.logps()?;
        let log_ratio = batch.sum_per_sequence(log_ratio(logps, batch)?);
        let ratio = log_ratio.clone().exp();
        // Credit gives every target of a sample the same advantage; without a target there is none.
        let advantage = |sequence: &aligner_core::Sequence| {
            batch.weights[sequence.targets.clone()].first().copied().unwrap_or(0.0)
        };
        let advantages: Vec<f32> = batch.sequences.iter().map(advantage).collect();
        let losses = clipped_loss(&ratio, &constant(&advantages, &ratio), &self.clip);
        let mut metrics = Metrics::default();
        log_clip_ratios(&mut metrics, &ratio, &advantages, &self.clip);
        log_ratio_stats(&mut metrics, &log_ratio);
        if let Some(entropy) = &out.entropy {
            metrics.add_all("entropy", entropy);
        }
        Ok(LossOutput { sum: losses.sum(), metrics })
    }

    /// Writes each sample's advantage on all of its `weights`.
    fn credit(&self, step: &mut StepBatch) -> Result<()> {
        let rewards = self.rewards(step);
        let rewards = agreed(step, rewards)?;
        let advantages = rewards.iter().map(|rewards| {
            let baselines = leave_one_out(rewards);
            rewards.iter().zip(baselines).map(|(reward, baseline)| reward - baseline).collect()
        });
        let mut advantages: Vec<Vec<f32>> = advantages.collect();
        log_moments(&mut step.metrics, "advantages", &advantages.concat());
        if self.config.normalize_advantages {
            let moments = Moments::over_ranks(step, &advantages.concat())?;
            for advantage in advantages.iter_mut().flatten() {
                let centered = f64::from(*advantage) - moments.mean;
                *advantage = (centered / (moments.std() + SCALE_EPSILON)) as f32;
            }
        }
        self.config.filter.mask(&mut step.groups);
        give(step, &advantages);
        Ok(())
    }

    fn needs(&self) -> Needs {
        let needs = Needs::OLD_LOGPS | Needs::ENTROPY;
        if self.config.beta > 0.0 { needs | Needs::REF_LOGPS } else { needs }
    }

    fn per(&self) -> Per {
        Per::Sequence
    }
}

/// Gives all targets of a sample its advantage, `[groups][samples]`.
pub(crate) fn give(step: &mut StepBatch, advantages: &[Vec<f32>]) {
    for (group, advantages) in step.groups.iter_mut().zip(advantages) {
        for (sample, advantage) in group.samples.iter_mut().zip(advantages) {
            let targets = places(sample).count();
            sample.weights = scatter(sample, &vec![*advantage; targets]);
        }
    }
}

/// Checks that each sample has a sibling to be compared with.
pub(crate) fn check_siblings(group: &Group) -> Result<()> {
    if group.samples.len() >= 2 {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "group {}: a leave-one-out baseline needs at least 2 samples of a prompt; this group has {}",
        group.id,
        group.samples.len()
    )))
}

#[cfg(test)]
mod tests;
