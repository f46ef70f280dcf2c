//! An operation that was carried out elsewhere, over several ranks for one: its result joins the graph
//! with the gradient that its maker gives it, on whatever device it lies.

use std::fmt;
use std::sync::Arc;

#[cfg(any(feature = "cuda", feature = "cube-cpu"))]
use burn::backend::Cube;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Autodiff, Backend, BackendTensor, Dispatch, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind,
    Flex, TensorMetadata, backend_extension,
};
use burn::tensor::Tensor;

use super::host::without_graph;
use crate::{Error, Result};

/// Most tensors that such an operation takes.
const INPUTS: usize = 3;

/// Gives the gradient with respect to each input, as many elements as it has, from that with respect to the
/// result; all `[elements]` in row-major order and on the result's device.
///
/// Where it fails since another rank is missing ([`Error::Collective`]), the gradients are zero: the next collective
/// of the step reports why. Where it fails otherwise, they are NaN, which no step takes, and the log says why.
pub type Pullback = Box<dyn Fn(Tensor<1>) -> Result<Vec<Tensor<1>>> + Send + Sync>;

/// `output` `[elements]`, in `shape`, as a differentiable function of `inputs`, which lie on the same device.
///
/// # Errors
/// [`Error::Shape`] where `output` does not fill `shape`; [`Error::Invalid`] for no or too many inputs, and for
/// one on another device.
pub fn external<const D: usize>(
    inputs: &[Tensor<2>],
    output: &Tensor<1>,
    shape: [usize; D],
    pullback: Pullback,
) -> Result<Tensor<D>> {
    let elements = output.dims()[0];
    if elements != shape.iter().product::<usize>() {
        return Err(Error::shape("an operation's result", format!("{shape:?}"), &[elements]));
    }
    if inputs.is_empty() || inputs.len() > INPUTS {
        let count = inputs.len();
        return Err(Error::Invalid(format!("an operation takes 1 to {INPUTS} inputs, got {count}")));
    }
    let output = without_graph(output);
    let device = output.device();
    if let Some(input) = inputs.iter().find(|input| input.device().inner() != device) {
        let (shape, other) = (input.dims(), input.device().inner());
        let message =
            format!("an input {shape:?} on {other:?} for an operation whose result lies on {device:?}");
        return Err(Error::Invalid(message));
    }
    let sizes = inputs.iter().map(Tensor::dims).collect();
    let call = Call { sizes, pullback: Arc::new(pullback) };
    let output = output.reshape(shape).into_dispatch();
    // The result stands in the place of inputs that there are not: nothing is tracked through it.
    let input = |at: usize| inputs.get(at).map_or_else(|| output.clone(), |x| x.clone().into_dispatch());
    let (a, b, c) = (input(0), input(1), input(2));
    Ok(Tensor::from_dispatch(<Dispatch as ExternalBackend>::join(a, b, c, output, call)))
}

/// What the backward pass needs.
#[derive(Clone)]
pub(crate) struct Call {
    /// Of each input.
    sizes: Vec<[usize; 2]>,
    pullback: Arc<Pullback>,
}

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Call").field("sizes", &self.sizes).finish_non_exhaustive()
    }
}

impl Call {
    /// The gradients with respect to the inputs; one value everywhere where there are none.
    fn gradients(&self, grad: Tensor<1>) -> Vec<Tensor<1>> {
        let device = grad.device();
        let elements = || self.sizes.iter().map(|[rows, columns]| rows * columns);
        let all = |value: f32| elements().map(|elements| Tensor::full([elements], value, &device)).collect();
        match (self.pullback)(grad) {
            Ok(given) if given.iter().map(|own| own.dims()[0]).eq(elements()) => given,
            Ok(given) => {
                let got: Vec<usize> = given.iter().map(|own| own.dims()[0]).collect();
                tracing::error!(
                    "gradients of an operation over ranks: expected one for each of {:?}, got {got:?} elements",
                    self.sizes
                );
                all(f32::NAN)
            }
            Err(Error::Collective(_)) => all(0.0),
            Err(error) => {
                tracing::error!("the gradient of an operation over ranks: {error}");
                all(f32::NAN)
            }
        }
    }
}

/// Joins a result to a graph; routed by Burn to the tensors' backend.
#[backend_extension(Autodiff, Flex, Cube: cfg(any(feature = "cuda", feature = "cube-cpu")))]
pub(crate) trait ExternalBackend: Backend {
    /// `output` as a function of the others.
    fn join(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        c: FloatTensor<Self>,
        output: FloatTensor<Self>,
        call: Call,
    ) -> FloatTensor<Self>;
}

/// A backend that computes; its tensors can leave it and come back.
pub(crate) trait Plain: ExternalBackend {
    fn wrap(tensor: FloatTensor<Self>) -> DispatchTensorKind;
    fn unwrap(tensor: DispatchTensorKind) -> Option<FloatTensor<Self>>;
}

