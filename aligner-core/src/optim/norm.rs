//! The global norm of a gradient, and clipping by it.

use burn::tensor::Tensor;
use rayon::prelude::*;

use crate::ParamSet;
use crate::ops::{host::with_slice, kernel::on_host};

/// Elements that one task reads. Fixed, so that the order of summation is the same on any number
/// of threads.
const CHUNK: usize = 1 << 15;
/// Independent partial sums within a chunk: as many as two vector registers of f64 hold.
const LANES: usize = 8;

/// How the elements of a gradient make one number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Norm {
    /// The sum of magnitudes.
    L1,
    /// The root of the sum of squares: what "global norm" means by default.
    #[default]
    L2,
    /// The largest magnitude.
    Max,
}

/// The norm over all gradients `[elements]` taken as one vector, accumulated in f64.
///
/// It is NaN or infinite where an element is.
pub fn global_norm(grads: &[Option<Tensor<1>>], norm: Norm) -> f64 {
    let parts = grads.iter().flatten().map(|grad| partial(grad, norm));
    match norm {
        Norm::L1 => parts.sum(),
        Norm::L2 => parts.sum::<f64>().sqrt(),
        Norm::Max => parts.fold(0.0, largest),
    }
}

/// What a gradient is multiplied by so that its norm is at most `max_norm`.
///
/// `min(1, max_norm / (norm + 1e-6))`, as `torch.nn.utils.clip_grad_norm_` has it: the 1e-6 keeps
/// a zero gradient from dividing by zero. A `max_norm` of 0 turns clipping off.
pub fn clip_coefficient(norm: f64, max_norm: f64) -> f64 {
    if max_norm > 0.0 { (max_norm / (norm + 1e-6)).min(1.0) } else { 1.0 }
}

/// Name of the first parameter whose gradient has a NaN or an infinity.
pub fn first_not_finite<'a>(params: &'a ParamSet, grads: &[Option<Tensor<1>>]) -> Option<&'a str> {
    let broken =
        |grad: &Option<Tensor<1>>| grad.as_ref().is_some_and(|grad| !partial(grad, Norm::L1).is_finite());
    params.iter().zip(grads).find(|(_, grad)| broken(grad)).map(|(param, _)| param.name.as_str())
}

/// One gradient's part: the sum of squares for L2.
fn partial(grad: &Tensor<1>, norm: Norm) -> f64 {
    if !on_host(grad) {
        return partial_on_device(grad, norm);
    }
    with_slice(grad, |values| {
        if values.len() <= CHUNK {
            return chunk(values, norm);
        }
        let parts: Vec<f64> = values.par_chunks(CHUNK).map(|part| chunk(part, norm)).collect();
        combine(&parts, norm)
    })
}

fn partial_on_device(grad: &Tensor<1>, norm: Norm) -> f64 {
    let value: f32 = match norm {
        Norm::L1 => grad.clone().abs().sum().into_scalar(),
        Norm::L2 => grad.clone().square().sum().into_scalar(),
        Norm::Max => grad.clone().abs().max().into_scalar(),
    };
    f64::from(value)
}

fn chunk(values: &[f32], norm: Norm) -> f64 {
    match norm {
        Norm::L1 => fold_lanes(values, norm, |sum, value| sum + value.abs()),
        Norm::L2 => fold_lanes(values, norm, |sum, value| sum + value * value),
        Norm::Max => fold_lanes(values, norm, |most, value| largest(most, value.abs())),
    }
}

fn fold_lanes(values: &[f32], norm: Norm, add: impl Fn(f64, f64) -> f64) -> f64 {
    let mut lanes = [0.0; LANES];
    let mut rows = values.chunks_exact(LANES);
    for row in &mut rows {
        for (lane, &value) in lanes.iter_mut().zip(row) {
            *lane = add(*lane, f64::from(value));
        }
    }
    for (lane, &value) in lanes.iter_mut().zip(rows.remainder()) {
        *lane = add(*lane, f64::from(value));
    }
    combine(&lanes, norm)
}

fn combine(parts: &[f64], norm: Norm) -> f64 {
    match norm {
        Norm::L1 | Norm::L2 => parts.iter().sum(),
        Norm::Max => parts.iter().copied().fold(0.0, largest),
    }
}

/// `f64::max` that does not lose a NaN.
fn largest(one: f64, other: f64) -> f64 {
    if other.is_nan() || other > one { other } else { one }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "sums of small integers, and coefficients of exactly 1")]
mod tests {
    use super::*;
    use burn::tensor::{Device, TensorData};

    fn grads(values: &[f32]) -> Vec<Option<Tensor<1>>> {
        let (one, other) = values.split_at(values.len() / 3);
        let tensor = |part: &[f32]| Some(Tensor::from_data(TensorData::from(part), &Device::flex()));
        vec![tensor(one), None, tensor(other)]
    }

    #[test]
    fn norms_have_their_hand_computed_values() {
        let grads = grads(&[3.0, -4.0, 12.0]);
        assert_eq!(global_norm(&grads, Norm::L2), 13.0);
        assert_eq!(global_norm(&grads, Norm::L1), 19.0);
        assert_eq!(global_norm(&grads, Norm::Max), 12.0);
    }

    #[test]
    fn the_sum_does_not_depend_on_the_number_of_threads() {
        let values: Vec<f32> = (0..200_000_u32).map(|at| (at as f32 * 0.37).sin()).collect();
        let grads = grads(&values);
        let on = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
            pool.install(|| global_norm(&grads, Norm::L2)).to_bits()
        };
        assert_eq!(on(1), on(4));
        let exact = values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
        assert!((global_norm(&grads, Norm::L2) - exact).abs() < 1e-9 * exact);
    }

    #[test]
    fn a_nan_reaches_every_norm_and_is_found_by_name() {
        let device = Device::flex();
        let mut params = ParamSet::default();
        params.insert_data("good", &[1], vec![0.0], &device).expect("new");
        params.insert_data("bad", &[2], vec![0.0; 2], &device).expect("new");
        let grads = vec![
            Some(Tensor::<1>::from_floats([1.0], &device)),
            Some(Tensor::from_floats([f32::NAN, 1.0], &device)),
        ];
        for norm in [Norm::L1, Norm::L2, Norm::Max] {
            assert!(global_norm(&grads, norm).is_nan(), "{norm:?}");
        }
        assert_eq!(first_not_finite(&params, &grads), Some("bad"));
    }

    #[test]
    fn a_short_gradient_is_not_clipped() {
        assert_eq!(clip_coefficient(0.5, 1.0), 1.0);
        assert_eq!(clip_coefficient(0.0, 1.0), 1.0);
        assert_eq!(clip_coefficient(7.0, 0.0), 1.0);
        assert!((clip_coefficient(2.0, 1.0) - 0.5).abs() < 1e-6);
    }
}
