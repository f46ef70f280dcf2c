//! Estimates of the Kullback–Leibler divergence from the reference, and the control of its coefficient.

use aligner_core::{Error, Result, Tensor};
use serde::{Deserialize, Serialize};

/// An estimate of KL(policy ‖ reference) from the log-probabilities of tokens that the policy drew, in nats.
///
/// With r = reference/policy these are Schulman's three (“Approximating KL divergence”, 2020) and the
/// magnitude that NeMo-Aligner takes: k1 is unbiased and of either sign, k2 is biased and never negative,
/// k3 is unbiased and never negative. That holds for the values: as a loss k1 has a gradient of mean 0,
/// k2 has that of the divergence.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// `−log r`.
    #[default]
    K1,
    /// `½ (log r)²`.
    K2,
    /// `r − 1 − log r`.
    K3,
    /// `|log r|`.
    Abs,
}

impl KlEstimator {
    /// The estimate for each token, `[tokens]` as both arguments, with its gradient with respect to both.
    pub fn tensor(self, logps: Tensor<1>, ref_logps: Tensor<1>) -> Tensor<1> {
        let log_ratio = ref_logps - logps;
        match self {
            Self::K1 => log_ratio.neg(),
            Self::K2 => log_ratio.square() * 0.5,
            Self::K3 => log_ratio.clone().exp() - log_ratio - 1.0,
            Self::Abs => log_ratio.abs(),
        }
    }

    /// The estimate for one token.
    pub fn host(self, logp: f32, ref_logp: f32) -> f64 {
        let log_ratio = f64::from(ref_logp) - f64::from(logp);
        match self {
            Self::K1 => -log_ratio,
            Self::K2 => 0.5 * log_ratio * log_ratio,
            Self::K3 => log_ratio.exp_m1() - log_ratio,
            Self::Abs => log_ratio.abs(),
        }
    }
}

/// An estimate from tokens that an older policy drew, `[tokens]`: weighed by `ratio`, new over old
/// probability, of which the gradient is taken too.
///
/// DeepSeek-V3.2 (arXiv:2512.02556), section 3.1; TRL's `use_bias_correction_kl`.
pub fn bias_corrected(kl: Tensor<1>, ratio: Tensor<1>) -> Tensor<1> {
    kl * ratio
}

/// How an adaptive controller moves; names and defaults as in TRL.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdaptiveKl {
    /// The divergence that is aimed at, summed over a sequence, in nats.
    pub target: f64,
    /// Samples over which a full error changes the coefficient by its own size.
    pub horizon: f64,
}

impl Default for AdaptiveKl {
    fn default() -> Self {
        Self { target: 6.0, horizon: 10_000.0 }
    }
}

/// The coefficient of a KL penalty: fixed, or led to a target. It is its own state, for a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct KlController {
    coef: f64,
    adaptive: Option<AdaptiveKl>,
}

impl KlController {
    /// Largest error that one update answers to, relative to the target.
    const MAX_ERROR: f64 = 0.2;

    /// A coefficient that stays.
    ///
    /// # Errors
    /// [`Error::Setting`] for a coefficient that is negative or not finite.
    pub fn fixed(coef: f64) -> Result<Self> {
        check_coef("kl.coef", coef)?;
        Ok(Self { coef, adaptive: None })
    }

    /// A coefficient that starts at `coef` and follows the divergence.
    ///
    /// # Errors
    /// [`Error::Setting`] for a coefficient, target or horizon that is not above 0.
    pub fn adaptive(coef: f64, adaptive: AdaptiveKl) -> Result<Self> {
        for (key, value) in
            [("kl.coef", coef), ("kl.target", adaptive.target), ("kl.horizon", adaptive.horizon)]
        {
            if !(value.is_finite() && value > 0.0) {
                return Err(Error::setting(key, format!("must be above 0, got {value}")));
            }
        }
        Ok(Self { coef, adaptive: Some(adaptive) })
    }

    /// The coefficient for the next step.
    pub fn coef(&self) -> f64 {
        self.coef
    }

