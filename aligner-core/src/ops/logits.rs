//! Reductions over one row of logits in host memory, for samplers. Each has a fixed order of summation.

use super::simd::{LANES, exp, sum_lanes, vectorized};

/// Values that share one partial result.
pub const BLOCK: usize = 128;

/// Below this exponent a weight counts as 0: e^-87 is the last one above the subnormal numbers.
const LEAST: f32 = -87.0;

#[inline(always)]
#[expect(clippy::inline_always, reason = "part of vectorised bodies")]
fn weight(exponent: f32) -> f32 {
    let weight = exp(exponent);
    if exponent < LEAST { 0.0 } else { weight }
}

vectorized! {
    /// Fills `maxima` with the largest value of each [`BLOCK`] of the row. False where a value is NaN or
    /// positive infinity; the maxima mean nothing then.
    pub fn block_maxima(values: &[f32], maxima: &mut Vec<f32>) -> bool {
        maxima.clear();
        let mut bad = [0; LANES];
        let is_bad = |value: f32| u32::from(value.is_nan()) | u32::from(value == f32::INFINITY);
        for block in values.chunks(BLOCK) {
            let mut lanes = [f32::NEG_INFINITY; LANES];
            let chunks = block.chunks_exact(LANES);
            let rest = chunks.remainder();
            for chunk in chunks {
                for ((&value, lane), bad) in chunk.iter().zip(&mut lanes).zip(&mut bad) {
                    *lane = if value > *lane { value } else { *lane };
                    *bad |= is_bad(value);
                }
            }
            for ((&value, lane), bad) in rest.iter().zip(&mut lanes).zip(&mut bad) {
                *lane = if value > *lane { value } else { *lane };
                *bad |= is_bad(value);
            }
            maxima.push(lanes.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a }));
        }
        bad.iter().all(|&bad| bad == 0)
    }
}

vectorized! {
    /// Sum of `e^((value - shift) * scale)`: the denominator of a softmax, where `shift` is the largest
    /// value. Terms below e^-87 count as 0.
    pub fn softmax_sum(values: &[f32], shift: f32, scale: f32) -> f64 {
        let mut sum = 0.0;
        for block in values.chunks(BLOCK) {
            let mut lanes = [0.0; LANES];
            let chunks = block.chunks_exact(LANES);
            let rest = chunks.remainder();
            for chunk in chunks {
                for (&value, lane) in chunk.iter().zip(&mut lanes) {
                    *lane += weight((value - shift) * scale);
                }
            }
            for (&value, lane) in rest.iter().zip(&mut lanes) {
                *lane += weight((value - shift) * scale);
            }
            sum += f64::from(sum_lanes(lanes));
        }
        sum
    }
}

vectorized! {
    /// The terms of [`softmax_sum`] as `weights`, as long as the row, and their sum over each [`BLOCK`].
    pub fn softmax_weights(
        values: &[f32],
        shift: f32,
        scale: f32,
        weights: &mut Vec<f32>,
        sums: &mut Vec<f64>,
    ) {
        weights.resize(values.len(), 0.0);
        sums.clear();
        for (block, out) in values.chunks(BLOCK).zip(weights.chunks_mut(BLOCK)) {
            let mut lanes = [0.0; LANES];
            let (chunks, mut outs) = (block.chunks_exact(LANES), out.chunks_exact_mut(LANES));
            let rest = chunks.remainder();
            for (chunk, out) in chunks.zip(&mut outs) {
                for ((&value, out), lane) in chunk.iter().zip(out).zip(&mut lanes) {
                    *out = weight((value - shift) * scale);
                    *lane += *out;
                }
            }
            for ((&value, out), lane) in rest.iter().zip(outs.into_remainder()).zip(&mut lanes) {
                *out = weight((value - shift) * scale);
                *lane += *out;
            }
            sums.push(f64::from(sum_lanes(lanes)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reductions_match_plain_ones_at_every_length() {
        for len in [0, 1, 15, 16, 17, 127, 128, 129, 300] {
            let values: Vec<f32> = (0..len).map(|i| (i as f32 * 0.7).sin() * 5.0).collect();
            let mut maxima = vec![9.0];
            assert!(block_maxima(&values, &mut maxima));
            let plain = |block: &[f32]| block.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(maxima, values.chunks(BLOCK).map(plain).collect::<Vec<_>>());

            let term = |value: &f32| ((f64::from(*value) - 5.0) * 0.5).exp();
            let (mut weights, mut sums) = (vec![7.0; 3], vec![7.0]);
            softmax_weights(&values, 5.0, 0.5, &mut weights, &mut sums);
            let expected: f64 = values.iter().map(term).sum();
            assert!((softmax_sum(&values, 5.0, 0.5) - expected).abs() <= 1e-6 * expected);
            assert!((sums.iter().sum::<f64>() - expected).abs() <= 1e-6 * expected);
            assert_eq!(weights.len(), len);
            for (weight, value) in weights.iter().zip(&values) {
                assert!((f64::from(*weight) / term(value) - 1.0).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn what_cannot_be_drawn_from_is_found_in_any_place() {
        let mut maxima = Vec::new();
        for at in [0, 5, 127, 128, 140, 149] {
            for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
                let mut values = vec![1.0; 150];
                values[at] = bad;
                assert!(!block_maxima(&values, &mut maxima), "{bad} at {at}");
            }
            let mut values = vec![1.0; 150];
            values[at] = f32::NEG_INFINITY;
            assert!(block_maxima(&values, &mut maxima));
            let (mut weights, mut sums) = (Vec::new(), Vec::new());
            softmax_weights(&values, 1.0, 1.0, &mut weights, &mut sums);
            assert!(weights[at].abs() == 0.0 && (sums.iter().sum::<f64>() - 149.0).abs() < 1e-9);
        }
    }
}
