//! Settings of REINFORCE.

use serde::{Deserialize, Serialize};

use crate::ops::filter::FilterConfig;
use crate::ops::kl::KlEstimator;

/// What an answer's return is compared with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Baseline {
    /// Nothing.
    None,
    /// The mean over the whole step.
    BatchMean,
    /// The mean over the group, itself included.
    GroupMean,
    /// The mean over the group's other answers (RLOO).
    #[default]
    LeaveOneOut,
}

/// Whether, and over what, advantages are shifted and scaled to mean 0 and variance 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Whiten {
    /// They stay as they are.
    #[default]
    None,
    /// Over all targets of the step.
    Token,
    /// Over all answers of the step.
    Sequence,
}

/// What the loss is averaged over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mean {
    /// Over targets, as in NeMo-Aligner.
    #[default]
    Token,
    /// Over answers, each summed over its targets: the gradient of the expected return.
    Sequence,
}

/// Settings of [`Reinforce`](crate::Reinforce); defaults as in NeMo-Aligner's `gpt_reinforce_actor`.
///
/// REINFORCE++ (arXiv:2501.03262) is `baseline = "none"`, `reward_to_go = true`, `whiten_advantages = "token"`,
/// `kl_estimator = "k1"`, `clip = 0.2`; its form with a baseline is `baseline = "group_mean"` and
/// `whiten_advantages = "sequence"`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ReinforceConfig {
    /// What an answer's return is compared with.
    pub baseline: Baseline,
    /// Factor of the KL penalty on the rewards; 0 turns it off, and no reference is needed.
    pub kl_coef: f64,
    /// The estimate of the divergence.
    pub kl_estimator: KlEstimator,
    /// Whether a token is credited with the rewards from itself on; else with those of the whole answer.
    pub reward_to_go: bool,
    /// Discount of a token's reward where it is credited with those from itself on, from 0 to 1.
    pub gamma: f64,
    /// Whether advantages are whitened over the step.
    pub whiten_advantages: Whiten,
    /// Where the ratio to the policy that sampled is clipped, for several updates on one rollout. Without it
    /// the loss is the log-likelihood, and every rollout is for one update.
    pub clip: Option<f64>,
    /// What the loss is averaged over.
    pub average: Mean,
    /// Scores are clipped to this magnitude.
    pub reward_clip: Option<f64>,
    /// What happens to answers that are too long or never ended.
    pub filter: FilterConfig,
}

impl Default for ReinforceConfig {
    fn default() -> Self {
        Self {
            baseline: Baseline::LeaveOneOut,
            kl_coef: 0.01,
            kl_estimator: KlEstimator::Abs,
            reward_to_go: false,
            gamma: 1.0,
            whiten_advantages: Whiten::None,
            clip: None,
            average: Mean::Token,
            reward_clip: None,
            filter: FilterConfig::default(),
        }
    }
}
