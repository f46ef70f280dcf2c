//! Settings of the rollout loop.

use aligner_core::ops::rows::PackedKind;
use aligner_core::{Error, Result, Sampling};
use serde::{Deserialize, Serialize};

use crate::ops::importance::ImportanceConfig;
use crate::ops::kl::{AdaptiveKl, KlController};

/// Which log-probabilities are the `old` ones of the ratio new / old.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OldLogps {
    /// Those that the engine drew with: no further pass.
    #[default]
    Engine,
    /// Those of the trainer's weights before the first update of the step: one pass more.
    Trainer,
}

/// A KL coefficient that is led to a target, in place of the algorithm's own (Ziegler et al. 2019, arXiv:1909.08593).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdaptiveKlConfig {
    /// The coefficient of the first step.
    pub coef: f64,
    /// The divergence from the reference that is aimed at, in nats a response.
    pub target: f64,
    /// Samples over which a full error changes the coefficient by its own size.
    pub horizon: f64,
}

impl Default for AdaptiveKlConfig {
    fn default() -> Self {
        let AdaptiveKl { target, horizon } = AdaptiveKl::default();
        Self { coef: 0.05, target, horizon }
    }
}

/// How the engine keeps the weights that it draws with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineWeights {
    /// The trainer's own.
    #[default]
    F32,
    /// A copy of 16 bits a value.
    Bf16,
    /// A copy of 8 bits a value.
    Int8,
    /// A copy of 4 bits a value.
    Int4,
    /// A copy of 4 bits a value, which stand for quantiles of a normal distribution.
    Nf4,
}

impl EngineWeights {
    /// The kind of copy; none where there is none.
    pub fn packed(self) -> Option<PackedKind> {
        match self {
            Self::F32 => None,
            Self::Bf16 => Some(PackedKind::Bf16),
            Self::Int8 => Some(PackedKind::Int8),
            Self::Int4 => Some(PackedKind::Int4),
            Self::Nf4 => Some(PackedKind::Nf4),
        }
    }
}

/// Settings of [`crate::Online`]; the names are TRL's where it has one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RolloutConfig {
    /// Responses to each prompt.
    pub num_generations: usize,
    /// Most tokens of a response.
    pub max_completion_length: usize,
    /// Fewest tokens of a response: stop tokens are not drawn before.
    pub min_completion_length: usize,
    /// Divides the logits, in the engine and in the trainer.
    pub temperature: f32,
    /// Keeps the k most likely tokens; 0 is off. The trainer's log-probabilities are those of the whole
    /// distribution, so anything else needs `importance`.
    pub top_k: usize,
    /// Keeps the smallest set of most likely tokens whose probability reaches this; 1 is off.
    pub top_p: f32,
    /// Keeps tokens whose probability is at least this part of the largest; 0 is off.
    pub min_p: f32,
    /// Passes over the samples of a step.
    pub num_iterations: usize,
    /// Optimizer steps of a pass.
    pub num_minibatches: usize,
    /// How many updates of the weights old the samples may be that a step learns from: so many steps are
    /// generated ahead, beside the learning. 0 is strictly on-policy.
    pub max_staleness: usize,
    /// Where `old` log-probabilities come from.
    pub old_logps: OldLogps,
    /// The weights that samples are drawn with: a smaller copy is faster, is made anew at each step, and needs
    /// `importance`.
    pub weights: EngineWeights,
    /// Corrects samples of other weights or another distribution than the trainer's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub importance: Option<ImportanceConfig>,
    /// Leads the KL coefficient to a target.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adaptive_kl: Option<AdaptiveKlConfig>,
    /// Leaves out groups whose rewards are all equal, and asks further prompts in their place (DAPO,
    /// arXiv:2503.14476, 3.2).
    pub dynamic_sampling: bool,
    /// Most rounds of generation in a step with `dynamic_sampling`.
    pub max_rounds: usize,
    /// Prompts that are asked beyond those that a step needs: it goes on with the first that are complete,
    /// and the others' responses are carried to the next step.
    pub oversampling: usize,
    /// Steps at the start in which only the critic learns.
    pub critic_warmup_steps: usize,
    /// Farthest that a ratio new / old may be from 1 on fresh samples of the trainer's own weights; checked
    /// on the first step.
    pub max_ratio_error: f64,
    /// The run stops where the mean KL to the reference of a step is above this, in nats per response.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_kl: Option<f64>,
}

impl Default for RolloutConfig {
    fn default() -> Self {
        Self {
            num_generations: 8,
            max_completion_length: 256,
            min_completion_length: 0,
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            num_iterations: 1,
            num_minibatches: 1,
            max_staleness: 0,
            old_logps: OldLogps::Engine,
            weights: EngineWeights::F32,
            importance: None,
            adaptive_kl: None,
            dynamic_sampling: false,
            max_rounds: 4,
            oversampling: 0,
            critic_warmup_steps: 0,
            max_ratio_error: 1e-3,
            max_kl: None,
        }
    }
}

