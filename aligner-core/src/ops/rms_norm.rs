//! `RMSNorm`: `y = x / sqrt(mean(x^2) + eps) * weight` (Zhang and Sennrich 2019, arXiv:1910.07467).

use burn::tensor::Tensor;
use rayon::prelude::*;

use super::kernel::{Grad, INPUTS, Kernel, NO_GRADS, on_host, run, unfilled};
use super::simd::{add, lane_sum, vectorized};
use crate::{Error, Result};

/// Rows of a parallel task; gradients of the weight are summed by task, then in the tasks' order.
const TASK_ROWS: usize = 64;

/// Normalises each row of `x` `[tokens, hidden]` and scales it by `weight` `[hidden]`.
///
/// # Errors
/// [`Error::Shape`] where the weight does not have the rows' length.
pub fn rms_norm(x: Tensor<2>, weight: Tensor<1>, epsilon: f32) -> Result<Tensor<2>> {
    normed(x, weight, 0.0, epsilon)
}

/// As [`rms_norm`], scaled by one more than the weight, as in Gemma.
///
/// # Errors
/// Those of [`rms_norm`].
pub fn rms_norm_plus_one(x: Tensor<2>, weight: Tensor<1>, epsilon: f32) -> Result<Tensor<2>> {
    normed(x, weight, 1.0, epsilon)
}

fn normed(x: Tensor<2>, weight: Tensor<1>, offset: f32, epsilon: f32) -> Result<Tensor<2>> {
    let [tokens, hidden] = x.dims();
    if weight.dims() != [hidden] {
        return Err(Error::shape("weight of an RMSNorm", format!("[{hidden}]"), &weight.dims()));
    }
    if !on_host(&x) {
        let weight = if offset == 0.0 { weight } else { weight + offset };
        return Ok(reference(x, weight, epsilon));
    }
    let kernel = RmsNorm { tokens, hidden, offset, epsilon };
    Ok(run(kernel, vec![x.into_dispatch(), weight.into_dispatch()]))
}

/// The composition of Burn operations.
pub fn reference(x: Tensor<2>, weight: Tensor<1>, epsilon: f32) -> Tensor<2> {
    let scale = (x.clone().square().mean_dim(1) + epsilon).sqrt();
    x / scale * weight.unsqueeze::<2>()
}

#[derive(Debug)]
struct RmsNorm {
    tokens: usize,
    hidden: usize,
    /// Added to the weight.
    offset: f32,
    epsilon: f32,
}

vectorized! {
    /// Each row of x over its root mean square, times the weight plus an offset.
    pub(super) fn normalize(x: &[f32], weight: &[f32], offset: f32, epsilon: f32, out: &mut [f32]) {
        let hidden = weight.len();
        for (x, out) in x.chunks_exact(hidden).zip(out.chunks_exact_mut(hidden)) {
            let scale = inverse_rms(x, epsilon);
            for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
                *out = x * scale * (weight + offset);
            }
        }
    }
}

vectorized! {
    fn backward_rows(
        x: &[f32],
        weight: &[f32],
        grad: &[f32],
        offset: f32,
        epsilon: f32,
        of_x: &mut [f32],
        of_weight: &mut [f32],
    ) {
        let hidden = weight.len();
        let of_weight = &mut of_weight[..hidden];
        let rows = x.chunks_exact(hidden).zip(grad.chunks_exact(hidden)).zip(of_x.chunks_exact_mut(hidden));
        for ((x, grad), of_x) in rows {
            let scale = inverse_rms(x, epsilon);
            let along = lane_sum(hidden, |i| grad[i] * (weight[i] + offset) * x[i]);
            let along = along * scale * scale * scale / hidden as f32;
            for i in 0..hidden {
                of_x[i] = grad[i] * (weight[i] + offset) * scale - x[i] * along;
                of_weight[i] += grad[i] * x[i] * scale;
            }
        }
    }
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "part of vectorised bodies")]
fn inverse_rms(x: &[f32], epsilon: f32) -> f32 {
    let square = lane_sum(x.len(), |i| x[i] * x[i]);
    1.0 / (square / x.len() as f32 + epsilon).sqrt()
}

impl Kernel for RmsNorm {
    fn shape(&self) -> Vec<usize> {
        vec![self.tokens, self.hidden]
    }

    fn forward(&self, inputs: &[&[f32]]) -> Vec<f32> {
        let (x, weight) = (inputs[0], inputs[1]);
        let mut out = unfilled(x.len());
        let task = TASK_ROWS * self.hidden;
        (out.par_chunks_mut(task).zip(x.par_chunks(task)))
            .for_each(|(out, x)| normalize(x, weight, self.offset, self.epsilon, out));
        out
    }

    fn backward(&self, inputs: &[&[f32]], _: &[f32], grad: &[f32], _: [bool; INPUTS]) -> [Grad; INPUTS] {
        let (x, weight) = (inputs[0], inputs[1]);
        let mut of_x = unfilled(x.len());
        let task = TASK_ROWS * self.hidden;
        let tasks = x.len().div_ceil(task);
        let mut partial = vec![0.0; tasks * self.hidden];
        (of_x.par_chunks_mut(task).zip(x.par_chunks(task)))
            .zip(grad.par_chunks(task).zip(partial.par_chunks_mut(self.hidden)))
            .for_each(|((of_x, x), (grad, of_weight))| {
                backward_rows(x, weight, grad, self.offset, self.epsilon, of_x, of_weight);
            });
        let mut of_weight = vec![0.0; self.hidden];
        partial.chunks_exact(self.hidden).for_each(|part| add(&mut of_weight, part));
        let mut grads = NO_GRADS;
        grads[0] = Grad::Data(of_x);
        grads[1] = Grad::Data(of_weight);
        grads
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{leaf, relative_error, weighted_sum};

    #[test]
    fn values_and_gradients_match_the_composition() {
        for [tokens, hidden] in [[1, 5], [7, 64], [150, 37]] {
            compare([tokens, hidden], rms_norm, 0.0);
            compare([tokens, hidden], rms_norm_plus_one, 1.0);
        }
    }

    fn compare(
        shape: [usize; 2],
        norm: impl Fn(Tensor<2>, Tensor<1>, f32) -> Result<Tensor<2>>,
        offset: f32,
    ) {
        let (x, weight) = (leaf(shape, 1), leaf([shape[1]], 2));
        let fused = norm(x.clone(), weight.clone(), 1e-5).unwrap();
        let plain = reference(x.clone(), weight.clone() + offset, 1e-5);
        assert!(relative_error(&fused, &plain) < 1e-6);
        let of_fused = weighted_sum(fused, 3).backward();
        let of_plain = weighted_sum(plain, 3).backward();
        for (got, expected) in [
            (x.grad(&of_fused).unwrap().reshape([-1]), x.grad(&of_plain).unwrap().reshape([-1])),
            (weight.grad(&of_fused).unwrap(), weight.grad(&of_plain).unwrap()),
        ] {
            assert!(relative_error::<1>(&got, &expected) < 2e-6);
        }
    }

    #[test]
    fn a_weight_of_another_length_is_refused() {
        let message = rms_norm(leaf([2, 4], 1), leaf([3], 2), 1e-5).unwrap_err().to_string();
        assert!(message.contains("[4]") && message.contains("[3]"), "{message}");
    }
}
