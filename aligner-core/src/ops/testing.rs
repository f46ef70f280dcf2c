//! What the operations' tests share: seeded values and comparisons of values and gradients.

use burn::tensor::{Device, Tensor, TensorData};

use super::host::to_vec;

/// Seeded values in (-1, 1).
pub(crate) fn values(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// A seeded autodiff leaf.
pub(crate) fn leaf<const D: usize>(shape: [usize; D], seed: u64) -> Tensor<D> {
    let len = shape.iter().product();
    let data = TensorData::new(values(len, seed), shape);
    Tensor::from_data(data, &Device::flex().autodiff()).require_grad()
}

/// Largest difference relative to the largest magnitude of `expected`.
pub(crate) fn relative_error<const D: usize>(got: &Tensor<D>, expected: &Tensor<D>) -> f32 {
    assert_eq!(got.dims(), expected.dims());
    let (got, expected) = (to_vec(got), to_vec(expected));
    let largest = expected.iter().fold(1e-6f32, |m, v| m.max(v.abs()));
    let pairs = got.iter().zip(&expected);
    pairs.map(|(a, b)| if (a - b).is_finite() { (a - b).abs() } else { f32::INFINITY }).fold(0.0, f32::max)
        / largest
}

/// A scalar that weights every element of `out` differently, so that no gradient cancels.
pub(crate) fn weighted_sum<const D: usize>(out: Tensor<D>, seed: u64) -> Tensor<1> {
    let shape = out.dims();
    let weights = TensorData::new(values(shape.iter().product(), seed), shape);
    let weights = Tensor::<D>::from_data(weights, &out.device());
    (out * weights).sum()
}
