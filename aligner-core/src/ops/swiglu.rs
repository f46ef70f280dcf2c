//! `SwiGLU`'s gate: `silu(gate) * up` (Shazeer 2020, arXiv:2002.05202).

use burn::tensor::{Tensor, activation};
use rayon::prelude::*;

use super::kernel::{Grad, INPUTS, Kernel, NO_GRADS, on_host, run, unfilled};
use super::simd::{exp, vectorized};
use crate::{Error, Result};

/// Elements of a parallel task.
const TASK: usize = 1 << 14;

/// `silu(gate) * up`, both `[tokens, intermediate]`.
///
/// # Errors
/// [`Error::Shape`] where the two differ.
pub fn swiglu(gate: Tensor<2>, up: Tensor<2>) -> Result<Tensor<2>> {
    if gate.dims() != up.dims() {
        return Err(Error::shape("SwiGLU's up projection", format!("{:?}", gate.dims()), &up.dims()));
    }
    if !on_host(&gate) {
        return Ok(reference(gate, up));
    }
    let kernel = SwiGlu { shape: gate.dims() };
    Ok(run(kernel, vec![gate.into_dispatch(), up.into_dispatch()]))
}

/// The composition of Burn operations.
pub fn reference(gate: Tensor<2>, up: Tensor<2>) -> Tensor<2> {
    activation::silu(gate) * up
}

#[derive(Debug)]
struct SwiGlu {
    shape: [usize; 2],
}

vectorized! {
    fn forward(gate: &[f32], up: &[f32], out: &mut [f32]) {
        for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
            *out = gate / (1.0 + exp(-gate)) * up;
        }
    }
}

vectorized! {
    /// `silu(gate) * up` in place of the gate.
    pub(super) fn forward_in_place(gate: &mut [f32], up: &[f32]) {
        for (gate, up) in gate.iter_mut().zip(up) {
            *gate = *gate / (1.0 + exp(-*gate)) * up;
        }
    }
}

vectorized! {
    fn backward(gate: &[f32], up: &[f32], grad: &[f32], of_gate: &mut [f32], of_up: &mut [f32]) {
        for i in 0..gate.len().min(up.len()).min(grad.len()).min(of_gate.len()).min(of_up.len()) {
            let sigmoid = 1.0 / (1.0 + exp(-gate[i]));
            let silu = gate[i] * sigmoid;
            of_gate[i] = grad[i] * up[i] * (sigmoid + silu * (1.0 - sigmoid));
            of_up[i] = grad[i] * silu;
        }
    }
}

impl Kernel for SwiGlu {
    fn shape(&self) -> Vec<usize> {
        self.shape.to_vec()
    }

    fn forward(&self, inputs: &[&[f32]]) -> Vec<f32> {
        let (gate, up) = (inputs[0], inputs[1]);
        let mut out = unfilled(gate.len());
        (out.par_chunks_mut(TASK).zip(gate.par_chunks(TASK).zip(up.par_chunks(TASK))))
            .for_each(|(out, (gate, up))| forward(gate, up, out));
        out
    }

    fn backward(&self, inputs: &[&[f32]], _: &[f32], grad: &[f32], _: [bool; INPUTS]) -> [Grad; INPUTS] {
        let (gate, up) = (inputs[0], inputs[1]);
        let (mut of_gate, mut of_up) = (unfilled(gate.len()), unfilled(up.len()));
        (of_gate.par_chunks_mut(TASK).zip(of_up.par_chunks_mut(TASK)))
            .zip(gate.par_chunks(TASK).zip(up.par_chunks(TASK)).zip(grad.par_chunks(TASK)))
            .for_each(|((of_gate, of_up), ((gate, up), grad))| backward(gate, up, grad, of_gate, of_up));
        let mut grads = NO_GRADS;
        grads[0] = Grad::Data(of_gate);
        grads[1] = Grad::Data(of_up);
        grads
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{leaf, relative_error, weighted_sum};

    #[test]
    fn values_and_gradients_match_the_composition() {
        for shape in [[1, 3], [37, 1000]] {
            // Gates from -20 to 20 reach both tails of the sigmoid.
            let (gate, up) = (leaf(shape, 1), leaf(shape, 2));
            let fused = swiglu(gate.clone() * 20.0, up.clone()).unwrap();
            let plain = reference(gate.clone() * 20.0, up.clone());
            assert!(relative_error(&fused, &plain) < 1e-6);
            let of_fused = weighted_sum(fused, 3).backward();
            let of_plain = weighted_sum(plain, 3).backward();
            for input in [&gate, &up] {
                let (got, expected) = (input.grad(&of_fused).unwrap(), input.grad(&of_plain).unwrap());
                assert!(relative_error(&got, &expected) < 2e-6);
            }
        }
    }
}
