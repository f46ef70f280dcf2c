//! Parameters on an accelerator.

use burn::tensor::{Device, Tensor};

use super::{Accelerator, Buffer, Matrix};
use crate::Result;
use crate::ops::host::with_slice;

impl Accelerator {
    /// The accelerator that Burn's tensors on `device` lie on; none for the CPU device.
    #[cfg(feature = "cuda")]
    pub fn of_device(device: &Device) -> Option<Self> {
        match device.clone().inner().as_dispatch() {
            burn::backend::DispatchDevice::Cube(device) => Some(Self::with_client(device.client())),
            _ => None,
        }
    }

    /// The accelerator that Burn's tensors on `device` lie on: none, for this build has none for Burn.
    #[cfg(not(feature = "cuda"))]
    pub fn of_device(_: &Device) -> Option<Self> {
        None
    }

    /// A parameter's elements in f32: the tensor's own memory where it lies on this device, else a copy,
    /// converted from whatever the tensor holds.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] where the tensor's memory is smaller than the tensor.
    pub fn parameter(&self, tensor: &Tensor<1>) -> Result<Buffer<f32>> {
        if let Some(own) = self.own(tensor)? {
            return Ok(own);
        }
        Ok(with_slice(tensor, |values| self.upload(values)))
    }

    /// A copy of a matrix `[out, in]` in bf16.
    pub fn bf16_matrix(&self, tensor: &Tensor<1>, shape: [usize; 2]) -> Matrix {
        let halves: Vec<half::bf16> =
            with_slice(tensor, |values| values.iter().copied().map(half::bf16::from_f32).collect());
        Matrix::Bf16(self.upload(&halves), shape)
    }

    #[cfg(feature = "cuda")]
    fn own(&self, tensor: &Tensor<1>) -> Result<Option<Buffer<f32>>> {
        use burn::backend::{BackendTensor, DispatchTensorKind};

        if tensor.is_autodiff() || tensor.dtype() != burn::tensor::DType::F32 {
            return Ok(None);
        }
        match tensor.clone().into_dispatch().kind {
            DispatchTensorKind::Cube(BackendTensor::Float(own))
                if own.client.service_id() == self.client().service_id() && own.meta.strides()[..] == [1] =>
            {
                Buffer::from_handle(own.handle, tensor.dims()[0]).map(Some)
            }
            _ => Ok(None),
        }
    }

    #[cfg(not(feature = "cuda"))]
    #[expect(clippy::unnecessary_wraps, clippy::unused_self, reason = "as with CUDA")]
    fn own(&self, _: &Tensor<1>) -> Result<Option<Buffer<f32>>> {
        Ok(None)
    }
}
