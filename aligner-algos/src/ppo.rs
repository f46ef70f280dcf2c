//! Proximal policy optimization: a critic's advantages, and a surrogate that is clipped where the policy
//! would move too far.

use aligner_core::{Algorithm, Batch, Error, Forward, LossOutput, Metrics, Needs, Per, Result, StepBatch};
use serde::{Deserialize, Serialize};

use crate::ops::advantage::gae;
use crate::ops::filter::{FilterConfig, check_reward_clip, clip_scores, log_scores};
use crate::ops::kl::{KlEstimator, check_coef};
use crate::ops::penalty::{Penalty, Shaped};
use crate::ops::ratio::{Clip, clipped_loss, log_clip_ratios, log_ratio, log_ratio_stats};
use crate::ops::reduce::{Moments, agreed, log_moments};
use crate::ops::targets::{gather_known, scatter};

/// Where the divergence from the reference is held down.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlPlace {
    /// As a penalty on each token's reward.
    #[default]
    Reward,
    /// As a term of the loss.
    Loss,
}

/// How the policy is held to its reference.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KlConfig {
    /// Factor of the divergence. 0 turns it off, and no reference is needed. In the reward, a step's
    /// [`StepBatch::kl_coef`] goes before it.
    pub coef: f64,
    /// The estimate.
    pub estimator: KlEstimator,
    /// Where it counts: `reward` or `loss`.
    #[serde(rename = "in")]
    pub place: KlPlace,
}

impl Default for KlConfig {
    fn default() -> Self {
        Self { coef: 0.05, estimator: KlEstimator::K1, place: KlPlace::Reward }
    }
}

/// Settings of [`Ppo`]; defaults as in TRL's `PPOConfig`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PpoConfig {
    /// Below `1 − clip_low` a ratio is clipped.
    pub clip_low: f64,
    /// Above `1 + clip_high` a ratio is clipped.
    pub clip_high: f64,
    /// Bound of the ratio where the advantage is negative; veRL takes 3.
    pub dual_clip: Option<f64>,
    /// Discount of a token's reward, from 0 to 1.
    pub gamma: f64,
    /// How far rewards reach in the advantages, from 0 (one token, by the critic) to 1 (the rest of the
    /// answer). TRL and NeMo-Aligner take 0.95, `OpenRLHF` and veRL 1.
    pub lambda: f64,
    /// How the policy is held to its reference.
    pub kl: KlConfig,
    /// Weight of the entropy, which the loss raises.
    pub entropy_coef: f64,
    /// Whether the shaped rewards are divided by their standard deviation over the step.
    pub whiten_rewards: bool,
    /// Whether the advantages are shifted and scaled to mean 0 and variance 1 over the step.
    pub whiten_advantages: bool,
    /// Scores are clipped to this magnitude; `OpenRLHF` takes 10.
    pub reward_clip: Option<f64>,
    /// What happens to answers that are too long or never ended.
    pub filter: FilterConfig,
}

impl Default for PpoConfig {
    fn default() -> Self {
        Self {
            clip_low: 0.2,
            clip_high: 0.2,
            dual_clip: None,
            gamma: 1.0,
            lambda: 0.95,
            kl: KlConfig::default(),
            entropy_coef: 0.0,
            whiten_rewards: false,
            whiten_advantages: true,
            reward_clip: None,
            filter: FilterConfig::default(),
        }
    }
}

/// Proximal policy optimization (Schulman et al. 2017, arXiv:1707.06347) of a language model.
///
/// Credit reads each sample's `reward`, `token_rewards` and the critic's `values`, and writes `weights`, the
/// advantages, and `returns`, for [`ValueLoss`](crate::ValueLoss) to train the critic on.
#[derive(Debug, Clone, Copy)]
pub struct Ppo {
    config: PpoConfig,
    clip: Clip,
}

impl Ppo {
    /// The algorithm with these settings.
    ///
    /// # Errors
    /// [`Error::Setting`] names a setting that is out of range.
    pub fn new(config: PpoConfig) -> Result<Self> {
        let clip = Clip { dual: config.dual_clip, ..Clip::new(config.clip_low, config.clip_high) };
        clip.check()?;
        for (key, value) in [("gamma", config.gamma), ("lambda", config.lambda)] {
            if !(0.0..=1.0).contains(&value) {
                return Err(Error::setting(key, format!("must be between 0 and 1, got {value}")));
            }
        }
        check_coef("kl.coef", config.kl.coef)?;
        check_coef("entropy_coef", config.entropy_coef)?;
        check_reward_clip(config.reward_clip)?;
        config.filter.check()?;
        Ok(Self { config, clip })
    }

    /// The penalty on this step's rewards.
    fn penalty(&self, step: &StepBatch) -> Penalty {
        let KlConfig { coef, estimator, place } = self.config.kl;
        let coef = if place == KlPlace::Reward { step.kl_coef.unwrap_or(coef) } else { 0.0 };
        Penalty { estimator, coef }
    }

