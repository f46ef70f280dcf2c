//! Memory of a CUDA device by its address, for libraries that work on it beside `CubeCL`.

use std::fmt;

use burn::backend::{BackendTensor, DispatchTensorKind};
use burn::tensor::Tensor;
use cubecl::cuda::CudaRuntime;
use cubecl_runtime::runtime::Runtime;

use super::Accelerator;
use crate::{Error, Result};

type Server = <CudaRuntime as Runtime>::Server;

/// The memory of a tensor `[elements]` on a CUDA device. It stays where it is as long as this lives.
///
/// `CubeCL` does not know who else reads or writes it: before that, [`Accelerator::finish`] waits for what was to be
/// computed, with the tensors that others had before in the same memory; and who wrote has to be done before the
/// tensor is used again.
pub struct CudaMemory {
    tensor: Tensor<1>,
    address: u64,
    _resource: Box<dyn Send>,
}

impl fmt::Debug for CudaMemory {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("CudaMemory").field("elements", &self.tensor.dims()[0]).finish_non_exhaustive()
    }
}

impl CudaMemory {
    /// That of a tensor outside of any graph.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a tensor that lies elsewhere, or not in one piece, and where the device failed.
    pub fn of(tensor: Tensor<1>) -> Result<Self> {
        let elsewhere = || Error::Invalid("expected a tensor in one piece on a CUDA device".into());
        if tensor.is_autodiff() {
            return Err(elsewhere());
        }
        let DispatchTensorKind::Cube(BackendTensor::Float(own)) = tensor.clone().into_dispatch().kind else {
            return Err(elsewhere());
        };
        if own.meta.strides()[..] != [1] {
            return Err(elsewhere());
        }
        let resource = own.client.get_resource::<Server>(own.handle.clone());
        let resource = resource.map_err(|error| Error::Invalid(format!("the device failed: {error:?}")))?;
        let address = resource.resource().ptr;
        Ok(Self { tensor, address, _resource: Box::new(resource) })
    }

    /// Where the first element lies on the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The tensor, with what has been written.
    pub fn into_tensor(self) -> Tensor<1> {
        self.tensor
    }
}

impl Accelerator {
    /// Waits until all is done that this thread has asked the device for.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the device failed.
    pub fn finish(&self) -> Result<()> {
        let done = cubecl::future::block_on(self.client().sync());
        done.map_err(|error| Error::Invalid(format!("the device failed: {error:?}")))
    }
}
