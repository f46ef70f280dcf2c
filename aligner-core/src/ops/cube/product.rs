//! `x W^T` for rows of x.
//!
//! A few lanes share a column of W: each sums every `lanes`-th vector of the inner dimension, in order, and
//! the lanes' sums are added in order. So an element's order of summation is the same whatever tile of
//! rows it falls into, and a row's result is bitwise the same in any company.

use cubecl::prelude::*;

use super::{Accelerator, Buffer, Element};
use crate::{Error, Result};

/// Columns of a tile.
const COLUMNS: usize = 4;
/// Most rows of a tile.
const ROWS: usize = 8;

/// A linear's weight `[out, in]` on an accelerator.
#[derive(Debug, Clone)]
pub enum Matrix {
    /// f32.
    F32(Buffer<f32>, [usize; 2]),
    /// bf16; sums stay f32.
    Bf16(Buffer<half::bf16>, [usize; 2]),
}

impl Matrix {
    /// `[out, in]`.
    pub fn shape(&self) -> [usize; 2] {
        match self {
            Self::F32(_, shape) | Self::Bf16(_, shape) => *shape,
        }
    }

    /// Bytes of the elements.
    pub fn bytes(&self) -> usize {
        match self {
            Self::F32(data, _) => data.len() * 4,
            Self::Bf16(data, _) => data.len() * 2,
        }
    }
}

/// `x W^T + b`, or that added to `add_to`, for x `[rows, in]`: `[rows, out]`.
///
/// # Errors
/// [`Error::Shape`] where shapes do not fit.
pub fn product(
    device: &Accelerator,
    x: &Buffer<f32>,
    weight: &Matrix,
    bias: Option<&Buffer<f32>>,
    add_to: Option<&Buffer<f32>>,
) -> Result<Buffer<f32>> {
    let [outputs, inputs] = weight.shape();
    if inputs == 0 || !x.len().is_multiple_of(inputs) {
        return Err(Error::shape("input of a linear", format!("a multiple of {inputs}"), &[x.len()]));
    }
    let rows = x.len() / inputs;
    if let Some(bias) = bias.filter(|bias| bias.len() != outputs) {
        return Err(Error::shape("bias of a linear", format!("[{outputs}]"), &[bias.len()]));
    }
    if let Some(base) = add_to.filter(|base| base.len() != rows * outputs) {
        return Err(Error::shape("residual of a linear", format!("[{rows}, {outputs}]"), &[base.len()]));
    }
    match weight {
        Matrix::F32(data, _) => run(device, x, data, [rows, outputs, inputs], bias, add_to),
        Matrix::Bf16(data, _) => run(device, x, data, [rows, outputs, inputs], bias, add_to),
    }
}

fn run<W: Element + Float>(
    device: &Accelerator,
    x: &Buffer<f32>,
    weight: &Buffer<W>,
    [rows, outputs, inputs]: [usize; 3],
    bias: Option<&Buffer<f32>>,
    add_to: Option<&Buffer<f32>>,
) -> Result<Buffer<f32>> {
    if weight.len() != outputs * inputs {
        return Err(Error::shape("weight of a linear", format!("[{outputs}, {inputs}]"), &[weight.len()]));
    }
    let out = device.empty(rows * outputs);
    if out.is_empty() {
        return Ok(out);
    }
    let width = if inputs.is_multiple_of(4) { 4 } else { 1 };
    let tile_rows = rows.next_power_of_two().min(ROWS);
    let lanes = device.units(32);
    let groups = device.units(128) / lanes;
    let count =
        CubeCount::Static(outputs.div_ceil(COLUMNS * groups) as u32, rows.div_ceil(tile_rows) as u32, 1);
    let dim = CubeDim::new_2d(lanes as u32, groups as u32);
    let options = (bias.is_some(), add_to.is_some());
    // SAFETY: the kernel reads whole rows of x and columns of W, clamped to the last ones, and writes the
    // rows and columns that are there; the sizes were checked.
    unsafe {
        tile::launch_unchecked::<W>(
            device.client(),
            count,
            dim,
            width,
            x.vectors(width),
            weight.vectors(width),
            bias.unwrap_or(x).arg(),
            add_to.unwrap_or(x).arg(),
            out.arg(),
            rows,
            outputs,
            inputs / width,
            tile_rows,
            lanes,
            groups,
            options.0,
            options.1,
        );
    }
    Ok(out)
}

/// A tile of rows and columns for each group of lanes.
#[cube(launch_unchecked)]
#[expect(clippy::too_many_arguments, reason = "a kernel's arguments")]
fn tile<W: Float, N: Size>(
    x: &[Vector<f32, N>],
    weight: &[Vector<W, N>],
    bias: &[f32],
    add_to: &[f32],
    out: &mut [f32],
    rows: usize,
    outputs: usize,
    vectors: usize,
    #[comptime] tile_rows: usize,
    #[comptime] lanes: usize,
    #[comptime] groups: usize,
    #[comptime] has_bias: bool,
    #[comptime] adds: bool,
) {
    let lane = UNIT_POS_X as usize;
    let group = UNIT_POS_Y as usize;
    let first_column = (CUBE_POS_X as usize * groups + group) * COLUMNS;
    let first_row = CUBE_POS_Y as usize * tile_rows;
    let mut sums = Array::<f32>::new(comptime!(tile_rows * COLUMNS));
    #[unroll]
    for i in 0..comptime!(tile_rows * COLUMNS) {
        sums[i] = 0.0;
    }
    let mut at = lane;
    while at < vectors {
        let mut columns = Array::<Vector<f32, N>>::new(COLUMNS);
        #[unroll]
        for c in 0..COLUMNS {
            let column = clamp_max(first_column + c, outputs - 1);
            columns[c] = Vector::<f32, N>::cast_from(weight[column * vectors + at]);
        }
        #[unroll]
        for r in 0..tile_rows {
            let row = clamp_max(first_row + r, rows - 1);
            let values = x[row * vectors + at];
            #[unroll]
            for c in 0..COLUMNS {
                let w = columns[c];
                let mut sum = sums[comptime!(r * COLUMNS + c)];
                #[unroll]
                for n in 0..N::value() {
                    sum = fma(values.extract(n), w.extract(n), sum);
                }
                sums[comptime!(r * COLUMNS + c)] = sum;
            }
        }
        at += lanes;
    }
    // One more than the lanes, so that neighbours read different banks.
    let stride = comptime!(lanes + 1);
    let base = group * comptime!(tile_rows * COLUMNS * stride);
    let mut shared = Shared::<[f32]>::new_slice(comptime!(groups * tile_rows * COLUMNS * stride));
    #[unroll]
    for i in 0..comptime!(tile_rows * COLUMNS) {
        shared[base + i * stride + lane] = sums[i];
    }
    sync_cube();
    let mut i = lane;
    while i < comptime!(tile_rows * COLUMNS) {
        let row = first_row + i / COLUMNS;
        let column = first_column + i % COLUMNS;
        if row < rows && column < outputs {
            let mut sum = f32::new(0.0);
            for l in 0..lanes {
                sum += shared[base + i * stride + l];
            }
            if has_bias {
                sum += bias[column];
            }
            if adds {
                sum += add_to[row * outputs + column];
            }
            out[row * outputs + column] = sum;
        }
        i += lanes;
    }
}
