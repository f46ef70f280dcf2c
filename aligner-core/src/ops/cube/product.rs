//! `x W^T` for rows of x.
//!
//! The units of a cube share a few columns of W: each sums every `units`-th vector of the inner dimension, in
//! order, and a tree of fixed shape adds their sums. How many they are depends on the weight's shape alone. So an
//! element's order of summation is the same whatever tile of rows it falls into, and a row's result is bitwise
//! the same in any company.

use cubecl::prelude::*;

use super::shared::sum_lines;
use super::{Accelerator, Buffer, Element};
use crate::{Error, Result};

/// Columns of a tile.
const COLUMNS: usize = 4;
/// Most rows of a tile.
const ROWS: usize = 8;
/// Weights of one launch.
const GROUP: usize = 3;
/// From this many columns on there are enough cubes to fill a device with fewer units each.
const MANY_COLUMNS: usize = 1 << 14;

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

/// One linear of a group that shares its input.
#[derive(Debug, Clone, Copy)]
pub struct Product<'a> {
    /// `[out, in]`.
    pub weight: &'a Matrix,
    /// `[out]`.
    pub bias: Option<&'a Buffer<f32>>,
    /// `[rows, out]`, which the product is added to.
    pub add_to: Option<&'a Buffer<f32>>,
}

/// `x W^T + b` for each product of a group, x `[rows, in]`: `[rows, out]` each. What is added to is not changed.
///
/// # Errors
/// [`Error::Shape`] where shapes do not fit.
pub fn products(device: &Accelerator, x: &Buffer<f32>, group: &[Product<'_>]) -> Result<Vec<Buffer<f32>>> {
    let mut out = Vec::with_capacity(group.len());
    // The weights of one launch are of one kind, and would each be summed by as many units alone.
    let kind = |product: &Product<'_>| (std::mem::discriminant(product.weight), wanted_units(product.weight));
    let alike = |a: &Product<'_>, b: &Product<'_>| kind(a) == kind(b);
    for group in group.chunk_by(alike).flat_map(|group| group.chunks(GROUP)) {
        let checked = group.iter().map(|product| check(x, product)).collect::<Result<Vec<_>>>()?;
        let made: Vec<Buffer<f32>> =
            checked.iter().map(|&[rows, outputs, _]| device.empty(rows * outputs)).collect();
        let &[rows, _, inputs] = &checked[0];
        let launch = Launch { device, x, group, rows, inputs, out: &made };
        match &group[0].weight {
            Matrix::F32(..) => launch.run(|matrix| match matrix {
                Matrix::F32(data, _) => Some(data),
                Matrix::Bf16(..) => None,
            }),
            Matrix::Bf16(..) => launch.run(|matrix| match matrix {
                Matrix::Bf16(data, _) => Some(data),
                Matrix::F32(..) => None,
            }),
        }
        out.extend(made);
    }
    Ok(out)
}

/// Units of a tile on a device that has as many.
fn wanted_units(weight: &Matrix) -> usize {
    if weight.shape()[0] < MANY_COLUMNS { 128 } else { 32 }
}

/// Checks a product's shapes: `[rows, out, in]`.
fn check(x: &Buffer<f32>, product: &Product<'_>) -> Result<[usize; 3]> {
    let [outputs, inputs] = product.weight.shape();
    if inputs == 0 || !x.len().is_multiple_of(inputs) {
        return Err(Error::shape("input of a linear", format!("a multiple of {inputs}"), &[x.len()]));
    }
    let rows = x.len() / inputs;
    let elements = match product.weight {
        Matrix::F32(data, _) => data.len(),
        Matrix::Bf16(data, _) => data.len(),
    };
    if elements != outputs * inputs {
        return Err(Error::shape("weight of a linear", format!("[{outputs}, {inputs}]"), &[elements]));
    }
    if let Some(bias) = product.bias.filter(|bias| bias.len() != outputs) {
        return Err(Error::shape("bias of a linear", format!("[{outputs}]"), &[bias.len()]));
    }
    if let Some(base) = product.add_to.filter(|base| base.len() != rows * outputs) {
        return Err(Error::shape("residual of a linear", format!("[{rows}, {outputs}]"), &[base.len()]));
    }
    Ok([rows, outputs, inputs])
}

/// One to [`GROUP`] checked products with weights of one kind.
struct Launch<'a> {
    device: &'a Accelerator,
    x: &'a Buffer<f32>,
    group: &'a [Product<'a>],
    rows: usize,
    inputs: usize,
    out: &'a [Buffer<f32>],
}

