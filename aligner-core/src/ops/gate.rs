//! The inner activation of an MLP, with its gate: `activation(gate) * up` (Shazeer 2020, arXiv:2002.05202).
//!
//! Both activations are `x sigmoid(s(x))`: silu with `s(x) = x`, and the tanh form of gelu (Hendrycks and Gimpel
//! 2016, arXiv:1606.08415) with twice the argument of its tanh, since `(1 + tanh u) / 2 = sigmoid(2 u)`.

use burn::tensor::{Tensor, activation};
use rayon::prelude::*;

use super::kernel::{Grad, INPUTS, Kernel, NO_GRADS, on_host, run, unfilled};
use super::simd::{exp, vectorized};
use crate::{Error, Result};

/// Elements of a parallel task.
const TASK: usize = 1 << 14;

/// What an MLP does with its gate, or with its only inner linear.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x sigmoid(x)`.
    Silu,
    /// `x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2`.
    GeluTanh,
}

/// Twice `sqrt(2 / pi)`, and that times 0.044715.
const GELU: [f32; 2] = [1.595_769_2, 0.071_354_816];

/// `activation(gate) * up`, both `[tokens, intermediate]`.
///
/// # Errors
/// [`Error::Shape`] where the two differ.
pub fn gated(gate: Tensor<2>, up: Tensor<2>, activation: Activation) -> Result<Tensor<2>> {
    if gate.dims() != up.dims() {
        return Err(Error::shape("a gate's up projection", format!("{:?}", gate.dims()), &up.dims()));
    }
    if !on_host(&gate) {
        return Ok(reference(gate, Some(up), activation));
    }
    let kernel = Gate { shape: gate.dims(), activation };
    Ok(run(kernel, vec![gate.into_dispatch(), up.into_dispatch()]))
}

/// `activation(x)`, `[tokens, intermediate]` to the same.
///
/// # Errors
/// None: any shape will do.
pub fn activate(x: Tensor<2>, activation: Activation) -> Result<Tensor<2>> {
    if !on_host(&x) {
        return Ok(reference(x, None, activation));
    }
    let kernel = Gate { shape: x.dims(), activation };
    Ok(run(kernel, vec![x.into_dispatch()]))
}

/// The composition of Burn operations.
pub fn reference(gate: Tensor<2>, up: Option<Tensor<2>>, activation: Activation) -> Tensor<2> {
    let activated = match activation {
        Activation::Silu => activation::silu(gate),
        Activation::GeluTanh => {
            let inner = gate.clone() + gate.clone().powi_scalar(3) * 0.044_715;
            let tanh = (inner * (2.0 / std::f64::consts::PI).sqrt()).tanh();
            gate * (tanh + 1.0) * 0.5
        }
    };
    match up {
        Some(up) => activated * up,
        None => activated,
    }
}

#[derive(Debug)]
struct Gate {
    shape: [usize; 2],
    activation: Activation,
}

/// Calls `each` with `s` and its slope as functions that are known where it is compiled.
macro_rules! with_activation {
    ($activation:expr, $each:expr) => {
        match $activation {
            Activation::Silu => $each(|x: f32| x, |_: f32| 1.0),
            Activation::GeluTanh => {
                $each(|x: f32| x * (GELU[0] + GELU[1] * x * x), |x: f32| GELU[0] + 3.0 * GELU[1] * x * x)
            }
        }
    };
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "part of vectorised bodies")]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

vectorized! {
    fn forward(gate: &[f32], up: &[f32], activation: Activation, out: &mut [f32]) {
        #[inline(always)]
        #[expect(clippy::inline_always, reason = "part of vectorised bodies")]
        fn each(gate: &[f32], up: &[f32], out: &mut [f32], s: impl Fn(f32) -> f32) {
            for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
                *out = gate / (1.0 + exp(-s(*gate))) * up;
            }
        }
        with_activation!(activation, |s, _| each(gate, up, out, s));
    }
}

vectorized! {
    /// `activation(gate) * up` in place of the gate.
    pub(super) fn forward_in_place(gate: &mut [f32], up: &[f32], activation: Activation) {
        #[inline(always)]
        #[expect(clippy::inline_always, reason = "part of vectorised bodies")]
        fn each(gate: &mut [f32], up: &[f32], s: impl Fn(f32) -> f32) {
            for (gate, up) in gate.iter_mut().zip(up) {
                *gate = *gate / (1.0 + exp(-s(*gate))) * up;
            }
        }
        with_activation!(activation, |s, _| each(gate, up, s));
    }
}

vectorized! {
    /// `activation(x)` in place.
    pub(super) fn activate_in_place(x: &mut [f32], activation: Activation) {
        #[inline(always)]
        #[expect(clippy::inline_always, reason = "part of vectorised bodies")]
        fn each(x: &mut [f32], s: impl Fn(f32) -> f32) {
            for x in x {
                *x /= 1.0 + exp(-s(*x));
            }
        }
        with_activation!(activation, |s, _| each(x, s));
    }
}

