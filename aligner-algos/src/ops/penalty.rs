//! A sample's rewards with the KL penalty, ready for returns and advantages.

use aligner_core::{Group, Metrics, Result};

use super::advantage::shaped_rewards;
use super::kl::KlEstimator;
use super::targets::{gather, gather_known};

/// The rewards of one sample's targets.
#[derive(Debug, Clone)]
pub(crate) struct Shaped {
    /// Place of its group in the step.
    pub(crate) group: usize,
    /// Its place in the group.
    pub(crate) sample: usize,
    /// The sample's score.
    pub(crate) score: f32,
    /// Reward of each target with the penalty, the score on the last one: `[targets]`.
    pub(crate) rewards: Vec<f32>,
    /// Estimated divergence from the reference at each target, in nats: `[targets]`; empty if unknown.
    pub(crate) kl: Vec<f64>,
    /// Log-probability of each target when it was sampled, in nats: `[targets]`; 0 if unknown.
    pub(crate) old_logps: Vec<f32>,
}

/// The KL penalty of a step's rewards.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Penalty {
    pub(crate) estimator: KlEstimator,
    /// Factor of the divergence.
    pub(crate) coef: f64,
}

impl Penalty {
    /// Shapes the rewards of each sample, given its score `[groups][samples]`.
    ///
    /// # Errors
    /// Names a sample that lacks log-probabilities which the penalty needs.
    pub(crate) fn shape(self, groups: &[Group], scores: &[Vec<f32>]) -> Result<Vec<Shaped>> {
        let places = scores.iter().enumerate().flat_map(|(group, scores)| {
            scores.iter().enumerate().map(move |(sample, score)| (group, sample, *score))
        });
        places.map(|(group, sample, score)| self.shape_one(groups, group, sample, score)).collect()
    }

    fn shape_one(self, groups: &[Group], group: usize, sample: usize, score: f32) -> Result<Shaped> {
        let own = &groups[group].samples[sample];
        let old = if own.old_logps.is_empty() { &own.logps } else { &own.old_logps };
        let (old_logps, ref_logps) = if self.coef > 0.0 {
            let source = ("logps", "the KL penalty needs them: the engine gives them");
            let old_logps = gather_known(&groups[group], sample, source, old)?;
            let source = ("ref_logps", "the KL penalty needs them: return `Needs::REF_LOGPS`");
            (old_logps, Some(gather_known(&groups[group], sample, source, &own.ref_logps)?))
        } else {
            let known = !old.is_empty() && !own.ref_logps.is_empty();
            (gather(own, old), known.then(|| gather(own, &own.ref_logps)))
        };
        let pairs = ref_logps.iter().flatten().zip(&old_logps);
        let kl: Vec<f64> =
            pairs.map(|(&reference, &policy)| self.estimator.host(policy, reference)).collect();
        let token_rewards = gather(own, &own.token_rewards);
        let rewards = shaped_rewards(old_logps.len(), score, &token_rewards, &kl, self.coef);
        Ok(Shaped { group, sample, score, rewards, kl, old_logps })
    }

    /// Logs the parts of the objective, means over the sequences that have a target, under TRL's names.
    ///
    /// `objective/{kl,entropy,non_score_reward,rlhf_reward,scores}`, each summed over a sequence; and the
    /// penalty's mean over targets as `kl`.
    pub(crate) fn log(self, metrics: &mut Metrics, shaped: &[Shaped]) {
        for sample in shaped.iter().filter(|sample| !sample.rewards.is_empty()) {
            let (kl, targets) = (sample.kl.iter().sum::<f64>(), sample.rewards.len() as f64);
            let entropy: f64 = sample.old_logps.iter().map(|logp| -f64::from(*logp)).sum();
            let score = f64::from(sample.score);
            if !sample.kl.is_empty() {
                metrics.add("objective/kl", kl, 1.0);
            }
            if self.coef > 0.0 {
                metrics.add("kl", kl, targets);
            }
            metrics.add("objective/entropy", entropy, 1.0);
            metrics.add("objective/non_score_reward", -self.coef * kl, 1.0);
            metrics.add("objective/rlhf_reward", score - self.coef * kl, 1.0);
            metrics.add("objective/scores", score, 1.0);
        }
    }
}
