//! The decode path's kernels for accelerators, in `CubeCL`: compiled for CUDA at run time, and for the CPU
//! in tests.
//!
//! Each is a function of an [`Accelerator`] and its [`Buffer`]s; what it computes is what [`super::rows`]
//! computes on host slices. As there, a row's result has a fixed order of summation: it depends neither on
//! the other rows nor on how they were cut into chunks, bitwise. It does depend on the kind of accelerator.

mod attention;
mod device;
mod gate;
#[cfg(feature = "cuda")]
mod memory;
mod norm;
mod params;
mod product;
mod rotary;
mod rows;
mod sample;
mod shared;

#[cfg(all(test, feature = "cube-cpu"))]
mod tests;

pub use attention::{SPAN, Tiles, paged_attention};
pub use device::{Accelerator, Buffer, Element};
pub use gate::{activate_rows, gate_rows, open_rows};
#[cfg(feature = "cuda")]
pub use memory::CudaMemory;
pub use norm::{RowNorm, norm_rows};
pub use product::{Matrix, Product, products};
pub use rotary::{KvPages, Qkv, rotate_and_write};
pub use rows::{copy_range, gather_rows, part_of_rows, scale_and_add, scatter_add, softcap_rows};
pub use sample::{Draw, DrawSettings, draw_rows};
