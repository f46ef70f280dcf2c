//! `LayerNorm`: `y = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias` (Ba et al. 2016, arXiv:1607.06450).

use burn::tensor::Tensor;
use rayon::prelude::*;

use super::kernel::{Grad, INPUTS, Kernel, NO_GRADS, on_host, run, unfilled};
use super::simd::{add, lane_sum, vectorized};
use crate::{Error, Result};

/// Rows of a parallel task; gradients of weight and bias are summed by task, then in the tasks' order.
const TASK_ROWS: usize = 64;

/// Normalises each row of `x` `[tokens, hidden]`, scales it by `weight` and adds `bias`, both `[hidden]`.
///
/// # Errors
/// [`Error::Shape`] where weight or bias do not have the rows' length.
pub fn layer_norm(x: Tensor<2>, weight: Tensor<1>, bias: Tensor<1>, epsilon: f32) -> Result<Tensor<2>> {
    let [tokens, hidden] = x.dims();
    for (what, tensor) in [("weight", &weight), ("bias", &bias)] {
        if tensor.dims() != [hidden] {
            return Err(Error::shape(
                format!("{what} of a LayerNorm"),
                format!("[{hidden}]"),
                &tensor.dims(),
            ));
        }
    }
    if !on_host(&x) {
        return Ok(reference(x, weight, bias, epsilon));
    }
    let kernel = LayerNorm { tokens, hidden, epsilon };
    Ok(run(kernel, vec![x.into_dispatch(), weight.into_dispatch(), bias.into_dispatch()]))
}

/// The composition of Burn operations.
pub fn reference(x: Tensor<2>, weight: Tensor<1>, bias: Tensor<1>, epsilon: f32) -> Tensor<2> {
    let centred = x.clone() - x.mean_dim(1);
    let scale = (centred.clone().square().mean_dim(1) + epsilon).sqrt();
    centred / scale * weight.unsqueeze::<2>() + bias.unsqueeze::<2>()
}

#[derive(Debug)]
struct LayerNorm {
    tokens: usize,
    hidden: usize,
    epsilon: f32,
}

/// The mean, and one over the root of the variance.
#[inline(always)]
#[expect(clippy::inline_always, reason = "part of vectorised bodies")]
fn moments(x: &[f32], epsilon: f32) -> (f32, f32) {
    let len = x.len() as f32;
    let mean = lane_sum(x.len(), |i| x[i]) / len;
    let square = lane_sum(x.len(), |i| (x[i] - mean) * (x[i] - mean));
    (mean, 1.0 / (square / len + epsilon).sqrt())
}

vectorized! {
    /// Each row of x, centred, over its standard deviation, times the weight, plus the bias.
    pub(super) fn normalize(x: &[f32], weight: &[f32], bias: &[f32], epsilon: f32, out: &mut [f32]) {
        let hidden = weight.len();
        let bias = &bias[..hidden];
        for (x, out) in x.chunks_exact(hidden).zip(out.chunks_exact_mut(hidden)) {
            let (mean, scale) = moments(x, epsilon);
            for i in 0..hidden {
                out[i] = (x[i] - mean) * scale * weight[i] + bias[i];
            }
        }
    }
}

vectorized! {
    /// With n = (x - mean) scale and g = grad weight, the gradient of x is
    /// `scale (g - mean(g) - n mean(g n))`; `of_ends` is the weight's gradient, then the bias's.
    fn backward_rows(x: &[f32], weight: &[f32], grad: &[f32], epsilon: f32, of_x: &mut [f32], of_ends: &mut [f32]) {
        let hidden = weight.len();
        let (of_weight, of_bias) = of_ends.split_at_mut(hidden);
        let of_bias = &mut of_bias[..hidden];
        let rows = x.chunks_exact(hidden).zip(grad.chunks_exact(hidden)).zip(of_x.chunks_exact_mut(hidden));
        for ((x, grad), of_x) in rows {
            let (mean, scale) = moments(x, epsilon);
            let whole = lane_sum(hidden, |i| grad[i] * weight[i]) / hidden as f32;
            let along = lane_sum(hidden, |i| grad[i] * weight[i] * (x[i] - mean)) * scale / hidden as f32;
            for i in 0..hidden {
                let normed = (x[i] - mean) * scale;
                of_x[i] = (grad[i] * weight[i] - whole - normed * along) * scale;
                of_weight[i] += grad[i] * normed;
                of_bias[i] += grad[i];
            }
        }
    }
}

impl Kernel for LayerNorm {
    fn shape(&self) -> Vec<usize> {
        vec![self.tokens, self.hidden]
    }

    fn forward(&self, inputs: &[&[f32]]) -> Vec<f32> {
        let &[x, weight, bias] = inputs else { return Vec::new() };
        let mut out = unfilled(x.len());
        let task = TASK_ROWS * self.hidden;
        (out.par_chunks_mut(task).zip(x.par_chunks(task)))
            .for_each(|(out, x)| normalize(x, weight, bias, self.epsilon, out));
        out
    }

    fn backward(&self, inputs: &[&[f32]], _: &[f32], grad: &[f32], _: [bool; INPUTS]) -> [Grad; INPUTS] {
        let (x, weight) = (inputs[0], inputs[1]);
        let mut of_x = unfilled(x.len());
        let task = TASK_ROWS * self.hidden;
        let tasks = x.len().div_ceil(task);
        let ends = 2 * self.hidden;
        let mut partial = vec![0.0; tasks * ends];
        (of_x.par_chunks_mut(task).zip(x.par_chunks(task)))
            .zip(grad.par_chunks(task).zip(partial.par_chunks_mut(ends)))
            .for_each(|((of_x, x), (grad, of_ends))| {
                backward_rows(x, weight, grad, self.epsilon, of_x, of_ends);
            });
        let mut of_ends = vec![0.0; ends];
        partial.chunks_exact(ends).for_each(|part| add(&mut of_ends, part));
        let of_bias = of_ends.split_off(self.hidden);
        let mut grads = NO_GRADS;
        for (grad, data) in grads.iter_mut().zip([of_x, of_ends, of_bias]) {
            *grad = Grad::Data(data);
        }
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
            // A mean that is far from zero.
            let (x, weight, bias) = (leaf([tokens, hidden], 1), leaf([hidden], 2), leaf([hidden], 3));
            let wide = || x.clone() + 2.0;
            let fused = layer_norm(wide(), weight.clone(), bias.clone(), 1e-5).unwrap();
            let plain = reference(wide(), weight.clone(), bias.clone(), 1e-5);
            assert!(relative_error(&fused, &plain) < 2e-6);
            let of_fused = weighted_sum(fused, 3).backward();
            let of_plain = weighted_sum(plain, 3).backward();
            let flat = |x: Option<Tensor<2>>| x.unwrap().reshape([-1]);
            for (got, expected) in [
                (flat(x.grad(&of_fused)), flat(x.grad(&of_plain))),
                (weight.grad(&of_fused).unwrap(), weight.grad(&of_plain).unwrap()),
                (bias.grad(&of_fused).unwrap(), bias.grad(&of_plain).unwrap()),
            ] {
                let error = relative_error::<1>(&got, &expected);
                assert!(error < 1e-5, "{tokens} x {hidden}: {error}");
            }
        }
    }

    #[test]
    fn a_bias_of_another_length_is_refused() {
        let message = layer_norm(leaf([2, 4], 1), leaf([4], 2), leaf([3], 3), 1e-5).unwrap_err().to_string();
        assert!(message.contains("bias") && message.contains("[3]"), "{message}");
    }
}