vectorized! {
    pub(super) fn backward(
        gate: &[f32],
        up: &[f32],
        grad: &[f32],
        activation: Activation,
        of_gate: &mut [f32],
        of_up: &mut [f32],
    ) {
        #[inline(always)]
        #[expect(clippy::inline_always, reason = "part of vectorised bodies")]
        fn each(
            [gate, up, grad]: [&[f32]; 3],
            [of_gate, of_up]: [&mut [f32]; 2],
            s: impl Fn(f32) -> f32,
            slope: impl Fn(f32) -> f32,
        ) {
            for i in 0..gate.len().min(up.len()).min(grad.len()).min(of_gate.len()).min(of_up.len()) {
                let sigmoid = sigmoid(s(gate[i]));
                let value = gate[i] * sigmoid;
                of_gate[i] = grad[i] * up[i] * (sigmoid + value * (1.0 - sigmoid) * slope(gate[i]));
                of_up[i] = grad[i] * value;
            }
        }
        with_activation!(activation, |s, slope| each([gate, up, grad], [of_gate, of_up], s, slope));
    }
}

vectorized! {
    fn backward_alone(x: &[f32], grad: &[f32], activation: Activation, of_x: &mut [f32]) {
        #[inline(always)]
        #[expect(clippy::inline_always, reason = "part of vectorised bodies")]
        fn each(
            [x, grad]: [&[f32]; 2],
            of_x: &mut [f32],
            s: impl Fn(f32) -> f32,
            slope: impl Fn(f32) -> f32,
        ) {
            for ((of_x, &x), grad) in of_x.iter_mut().zip(x).zip(grad) {
                let sigmoid = sigmoid(s(x));
                *of_x = grad * (sigmoid + x * sigmoid * (1.0 - sigmoid) * slope(x));
            }
        }
        with_activation!(activation, |s, slope| each([x, grad], of_x, s, slope));
    }
}

impl Kernel for Gate {
    fn shape(&self) -> Vec<usize> {
        self.shape.to_vec()
    }

    fn forward(&self, inputs: &[&[f32]]) -> Vec<f32> {
        let &[gate, up] = inputs else {
            let mut out = inputs[0].to_vec();
            out.par_chunks_mut(TASK).for_each(|out| activate_in_place(out, self.activation));
            return out;
        };
        let mut out = unfilled(gate.len());
        (out.par_chunks_mut(TASK).zip(gate.par_chunks(TASK).zip(up.par_chunks(TASK))))
            .for_each(|(out, (gate, up))| forward(gate, up, self.activation, out));
        out
    }

    fn backward(&self, inputs: &[&[f32]], _: &[f32], grad: &[f32], _: [bool; INPUTS]) -> [Grad; INPUTS] {
        let mut grads = NO_GRADS;
        let &[gate, up] = inputs else {
            let (x, mut of_x) = (inputs[0], unfilled(grad.len()));
            (of_x.par_chunks_mut(TASK).zip(x.par_chunks(TASK).zip(grad.par_chunks(TASK))))
                .for_each(|(of_x, (x, grad))| backward_alone(x, grad, self.activation, of_x));
            grads[0] = Grad::Data(of_x);
            return grads;
        };
        let (mut of_gate, mut of_up) = (unfilled(gate.len()), unfilled(up.len()));
        (of_gate.par_chunks_mut(TASK).zip(of_up.par_chunks_mut(TASK)))
            .zip(gate.par_chunks(TASK).zip(up.par_chunks(TASK)).zip(grad.par_chunks(TASK)))
            .for_each(|((of_gate, of_up), ((gate, up), grad))| {
                backward(gate, up, grad, self.activation, of_gate, of_up);
            });
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
        for activation in [Activation::Silu, Activation::GeluTanh] {
            for shape in [[1, 3], [37, 1000]] {
                // Gates from -20 to 20 reach both tails of the sigmoid.
                let (gate, up) = (leaf(shape, 1), leaf(shape, 2));
                let with = |up: Option<Tensor<2>>| {
                    let wide = || gate.clone() * 20.0;
                    let fused = match up.clone() {
                        Some(up) => gated(wide(), up, activation).unwrap(),
                        None => activate(wide(), activation).unwrap(),
                    };
                    let plain = reference(wide(), up, activation);
                    assert!(relative_error(&fused, &plain) < 1e-6, "{activation:?}");
                    [fused, plain].map(|out| weighted_sum(out, 3).backward())
                };
                let ([of_fused, of_plain], [alone, plain_alone]) = (with(Some(up.clone())), with(None));
                for (input, fused, plain) in [
                    (&gate, &of_fused, &of_plain),
                    (&up, &of_fused, &of_plain),
                    (&gate, &alone, &plain_alone),
                ] {
                    let (got, expected) = (input.grad(fused).unwrap(), input.grad(plain).unwrap());
                    assert!(relative_error(&got, &expected) < 2e-6, "{activation:?}");
                }
            }
        }
    }
}