    /// Takes note of the mean divergence of `samples` sequences, in nats a sequence.
    ///
    /// Ziegler et al. 2019 (arXiv:1909.08593), section 2.2: `β ← β (1 + clip((KL − target)/target,
    /// −0.2, 0.2) · samples / horizon)`, never below 0.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a divergence that is not finite.
    pub fn update(&mut self, kl: f64, samples: usize) -> Result<()> {
        if !kl.is_finite() {
            return Err(Error::Invalid(format!("the KL divergence of the step is {kl}")));
        }
        if let Some(AdaptiveKl { target, horizon }) = self.adaptive {
            let error = (kl / target - 1.0).clamp(-Self::MAX_ERROR, Self::MAX_ERROR);
            self.coef *= (1.0 + error * samples as f64 / horizon).max(0.0);
        }
        Ok(())
    }
}

/// A coefficient is finite and not negative.
pub(crate) fn check_coef(key: &str, coef: f64) -> Result<()> {
    if coef.is_finite() && coef >= 0.0 {
        return Ok(());
    }
    Err(Error::setting(key, format!("must be finite and not negative, got {coef}")))
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "a fixed coefficient does not move at all")]
mod tests {
    use super::*;
    use aligner_core::Device;
    use aligner_core::ops::host::to_vec;

    const ALL: [KlEstimator; 4] = [KlEstimator::K1, KlEstimator::K2, KlEstimator::K3, KlEstimator::Abs];

    #[test]
    fn host_and_tensor_forms_agree() {
        let (logps, ref_logps) = ([-1.0_f32, -0.5, -3.0, -2.0], [-1.0_f32, -2.5, -0.25, -2.001]);
        for estimator in ALL {
            let tensor = |values: [f32; 4]| Tensor::<1>::from_floats(values, &Device::flex());
            let together = to_vec(&estimator.tensor(tensor(logps), tensor(ref_logps)));
            for at in 0..4 {
                let alone = estimator.host(logps[at], ref_logps[at]);
                assert!((f64::from(together[at]) - alone).abs() < 1e-6, "{estimator:?} at {at}");
            }
        }
    }

    #[test]
    fn every_estimate_is_0_at_the_reference() {
        for estimator in ALL {
            assert_eq!(estimator.host(-1.7, -1.7), 0.0, "{estimator:?}");
        }
    }

    #[test]
    fn the_adaptive_coefficient_goes_to_the_target_from_both_sides() {
        let settings = AdaptiveKl { target: 6.0, horizon: 10_000.0 };
        for (kl, factor) in [(60.0, 1.0 + 0.2 * 0.05), (6.6, 1.0 + 0.1 * 0.05), (6.0, 1.0), (0.0, 0.99)] {
            let mut controller = KlController::adaptive(0.1, settings).expect("valid");
            controller.update(kl, 500).expect("a number");
            assert!((controller.coef() - 0.1 * factor).abs() < 1e-12, "{kl}: {}", controller.coef());
        }
    }

    #[test]
    fn a_fixed_coefficient_stays_and_a_controller_survives_a_checkpoint() {
        let mut fixed = KlController::fixed(0.05).expect("valid");
        fixed.update(1e9, 512).expect("a number");
        assert_eq!(fixed.coef(), 0.05);
        let mut moved = KlController::adaptive(0.05, AdaptiveKl::default()).expect("valid");
        moved.update(3.0, 512).expect("a number");
        let text = serde_json::to_string(&moved).expect("plain numbers");
        assert_eq!(serde_json::from_str::<KlController>(&text).expect("its own text"), moved);
    }

    #[test]
    fn what_cannot_be_steered_is_refused_by_name() {
        let adaptive = AdaptiveKl { target: 0.0, ..AdaptiveKl::default() };
        let message = KlController::adaptive(0.1, adaptive).expect_err("no target").to_string();
        assert!(message.starts_with("kl.target"), "{message}");
        let message = KlController::fixed(f64::NAN).expect_err("no number").to_string();
        assert!(message.starts_with("kl.coef"), "{message}");
        let mut controller = KlController::fixed(0.1).expect("valid");
        assert!(controller.update(f64::INFINITY, 1).is_err());
    }
}
