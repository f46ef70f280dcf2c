//! Losses of preference pairs as functions of score differences.

use aligner_core::{Batch, Error, Metrics, Result, Tensor};

/// The two sides of each preference pair, both `[pairs]`.
#[derive(Debug, Clone)]
pub struct Pairs {
    /// Of the chosen answers.
    pub chosen: Tensor<1>,
    /// Of the rejected answers.
    pub rejected: Tensor<1>,
}

impl Pairs {
    /// Takes values `[sequences]` apart, where `batch` holds ordered pairs: chosen, then rejected.
    ///
    /// # Errors
    /// [`Error::Invalid`] names a group that is not a pair; [`Error::Shape`] where there is not one
    /// value for each sample.
    pub fn split(values: &Tensor<1>, batch: &Batch) -> Result<Self> {
        check_pairs(batch)?;
        let (sequences, dims) = (batch.sequences.len(), values.dims());
        if dims != [sequences] {
            return Err(Error::shape(
                "values of preference pairs",
                format!("[{sequences} sequences]"),
                &dims,
            ));
        }
        let pairs = sequences / 2;
        let side = |at: usize| values.clone().reshape([pairs, 2]).narrow(1, at, 1).reshape([pairs]);
        Ok(Self { chosen: side(0), rejected: side(1) })
    }

    /// Chosen minus rejected, `[pairs]`.
    pub fn difference(&self) -> Tensor<1> {
        self.chosen.clone() - self.rejected.clone()
    }
}

/// Checks that every group of the batch is a pair.
fn check_pairs(batch: &Batch) -> Result<()> {
    let mut samples = vec![0_usize; batch.groups.len()];
    for sequence in &batch.sequences {
        samples[sequence.group] += 1;
    }
    batch.groups.iter().zip(samples).try_for_each(|(id, samples)| check_pair(id, samples))
}

/// Checks that the group called `id` is a preference pair.
pub(crate) fn check_pair(id: &str, samples: usize) -> Result<()> {
    if samples == 2 {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "group {id}: a preference pair has 2 samples, chosen and rejected; this group has {samples}"
    )))
}

/// `log σ(x)`, elementwise, finite and with full relative precision in both tails.
///
/// The value is `min(x, 0) − log(1 + e^−|x|)`. Its gradient is set to `σ(−x)` rather than derived:
/// the derivatives of `min` and of the magnitude at 0, where every DPO run starts, would not add
/// up to one half.
pub fn log_sigmoid(x: Tensor<1>) -> Tensor<1> {
    let at = x.clone().detach();
    let small = at.clone().abs().neg().exp();
    let value = at.clone().clamp_max(0.0) - small.clone().log1p();
    let positive = at.clone().greater_equal_elem(0.0);
    let slope = small.ones_like().mask_where(positive, small.clone()) / (small + 1.0);
    value + (x - at) * slope
}

/// Sigmoid loss of DPO with label smoothing, `[pairs]`: `−(1−ε) log σ(z) − ε log σ(−z)`.
///
/// `logits` is z = β·(difference of log-ratios). Rafailov et al. 2023 (arXiv:2305.18290), equation
/// 7; with smoothing cDPO, equation 3 of Mitchell's note.
pub fn smoothed_sigmoid_loss(logits: Tensor<1>, label_smoothing: f64) -> Tensor<1> {
    if label_smoothing == 0.0 {
        return log_sigmoid(logits).neg();
    }
    let flipped = log_sigmoid(logits.clone().neg()) * label_smoothing;
    (log_sigmoid(logits) * (1.0 - label_smoothing) + flipped).neg()
}

/// Robust DPO, `[pairs]`: `(−(1−ε) log σ(z) + ε log σ(−z)) / (1 − 2ε)`.
///
/// Unbiased where a share ε < ½ of the labels is flipped: Chowdhury et al. 2024
/// (arXiv:2403.00409).
pub fn robust_loss(logits: Tensor<1>, label_smoothing: f64) -> Tensor<1> {
    let flipped = log_sigmoid(logits.clone().neg()) * label_smoothing;
    (flipped - log_sigmoid(logits) * (1.0 - label_smoothing)) / (1.0 - 2.0 * label_smoothing)
}

