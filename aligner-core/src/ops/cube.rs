//! The decode path's kernels for accelerators, in `CubeCL`: compiled for CUDA at run time, and for the CPU
//! in tests.
//!
//! Each is a function of an [`Accelerator`] and its [`Buffer`]s; what it computes is what [`super::rows`]
//! computes on host slices. As there, a row's result has a fixed order of summation: it depends neither on
//! the other rows nor on how they were cut into chunks, bitwise. It does depend on the kind of accelerator.

mod attention;
mod device;
mod params;
mod product;
mod rms_norm;
mod rotary;
mod rows;
mod sample;
mod shared;
mod swiglu;

#[cfg(all(test, feature = "cube-cpu"))]
mod tests;

pub use attention::{SPAN, Tiles, paged_attention};
pub use device::{Accelerator, Buffer, Element};
pub use product::{Matrix, Product, products};
pub use rms_norm::norm_rows;
pub use rotary::{KvPages, Qkv, rotate_and_write};
pub use rows::{copy_range, gather_rows};
pub use sample::{Draw, DrawSettings, draw_rows};
pub use swiglu::gate_rows;
