//! Importance weights of the trainer over the engine that sampled, whose kernels and weights may differ.

use aligner_core::{Error, Group, Metrics, Result, Sample};
use serde::{Deserialize, Serialize};

use super::targets::{gather_known, places};

/// What one weight is of, and what becomes of a weight over the cap; names as in TRL.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImportanceMode {
    /// One weight a token; those over the cap become the cap.
    TokenTruncate,
    /// One weight a token; those outside of 1/cap..cap become 0.
    TokenMask,
    /// One weight a sequence, the product over its tokens; those over the cap become the cap.
    SequenceTruncate,
    /// One weight a sequence; those outside of 1/cap..cap become 0: the whole sequence is left out.
    #[default]
    SequenceMask,
}

/// Settings of [`correct`]; defaults as in TRL.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ImportanceConfig {
    /// What one weight is of, and what becomes of a large one.
    pub mode: ImportanceMode,
    /// The cap, at least 1.
    pub cap: f64,
}

impl Default for ImportanceConfig {
    fn default() -> Self {
        Self { mode: ImportanceMode::SequenceMask, cap: 3.0 }
    }
}

impl ImportanceConfig {
    /// Checks the cap.
    ///
    /// # Errors
    /// [`Error::Setting`] for a `cap` below 1.
    pub fn check(&self) -> Result<()> {
        if self.cap.is_finite() && self.cap >= 1.0 {
            return Ok(());
        }
        Err(Error::setting("cap", format!("must be at least 1, got {}", self.cap)))
    }

    /// The weight that stands for `ratio`.
    fn bounded(&self, ratio: f64) -> f64 {
        match self.mode {
            ImportanceMode::TokenTruncate | ImportanceMode::SequenceTruncate => ratio.min(self.cap),
            ImportanceMode::TokenMask | ImportanceMode::SequenceMask => {
                if (1.0 / self.cap..=self.cap).contains(&ratio) { ratio } else { 0.0 }
            }
        }
    }

    fn by_sequence(&self) -> bool {
        matches!(self.mode, ImportanceMode::SequenceTruncate | ImportanceMode::SequenceMask)
    }
}

/// Multiplies every sample's `weights` by the importance weight of its targets: probability under the trainer
/// (`old_logps`) over that under the engine (`logps`), truncated or masked. Call it once, after credit.
///
/// Truncated importance sampling is that of Yao et al. 2025 (“Your efficient RL framework secretly brings
/// you off-policy RL training”). Logs TRL's `sampling/importance_sampling_ratio/{mean,min,max}` (after the
/// bound) and `sampling/sampling_logp_difference/{mean,max}` (magnitude, in nats), and beside them
/// `…/raw_mean` and `…/raw_max` before the bound.
///
/// # Errors
/// [`Error::Invalid`] names a sample that lacks either log-probabilities.
pub fn correct(groups: &mut [Group], config: &ImportanceConfig, metrics: &mut Metrics) -> Result<()> {
    config.check()?;
    for group in groups {
        for at in 0..group.samples.len() {
            if group.samples[at].targets() == 0 {
                continue;
            }
            let trainer = ("old_logps", "the trainer gives them after the rollout");
            let trainer = gather_known(group, at, trainer, &group.samples[at].old_logps)?;
            let engine =
                gather_known(group, at, ("logps", "the engine gives them"), &group.samples[at].logps)?;
            let gaps = trainer.iter().zip(&engine).map(|(t, e)| f64::from(*t) - f64::from(*e)).collect();
            weigh(&mut group.samples[at], gaps, config, metrics);
        }
    }
    Ok(())
}

/// Largest logarithm of a ratio: what is logged stays a number.
const MAX_LOG_RATIO: f64 = 80.0;

/// Weighs one sample by its targets' differences of log-probabilities, trainer less engine.
fn weigh(sample: &mut Sample, gaps: Vec<f64>, config: &ImportanceConfig, metrics: &mut Metrics) {
    for gap in &gaps {
        metrics.add("sampling/sampling_logp_difference/mean", gap.abs(), 1.0);
        metrics.add_max("sampling/sampling_logp_difference/max", gap.abs());
    }
    let log_ratios = if config.by_sequence() { vec![gaps.iter().sum()] } else { gaps };
    let weights: Vec<f64> =
        log_ratios.iter().map(|&log_ratio| log_weight(log_ratio, config, metrics)).collect();
    if sample.weights.is_empty() {
        sample.weights = vec![1.0; sample.tokens.len()];
    }
    let places: Vec<usize> = places(sample).collect();
    let cycle = weights.iter().cycle();
    for (place, weight) in places.into_iter().zip(cycle) {
        sample.weights[place] = (f64::from(sample.weights[place]) * weight) as f32;
    }
}

