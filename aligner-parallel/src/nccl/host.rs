//! Host memory in the place of a device's, for a library in the place of NCCL (`tests/nccl/mock.rs`).

use std::sync::atomic::{AtomicU64, Ordering};

use aligner_core::{Device, Tensor};
use burn::backend::DispatchDevice;
use burn::tensor::{DType, TensorData};
use bytemuck::Pod;

use super::library::{Span, Told};
use super::memory::{Chunk, Memory, element};
use crate::call::Element;

/// The memory of tensors on the CPU device. A stream is the address of a number: of work that is not done.
pub(super) struct Host;

/// Elements that have an address of their own.
fn chunk<E: Pod + burn::tensor::Element>(mut values: Vec<E>, element: Element, dtype: DType) -> Chunk {
    let span = Span { address: values.as_mut_ptr() as u64, elements: values.len(), element };
    let tensor = move || {
        let shape = [values.len()];
        Tensor::from_data(TensorData::new(values, shape), (&Device::flex(), dtype))
    };
    Chunk { span, tensor: Box::new(tensor) }
}

impl Memory for Host {
    fn has(&self, device: &Device) -> bool {
        matches!(device.clone().inner().as_dispatch(), DispatchDevice::Flex(_))
    }

    fn enter(&self) -> Told<()> {
        Ok(())
    }

    fn hold(&self, tensor: Tensor<1>) -> Told<Chunk> {
        let dtype = tensor.dtype();
        let element = element(dtype).filter(|element| matches!(element, Element::F32 | Element::F64));
        match element.ok_or_else(|| format!("the test's memory has no {dtype:?}"))? {
            Element::F64 => Ok(chunk(tensor.into_data().iter::<f64>().collect(), Element::F64, dtype)),
            element => Ok(chunk(tensor.into_data().iter::<f32>().collect(), element, dtype)),
        }
    }

    fn room(&self, elements: usize, dtype: DType) -> Told<Chunk> {
        self.hold(Tensor::zeros([elements], (&Device::flex(), dtype)))
    }

    fn settle(&self) -> Told<()> {
        Ok(())
    }

    fn open_stream(&self) -> Told<u64> {
        Ok(Box::into_raw(Box::new(AtomicU64::new(0))) as u64)
    }

    fn is_done(&self, stream: u64) -> Told<bool> {
        // SAFETY: the stream is one of `open_stream`'s, and has not been given back.
        let pending = unsafe { &*(stream as *const AtomicU64) };
        Ok(pending.load(Ordering::Acquire) == 0)
    }

    fn close_stream(&self, stream: u64) {
        // SAFETY: as above; nobody has it any more.
        drop(unsafe { Box::from_raw(stream as *mut AtomicU64) });
    }
}
