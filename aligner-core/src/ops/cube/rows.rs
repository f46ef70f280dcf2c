//! Copies of rows.

use cubecl::prelude::*;

use super::{Accelerator, Buffer};
use crate::{Error, Result};

/// The rows of `table` `[rows, columns]` at `indices`: `[indices, columns]`. An index past the last row is
/// the caller's mistake, and gives any row.
///
/// # Errors
/// [`Error::Shape`] where the table is not whole rows.
pub fn gather_rows(
    device: &Accelerator,
    table: &Buffer<f32>,
    columns: usize,
    indices: &Buffer<u32>,
) -> Result<Buffer<f32>> {
    if columns == 0 || !table.len().is_multiple_of(columns) {
        return Err(Error::shape("a table of rows", format!("a multiple of {columns}"), &[table.len()]));
    }
    let out = device.empty(indices.len() * columns);
    if !out.is_empty() {
        let (count, dim) = device.flat(out.len());
        gather::launch(device.client(), count, dim, table.arg(), indices.arg(), out.arg(), columns);
    }
    Ok(out)
}

#[cube(launch)]
fn gather(table: &[f32], indices: &[u32], out: &mut [f32], #[comptime] columns: usize) {
    let at = ABSOLUTE_POS;
    if at < out.len() {
        out[at] = table[indices[at / columns] as usize * columns + at % columns];
    }
}

/// Copies `len` elements from `from` to `to` within a buffer; the two ranges do not overlap.
///
/// # Errors
/// [`Error::Shape`] where one of the ranges is not in the buffer.
pub fn copy_range(
    device: &Accelerator,
    data: &Buffer<f32>,
    from: usize,
    to: usize,
    len: usize,
) -> Result<()> {
    if from.max(to) + len > data.len() {
        let expected = format!("at least {} elements", from.max(to) + len);
        return Err(Error::shape("a buffer on the accelerator", expected, &[data.len()]));
    }
    if len > 0 {
        let (count, dim) = device.flat(len);
        copy::launch(device.client(), count, dim, data.arg(), from, to, len);
    }
    Ok(())
}

#[cube(launch)]
fn copy(data: &mut [f32], from: usize, to: usize, len: usize) {
    if ABSOLUTE_POS < len {
        data[to + ABSOLUTE_POS] = data[from + ABSOLUTE_POS];
    }
}
