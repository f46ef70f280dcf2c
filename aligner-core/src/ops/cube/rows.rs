//! Copies, sums and scalings of rows.

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

/// Columns `first..first + count` of x `[rows, columns]`: `[rows, count]`.
///
/// # Errors
/// [`Error::Shape`] where x is not whole rows, or they have fewer columns.
pub fn part_of_rows(
    device: &Accelerator,
    x: &Buffer<f32>,
    columns: usize,
    first: usize,
    count: usize,
) -> Result<Buffer<f32>> {
    if columns == 0 || !x.len().is_multiple_of(columns) || first + count > columns {
        let expected = format!("rows of {columns}, at least {} columns", first + count);
        return Err(Error::shape("a part of rows", expected, &[x.len()]));
    }
    let out = device.empty(x.len() / columns * count);
    if !out.is_empty() {
        let (cubes, dim) = device.flat(out.len());
        part::launch(device.client(), cubes, dim, x.arg(), out.arg(), columns, first, count);
    }
    Ok(out)
}

#[cube(launch)]
fn part(
    x: &[f32],
    out: &mut [f32],
    #[comptime] columns: usize,
    #[comptime] first: usize,
    #[comptime] count: usize,
) {
    let at = ABSOLUTE_POS;
    if at < out.len() {
        out[at] = x[at / count * columns + first + at % count];
    }
}

/// `scale x + y`, or `scale x` where there is no y, of equal lengths.
///
/// # Errors
/// [`Error::Shape`] where the two differ.
pub fn scale_and_add(
    device: &Accelerator,
    x: &Buffer<f32>,
    scale: f32,
    y: Option<&Buffer<f32>>,
) -> Result<Buffer<f32>> {
    if let Some(y) = y.filter(|y| y.len() != x.len()) {
        return Err(Error::shape("what is added to rows", format!("[{}]", x.len()), &[y.len()]));
    }
    let out = device.empty(x.len());
    if !x.is_empty() {
        let (count, dim) = device.flat(x.len());
        // An absent operand is never read; something has to stand in its place.
        let (other, adds) = (y.unwrap_or(x), y.is_some());
        scaled::launch(device.client(), count, dim, x.arg(), other.arg(), out.arg(), scale, adds);
    }
    Ok(out)
}

#[cube(launch)]
fn scaled(x: &[f32], y: &[f32], out: &mut [f32], scale: f32, #[comptime] adds: bool) {
    let at = ABSOLUTE_POS;
    if at < out.len() {
        let mut value = scale * x[at];
        if comptime!(adds) {
            value += y[at];
        }
        out[at] = value;
    }
}

/// `cap tanh(x / cap)`.
pub fn softcap_rows(device: &Accelerator, x: &Buffer<f32>, cap: f32) -> Buffer<f32> {
    let out = device.empty(x.len());
    if !x.is_empty() {
        let (count, dim) = device.flat(x.len());
        capped::launch(device.client(), count, dim, x.arg(), out.arg(), cap);
    }
    out
}

#[cube(launch)]
fn capped(x: &[f32], out: &mut [f32], cap: f32) {
    let at = ABSOLUTE_POS;
    if at < out.len() {
        out[at] = cap * (x[at] / cap).tanh();
    }
}

/// Adds to `sum` `[rows, columns]`, in place, the rows of `x` `[indices, columns]`: the i-th, times `weights[i]`,
/// to row `indices[i]`. An index is there once at most.
///
/// # Errors
/// [`Error::Shape`] where the sizes do not fit.
pub fn scatter_add(
    device: &Accelerator,
    sum: &Buffer<f32>,
    x: &Buffer<f32>,
    indices: &Buffer<u32>,
    weights: &Buffer<f32>,
) -> Result<()> {
    if indices.len() != weights.len() || indices.is_empty() || !x.len().is_multiple_of(indices.len()) {
        let expected = format!("{} rows, with a weight each", indices.len());
        return Err(Error::shape("rows to add", expected, &[x.len(), weights.len()]));
    }
    let (count, dim) = device.flat(x.len());
    let columns = x.len() / indices.len();
    let (sum, x) = (sum.arg(), x.arg());
    scatter::launch(device.client(), count, dim, sum, x, indices.arg(), weights.arg(), columns);
    Ok(())
}

#[cube(launch)]
fn scatter(sum: &mut [f32], x: &[f32], indices: &[u32], weights: &[f32], #[comptime] columns: usize) {
    let at = ABSOLUTE_POS;
    if at < x.len() {
        let to = indices[at / columns] as usize * columns + at % columns;
        sum[to] = fma(weights[at / columns], x[at], sum[to]);
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
