//! The memory that NCCL works on, by address.

use aligner_core::{Device, Tensor};
use burn::tensor::DType;

use super::library::{Span, Told};
use crate::call::Element;

/// A device's memory, and the order of what is done on it. All tensors here are outside of any graph.
pub(super) trait Memory: Send + Sync {
    /// Whether tensors on this device lie in it.
    fn has(&self, device: &Device) -> bool;

    /// Makes the device that of the calling thread.
    fn enter(&self) -> Told<()>;

    /// A tensor's memory `[elements]`.
    fn hold(&self, tensor: Tensor<1>) -> Told<Chunk>;

    /// Memory for so many elements, with anything in them.
    fn room(&self, elements: usize, dtype: DType) -> Told<Chunk>;

    /// Waits until all is computed that was to be, in all chunks.
    fn settle(&self) -> Told<()>;

    /// A new stream: an order of work of its own.
    fn open_stream(&self) -> Told<u64>;

    /// Whether all that was begun on a stream is done.
    fn is_done(&self, stream: u64) -> Told<bool>;

    /// Gives a stream back.
    fn close_stream(&self, stream: u64);
}

/// A tensor's memory, which stays where it is as long as this lives.
pub(super) struct Chunk {
    pub(super) span: Span,
    /// Holds the memory, and gives the tensor.
    pub(super) tensor: Box<dyn FnOnce() -> Tensor<1> + Send>,
}

impl Chunk {
    pub(super) fn into_tensor(self) -> Tensor<1> {
        (self.tensor)()
    }
}

/// The type as NCCL has it; none where it does not.
pub(super) fn element(dtype: DType) -> Option<Element> {
    match dtype {
        DType::F32 => Some(Element::F32),
        DType::F64 => Some(Element::F64),
        DType::F16 => Some(Element::F16),
        DType::BF16 => Some(Element::Bf16),
        _ => None,
    }
}
