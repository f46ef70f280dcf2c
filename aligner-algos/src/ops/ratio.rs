//! Ratios of the policy to the one that sampled, and the surrogates that clip them.

use aligner_core::ops::host::to_vec;
use aligner_core::{Batch, Error, Metrics, Result, Tensor};
use burn::tensor::{Int, TensorData};
use serde::{Deserialize, Serialize};

/// What one ratio is of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RatioLevel {
    /// Of each token.
    #[default]
    Token,
    /// Of the whole sequence: the geometric mean over its tokens (GSPO, arXiv:2507.18071).
    Sequence,
}

/// Where a surrogate stops rewarding a ratio for moving on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Clip {
    /// Below `1 − low` a ratio is clipped.
    pub low: f64,
    /// Above `1 + high` a ratio is clipped.
    pub high: f64,
    /// Bound of a ratio where the advantage is negative, as a factor of the advantage (dual clip,
    /// arXiv:1912.09729, equation 5).
    pub dual: Option<f64>,
    /// Upper bound of the unclipped ratio, whatever the advantage's sign (TRL's `delta`; INTELLECT-2,
    /// arXiv:2505.07291).
    pub delta: Option<f64>,
}

impl Clip {
    /// Clips at `1 − low` and `1 + high` only.
    pub fn new(low: f64, high: f64) -> Self {
        Self { low, high, dual: None, delta: None }
    }

    /// Checks the bounds.
    ///
    /// # Errors
    /// [`Error::Setting`] names `clip_low` (0 to 1), `clip_high` (0 or more), `dual_clip` (above 1) or
    /// `delta` (above `1 + clip_high`).
    pub fn check(&self) -> Result<()> {
        let Self { low, high, dual, delta } = *self;
        if !(0.0..=1.0).contains(&low) {
            return Err(Error::setting("clip_low", format!("must be between 0 and 1, got {low}")));
        }
        if !(high.is_finite() && high >= 0.0) {
            return Err(Error::setting("clip_high", format!("must be finite and not negative, got {high}")));
        }
        if let Some(dual) = dual.filter(|dual| !(dual.is_finite() && *dual > 1.0)) {
            return Err(Error::setting("dual_clip", format!("must be above 1, got {dual}")));
        }
        if let Some(delta) = delta.filter(|delta| !(delta.is_finite() && *delta > 1.0 + high)) {
            let message = format!("must be above 1 + clip_high = {}, got {delta}", 1.0 + high);
            return Err(Error::setting("delta", message));
        }
        Ok(())
    }
}

/// Logarithm of each target's ratio, `[targets]`: log-probability now less that when it was sampled.
///
/// A batch that knows no old log-probabilities is taken to be fresh from this policy: the ratio is 1, and its
/// gradient is that of the log-probability, as in TRL.
///
/// # Errors
/// [`Error::Missing`] for a batch that knows some.
pub fn log_ratio(logps: &Tensor<1>, batch: &Batch) -> Result<Tensor<1>> {
    let old = if batch.old_logps.is_empty() { logps.clone().detach() } else { batch.old_logps(logps)? };
    Ok(logps.clone() - old)
}

/// Logarithm of each sequence's length-normalised ratio, `[targets]` to `[sequences]`: the mean over its
/// targets, 0 where it has none. GSPO (arXiv:2507.18071), equation 7.
pub fn sequence_log_ratio(log_ratio: Tensor<1>, batch: &Batch) -> Tensor<1> {
    let lengths: Vec<f32> =
        batch.sequences.iter().map(|sequence| sequence.targets.len().max(1) as f32).collect();
    let sums = batch.sum_per_sequence(log_ratio);
    let lengths = aligner_core::constant(&lengths, &sums);
    sums / lengths
}

/// Each sequence's value on each of its targets, `[sequences]` to `[targets]`, differentiable.
pub fn on_targets(values: Tensor<1>, batch: &Batch) -> Tensor<1> {
    let owners: Vec<i64> = (batch.sequences.iter().enumerate())
        .flat_map(|(at, sequence)| std::iter::repeat_n(at as i64, sequence.targets.len()))
        .collect();
    if owners.is_empty() {
        return Tensor::zeros([0], &values.device());
    }
    let owners = Tensor::<1, Int>::from_data(TensorData::from(owners.as_slice()), &values.device());
    values.select(0, owners)
}

