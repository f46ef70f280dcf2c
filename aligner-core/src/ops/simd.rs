//! Vector width at run time, and the few vector functions that the kernels share.

/// Defines a function whose body is compiled for the baseline processor and for AVX2 with FMA, and
/// picked at run time: the binary stays portable and the loops still use the whole register.
macro_rules! vectorized {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn wide($($arg: $ty),*) $(-> $ret)? {
                    body($($arg),*)
                }
                if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                    // SAFETY: this processor has both features.
                    return unsafe { wide($($arg),*) };
                }
            }
            body($($arg),*)
        }
    };
}
pub(crate) use vectorized;

/// Partial sums that a reduction keeps, so that it vectorises with a fixed order of summation.
pub(crate) const LANES: usize = 16;

/// Sums the lanes pairwise, in a fixed order.
#[inline(always)]
#[expect(clippy::inline_always, reason = "part of vectorised bodies")]
pub(crate) fn sum_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Sums `term(i)` for `i < len` in [`LANES`] partial sums.
#[inline(always)]
#[expect(clippy::inline_always, reason = "part of vectorised bodies")]
pub(crate) fn lane_sum(len: usize, term: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let whole = len / LANES * LANES;
    let mut at = 0;
    while at < whole {
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum += term(at + lane);
        }
        at += LANES;
    }
    let mut sum = sum_lanes(lanes);
    for i in whole..len {
        sum += term(i);
    }
    sum
}

/// e^x with a relative error below 2e-7 for x in [-87, 88]; clamped outside.
///
/// Cephes' `expf`: x = n ln 2 + r, a polynomial of degree 5 in r, and 2^n through the exponent bits.
#[inline(always)]
#[expect(clippy::excessive_precision, reason = "the published coefficients")]
pub(crate) fn exp(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_375;
    const LN2_LOW: f32 = -2.121_944_40e-4;
    // 1.5 * 2^23: adding it rounds to the nearest integer and leaves it in the low mantissa bits.
    const ROUND: f32 = 12_582_912.0;
    let x = x.clamp(-87.0, 88.0);
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    let p = 1.987_569_15e-4;
    let p = p * r + 1.398_199_95e-3;
    let p = p * r + 8.333_451_91e-3;
    let p = p * r + 4.166_579_59e-2;
    let p = p * r + 1.666_666_55e-1;
    let p = p * r + 0.5;
    let p = p * (r * r) + r + 1.0;
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    p * scale
}

/// tanh x with a relative error below 4e-7.
///
/// Cephes' `tanhf`: an odd polynomial up to 0.625, `1 - 2 / (e^2x + 1)` above.
#[inline(always)]
#[expect(clippy::inline_always, reason = "part of vectorised bodies")]
#[expect(clippy::excessive_precision, reason = "the published coefficients")]
pub(crate) fn tanh(x: f32) -> f32 {
    let square = x * x;
    let p = -5.704_988_727_45e-3;
    let p = p * square + 2.063_908_879_54e-2;
    let p = p * square - 5.373_971_555_31e-2;
    let p = p * square + 1.333_144_220_36e-1;
    let p = p * square - 3.333_328_194_22e-1;
    let near = p * square * x + x;
    let far = (1.0 - 2.0 / (exp(2.0 * x.abs()) + 1.0)).copysign(x);
    if x.abs() < 0.625 { near } else { far }
}

vectorized! {
    /// Replaces each value by `cap tanh(value / cap)`.
    pub(crate) fn softcap(values: &mut [f32], cap: f32) {
        for value in values {
            *value = cap * tanh(*value / cap);
        }
    }
}

vectorized! {
    /// Replaces each value by `e^(value - shift)` and returns their sum.
    pub(crate) fn exp_sum(values: &mut [f32], shift: f32) -> f32 {
        let mut lanes = [0.0; LANES];
        let mut chunks = values.chunks_exact_mut(LANES);
        for chunk in &mut chunks {
            for (value, sum) in chunk.iter_mut().zip(&mut lanes) {
                *value = exp(*value - shift);
                *sum += *value;
            }
        }
        let mut sum = sum_lanes(lanes);
        for value in chunks.into_remainder() {
            *value = exp(*value - shift);
            sum += *value;
        }
        sum
    }
}

vectorized! {
    /// Sum of `e^(value - shift)`, and of `e^(value - shift) * (value - shift)`.
    pub(crate) fn exp_moments(values: &[f32], shift: f32) -> (f32, f32) {
        let mut sums = [0.0; LANES];
        let mut weighted = [0.0; LANES];
        let chunks = values.chunks_exact(LANES);
        let rest = chunks.remainder();
        for chunk in chunks {
            for ((&value, sum), weighted) in chunk.iter().zip(&mut sums).zip(&mut weighted) {
                let e = exp(value - shift);
                *sum += e;
                *weighted += e * (value - shift);
            }
        }
        let (mut sum, mut weight) = (sum_lanes(sums), sum_lanes(weighted));
        for &value in rest {
            let e = exp(value - shift);
            sum += e;
            weight += e * (value - shift);
        }
        (sum, weight)
    }
}

vectorized! {
    /// The largest value; negative infinity of nothing. NaN is skipped.
    pub(crate) fn max(values: &[f32]) -> f32 {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        let chunks = values.chunks_exact(LANES);
        let rest = chunks.remainder();
        for chunk in chunks {
            for (&value, lane) in chunk.iter().zip(&mut lanes) {
                *lane = if value > *lane { value } else { *lane };
            }
        }
        let all = lanes.iter().chain(rest);
        all.fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a })
    }
}

vectorized! {
    /// The inner product.
    pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
        let len = a.len().min(b.len());
        let (a, b) = (&a[..len], &b[..len]);
        lane_sum(len, |i| a[i] * b[i])
    }
}

vectorized! {
    /// `sum += values`.
    pub(crate) fn add(sum: &mut [f32], values: &[f32]) {
        for (sum, value) in sum.iter_mut().zip(values) {
            *sum += value;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulps_of_the_library() {
        for i in -8700..8800 {
            let x = i as f32 / 100.0 + 0.001_3;
            if x > 88.0 {
                break;
            }
            let (got, expected) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((got / expected - 1.0).abs() < 2.5e-7, "exp({x}) = {got}, not {expected}");
        }
    }

    #[test]
    fn tanh_is_within_a_few_ulps_of_the_library() {
        for i in -12_000..12_000 {
            let x = i as f32 / 1000.0 + 0.000_13;
            let (got, expected) = (f64::from(tanh(x)), f64::from(x).tanh());
            assert!((got / expected - 1.0).abs() < 4e-7, "tanh({x}) = {got}, not {expected}");
        }
    }

    #[test]
    fn sums_match_plain_ones_at_every_length() {
        for len in 0..70 {
            let values: Vec<f32> = (0..len).map(|i| (i as f32 * 0.7).sin()).collect();
            let mut exps = values.clone();
            let plain: f32 = values.iter().map(|v| (v - 0.5).exp()).sum();
            assert!((exp_sum(&mut exps, 0.5) - plain).abs() < 1e-4);
            assert!((exp_moments(&values, 0.5).0 - plain).abs() < 1e-4);
            let product: f32 = values.iter().map(|v| v * v).sum();
            assert!((dot(&values, &values) - product).abs() < 1e-4);
            let largest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert!(max(&values).total_cmp(&largest).is_eq());
        }
    }
}