fn log_weight(log_ratio: f64, config: &ImportanceConfig, metrics: &mut Metrics) -> f64 {
    const NAME: &str = "sampling/importance_sampling_ratio";
    let raw = log_ratio.min(MAX_LOG_RATIO).exp();
    let weight = config.bounded(raw);
    metrics.add(format!("{NAME}/raw_mean"), raw, 1.0);
    metrics.add_max(format!("{NAME}/raw_max"), raw);
    metrics.add(format!("{NAME}/mean"), weight, 1.0);
    metrics.add_min(format!("{NAME}/min"), weight);
    metrics.add_max(format!("{NAME}/max"), weight);
    weight
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ratios 4 and ½ of a two-token answer: a product of 2.
    fn groups() -> Vec<Group> {
        let mut sample = Sample::response(&[1], &[2, 3]);
        sample.logps = vec![0.0, -2.0, -1.0];
        sample.old_logps = vec![0.0, -2.0 + 4.0_f32.ln(), -1.0 - 2.0_f32.ln()];
        sample.weights = vec![0.0, 1.0, -1.0];
        vec![Group::single("row 1", sample)]
    }

    fn corrected(mode: ImportanceMode, cap: f64) -> (Vec<f32>, Metrics) {
        let (mut groups, mut metrics) = (groups(), Metrics::default());
        correct(&mut groups, &ImportanceConfig { mode, cap }, &mut metrics).expect("complete");
        (groups.remove(0).samples.remove(0).weights, metrics)
    }

    #[test]
    fn weights_are_truncated_or_masked_by_token_or_by_sequence() {
        for (mode, cap, expected) in [
            (ImportanceMode::TokenTruncate, 3.0, [3.0, -0.5]),
            (ImportanceMode::TokenTruncate, 8.0, [4.0, -0.5]),
            (ImportanceMode::TokenMask, 3.0, [0.0, -0.5]),
            (ImportanceMode::TokenMask, 1.5, [0.0, 0.0]),
            (ImportanceMode::SequenceTruncate, 3.0, [2.0, -2.0]),
            (ImportanceMode::SequenceTruncate, 1.5, [1.5, -1.5]),
            (ImportanceMode::SequenceMask, 3.0, [2.0, -2.0]),
            (ImportanceMode::SequenceMask, 1.5, [0.0, 0.0]),
        ] {
            let (weights, _) = corrected(mode, cap);
            let gap = weights[1..].iter().zip(expected).map(|(w, e): (&f32, f32)| (w - e).abs());
            assert!(gap.fold(0.0, f32::max) < 1e-6, "{mode:?} {cap}: {weights:?}");
        }
    }

    #[test]
    fn raw_and_bounded_ratios_are_logged() {
        let (_, metrics) = corrected(ImportanceMode::TokenTruncate, 3.0);
        for (name, value) in [
            ("importance_sampling_ratio/raw_mean", 2.25),
            ("importance_sampling_ratio/raw_max", 4.0),
            ("importance_sampling_ratio/mean", 1.75),
            ("importance_sampling_ratio/min", 0.5),
            ("importance_sampling_ratio/max", 3.0),
            ("sampling_logp_difference/mean", 1.5 * 2.0_f64.ln()),
            ("sampling_logp_difference/max", 4.0_f64.ln()),
        ] {
            let got = metrics.get(&format!("sampling/{name}")).expect("logged");
            assert!((got - value).abs() < 1e-6, "{name}: {got}");
        }
    }

    #[test]
    fn an_infinite_ratio_stays_a_number() {
        let (mut groups, mut metrics) = (groups(), Metrics::default());
        groups[0].samples[0].logps[1] = -900.0;
        let config = ImportanceConfig { mode: ImportanceMode::SequenceTruncate, cap: 3.0 };
        correct(&mut groups, &config, &mut metrics).expect("complete");
        assert!((groups[0].samples[0].weights[1] - 3.0).abs() < 1e-6);
        assert!(metrics.iter().all(|(_, value)| value.is_finite()));
    }

    #[test]
    fn a_sample_without_the_trainers_logps_is_named() {
        let mut groups = groups();
        groups[0].samples[0].old_logps.clear();
        let refused = correct(&mut groups, &ImportanceConfig::default(), &mut Metrics::default());
        let message = refused.expect_err("nothing to compare").to_string();
        assert!(message.contains("row 1, sample 0") && message.contains("old_logps"), "{message}");
        let config = ImportanceConfig { cap: 0.5, ..ImportanceConfig::default() };
        assert!(config.check().expect_err("below 1").to_string().starts_with("cap"));
    }
}