/// Loss of each unit (token or sequence) under the clipped surrogate, `[units]` as all arguments.
///
/// `−min(r A, clip(r, 1−low, 1+high) A)`: PPO (arXiv:1707.06347), equation 7, with bounds of its own on each
/// side (DAPO, arXiv:2503.14476, equation 10). With a dual clip c no less than `c A` where A < 0; with a
/// delta the unclipped ratio is bounded too.
pub fn clipped_loss(ratio: &Tensor<1>, advantages: &Tensor<1>, clip: &Clip) -> Tensor<1> {
    let free = clip.delta.map_or_else(|| ratio.clone(), |delta| ratio.clone().clamp_max(delta));
    let clipped = ratio.clone().clamp(1.0 - clip.low, 1.0 + clip.high);
    let surrogate = (free * advantages.clone()).min_pair(clipped * advantages.clone());
    let Some(dual) = clip.dual else { return surrogate.neg() };
    let bounded = surrogate.clone().max_pair(advantages.clone() * dual);
    surrogate.mask_where(advantages.clone().lower_elem(0.0), bounded).neg()
}

/// Loss of each target under CISPO, `[targets]` as all arguments: `−sg(min(r, cap)) A log π`.
///
/// MiniMax-M1 (arXiv:2506.13585), equation 4, without a lower bound. No gradient is lost to clipping: the ratio
/// is a weight, of which none is taken.
pub fn cispo_loss(ratio: &Tensor<1>, advantages: &Tensor<1>, logps: &Tensor<1>, cap: f64) -> Tensor<1> {
    let weights = ratio.clone().detach().clamp_max(cap);
    (weights * advantages.clone() * logps.clone()).neg()
}

/// Logs the shares of units whose ratio is clipped so that it has no gradient, under TRL's names:
/// `clip_ratio/low_mean` (below the range, advantage negative), `clip_ratio/high_mean` (above it, advantage
/// positive), `clip_ratio/region_mean` (either).
pub fn log_clip_ratios(metrics: &mut Metrics, ratio: &Tensor<1>, advantages: &[f32], clip: &Clip) {
    let (low_end, high_end) = ((1.0 - clip.low) as f32, (1.0 + clip.high) as f32);
    let (mut low, mut high) = (0, 0);
    for (ratio, &advantage) in to_vec(ratio).into_iter().zip(advantages) {
        low += usize::from(ratio < low_end && advantage < 0.0);
        high += usize::from(ratio > high_end && advantage > 0.0);
    }
    let count = advantages.len() as f64;
    metrics.add("clip_ratio/low_mean", low as f64, count);
    metrics.add("clip_ratio/high_mean", high as f64, count);
    metrics.add("clip_ratio/region_mean", (low + high) as f64, count);
}

/// Logs the share of targets whose weight is bounded and whose advantage is positive as TRL's
/// `cispo_clip_ratio`.
pub fn log_cispo_clip_ratio(metrics: &mut Metrics, ratio: &Tensor<1>, advantages: &[f32], cap: f64) {
    let cap = cap as f32;
    let bounded = to_vec(ratio).into_iter().zip(advantages).filter(|(r, a)| *r > cap && **a > 0.0).count();
    metrics.add("cispo_clip_ratio", bounded as f64, advantages.len() as f64);
}

/// Logs how far the policy has moved since it sampled: `policy/approxkl_avg`, the mean of ½(log r)² in nats,
/// and the ratio's mean and extremes `val/ratio`, `val/ratio_min`, `val/ratio_max`.
pub fn log_ratio_stats(metrics: &mut Metrics, log_ratio: &Tensor<1>) {
    let log_ratios: Vec<f64> = to_vec(log_ratio).into_iter().map(f64::from).collect();
    let count = log_ratios.len() as f64;
    metrics.add("policy/approxkl_avg", log_ratios.iter().map(|r| 0.5 * r * r).sum(), count);
    metrics.add("val/ratio", log_ratios.iter().map(|r| r.exp()).sum(), count);
    for log_ratio in log_ratios {
        metrics.add_min("val/ratio_min", log_ratio.exp());
        metrics.add_max("val/ratio_max", log_ratio.exp());
    }
}

#[cfg(test)]
mod tests;
