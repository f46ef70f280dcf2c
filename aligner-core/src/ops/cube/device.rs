//! An accelerator and memory on it.

use std::fmt;
use std::marker::PhantomData;
use std::path::Path;

use cubecl::device::DeviceUnavailable;
use cubecl::prelude::{BufferArg, Client, CubeCount, CubeDim, CubeElement};
use cubecl::server::Handle;

use crate::{Error, Result};

/// What a [`Buffer`] may hold.
pub trait Element: CubeElement + Copy + Default {}

impl Element for f32 {}
impl Element for f64 {}
impl Element for u32 {}
impl Element for half::bf16 {}

/// A device that runs kernels. A clone is the same device.
#[derive(Clone)]
pub struct Accelerator {
    client: Client,
    /// Most units (threads) of a cube (block), a power of two.
    max_units: usize,
}

impl fmt::Debug for Accelerator {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Accelerator").field("runtime", &self.client.name()).finish_non_exhaustive()
    }
}

impl Accelerator {
    /// The CUDA device at `index`.
    ///
    /// # Errors
    /// [`Error::Setting`] where this build has no CUDA, the machine no such device, or the toolkit's library of
    /// mathematical functions is not found, which the kernels are linked with as they are compiled.
    pub fn cuda(index: usize) -> Result<Self> {
        let device = cubecl::Device::cuda(index).map_err(|error| {
            let hint = match error {
                DeviceUnavailable::NoSuchDevice { available: 0, .. } => {
                    "; is NVIDIA's driver (libcuda.so.1) installed, and is the device visible to this process?"
                }
                _ => "",
            };
            Error::setting("device", format!("cuda:{index}: {error}{hint}"))
        })?;
        if !has_libdevice() {
            let message = "libdevice.10.bc is not found: install the CUDA toolkit, or set CUDA_PATH to a \
                           directory with nvvm/libdevice/libdevice.10.bc";
            return Err(Error::setting("device", format!("cuda:{index}: {message}")));
        }
        Ok(Self::with_client(device.client()))
    }

    /// `CubeCL`'s runtime on this machine's processor: slow, for tests.
    ///
    /// # Errors
    /// [`Error::Setting`] where this build lacks it.
    pub fn cpu() -> Result<Self> {
        let device = cubecl::Device::cpu().map_err(|error| Error::setting("device", error.to_string()))?;
        Ok(Self::with_client(device.client()))
    }

    /// The device that a client of `CubeCL` belongs to.
    pub fn with_client(client: Client) -> Self {
        let most = client.properties().hardware.max_units_per_cube.max(1) as usize;
        let max_units = if most.is_power_of_two() { most } else { most.next_power_of_two() / 2 };
        Self { client, max_units }
    }

    /// Memory for `len` elements, not filled.
    pub fn empty<T: Element>(&self, len: usize) -> Buffer<T> {
        // An allocation of no bytes is not every runtime's business.
        let handle = self.client.empty(len.max(1) * size_of::<T>());
        Buffer { handle, len, element: PhantomData }
    }

    /// A copy of `data`.
    pub fn upload<T: Element>(&self, data: &[T]) -> Buffer<T> {
        if data.is_empty() {
            return self.empty(0);
        }
        let handle = self.client.create_from_slice(T::as_bytes(data));
        Buffer { handle, len: data.len(), element: PhantomData }
    }

    /// A buffer's elements, once everything before is done.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the device failed, in this or in an earlier operation.
    pub fn read<T: Element>(&self, buffer: &Buffer<T>) -> Result<Vec<T>> {
        if buffer.len == 0 {
            return Ok(Vec::new());
        }
        let bytes = self.client.read_one(buffer.handle.clone());
        let bytes = bytes.map_err(|error| Error::Invalid(format!("the accelerator failed: {error:?}")))?;
        Ok(T::from_bytes(&bytes)[..buffer.len].to_vec())
    }

    /// The name of the runtime: `cuda`, `cpu`.
    pub fn runtime(&self) -> &'static str {
        self.client.name()
    }

    /// Bytes of the device's memory; 2 GiB where it does not say.
    pub fn memory_bytes(&self) -> usize {
        self.client.properties().memory.max_memory().map_or(2 << 30, |bytes| bytes as usize)
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    /// `wanted` units, or as many as the device has.
    pub(super) fn units(&self, wanted: usize) -> usize {
        wanted.min(self.max_units)
    }

    /// Cubes and units for a kernel with one unit for each of `elements`.
    pub(super) fn flat(&self, elements: usize) -> (CubeCount, CubeDim) {
        let units = self.units(256);
        (CubeCount::Static(elements.div_ceil(units) as u32, 1, 1), CubeDim::new_1d(units as u32))
    }
}

/// Whether the library that CUDA's compiler takes `exp` and its like from is where `CubeCL` looks for it.
fn has_libdevice() -> bool {
    const ROOTS: [&str; 4] = ["/usr/local/cuda", "/opt/cuda", "/usr/lib/cuda", "/usr"];
    let has = |root: &Path| root.join("nvvm/libdevice/libdevice.10.bc").is_file();
    match std::env::var_os("CUDA_PATH") {
        Some(root) => has(Path::new(&root)),
        None => ROOTS.iter().any(|root| has(Path::new(root))),
    }
}

/// Elements in an accelerator's memory. A clone is the same memory.
pub struct Buffer<T> {
    handle: Handle,
    len: usize,
    element: PhantomData<T>,
}

impl<T> Clone for Buffer<T> {
    fn clone(&self) -> Self {
        Self { handle: self.handle.clone(), len: self.len, element: PhantomData }
    }
}

impl<T> fmt::Debug for Buffer<T> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Buffer").field("len", &self.len).finish_non_exhaustive()
    }
}

impl<T: Element> Buffer<T> {
    /// The first `len` elements of memory that somebody else reserved.
    ///
    /// # Errors
    /// [`Error::Shape`] where there are fewer.
    pub fn from_handle(handle: Handle, len: usize) -> Result<Self> {
        let has = handle.size_in_used() as usize / size_of::<T>();
        if has < len {
            return Err(Error::shape("a buffer on the accelerator", format!("{len} elements"), &[has]));
        }
        Ok(Self { handle, len, element: PhantomData })
    }

    /// How many elements it has.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The argument of a kernel that sees the buffer as vectors of `width` elements.
    pub(super) fn vectors(&self, width: usize) -> BufferArg {
        // SAFETY: the handle has `len` elements.
        unsafe { BufferArg::from_raw_parts(self.handle.clone(), self.len / width) }
    }

    /// The argument of a kernel.
    pub(super) fn arg(&self) -> BufferArg {
        self.vectors(1)
    }
}
