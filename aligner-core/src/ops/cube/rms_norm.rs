//! `RMSNorm` of rows.

use cubecl::prelude::*;

use super::shared::sum_lines;
use super::{Accelerator, Buffer};
use crate::{Error, Result};

/// `RMSNorm` of each row of x `[rows, hidden]`: the same shape; the weight is `[hidden]`. The mean of
/// squares is summed in f32. (The addition to the residual stream before a norm is part of the
/// [`super::product`] that makes it.)
///
/// # Errors
/// [`Error::Shape`] where x is not whole rows.
pub fn norm_rows(
    device: &Accelerator,
    x: &Buffer<f32>,
    weight: &Buffer<f32>,
    epsilon: f32,
) -> Result<Buffer<f32>> {
    let hidden = weight.len().max(1);
    if !x.len().is_multiple_of(hidden) {
        return Err(Error::shape("rows of an RMSNorm", format!("a multiple of {hidden}"), &[x.len()]));
    }
    let out = device.empty(x.len());
    let (rows, units) = (x.len() / hidden, device.units(256));
    if rows == 0 {
        return Ok(out);
    }
    let (count, dim) = (CubeCount::Static(rows as u32, 1, 1), CubeDim::new_1d(units as u32));
    norm::launch(device.client(), count, dim, x.arg(), weight.arg(), out.arg(), epsilon, units);
    Ok(out)
}

/// One cube a row.
#[cube(launch)]
fn norm(x: &[f32], weight: &[f32], out: &mut [f32], epsilon: f32, #[comptime] units: usize) {
    let hidden = weight.len();
    let start = CUBE_POS_X as usize * hidden;
    let unit = UNIT_POS as usize;
    let mut squares = Shared::<[f32]>::new_slice(units);
    let mut sum = f32::new(0.0);
    let mut at = unit;
    while at < hidden {
        let value = x[start + at];
        sum = fma(value, value, sum);
        at += units;
    }
    squares[unit] = sum;
    sum_lines::<f32>(&mut squares, 1usize, units);
    let inverse = 1.0 / (squares[0] / f32::cast_from(hidden) + epsilon).sqrt();
    let mut at = unit;
    while at < hidden {
        out[start + at] = x[start + at] * inverse * weight[at];
        at += units;
    }
}