/// Outside of a graph there is nothing to join.
macro_rules! plain {
    ($backend:ident) => {
        impl ExternalBackend for $backend {
            fn join(
                _: FloatTensor<Self>,
                _: FloatTensor<Self>,
                _: FloatTensor<Self>,
                output: FloatTensor<Self>,
                _: Call,
            ) -> FloatTensor<Self> {
                output
            }
        }

        impl Plain for $backend {
            fn wrap(tensor: FloatTensor<Self>) -> DispatchTensorKind {
                DispatchTensorKind::$backend(BackendTensor::Float(tensor))
            }

            fn unwrap(tensor: DispatchTensorKind) -> Option<FloatTensor<Self>> {
                match tensor {
                    DispatchTensorKind::$backend(BackendTensor::Float(tensor)) => Some(tensor),
                    _ => None,
                }
            }
        }
    };
}

plain!(Flex);
#[cfg(any(feature = "cuda", feature = "cube-cpu"))]
plain!(Cube);

#[derive(Debug)]
struct Joined;

impl<B: Plain> Backward<B, INPUTS> for Joined {
    type State = Call;

    fn backward(self, ops: Ops<Call, INPUTS>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (call, grad) = (ops.state, grads.consume::<B>(&ops.node));
        let elements = grad.shape().num_elements();
        let grad = B::wrap(B::float_reshape(grad, [elements].into()));
        let grad = DispatchTensor { kind: grad, autodiff: DispatchAutodiffContext::Disabled };
        let grad = Tensor::<1>::from_dispatch(grad);
        let device = grad.device();
        let of_inputs = call.sizes.iter().zip(call.gradients(grad));
        for (parent, (&size, of_input)) in ops.parents.into_iter().zip(of_inputs) {
            let Some(node) = parent else { continue };
            let of_input = without_graph(&of_input).to_device(&device).reshape(size).into_dispatch();
            let of_input = B::unwrap(of_input.kind).expect("a tensor on the device of this backend");
            grads.register::<B>(node.id, of_input);
        }
    }
}

impl<B: Plain, C: CheckpointStrategy> ExternalBackend for Autodiff<B, C> {
    fn join(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        c: FloatTensor<Self>,
        output: FloatTensor<Self>,
        call: Call,
    ) -> FloatTensor<Self> {
        let (nodes, output) = ([a.node(), b.node(), c.node()], output.into_primitive());
        match Joined.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(call, output),
            OpsKind::UnTracked(prep) => prep.finish(output),
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::CollectiveError;
    use crate::ops::host::to_vec;
    use crate::ops::testing::leaf;

    #[test]
    fn a_result_from_elsewhere_has_the_gradient_of_its_maker() {
        let (a, b) = (leaf([2, 2], 1), leaf([1, 3], 2));
        let sums = [a.clone().inner().sum(), b.clone().inner().sum()];
        let value = sums[0].clone() * sums[1].clone();
        let pullback: Pullback = Box::new(move |grad| {
            let of = |sum: &Tensor<1>, len| (grad.clone() * sum.clone()).expand([len]);
            Ok(vec![of(&sums[1], 4), of(&sums[0], 3)])
        });
        let out: Tensor<1> = external(&[a.clone(), b.clone()], &value, [1], pullback).unwrap();
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
    fn where_the_gradient_fails_it_is_zero_if_others_will_say_why() {
        let missing = || {
            let [operation, cause, history] = ["all_reduce", "rank 1 is missing", ""].map(String::from);
            CollectiveError { rank: 0, size: 2, operation, culprits: vec![1], cause, history }.into()
        };
        let of = |pullback: Pullback| {
            let x = leaf([2, 2], 1);
            let value = Tensor::from_floats([1.0], &Device::flex());
            let out: Tensor<1> = external(std::slice::from_ref(&x), &value, [1], pullback).unwrap();
            to_vec(&x.grad(&out.backward()).unwrap())
        };
        assert_eq!(of(Box::new(move |_| Err(missing()))), [0.0; 4]);
        let wrong = of(Box::new(|_| Err(Error::Invalid("not of a rank".into()))));
        assert!(wrong.iter().all(|value| value.is_nan()), "{wrong:?}");
        let small = of(Box::new(|grad| Ok(vec![grad])));
        assert!(small.iter().all(|value| value.is_nan()), "{small:?}");
    }

    #[test]
    fn wrong_sizes_are_refused() {
        let call = |inputs: &[Tensor<2>], elements: usize| {
            let output = Tensor::zeros([elements], &Device::flex());
            external::<1>(inputs, &output, [3], Box::new(|_| Ok(Vec::new()))).unwrap_err().to_string()
        };
        assert!(call(&[leaf([1, 1], 1)], 2).contains("[3]"));
        assert!(call(&[], 3).contains("inputs"));
    }
}