impl Launch<'_> {
    fn run<W: Element + Float>(&self, data: impl Fn(&Matrix) -> Option<&Buffer<W>>) {
        let Self { device, x, group, rows, inputs, out } = *self;
        let weights: Vec<&Buffer<W>> = group.iter().filter_map(|product| data(product.weight)).collect();
        let outputs = [0, 1, 2].map(|at| group.get(at).map_or(0, |product| product.weight.shape()[0]));
        let all: usize = outputs.iter().sum();
        if rows == 0 || all == 0 || weights.len() != group.len() {
            return;
        }
        let width = if inputs.is_multiple_of(4) { 4 } else { 1 };
        let tile_rows = rows.next_power_of_two().min(ROWS);
        let units = device.units(wanted_units(group[0].weight));
        let blocks = outputs.map(|outputs| outputs.div_ceil(COLUMNS));
        let count =
            CubeCount::Static(blocks.iter().sum::<usize>() as u32, rows.div_ceil(tile_rows) as u32, 1);
        // Absent operands are never read; something has to stand in their place.
        let at = |at: usize| at.min(group.len() - 1);
        let weight = |i: usize| weights[at(i)].vectors(width);
        let bias = |i: usize| group[at(i)].bias.unwrap_or(x).arg();
        let add_to = |i: usize| group[at(i)].add_to.unwrap_or(x).arg();
        let options = |i: usize| (group[at(i)].bias.is_some(), group[at(i)].add_to.is_some());
        // SAFETY: the kernel reads whole rows of x and columns of the weights, clamped to the last ones, and
        // writes the rows and columns that are there; the sizes were checked.
        unsafe {
            tiles::launch_unchecked::<W>(
                device.client(),
                count,
                CubeDim::new_1d(units as u32),
                width,
                x.vectors(width),
                weight(0),
                weight(1),
                weight(2),
                bias(0),
                bias(1),
                bias(2),
                add_to(0),
                add_to(1),
                add_to(2),
                out[at(0)].arg(),
                out[at(1)].arg(),
                out[at(2)].arg(),
                rows,
                inputs / width,
                outputs[0],
                outputs[1],
                outputs[2],
                options(0),
                options(1),
                options(2),
                group.len(),
                tile_rows,
                units,
            );
        }
    }
}

/// Where a tile lies in its product.
#[derive(CubeType, Clone, Copy)]
struct Place {
    /// Its first column.
    column: usize,
    /// Its first row.
    row: usize,
    rows: usize,
    outputs: usize,
    /// Vectors of the inner dimension.
    vectors: usize,
}

