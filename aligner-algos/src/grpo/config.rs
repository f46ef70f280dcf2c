//! Settings of GRPO and its kin.

use aligner_core::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::ops::advantage::ScaleRewards;
use crate::ops::filter::FilterConfig;
use crate::ops::kl::{KlEstimator, check_coef};
use crate::ops::ratio::{Clip, RatioLevel};

/// Surrogate and normaliser; names as in TRL.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GrpoLoss {
    /// Every answer weighs the same (arXiv:2402.03300).
    Grpo,
    /// Every target weighs the same.
    Bnpo,
    /// Every target weighs the same (arXiv:2503.14476).
    #[default]
    Dapo,
    /// Every target weighs the same, over a constant length (arXiv:2503.20783).
    DrGrpo,
    /// Truncated importance weights without clipping (arXiv:2506.13585).
    Cispo,
}

/// Settings of [`Grpo`](crate::Grpo); defaults as in TRL's `GRPOConfig`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GrpoConfig {
    /// Factor of the divergence from the reference in the loss; 0 turns it off, and no reference is needed.
    pub beta: f64,
    /// The estimate of the divergence.
    pub kl_estimator: KlEstimator,
    /// Whether the divergence is weighed by the ratio (DeepSeek-V3.2), for several updates on one rollout.
    pub use_bias_correction_kl: bool,
    /// Below `1 − clip_low` a ratio is clipped.
    pub clip_low: f64,
    /// Above `1 + clip_high` a ratio is clipped. For `cispo` it is the bound of the ratio itself, as in TRL;
    /// `ScaleRL` (arXiv:2510.13786) takes 5.
    pub clip_high: f64,
    /// Upper bound of the unclipped ratio, above `1 + clip_high`.
    pub delta: Option<f64>,
    /// Surrogate and normaliser.
    pub loss_type: GrpoLoss,
    /// What a ratio is of: `token`, or `sequence` (GSPO).
    pub level: RatioLevel,
    /// What advantages are divided by.
    pub scale_rewards: ScaleRewards,
    /// The longest answer, in tokens; `dr_grpo` divides by it.
    pub max_completion_length: Option<usize>,
    /// What happens to answers that are too long or never ended.
    pub filter: FilterConfig,
}

impl Default for GrpoConfig {
    fn default() -> Self {
        Self {
            beta: 0.0,
            kl_estimator: KlEstimator::K3,
            use_bias_correction_kl: false,
            clip_low: 0.2,
            clip_high: 0.2,
            delta: None,
            loss_type: GrpoLoss::Dapo,
            level: RatioLevel::Token,
            scale_rewards: ScaleRewards::Group,
            max_completion_length: None,
            filter: FilterConfig::default(),
        }
    }
}

impl GrpoConfig {
    pub(super) fn clip(&self) -> Clip {
        Clip { delta: self.delta, ..Clip::new(self.clip_low, self.clip_high) }
    }

    pub(super) fn check(&self) -> Result<()> {
        self.clip().check()?;
        check_coef("beta", self.beta)?;
        self.filter.check()?;
        match (self.loss_type, self.max_completion_length) {
            (GrpoLoss::DrGrpo, None) => {
                let message = "`dr_grpo` divides by the longest answer, in tokens: set it";
                return Err(Error::setting("max_completion_length", message));
            }
            (_, Some(0)) => {
                return Err(Error::setting("max_completion_length", "must be at least 1, got 0"));
            }
            _ => {}
        }
        if self.loss_type != GrpoLoss::Cispo {
            return Ok(());
        }
        if self.delta.is_some() {
            return Err(Error::setting("delta", "does nothing with `cispo`: clip_high is the bound"));
        }
        if self.level == RatioLevel::Sequence {
            return Err(Error::setting("level", "`cispo` weighs tokens: set `token`"));
        }
        if self.clip_high <= 0.0 {
            let message =
                format!("is the bound of a `cispo` weight and must be above 0, got {}", self.clip_high);
            return Err(Error::setting("clip_high", message));
        }
        Ok(())
    }
}
