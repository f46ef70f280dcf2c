//! REINFORCE: each answer is made likelier by how much better it was than a baseline.

mod config;

use aligner_core::{Algorithm, Batch, Error, Forward, LossOutput, Metrics, Needs, Per, Result, StepBatch};

use crate::ops::advantage::{leave_one_out_of, mean, rewards_to_go};
use crate::ops::filter::{check_reward_clip, clip_scores, log_scores};
use crate::ops::kl::check_coef;
use crate::ops::penalty::{Penalty, Shaped};
use crate::ops::ratio::{Clip, clipped_loss, log_clip_ratios, log_ratio, log_ratio_stats};
use crate::ops::reduce::{Moments, agreed, log_moments};
use crate::ops::targets::scatter;

pub use config::{Baseline, Mean, ReinforceConfig, Whiten};

/// REINFORCE (Williams 1992) with a baseline; RLOO of Ahmadian et al. 2024 (arXiv:2402.14740) as it is set.
#[derive(Debug, Clone, Copy)]
pub struct Reinforce {
    config: ReinforceConfig,
    clip: Option<Clip>,
}

/// One sample's credit.
struct Credit {
    group: usize,
    sample: usize,
    /// Sum of the sample's shaped rewards: what baselines are means of.
    total: f32,
    /// Advantage of each target, `[targets]`.
    advantages: Vec<f32>,
}

impl Reinforce {
    /// The algorithm with these settings.
    ///
    /// # Errors
    /// [`Error::Setting`] names a setting that is out of range.
    pub fn new(config: ReinforceConfig) -> Result<Self> {
        let clip = config.clip.map(|clip| Clip::new(clip, clip));
        if let Some(clip) = config.clip.filter(|clip| !(*clip > 0.0 && *clip < 1.0)) {
            return Err(Error::setting("clip", format!("must be above 0 and below 1, got {clip}")));
        }
        if !(0.0..=1.0).contains(&config.gamma) {
            return Err(Error::setting("gamma", format!("must be between 0 and 1, got {}", config.gamma)));
        }
        if config.reward_to_go && config.whiten_advantages == Whiten::Sequence {
            let message = "`sequence` needs one advantage an answer, so reward_to_go = false; else `token`";
            return Err(Error::setting("whiten_advantages", message));
        }
        check_coef("kl_coef", config.kl_coef)?;
        check_reward_clip(config.reward_clip)?;
        config.filter.check()?;
        Ok(Self { config, clip })
    }

    /// Returns of every sample's targets, before any baseline.
    fn returns(&self, step: &mut StepBatch) -> Result<Vec<Credit>> {
        let mut scores = self.config.filter.scores(&step.groups)?;
        log_scores(&mut step.metrics, &scores);
        clip_scores(&mut scores, self.config.reward_clip);
        self.check_groups(step)?;
        // Before the mask: an answer that teaches nothing may still be in a baseline.
        let coef = step.kl_coef.unwrap_or(self.config.kl_coef);
        let penalty = Penalty { estimator: self.config.kl_estimator, coef };
        let shaped = penalty.shape(&step.groups, &scores)?;
        penalty.log(&mut step.metrics, &shaped);
        Ok(shaped.into_iter().map(|shaped| self.credit_of(&shaped)).collect())
    }

    fn check_groups(&self, step: &StepBatch) -> Result<()> {
        if self.config.baseline != Baseline::LeaveOneOut {
            return Ok(());
        }
        step.groups.iter().try_for_each(crate::rloo::check_siblings)
    }

    fn credit_of(&self, shaped: &Shaped) -> Credit {
        let total = shaped.rewards.iter().map(|&reward| f64::from(reward)).sum::<f64>() as f32;
        let advantages = if self.config.reward_to_go {
            rewards_to_go(&shaped.rewards, self.config.gamma)
        } else {
            vec![total; shaped.rewards.len()]
        };
        Credit { group: shaped.group, sample: shaped.sample, total, advantages }
    }

