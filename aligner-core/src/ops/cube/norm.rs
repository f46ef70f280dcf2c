//! Norms of rows.

use cubecl::prelude::*;

use super::shared::sum_lines;
use super::{Accelerator, Buffer};
use crate::{Error, Result};

/// A norm of rows.
#[derive(Debug, Clone, Copy)]
pub enum RowNorm<'a> {
    /// `RMSNorm`, scaled by the weight `[hidden]` plus an offset.
    Rms(&'a Buffer<f32>, f32),
    /// `LayerNorm`, with weight and bias, both `[hidden]`.
    Layer(&'a Buffer<f32>, &'a Buffer<f32>),
}

/// The norm of each row of x `[rows, hidden]`: the same shape. Means are summed in f32. (The addition to the
/// residual stream before a norm is part of the [`super::product`] that makes it.)
///
/// # Errors
/// [`Error::Shape`] where x is not whole rows, or a bias is not as long as its weight.
pub fn norm_rows(
    device: &Accelerator,
    x: &Buffer<f32>,
    norm: RowNorm<'_>,
    epsilon: f32,
) -> Result<Buffer<f32>> {
    let (weight, bias, offset) = match norm {
        RowNorm::Rms(weight, offset) => (weight, None, offset),
        RowNorm::Layer(weight, bias) => (weight, Some(bias), 0.0),
    };
    let hidden = weight.len().max(1);
    if !x.len().is_multiple_of(hidden) {
        return Err(Error::shape("rows of a norm", format!("a multiple of {hidden}"), &[x.len()]));
    }
    if let Some(bias) = bias.filter(|bias| bias.len() != weight.len()) {
        return Err(Error::shape("bias of a norm", format!("[{hidden}]"), &[bias.len()]));
    }
    let out = device.empty(x.len());
    let (rows, units) = (x.len() / hidden, device.units(256));
    if rows == 0 {
        return Ok(out);
    }
    let (count, dim) = (CubeCount::Static(rows as u32, 1, 1), CubeDim::new_1d(units as u32));
    // An absent operand is never read; something has to stand in its place.
    let (other, centred) = (bias.unwrap_or(weight), bias.is_some());
    let client = device.client();
    norm_row::launch(
        client,
        count,
        dim,
        x.arg(),
        weight.arg(),
        other.arg(),
        out.arg(),
        offset,
        epsilon,
        centred,
        units,
    );
    Ok(out)
}

/// One cube a row.
#[cube(launch)]
#[expect(clippy::too_many_arguments, reason = "a kernel's arguments")]
fn norm_row(
    x: &[f32],
    weight: &[f32],
    bias: &[f32],
    out: &mut [f32],
    offset: f32,
    epsilon: f32,
    #[comptime] centred: bool,
    #[comptime] units: usize,
) {
    let hidden = weight.len();
    let start = CUBE_POS_X as usize * hidden;
    let unit = UNIT_POS as usize;
    let mut sums = Shared::<[f32]>::new_slice(units);
    let mut mean = f32::new(0.0);
    if comptime!(centred) {
        let mut sum = f32::new(0.0);
        let mut at = unit;
        while at < hidden {
            sum += x[start + at];
            at += units;
        }
        sums[unit] = sum;
        sum_lines::<f32>(&mut sums, 1usize, units);
        mean = sums[0] / f32::cast_from(hidden);
        // Nobody writes over a sum that another unit has yet to read.
        sync_cube();
    }
    let mut sum = f32::new(0.0);
    let mut at = unit;
    while at < hidden {
        let value = x[start + at] - mean;
        sum = fma(value, value, sum);
        at += units;
    }
    sums[unit] = sum;
    sum_lines::<f32>(&mut sums, 1usize, units);
    let inverse = 1.0 / (sums[0] / f32::cast_from(hidden) + epsilon).sqrt();
    let mut at = unit;
    while at < hidden {
        let mut value = (x[start + at] - mean) * inverse * (weight[at] + offset);
        if comptime!(centred) {
            value += bias[at];
        }
        out[start + at] = value;
        at += units;
    }
}