    /// Shaped rewards and the critic's values of every sample, after masking.
    fn rollout(&self, step: &mut StepBatch) -> Result<Vec<(Shaped, Vec<f32>)>> {
        let mut scores = self.config.filter.scores(&step.groups)?;
        log_scores(&mut step.metrics, &scores);
        clip_scores(&mut scores, self.config.reward_clip);
        self.config.filter.mask(&mut step.groups);
        let penalty = self.penalty(step);
        let shaped = penalty.shape(&step.groups, &scores)?;
        penalty.log(&mut step.metrics, &shaped);
        let values = |shaped: Shaped| {
            let group = &step.groups[shaped.group];
            let source = ("values", "the critic gives them: return `Needs::VALUES`");
            let values = gather_known(group, shaped.sample, source, &group.samples[shaped.sample].values)?;
            Ok((shaped, values))
        };
        shaped.into_iter().map(values).collect()
    }
}

impl Algorithm for Ppo {
    /// Sum over targets of the clipped surrogate, of the divergence where it is in the loss, and of the
    /// entropy with its sign changed.
    fn loss(&self, out: &Forward, batch: &Batch) -> Result<LossOutput> {
        let logps = out.logps()?;
        let count = batch.targets.len() as f64;
        let log_ratio = log_ratio(logps, batch)?;
        let ratio = log_ratio.clone().exp();
        let policy = clipped_loss(&ratio, &batch.weights(logps), &self.clip);
        let mut metrics = Metrics::default();
        log_clip_ratios(&mut metrics, &ratio, &batch.weights, &self.clip);
        metrics.add(
            "policy/clipfrac_avg",
            metrics.get("clip_ratio/region_mean").unwrap_or(0.0) * count,
            count,
        );
        log_ratio_stats(&mut metrics, &log_ratio);
        metrics.add_all("loss/policy_avg", &policy);
        let mut losses = policy;
        if self.config.kl.place == KlPlace::Loss && self.config.kl.coef > 0.0 {
            let kl = self.config.kl.estimator.tensor(logps.clone(), batch.ref_logps(logps)?);
            metrics.add_all("kl", &kl);
            losses = losses + kl * self.config.kl.coef;
        }
        if let Some(entropy) = &out.entropy {
            metrics.add_all("entropy", entropy);
        }
        if self.config.entropy_coef > 0.0 {
            losses = losses - out.entropy()?.clone() * self.config.entropy_coef;
        }
        Ok(LossOutput { sum: losses.sum(), metrics })
    }

    /// Writes advantages into `weights`, and `returns`.
    fn credit(&self, step: &mut StepBatch) -> Result<()> {
        let rollout = self.rollout(step);
        let mut rollout = agreed(step, rollout)?;
        if self.config.whiten_rewards {
            let all: Vec<f32> = rollout.iter().flat_map(|(shaped, _)| shaped.rewards.clone()).collect();
            let moments = Moments::over_ranks(step, &all)?;
            let rewards = rollout.iter_mut().flat_map(|(shaped, _)| &mut shaped.rewards);
            rewards.for_each(|reward| *reward = moments.whiten_keeping_mean(*reward));
        }
        let estimates: Vec<(Vec<f32>, Vec<f32>)> = rollout
            .iter()
            .map(|(shaped, values)| gae(&shaped.rewards, values, self.config.gamma, self.config.lambda))
            .collect();
        let advantages: Vec<f32> = estimates.iter().flat_map(|(advantages, _)| advantages.clone()).collect();
        let whiten = self.config.whiten_advantages.then(|| Moments::over_ranks(step, &advantages));
        let whiten = whiten.transpose()?;
        let returns: Vec<f32> = estimates.iter().flat_map(|(_, returns)| returns.clone()).collect();
        let values: Vec<f32> = rollout.iter().flat_map(|(_, values)| values.clone()).collect();
        log_critic(&mut step.metrics, &advantages, &returns, &values);
        for ((shaped, _), (mut advantages, returns)) in rollout.iter().zip(estimates) {
            if let Some(moments) = whiten {
                advantages = advantages.into_iter().map(|advantage| moments.whiten(advantage)).collect();
            }
            let sample = &mut step.groups[shaped.group].samples[shaped.sample];
            sample.weights = scatter(sample, &advantages);
            sample.returns = scatter(sample, &returns);
        }
        Ok(())
    }

    fn needs(&self) -> Needs {
        let needs = Needs::OLD_LOGPS | Needs::VALUES | Needs::ENTROPY;
        if self.config.kl.coef > 0.0 { needs | Needs::REF_LOGPS } else { needs }
    }

    fn per(&self) -> Per {
        Per::Token
    }
}

/// Logs what the critic's values led to, before whitening: `advantages/*`, `returns/*`, `values/*`, and the
/// share of the returns' variance that the values explain.
fn log_critic(metrics: &mut Metrics, advantages: &[f32], returns: &[f32], values: &[f32]) {
    log_moments(metrics, "advantages", advantages);
    log_moments(metrics, "returns", returns);
    log_moments(metrics, "values", values);
    let errors: Vec<f32> = returns.iter().zip(values).map(|(target, value)| target - value).collect();
    let (unexplained, whole) = (Moments::of(&errors), Moments::of(returns));
    if whole.variance > 0.0 {
        let explained = 1.0 - unexplained.variance / whole.variance;
        metrics.add("critic/vf_explained_var", explained * whole.count, whole.count);
    }
}

#[cfg(test)]
mod tests;
