//! One differentiable Burn operation that runs any of our host kernels.
//!
//! Burn wants a backend trait, a `flex` implementation and an autodiff node for each custom
//! operation. Here they stand once: a kernel is an object that maps slices to slices.

use std::fmt::Debug;
use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Autodiff, Backend, Dispatch, DispatchDevice, DispatchTensor, Flex, TensorMetadata, backend_extension,
};
use burn::tensor::{Tensor, TensorData};

/// Most tensors that a kernel takes.
pub(crate) const INPUTS: usize = 6;

/// A gradient with respect to one input.
#[derive(Debug)]
pub(crate) enum Grad {
    /// Not asked for, or always zero.
    None,
    /// As many elements as the input.
    Data(Vec<f32>),
    /// The output's own gradient, shared without a copy.
    Same,
}

/// A differentiable function of up to [`INPUTS`] contiguous f32 tensors.
///
/// A kernel object serves one call: what its backward pass needs beside inputs and output it keeps
/// in itself. Shapes are checked by the public operation before the kernel is built.
pub(crate) trait Kernel: Debug + Send + Sync + 'static {
    /// Shape of the output.
    fn shape(&self) -> Vec<usize>;
    /// The output's elements in row-major order.
    fn forward(&self, inputs: &[&[f32]]) -> Vec<f32>;
    /// The gradients with respect to the inputs; `wanted` says which ones count.
    fn backward(
        &self,
        inputs: &[&[f32]],
        output: &[f32],
        grad: &[f32],
        wanted: [bool; INPUTS],
    ) -> [Grad; INPUTS];
}

/// Gradients that are all [`Grad::None`].
pub(crate) const NO_GRADS: [Grad; INPUTS] = [const { Grad::None }; INPUTS];

/// A shared kernel with the number of inputs that are its own, not placeholders.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    kernel: Arc<dyn Kernel>,
    inputs: usize,
}

/// Runs a kernel; routed by Burn to the tensors' backend.
#[backend_extension(Autodiff, Flex)]
pub(crate) trait KernelBackend: Backend {
    /// The kernel's forward pass; placeholders stand for absent inputs.
    fn run_kernel(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        c: FloatTensor<Self>,
        d: FloatTensor<Self>,
        e: FloatTensor<Self>,
        f: FloatTensor<Self>,
        call: Call,
    ) -> FloatTensor<Self>;
}

/// A backend that runs kernels and their backward passes on its own tensors.
pub(crate) trait KernelGrads: KernelBackend {
    /// The kernel's backward pass.
    fn kernel_grads(
        call: &Call,
        inputs: &[FloatTensor<Self>; INPUTS],
        output: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        wanted: [bool; INPUTS],
    ) -> [Option<FloatTensor<Self>>; INPUTS];
}

fn slice(tensor: &FlexTensor) -> &[f32] {
    tensor.as_slice::<f32>().expect("kernel inputs are made contiguous f32 before the call")
}

impl KernelBackend for Flex {
    fn run_kernel(
        a: FlexTensor,
        b: FlexTensor,
        c: FlexTensor,
        d: FlexTensor,
        e: FlexTensor,
        f: FlexTensor,
        call: Call,
    ) -> FlexTensor {
        let inputs = [a, b, c, d, e, f].map(|tensor| tensor.to_contiguous());
        let slices: Vec<&[f32]> = inputs.iter().take(call.inputs).map(slice).collect();
        let output = call.kernel.forward(&slices);
        FlexTensor::from_data(TensorData::new(output, call.kernel.shape()))
    }
}

impl KernelGrads for Flex {
    fn kernel_grads(
        call: &Call,
        inputs: &[FlexTensor; INPUTS],
        output: FlexTensor,
        grad: FlexTensor,
        wanted: [bool; INPUTS],
    ) -> [Option<FlexTensor>; INPUTS] {
        let contiguous = inputs.each_ref().map(FlexTensor::to_contiguous);
        let slices: Vec<&[f32]> = contiguous.iter().take(call.inputs).map(slice).collect();
        let (output, grad) = (output.to_contiguous(), grad.to_contiguous());
        let grads = call.kernel.backward(&slices, slice(&output), slice(&grad), wanted);
        let mut shapes = inputs.iter().map(TensorMetadata::shape);
        grads.map(|of_input| {
            let shape = shapes.next()?;
            match of_input {
                Grad::None => None,
                Grad::Data(data) => Some(FlexTensor::from_data(TensorData::new(data, shape))),
                Grad::Same => Some(grad.reshape(shape)),
            }
        })
    }
}

#[derive(Debug)]
struct KernelBackward;

impl<B: KernelGrads> Backward<B, INPUTS> for KernelBackward {
    type State = (Call, [FloatTensor<B>; INPUTS], FloatTensor<B>);