/// Adds the share of pairs whose chosen side is higher under `name`; a tie counts one half.
pub fn add_accuracy(metrics: &mut Metrics, name: &str, chosen: &[f32], rejected: &[f32]) {
    let wins = chosen.iter().zip(rejected).map(|(chosen, rejected)| {
        if chosen > rejected {
            1.0
        } else if chosen < rejected {
            0.0
        } else {
            0.5
        }
    });
    metrics.add(name, wins.sum(), chosen.len() as f64);
}

/// Adds the mean of `values` under `name`.
pub(crate) fn add_mean(metrics: &mut Metrics, name: &str, values: &[f32]) {
    metrics.add(name, values.iter().map(|v| f64::from(*v)).sum(), values.len() as f64);
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "these slopes are exact")]
mod tests {
    use super::*;
    use aligner_core::ops::host::to_vec;
    use aligner_core::{Device, Group, Sample};

    fn value_and_slope(f: impl Fn(Tensor<1>) -> Tensor<1>, x: f32) -> (f64, f64) {
        let at = Tensor::<1>::from_floats([x], &Device::flex().autodiff()).require_grad();
        let out = f(at.clone());
        let slope = at.grad(&out.clone().sum().backward()).expect("tracked");
        (f64::from(to_vec(&out)[0]), f64::from(to_vec(&slope)[0]))
    }

    #[test]
    fn log_sigmoid_is_right_in_both_tails() {
        for x in [-100.0_f32, -30.0, -3.0, -1e-3, 0.0, 1e-3, 3.0, 30.0, 80.0, 100.0] {
            let exact = f64::from(x);
            let expected = exact.min(0.0) - (-exact.abs()).exp().ln_1p();
            let (value, slope) = value_and_slope(log_sigmoid, x);
            let expected_slope = 1.0 / (1.0 + exact.exp());
            // Below 1e-37 the exact values are subnormal in f32 and keep few digits.
            assert!((value - expected).abs() <= 1e-6 * expected.abs() + 1e-37, "{x}: {value} for {expected}");
            let gap = (slope - expected_slope).abs();
            assert!(gap <= 1e-6 * expected_slope + 1e-37, "{x}: slope {slope} for {expected_slope}");
        }
    }

    #[test]
    fn the_slope_at_zero_is_one_half() {
        assert_eq!(value_and_slope(log_sigmoid, 0.0).1, 0.5);
        assert_eq!(value_and_slope(|z| smoothed_sigmoid_loss(z, 0.25), 0.0).1, -0.25);
    }

    #[test]
    fn both_losses_are_ln_2_where_policy_and_reference_agree() {
        for smoothing in [0.0, 0.1, 0.4] {
            let sigmoid = value_and_slope(|z| smoothed_sigmoid_loss(z, smoothing), 0.0).0;
            let robust = value_and_slope(|z| robust_loss(z, smoothing), 0.0).0;
            assert!((sigmoid - std::f64::consts::LN_2).abs() < 1e-6, "{sigmoid}");
            assert!((robust - std::f64::consts::LN_2).abs() < 1e-6, "{robust}");
        }
    }

    #[test]
    fn ties_count_one_half() {
        let mut metrics = Metrics::default();
        add_accuracy(&mut metrics, "rewards/accuracies", &[1.0, 2.0, 3.0, 0.0], &[1.0, 1.0, 4.0, 0.0]);
        assert_eq!(metrics.get("rewards/accuracies"), Some(0.5));
    }

    #[test]
    fn a_group_that_is_no_pair_is_named() {
        let group = Group::single("row 9", Sample::response(&[1], &[2]));
        let batch = Batch::collate([&group]).expect("a valid group");
        let values = Tensor::<1>::zeros([1], &Device::flex());
        let message = Pairs::split(&values, &batch).expect_err("one sample").to_string();
        assert!(message.contains("row 9") && message.contains("has 1"), "{message}");
    }
}
