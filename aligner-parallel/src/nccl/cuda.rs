//! The memory of a CUDA device.

use aligner_core::ops::cube::{Accelerator, CudaMemory};
use aligner_core::{Device, Error, Result, Tensor};
use burn::backend::DispatchDevice;
use burn::tensor::DType;
use cudarc::driver::result::{self, stream::StreamKind};
use cudarc::driver::sys::{self, CUcontext, CUresult, CUstream};

use super::library::{Span, Told};
use super::memory::{Chunk, Memory, element};

/// The device of this index.
pub(super) struct Cuda {
    device: Device,
    accelerator: Accelerator,
    context: Context,
    /// The driver's number of it.
    number: sys::CUdevice,
}

/// CUDA's own state of a device, which `CubeCL` uses too.
struct Context(CUcontext);

// SAFETY: a context may be that of any thread, and of several at once.
unsafe impl Send for Context {}
// SAFETY: as above; it is read alone.
unsafe impl Sync for Context {}

impl Cuda {
    /// The device at `index`.
    pub(super) fn open(index: usize) -> Result<Self> {
        let refused = |message: String| Error::setting("device", format!("cuda:{index}: {message}"));
        // SAFETY: it opens a library, which runs no code of ours.
        if !unsafe { sys::is_culib_present() } {
            return Err(refused("NVIDIA's driver (libcuda.so.1) is not found".into()));
        }
        let cuda = |error: result::DriverError| refused(format!("the driver says {error}"));
        result::init().map_err(cuda)?;
        let devices = result::device::get_count().map_err(cuda)? as usize;
        if index >= devices {
            let message =
                format!("this process sees {devices} devices; each rank of a machine needs one of its own");
            return Err(refused(message));
        }
        let accelerator = Accelerator::cuda(index)?;
        let device = result::device::get(index as i32).map_err(cuda)?;
        // SAFETY: the device exists. It is held to the end of the process, as `CubeCL` holds it.
        let context = Context(unsafe { result::primary_ctx::retain(device) }.map_err(cuda)?);
        Ok(Self { device: Device::cuda(index), accelerator, context, number: device })
    }

    /// What no other device has, on any machine.
    pub(super) fn identity(&self) -> Result<Vec<u8>> {
        let uuid = result::device::get_uuid(self.number);
        let uuid = uuid.map_err(|error| Error::setting("device", format!("the driver says {error}")))?;
        Ok(uuid.bytes.iter().map(|&byte| byte as u8).collect())
    }
}

fn told<T>(result: std::result::Result<T, impl std::fmt::Display>) -> Told<T> {
    result.map_err(|error| error.to_string())
}

impl Memory for Cuda {
    fn has(&self, device: &Device) -> bool {
        let (own, other) = (self.device.as_dispatch(), device.clone().inner());
        match (own, other.as_dispatch()) {
            (DispatchDevice::Cube(own), DispatchDevice::Cube(other)) => own == other,
            _ => false,
        }
    }

    fn enter(&self) -> Told<()> {
        // SAFETY: the context is held.
        told(unsafe { result::ctx::set_current(self.context.0) })
    }

    fn hold(&self, tensor: Tensor<1>) -> Told<Chunk> {
        let (elements, dtype) = (tensor.dims()[0], tensor.dtype());
        let element = element(dtype).ok_or_else(|| format!("NCCL has no {dtype:?}"))?;
        let memory = match CudaMemory::of(tensor.clone()) {
            Ok(memory) => memory,
            // A view of other memory is written out once.
            Err(_) => told(CudaMemory::of(tensor.mul_scalar(1)))?,
        };
        let span = Span { address: memory.address(), elements, element };
        Ok(Chunk { span, tensor: Box::new(|| memory.into_tensor()) })
    }

    fn room(&self, elements: usize, dtype: DType) -> Told<Chunk> {
        self.hold(Tensor::empty([elements], (&self.device, dtype)))
    }

    fn settle(&self) -> Told<()> {
        told(self.accelerator.finish())
    }

    fn open_stream(&self) -> Told<u64> {
        self.enter()?;
        Ok(told(result::stream::create(StreamKind::NonBlocking))? as u64)
    }

    fn is_done(&self, stream: u64) -> Told<bool> {
        self.enter()?;
        // SAFETY: the stream is one of `open_stream`'s.
        match unsafe { sys::cuStreamQuery(stream as CUstream) } {
            CUresult::CUDA_SUCCESS => Ok(true),
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            error => Err(format!("the device failed: {error:?}")),
        }
    }

    fn close_stream(&self, stream: u64) {
        if self.enter().is_ok() {
            // SAFETY: the stream is one of `open_stream`'s, and nobody has it any more.
            let _ = unsafe { result::stream::destroy(stream as CUstream) };
        }
    }
}