impl RolloutConfig {
    /// The settings that are on and that ranks which draw together cannot share: one stops the others' draws, or draws
    /// beside what is learned.
    pub fn alone(&self) -> Vec<&'static str> {
        let all = [("oversampling", self.oversampling > 0), ("max_staleness", self.max_staleness > 0)];
        all.into_iter().filter_map(|(key, is_on)| is_on.then_some(key)).collect()
    }

    /// Everything that is wrong with the settings.
    pub fn errors(&self) -> Vec<Error> {
        let mut errors = Vec::new();
        let counts = [
            ("num_generations", self.num_generations),
            ("max_completion_length", self.max_completion_length),
            ("num_iterations", self.num_iterations),
            ("num_minibatches", self.num_minibatches),
            ("max_rounds", self.max_rounds),
        ];
        for (key, _) in counts.into_iter().filter(|(_, count)| *count == 0) {
            errors.push(Error::setting(key, "must be at least 1, got 0"));
        }
        if self.min_completion_length > self.max_completion_length {
            let (min, max) = (self.min_completion_length, self.max_completion_length);
            let message = format!("{min} is more than max_completion_length = {max}");
            errors.push(Error::setting("min_completion_length", message));
        }
        if !(self.temperature.is_finite() && self.temperature > 0.0) {
            let message =
                format!("must be above 0 (a greedy sample explores nothing), got {}", self.temperature);
            errors.push(Error::setting("temperature", message));
        }
        let cuts = [("top_k", self.top_k > 0), ("top_p", self.top_p < 1.0), ("min_p", self.min_p > 0.0)];
        for (key, _) in cuts.into_iter().filter(|(_, cuts)| *cuts && self.importance.is_none()) {
            let message = "cuts the distribution that is sampled, and the trainer's log-probabilities are of the whole one; \
                           leave it off, or correct for it with [rollout.importance]";
            errors.push(Error::setting(key, message));
        }
        if self.weights != EngineWeights::F32 && self.importance.is_none() {
            let message = "a smaller copy draws from another distribution than the trainer's; correct for it with [rollout.importance]";
            errors.push(Error::setting("weights", message));
        }
        if self.importance.is_some() && self.old_logps == OldLogps::Engine {
            let message =
                "`importance` compares the engine's log-probabilities with the trainer's: set \"trainer\"";
            errors.push(Error::setting("old_logps", message));
        }
        if let Some(Err(Error::Setting { key, message })) =
            self.importance.as_ref().map(ImportanceConfig::check)
        {
            errors.push(Error::setting(format!("importance.{key}"), message));
        }
        if let Err(Error::Setting { key, message }) = self.kl_controller() {
            errors.push(Error::setting(key.replace("kl.", "adaptive_kl."), message));
        }
        let limits = [("max_ratio_error", Some(self.max_ratio_error)), ("max_kl", self.max_kl)];
        for (key, limit) in limits.into_iter().filter_map(|(key, limit)| Some((key, limit?))) {
            if !(limit.is_finite() && limit > 0.0) {
                errors.push(Error::setting(key, format!("must be above 0, got {limit}")));
            }
        }
        errors
    }

    /// How the engine draws, up to the tokens that stop a response.
    pub(super) fn sampling(&self, seed: u64, stop_tokens: Vec<u32>) -> Sampling {
        Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            min_tokens: self.min_completion_length,
            max_tokens: self.max_completion_length,
            stop_tokens,
            seed,
            ..Sampling::default()
        }
    }

    /// What leads the KL coefficient, where that is asked.
    pub(super) fn kl_controller(&self) -> Result<Option<KlController>> {
        let led = |AdaptiveKlConfig { coef, target, horizon }: AdaptiveKlConfig| {
            KlController::adaptive(coef, AdaptiveKl { target, horizon })
        };
        self.adaptive_kl.map(led).transpose()
    }

    /// Optimizer steps of a run of `steps` rollouts.
    pub fn updates(&self, steps: u64) -> u64 {
        steps * (self.num_iterations * self.num_minibatches) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_cannot_work_are_named() {
        let base = RolloutConfig::default();
        assert!(base.errors().is_empty());
        for (config, key) in [
            (RolloutConfig { num_generations: 0, ..base.clone() }, "num_generations"),
            (RolloutConfig { temperature: 0.0, ..base.clone() }, "temperature"),
            (RolloutConfig { top_p: 0.9, ..base.clone() }, "top_p"),
            (RolloutConfig { weights: EngineWeights::Int8, ..base.clone() }, "weights"),
            (RolloutConfig { min_completion_length: 300, ..base.clone() }, "min_completion_length"),
            (RolloutConfig { max_kl: Some(f64::NAN), ..base.clone() }, "max_kl"),
        ] {
            let errors = config.errors();
            assert!(errors.len() == 1 && errors[0].to_string().starts_with(key), "{key}: {errors:?}");
        }
    }
}
