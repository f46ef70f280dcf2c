//! An operation that was carried out elsewhere, over several ranks for one: its result joins the graph
//! with the gradient that its maker gives it.

use std::fmt;
use std::sync::Mutex;

use burn::tensor::Tensor;

use super::kernel::{Grad, INPUTS, Kernel, NO_GRADS, on_host, run};
use crate::{Error, Result};

/// What a backward pass has to work with; all in row-major order.
#[derive(Debug, Clone, Copy)]
pub struct Backward<'a> {
    /// The elements of each input.
    pub inputs: &'a [&'a [f32]],
    /// The operation's result.
    pub output: &'a [f32],
    /// The gradient with respect to the result.
    pub grad: &'a [f32],
}

/// Gives the gradient with respect to each input, as many elements as it has.
///
/// It cannot fail: one that needs other ranks and does not reach them returns zeros, and the next
/// collective of the step reports why.
pub type Pullback = Box<dyn Fn(Backward<'_>) -> Vec<Vec<f32>> + Send + Sync>;

/// `output`, of `shape`, as a differentiable function of `inputs`.
///
/// # Errors
/// [`Error::Shape`] where `output` is not of `shape`; [`Error::Invalid`] for no or too many inputs, and
/// on a device other than the CPU.
pub fn external<const D: usize>(
    inputs: Vec<Tensor<2>>,
    output: Vec<f32>,
    shape: [usize; D],
    pullback: Pullback,
) -> Result<Tensor<D>> {
    if output.len() != shape.iter().product::<usize>() {
        return Err(Error::shape("an operation's result", format!("{shape:?}"), &[output.len()]));
    }
    if inputs.is_empty() || inputs.len() > INPUTS {
        let count = inputs.len();
        return Err(Error::Invalid(format!("an operation takes 1 to {INPUTS} inputs, got {count}")));
    }
    if !inputs.iter().all(on_host) {
        return Err(Error::Invalid("an operation over several ranks runs on the CPU device alone".into()));
    }
    let kernel = External { shape: shape.to_vec(), output: Mutex::new(Some(output)), pullback };
    Ok(run(kernel, inputs.into_iter().map(Tensor::into_dispatch).collect()))
}

struct External {
    shape: Vec<usize>,
    output: Mutex<Option<Vec<f32>>>,
    pullback: Pullback,
}

impl fmt::Debug for External {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("External").field("shape", &self.shape).finish_non_exhaustive()
    }
}

impl Kernel for External {
    fn shape(&self) -> Vec<usize> {
        self.shape.clone()
    }

    fn forward(&self, _: &[&[f32]]) -> Vec<f32> {
        let taken = self.output.lock().ok().and_then(|mut output| output.take());
        taken.expect("a kernel object serves one call")
    }

    fn backward(&self, inputs: &[&[f32]], output: &[f32], grad: &[f32], _: [bool; INPUTS]) -> [Grad; INPUTS] {
        let mut grads = NO_GRADS;
        let of_inputs = (self.pullback)(Backward { inputs, output, grad });
        debug_assert_eq!(of_inputs.len(), inputs.len(), "a gradient for each input");
        for (grad, of_input) in grads.iter_mut().zip(of_inputs) {
            *grad = Grad::Data(of_input);
        }
        grads
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::host::{HostTensor, to_vec};
    use crate::ops::testing::leaf;

    #[test]
    fn a_result_from_elsewhere_has_the_gradient_of_its_maker() {
        let (a, b) = (leaf([2, 2], 1), leaf([1, 3], 2));
        let product = |inputs: &[&[f32]]| inputs[0].iter().sum::<f32>() * inputs[1].iter().sum::<f32>();
        let value =
            product(&[HostTensor::without_graph(&a).as_slice(), HostTensor::without_graph(&b).as_slice()]);
        let pullback: Pullback = Box::new(|pass| {
            let sums = [pass.inputs[1].iter().sum::<f32>(), pass.inputs[0].iter().sum::<f32>()];
            let of = |at: usize| vec![pass.grad[0] * sums[at]; pass.inputs[at].len()];
            vec![of(0), of(1)]
        });
        let out: Tensor<1> = external(vec![a.clone(), b.clone()], vec![value], [1], pullback).unwrap();
        let grads = (out * 2.0).backward();
        let plain = (a.clone().sum() * b.clone().sum() * 2.0).backward();
        for input in [&a, &b] {
            let (own, expected) =
                (to_vec(&input.grad(&grads).unwrap()), to_vec(&input.grad(&plain).unwrap()));
            for (own, expected) in own.iter().zip(expected) {
                assert!((own - expected).abs() < 1e-5 * expected.abs().max(1.0), "{own} {expected}");
            }
        }
    }

    #[test]
    fn wrong_sizes_are_refused() {
        let call = |inputs: Vec<Tensor<2>>| {
            external::<1>(inputs, vec![0.0; 2], [3], Box::new(|_| Vec::new())).unwrap_err().to_string()
        };
        assert!(call(vec![leaf([1, 1], 1)]).contains("[3]"));
        let none = external::<1>(Vec::new(), vec![0.0], [1], Box::new(|_| Vec::new())).unwrap_err();
        assert!(none.to_string().contains("inputs"), "{none}");
    }
}
