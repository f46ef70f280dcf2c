//! Means and variances over tokens, over sequences, and over a whole step.

use aligner_core::{Batch, Metrics, Result, StepBatch, Tensor, constant};

/// Added to a variance before its root, so that equal values become 0 and not NaN; as in TRL's `masked_whiten`.
pub const WHITEN_EPSILON: f64 = 1e-8;

/// The mean over all targets, `[targets]` to `[1]`.
pub fn token_mean(values: Tensor<1>) -> Tensor<1> {
    let count = values.dims()[0].max(1) as f64;
    values.sum() / count
}

/// The mean over sequences of their means over targets, `[targets]` to `[1]`. A sequence without a target
/// is not counted.
pub fn sequence_mean(values: Tensor<1>, batch: &Batch) -> Tensor<1> {
    let counted = batch.sequences.iter().filter(|sequence| !sequence.targets.is_empty()).count();
    let shares = constant(&sequence_shares(batch), &values);
    (values * shares).sum() / counted.max(1) as f64
}

/// One over the number of targets of each target's sequence, `[targets]`: what turns a sum over targets
/// into a sum over sequences of their means.
pub fn sequence_shares(batch: &Batch) -> Vec<f32> {
    let share = |len: usize| std::iter::repeat_n(1.0 / len as f32, len);
    batch.sequences.iter().flat_map(|sequence| share(sequence.targets.len())).collect()
}

/// The unbiased variance of values, `[targets]` to `[1]`; of fewer than two it is 0.
pub fn variance(values: Tensor<1>) -> Tensor<1> {
    let count = values.dims()[0];
    let centered = values.clone() - token_mean(values);
    centered.square().sum() / count.saturating_sub(1).max(1) as f64
}

/// How many values there are, their mean and their unbiased variance (0 for fewer than two).
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Moments {
    /// Values.
    pub count: f64,
    /// Their mean.
    pub mean: f64,
    /// Their variance, with one less than their number for a divisor.
    pub variance: f64,
}

impl Moments {
    /// Of values on this rank.
    pub fn of(values: &[f32]) -> Self {
        let mean = sum(values, 0.0, 1) / (values.len() as f64).max(1.0);
        Self::from_sums(values.len() as f64, mean, sum(values, mean, 2))
    }

    /// Of the values of all ranks that share the step; every rank has to call it.
    ///
    /// # Errors
    /// Those of the exchange.
    pub fn over_ranks(step: &StepBatch, values: &[f32]) -> Result<Self> {
        let [count, total] = step.sum_over_ranks(Ok([values.len() as f64, sum(values, 0.0, 1)]))?;
        let mean = total / count.max(1.0);
        let [squares] = step.sum_over_ranks(Ok([sum(values, mean, 2)]))?;
        Ok(Self::from_sums(count, mean, squares))
    }

    fn from_sums(count: f64, mean: f64, squares: f64) -> Self {
        let variance = if count > 1.0 { squares / (count - 1.0) } else { 0.0 };
        Self { count, mean, variance }
    }

    /// The standard deviation.
    pub fn std(&self) -> f64 {
        self.variance.sqrt()
    }

    /// `value` with the mean taken off, over the standard deviation.
    pub fn whiten(&self, value: f32) -> f32 {
        ((f64::from(value) - self.mean) / (self.variance + WHITEN_EPSILON).sqrt()) as f32
    }

    /// [`Moments::whiten`] with the mean put back: only the scale changes.
    pub fn whiten_keeping_mean(&self, value: f32) -> f32 {
        (f64::from(self.whiten(value)) + self.mean) as f32
    }
}

/// Fails on every rank of the step where one has failed, so that none waits for another in a later sum.
pub(crate) fn agreed<T>(step: &StepBatch, own: Result<T>) -> Result<T> {
    let mut done = None;
    let own = own.map(|own| {
        done = Some(own);
        []
    });
    step.sum_over_ranks(own)?;
    Ok(done.expect("a sum without an error has this rank's part"))
}

/// Logs the mean and the standard deviation of values as `NAME/mean` and `NAME/std`.
pub(crate) fn log_moments(metrics: &mut Metrics, name: &str, values: &[f32]) {
    let Moments { count, mean, .. } = Moments::of(values);
    metrics.add(format!("{name}/mean"), mean * count, count);
    metrics.add(format!("{name}/std"), Moments::of(values).std() * count, count);
}

/// Sum of the powers of the differences to `center`.
fn sum(values: &[f32], center: f64, power: i32) -> f64 {
    values.iter().map(|&value| (f64::from(value) - center).powi(power)).sum()
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "equal values have no variance at all")]
mod tests {
    use super::*;
    use aligner_core::{Device, Group, Sample};

    #[test]
    fn a_sequence_without_a_target_is_not_counted() {
        let silent = Group::single("s", Sample::new(vec![1, 2], vec![false; 2]));
        let groups = [
            Group::single("a", Sample::response(&[1], &[2])),
            silent,
            Group::single("b", Sample::response(&[1], &[2, 3])),
        ];
        let batch = Batch::collate(&groups).expect("valid");
        assert_eq!(sequence_shares(&batch), [1.0, 0.5, 0.5]);
        let values = Tensor::<1>::from_floats([4.0, 1.0, 3.0], &Device::flex());
        assert_eq!(sequence_mean(values.clone(), &batch).into_scalar::<f32>(), 3.0);
        assert!((token_mean(values).into_scalar::<f32>() - 8.0 / 3.0).abs() < 1e-6);
    }

    #[test]
    fn few_or_equal_values_whiten_to_zero() {
        for values in [&[][..], &[0.1], &[0.1; 7]] {
            let moments = Moments::of(values);
            assert_eq!(moments.variance, 0.0);
            assert!(values.iter().all(|&value| moments.whiten(value) == 0.0));
        }
    }

    #[test]
    fn one_rank_is_the_whole_step() {
        let values = [0.5, -2.0, 7.0];
        let moments = Moments::over_ranks(&StepBatch::default(), &values).expect("one rank");
        assert_eq!(moments, Moments::of(&values));
        assert!((moments.mean - 5.5 / 3.0).abs() < 1e-12 && (moments.variance - 21.583_333).abs() < 1e-5);
    }
}