    /// The baseline of each sample, in the order of `credits`.
    fn baselines(&self, step: &StepBatch, credits: &[Credit]) -> Result<Vec<f32>> {
        let totals: Vec<f32> = credits.iter().map(|credit| credit.total).collect();
        Ok(match self.config.baseline {
            Baseline::None => vec![0.0; totals.len()],
            Baseline::BatchMean => {
                let mean = Moments::over_ranks(step, &totals)?.mean as f32;
                vec![mean; totals.len()]
            }
            Baseline::GroupMean => {
                let groups = credits.chunk_by(|one, other| one.group == other.group).map(|group| {
                    let totals: Vec<f32> = group.iter().map(|credit| credit.total).collect();
                    vec![mean(&totals) as f32; totals.len()]
                });
                groups.flatten().collect()
            }
            Baseline::LeaveOneOut => {
                let groups = credits.chunk_by(|one, other| one.group == other.group).map(|group| {
                    let totals: Vec<f32> = group.iter().map(|credit| credit.total).collect();
                    let counts = |credit: &Credit| {
                        !self.config.filter.masks(&step.groups[credit.group].samples[credit.sample])
                    };
                    leave_one_out_of(&totals, &group.iter().map(counts).collect::<Vec<_>>())
                });
                groups.flatten().collect()
            }
        })
    }

    /// Whitens the advantages of the samples that are not masked out.
    fn whiten(&self, step: &StepBatch, credits: &mut [Credit]) -> Result<()> {
        let counted = |credit: &&Credit| step.groups[credit.group].samples[credit.sample].targets() > 0;
        let counted = credits.iter().filter(counted);
        let values: Vec<f32> = match self.config.whiten_advantages {
            Whiten::None => return Ok(()),
            Whiten::Token => counted.flat_map(|credit| credit.advantages.clone()).collect(),
            Whiten::Sequence => counted.filter_map(|credit| credit.advantages.first().copied()).collect(),
        };
        let moments = Moments::over_ranks(step, &values)?;
        let advantages = credits.iter_mut().flat_map(|credit| &mut credit.advantages);
        advantages.for_each(|advantage| *advantage = moments.whiten(*advantage));
        Ok(())
    }
}

impl Algorithm for Reinforce {
    /// `−Σ A log π` over targets, or the clipped surrogate.
    fn loss(&self, out: &Forward, batch: &Batch) -> Result<LossOutput> {
        let logps = out.logps()?;
        let advantages = batch.weights(logps);
        let log_ratio = log_ratio(logps, batch)?;
        let mut metrics = Metrics::default();
        log_ratio_stats(&mut metrics, &log_ratio);
        let losses = match &self.clip {
            Some(clip) => {
                let ratio = log_ratio.exp();
                log_clip_ratios(&mut metrics, &ratio, &batch.weights, clip);
                clipped_loss(&ratio, &advantages, clip)
            }
            None => (logps.clone() * advantages).neg(),
        };
        if let Some(entropy) = &out.entropy {
            metrics.add_all("entropy", entropy);
        }
        Ok(LossOutput { sum: losses.sum(), metrics })
    }

    /// Writes advantages into `weights`.
    fn credit(&self, step: &mut StepBatch) -> Result<()> {
        let credits = self.returns(step);
        let mut credits = agreed(step, credits)?;
        let baselines = self.baselines(step, &credits)?;
        for (credit, baseline) in credits.iter_mut().zip(baselines) {
            credit.advantages.iter_mut().for_each(|advantage| *advantage -= baseline);
        }
        let advantages: Vec<f32> = credits.iter().flat_map(|credit| credit.advantages.clone()).collect();
        log_moments(&mut step.metrics, "advantages", &advantages);
        self.config.filter.mask(&mut step.groups);
        self.whiten(step, &mut credits)?;
        for credit in credits {
            let sample = &mut step.groups[credit.group].samples[credit.sample];
            sample.weights = scatter(sample, &credit.advantages);
        }
        Ok(())
    }

    fn needs(&self) -> Needs {
        let needs = if self.clip.is_some() { Needs::OLD_LOGPS } else { Needs::NOTHING };
        let needs = needs | Needs::ENTROPY;
        if self.config.kl_coef > 0.0 { needs | Needs::REF_LOGPS | Needs::OLD_LOGPS } else { needs }
    }

    fn per(&self) -> Per {
        match self.config.average {
            Mean::Token => Per::Token,
            Mean::Sequence => Per::Sequence,
        }
    }
}

#[cfg(test)]
mod tests;