    fn backward(self, ops: Ops<Self::State, INPUTS>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let (call, inputs, output) = ops.state;
        let wanted = ops.parents.each_ref().map(Option::is_some);
        let of_inputs = B::kernel_grads(&call, &inputs, output, grad, wanted);
        for (parent, value) in ops.parents.into_iter().zip(of_inputs) {
            if let (Some(node), Some(value)) = (parent, value) {
                grads.register::<B>(node.id, value);
            }
        }
    }
}

impl<B: KernelGrads, C: CheckpointStrategy> KernelBackend for Autodiff<B, C> {
    fn run_kernel(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        c: FloatTensor<Self>,
        d: FloatTensor<Self>,
        e: FloatTensor<Self>,
        f: FloatTensor<Self>,
        call: Call,
    ) -> FloatTensor<Self> {
        let nodes = [a.node(), b.node(), c.node(), d.node(), e.node(), f.node()];
        let [a, b, c, d, e, f] = [a, b, c, d, e, f].map(<FloatTensor<Self>>::into_primitive);
        match KernelBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let inputs = [a.clone(), b.clone(), c.clone(), d.clone(), e.clone(), f.clone()];
                let output = B::run_kernel(a, b, c, d, e, f, call.clone());
                prep.finish((call, inputs, output.clone()), output)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::run_kernel(a, b, c, d, e, f, call)),
        }
    }
}

/// Runs `kernel` on one to [`INPUTS`] tensors of the CPU device.
pub(crate) fn run<const D: usize>(kernel: impl Kernel, inputs: Vec<DispatchTensor>) -> Tensor<D> {
    let call = Call { kernel: Arc::new(kernel), inputs: inputs.len() };
    let mut inputs = inputs.into_iter();
    let mut next = || {
        inputs
            .next()
            .unwrap_or_else(|| Tensor::<1>::zeros([1], &burn::tensor::Device::flex()).into_dispatch())
    };
    let (a, b, c, d, e, f) = (next(), next(), next(), next(), next(), next());
    Tensor::from_dispatch(<Dispatch as KernelBackend>::run_kernel(a, b, c, d, e, f, call))
}

/// Whether the tensor lives on the CPU device that our kernels serve.
pub fn on_host<const D: usize>(tensor: &Tensor<D>) -> bool {
    let device = tensor.device().inner();
    matches!(device.as_dispatch(), DispatchDevice::Flex(_)) && tensor.dtype() == burn::tensor::DType::F32
}

/// A vector that the caller fills before anything reads it.
///
/// Zeroing the outputs of every operation first costs several per cent of a training step.
#[expect(clippy::uninit_vec, reason = "kernels overwrite their outputs; see below")]
pub(crate) fn unfilled(len: usize) -> Vec<f32> {
    let mut values = Vec::with_capacity(len);
    // SAFETY: the capacity is there, an f32 has no invalid bit pattern, and each kernel writes all
    // elements before it or anyone else reads one. (The language promises nothing about references to
    // memory that was never written; this relies on nobody looking.)
    unsafe {
        values.set_len(len);
    }
    values
}

/// A mutable slice that parallel tasks write disjoint parts of.
#[derive(Clone, Copy)]
pub(crate) struct Shared<'a> {
    pointer: *mut f32,
    len: usize,
    slice: std::marker::PhantomData<&'a mut [f32]>,
}

// SAFETY: `part` hands out disjoint ranges, as its callers promise.
unsafe impl Send for Shared<'_> {}
// SAFETY: as above.
unsafe impl Sync for Shared<'_> {}

impl<'a> Shared<'a> {
    pub(crate) fn new(slice: &'a mut [f32]) -> Self {
        Self { pointer: slice.as_mut_ptr(), len: slice.len(), slice: std::marker::PhantomData }
    }

    /// `len` elements from `pointer`.
    ///
    /// # Safety
    /// They are one allocation's, and nobody else touches the ones that the holder writes, for `'a`.
    pub(crate) unsafe fn from_raw(pointer: *mut f32, len: usize) -> Self {
        Self { pointer, len, slice: std::marker::PhantomData }
    }

    /// The address of `start`, for a matrix product that strides over `extent` elements from there
    /// while other tasks visit the elements between its own.
    pub(crate) fn at(self, start: usize, extent: usize) -> *mut f32 {
        assert!(start + extent <= self.len, "range {start}+{extent} of {}", self.len);
        self.pointer.wrapping_add(start)
    }

    /// The range `start..start + len`.
    ///
    /// # Safety
    /// No other task may touch an element of the range while the returned slice lives.
    pub(crate) unsafe fn part(self, start: usize, len: usize) -> &'a mut [f32] {
        assert!(start + len <= self.len, "range {start}+{len} of {}", self.len);
        // SAFETY: in bounds by the assertion, exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.add(start), len) }
    }
}
