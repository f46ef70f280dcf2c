//! Settings of the learner.

use aligner_core::optim::{AdamWConfig, LearningRate, Schedule, ScheduleOptions};
use aligner_core::{Error, Result};
use serde::{Deserialize, Serialize};

/// Settings of [`super::Learner`]. Names and defaults follow TRL and `transformers` where they have
/// one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LearnerConfig {
    /// Most tokens that one pass computes; bounds memory, changes no gradient beyond rounding.
    pub micro_batch_tokens: usize,
    /// Peak learning rate. 2e-5 as TRL's SFT; preference losses usually want 1e-6, reward models 1e-5.
    pub learning_rate: f64,
    /// Curve of the learning rate.
    pub schedule: Schedule,
    /// What the curve can be told beside the warmup.
    pub schedule_options: ScheduleOptions,
    /// Steps of linear warmup.
    pub warmup_steps: u64,
    /// Share of the run that warms up, where `warmup_steps` is 0.
    pub warmup_ratio: f64,
    /// Decoupled weight decay; norms and biases are spared.
    pub weight_decay: f64,
    /// Whether norms and biases decay too.
    pub decay_vectors: bool,
    /// Decay rates of `AdamW`'s moments.
    pub betas: (f64, f64),
    /// Added to `AdamW`'s denominator.
    pub eps: f64,
    /// Largest global norm of a gradient; 0 turns clipping off.
    pub max_grad_norm: f64,
    /// Whether layers are computed a second time in the backward pass to save memory. The model does
    /// it: whoever builds the model passes this on.
    pub gradient_checkpointing: bool,
}

impl Default for LearnerConfig {
    fn default() -> Self {
        let AdamWConfig { betas, eps, weight_decay, decay_vectors, .. } = AdamWConfig::default();
        Self {
            micro_batch_tokens: 2048,
            learning_rate: 2e-5,
            schedule: Schedule::Linear,
            schedule_options: ScheduleOptions::default(),
            warmup_steps: 0,
            warmup_ratio: 0.0,
            weight_decay,
            decay_vectors,
            betas,
            eps,
            max_grad_norm: 1.0,
            gradient_checkpointing: false,
        }
    }
}

impl LearnerConfig {
    /// The optimizer's part.
    pub fn adamw(&self) -> AdamWConfig {
        AdamWConfig {
            betas: self.betas,
            eps: self.eps,
            weight_decay: self.weight_decay,
            decay_vectors: self.decay_vectors,
            amsgrad: false,
        }
    }

    /// The learning rate of each of `total_steps` steps.
    ///
    /// # Errors
    /// [`Error::Setting`] for a rate or an option that is negative or not finite; the key of an option is
    /// `schedule_options.NAME`.
    pub fn rate(&self, total_steps: u64) -> Result<LearningRate> {
        let warmup = self.warmup(total_steps);
        LearningRate::new(self.schedule, self.schedule_options, self.learning_rate, warmup, total_steps)
            .map_err(|error| match error {
                Error::Setting { key, message } if key != "learning_rate" => option(&key, message),
                other => other,
            })
    }

    /// Steps of a run of `total_steps` that warm up.
    pub fn warmup(&self, total_steps: u64) -> u64 {
        let by_ratio = (self.warmup_ratio * total_steps as f64).ceil() as u64;
        if self.warmup_steps > 0 { self.warmup_steps } else { by_ratio }
    }

    /// Everything that is wrong with the settings.
    pub fn errors(&self) -> Vec<Error> {
        let mut errors = Vec::new();
        if self.micro_batch_tokens == 0 {
            errors.push(Error::setting("micro_batch_tokens", "must be at least 1"));
        }
        if !(0.0..=1.0).contains(&self.warmup_ratio) {
            let message = format!("must be between 0 and 1, got {}", self.warmup_ratio);
            errors.push(Error::setting("warmup_ratio", message));
        }
        if !(self.max_grad_norm.is_finite() && self.max_grad_norm >= 0.0) {
            let message = format!("must be finite and not negative, got {}", self.max_grad_norm);
            errors.push(Error::setting("max_grad_norm", message));
        }
        let ScheduleOptions { min_lr_rate, min_lr_ratio, .. } = self.schedule_options;
        for (key, share) in [("min_lr_rate", min_lr_rate), ("min_lr_ratio", min_lr_ratio)] {
            if let Some(share) = share.filter(|share| *share > 1.0) {
                errors.push(option(
                    key,
                    format!("must be a share of the learning rate, at most 1, got {share}"),
                ));
            }
        }
        errors.extend(self.rate(1).err());
        errors.extend(aligner_core::optim::AdamW::new(self.adamw()).err());
        errors
    }
}

/// An error of an option of the schedule.
fn option(key: &str, message: String) -> Error {
    Error::setting(format!("schedule_options.{key}"), message)
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "the factor at the peak is exactly 1")]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid() {
        assert!(LearnerConfig::default().errors().is_empty());
    }

    #[test]
    fn every_error_is_reported_at_once() {
        let config = LearnerConfig {
            micro_batch_tokens: 0,
            learning_rate: -1.0,
            betas: (0.9, 1.0),
            max_grad_norm: f64::NAN,
            warmup_ratio: 2.0,
            ..LearnerConfig::default()
        };
        let messages: Vec<String> = config.errors().iter().map(ToString::to_string).collect();
        for key in ["micro_batch_tokens", "learning_rate", "betas[1]", "max_grad_norm", "warmup_ratio"] {
            assert!(messages.iter().any(|message| message.starts_with(key)), "{key}: {messages:?}");
        }
    }

    #[test]
    fn an_option_of_the_schedule_is_named_in_full() {
        let errors = |schedule_options| {
            let config = LearnerConfig { schedule_options, ..LearnerConfig::default() };
            config.errors().iter().map(ToString::to_string).collect::<String>()
        };
        let power = errors(ScheduleOptions { power: Some(-1.0), ..ScheduleOptions::default() });
        assert!(power.starts_with("schedule_options.power: "), "{power}");
        let share = errors(ScheduleOptions { min_lr_rate: Some(1.5), ..ScheduleOptions::default() });
        assert!(share.starts_with("schedule_options.min_lr_rate: ") && share.contains("1.5"), "{share}");
    }

    #[test]
    fn a_warmup_ratio_counts_where_no_steps_are_given() {
        let config = LearnerConfig { learning_rate: 1.0, warmup_ratio: 0.1, ..LearnerConfig::default() };
        assert_eq!(config.rate(40).expect("valid").at(4), 1.0);
        assert!(config.rate(40).expect("valid").at(3) < 1.0);
    }
}