/// Each cube a tile of one of the products.
#[cube(launch_unchecked)]
#[expect(clippy::too_many_arguments, reason = "a kernel's arguments")]
fn tiles<W: Float, N: Size>(
    x: &[Vector<f32, N>],
    weight_0: &[Vector<W, N>],
    weight_1: &[Vector<W, N>],
    weight_2: &[Vector<W, N>],
    bias_0: &[f32],
    bias_1: &[f32],
    bias_2: &[f32],
    add_to_0: &[f32],
    add_to_1: &[f32],
    add_to_2: &[f32],
    out_0: &mut [f32],
    out_1: &mut [f32],
    out_2: &mut [f32],
    rows: usize,
    vectors: usize,
    outputs_0: usize,
    outputs_1: usize,
    outputs_2: usize,
    #[comptime] options_0: (bool, bool),
    #[comptime] options_1: (bool, bool),
    #[comptime] options_2: (bool, bool),
    #[comptime] count: usize,
    #[comptime] tile_rows: usize,
    #[comptime] units: usize,
) {
    let mut shared = Shared::<[f32]>::new_slice(comptime!(tile_rows * COLUMNS * units));
    let block = CUBE_POS_X as usize;
    let row = CUBE_POS_Y as usize * tile_rows;
    let blocks_0 = outputs_0.div_ceil(COLUMNS);
    let blocks_1 = outputs_1.div_ceil(COLUMNS);
    if block < blocks_0 {
        let place = Place { column: block * COLUMNS, row, rows, outputs: outputs_0, vectors };
        tile::<W, N>(x, weight_0, bias_0, add_to_0, out_0, &mut shared, &place, options_0, tile_rows, units);
    } else if comptime!(count > 1) {
        if block < blocks_0 + blocks_1 {
            let column = (block - blocks_0) * COLUMNS;
            let place = Place { column, row, rows, outputs: outputs_1, vectors };
            tile::<W, N>(
                x,
                weight_1,
                bias_1,
                add_to_1,
                out_1,
                &mut shared,
                &place,
                options_1,
                tile_rows,
                units,
            );
        } else if comptime!(count > 2) {
            let column = (block - blocks_0 - blocks_1) * COLUMNS;
            let place = Place { column, row, rows, outputs: outputs_2, vectors };
            tile::<W, N>(
                x,
                weight_2,
                bias_2,
                add_to_2,
                out_2,
                &mut shared,
                &place,
                options_2,
                tile_rows,
                units,
            );
        }
    }
}

/// A tile of rows and columns of one product.
#[cube]
#[expect(clippy::too_many_arguments, reason = "a kernel's arguments")]
fn tile<W: Float, N: Size>(
    x: &[Vector<f32, N>],
    weight: &[Vector<W, N>],
    bias: &[f32],
    add_to: &[f32],
    out: &mut [f32],
    shared: &mut Shared<[f32]>,
    place: &Place,
    #[comptime] options: (bool, bool),
    #[comptime] tile_rows: usize,
    #[comptime] units: usize,
) {
    let unit = UNIT_POS as usize;
    let lines = comptime!(tile_rows * COLUMNS);
    let mut sums = Array::<f32>::new(lines);
    #[unroll]
    for i in 0..lines {
        sums[i] = 0.0;
    }
    let mut at = unit;
    while at < place.vectors {
        let mut columns = Array::<Vector<f32, N>>::new(COLUMNS);
        #[unroll]
        for c in 0..COLUMNS {
            let column = clamp_max(place.column + c, place.outputs - 1);
            columns[c] = Vector::<f32, N>::cast_from(weight[column * place.vectors + at]);
        }
        #[unroll]
        for r in 0..tile_rows {
            let row = clamp_max(place.row + r, place.rows - 1);
            let values = x[row * place.vectors + at];
            #[unroll]
            for c in 0..COLUMNS {
                let column = columns[c];
                let mut sum = sums[comptime!(r * COLUMNS + c)];
                #[unroll]
                for n in 0..N::value() {
                    sum = fma(values.extract(n), column.extract(n), sum);
                }
                sums[comptime!(r * COLUMNS + c)] = sum;
            }
        }
        at += units;
    }
    #[unroll]
    for i in 0..lines {
        shared[i * units + unit] = sums[i];
    }
    sum_lines::<f32>(shared, lines, units);
    let mut i = unit;
    while i < lines {
        let row = place.row + i / COLUMNS;
        let column = place.column + i % COLUMNS;
        if row < place.rows && column < place.outputs {
            let mut sum = shared[i * units];
            if comptime!(options.0) {
                sum += bias[column];
            }
            if comptime!(options.1) {
                sum += add_to[row * place.outputs + column];
            }
            out[row * place.outputs + column] = sum;
        }
        i += units;
    }
}
