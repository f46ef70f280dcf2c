//! `x W^T` for few rows of x: inner products along the contiguous inner dimension, W read once for up to
//! [`BLOCK`] rows.
//!
//! Each element is summed in eight lanes over the inner dimension, then across the lanes, then over the
//! last few columns, whatever tile it falls into: a row's result is bitwise the same in any company.

use std::ops::Range;

use rayon::prelude::*;

use super::vector::{LANES, Vector, dispatched, prefetch};
use super::weight::{Columns, Weight};
use crate::ops::kernel::Shared;

/// Rows of x that share a pass over W; they stay in the second-level cache.
const BLOCK: usize = 48;
/// Columns of a tile; the tasks' ranges are multiples of it.
const TILE: usize = 4;
/// The longest run of the inner dimension that all rows take before they go on: a tile's columns and its rows of x
/// stay in the first-level cache.
const RUN: usize = 768;
/// Rows or columns so many elements apart, and multiples of it, fall into the same places of that cache: runs of them
/// would not stay.
const CLASH: usize = 1024;
/// Products below this many multiplications run on the calling thread.
const SERIAL_BELOW: usize = 1 << 16;

/// One linear of a group that shares its input.
#[derive(Debug)]
pub struct Product<'a> {
    /// `[out, in]`.
    pub weight: Weight<'a>,
    /// `[out]`.
    pub bias: Option<&'a [f32]>,
    /// `[rows, out]`.
    pub out: &'a mut [f32],
    /// Whether the product is added to what `out` holds.
    pub add: bool,
}

/// `out (+)= x W^T + b` for each product of a group; x is `[rows, in]`.
///
/// # Panics
/// Where a slice does not have the size that `rows` and the weights ask for: the caller's mistake.
pub fn products<const N: usize>(x: &[f32], rows: usize, mut group: [Product<'_>; N]) {
    let Some(inputs) = x.len().checked_div(rows) else { return };
    for product in &group {
        let [outputs, columns] = product.weight.shape();
        assert!(columns == inputs && x.len() == rows * inputs, "input of a product");
        assert!(product.out.len() == rows * outputs, "output of a product");
        assert!(product.bias.is_none_or(|bias| bias.len() == outputs), "bias of a product");
    }
    let all: usize = group.iter().map(|product| product.weight.shape()[0]).sum();
    let serial = all * inputs * rows < SERIAL_BELOW;
    let threads = if serial { 1 } else { rayon::current_num_threads() };
    let step = if threads == 1 { all } else { all.div_ceil(threads * 4) }.next_multiple_of(TILE);
    let parts = group.each_mut().map(|product| {
        let outputs = product.weight.shape()[0];
        let part = Part { weight: product.weight, bias: product.bias, add: product.add, rows, outputs };
        (part, Shared::new(product.out), outputs.div_ceil(step))
    });
    let run = |task: usize| {
        let mut first = 0;
        for (part, out, tasks) in &parts {
            if task < first + tasks {
                let start = (task - first) * step;
                return part.run(x, start..(start + step).min(part.outputs), *out);
            }
            first += tasks;
        }
    };
    let tasks = parts.iter().map(|(_, _, tasks)| tasks).sum();
    if serial { (0..tasks).for_each(run) } else { (0..tasks).into_par_iter().for_each(run) }
}

/// What the tasks of one product share.
struct Part<'a> {
    weight: Weight<'a>,
    bias: Option<&'a [f32]>,
    add: bool,
    rows: usize,
    outputs: usize,
}

impl Part<'_> {
    fn run(&self, x: &[f32], columns: Range<usize>, out: Shared<'_>) {
        let inputs = x.len() / self.rows;
        for first in (0..self.rows).step_by(BLOCK) {
            let rows = BLOCK.min(self.rows - first);
            let block = Block {
                x: &x[first * inputs..][..rows * inputs],
                rows,
                inputs,
                out: out.at(first * self.outputs, rows * self.outputs),
                stride: self.outputs,
                bias: self.bias,
                add: self.add,
            };
            // SAFETY: no other task has these columns, and `products` checked all sizes.
            unsafe {
                match self.weight {
                    Weight::F32(weight) => run_f32(&block, weight, columns.clone()),
                    Weight::Bf16(weight) => run_bf16(&block, weight, columns.clone()),
                    Weight::Int8(weight) => run_int8(&block, weight, columns.clone()),
                    Weight::Int4(weight) => run_int4(&block, weight, columns.clone()),
                    Weight::Nf4(weight) => run_nf4(&block, weight, columns.clone()),
                }
            }
        }
    }
}

struct Block<'a> {
    x: &'a [f32],
    rows: usize,
    inputs: usize,
    out: *mut f32,
    stride: usize,
    bias: Option<&'a [f32]>,
    add: bool,
}

use super::nf4::Nf4;
use super::weight::{Bf16, F32, Int4, Int8};
dispatched!(fn run_f32(block: &Block<'_>, weight: F32<'_>, columns: Range<usize>) = f32_block);
dispatched!(fn run_bf16(block: &Block<'_>, weight: Bf16<'_>, columns: Range<usize>) = bf16_block);
dispatched!(fn run_int8(block: &Block<'_>, weight: Int8<'_>, columns: Range<usize>) = int8_block);
dispatched!(fn run_int4(block: &Block<'_>, weight: Int4<'_>, columns: Range<usize>) = int4_block);
dispatched!(fn run_nf4(block: &Block<'_>, weight: Nf4<'_>, columns: Range<usize>) = nf4_block);

macro_rules! block {
    ($name:ident, $weight:ident) => {
        #[inline(always)]
        unsafe fn $name<V: Vector>(block: &Block<'_>, weight: $weight<'_>, columns: Range<usize>) {
            // SAFETY: as the caller promises.
            unsafe { multiply::<V, _>(block, &weight, columns) }
        }
    };
}
block!(f32_block, F32);
block!(bf16_block, Bf16);
block!(int8_block, Int8);
block!(int4_block, Int4);
block!(nf4_block, Nf4);

/// All rows of the block with a range of columns.
///
/// # Safety
/// The columns are the weight's, the block's slices have the sizes it says, and nobody else touches
/// these columns of the output.
#[inline(always)]
#[expect(clippy::inline_always, reason = "must end up in a function with the features")]
unsafe fn multiply<V: Vector, W: Columns>(block: &Block<'_>, weight: &W, columns: Range<usize>) {
    let mut column = columns.start;
    let whole = block.inputs / LANES * LANES;
    // SAFETY: tiles stay within the block's rows and the range of columns.
    unsafe {
        if block.rows == 1 {
            while column + 2 * TILE <= columns.end {
                let ahead = Ahead::new(weight, column + 2 * TILE, 2 * TILE, 1);
                let at = Place { row: 0, column, start: 0, end: whole };
                tile::<V, W, 1, 2, 4>(block, weight, at, &mut [], ahead);
                column += 2 * TILE;
            }
        }
        let tiles = block.rows.div_ceil(3);
        let run = run(block.inputs, tiles);
        let mut held = [[V::splat(0.0); TILE]; BLOCK];
        while column + TILE <= columns.end {
            let mut ahead = Ahead::new(weight, column + TILE, TILE, tiles);
            let mut start = 0;
            loop {
                let end = (start + run).min(whole);
                let mut row = 0;
                while row < block.rows {
                    let left = block.rows - row;
                    let at = Place { row, column, start, end };
                    let held = &mut held[row..];
                    // Four rows are two and two: one alone would wait for its sums.
                    row += match (left, tiles == 1) {
                        (1, true) => tile::<V, W, 1, 1, 2>(block, weight, at, held, ahead),
                        (2, true) => tile::<V, W, 2, 1, 2>(block, weight, at, held, ahead),
                        (3, true) => tile::<V, W, 3, 1, 2>(block, weight, at, held, ahead),
                        (2 | 4, _) => tile::<V, W, 2, 1, 1>(block, weight, at, held, ahead),
                        _ => tile::<V, W, 3, 1, 1>(block, weight, at, held, ahead),
                    };
                    ahead.start = ahead.start.wrapping_add((end - start) / LANES * ahead.step);
                }
                start = end;
                if start == whole {
                    break;
                }
            }
            column += TILE;
        }
        while column < columns.end {
            (0..block.rows).for_each(|row| single::<V, W>(block, weight, row, column));
            column += 1;
        }
    }
}

/// Into how long runs the inner dimension is cut, for so many tiles of rows.
fn run(inputs: usize, tiles: usize) -> usize {
    let whole = inputs / LANES * LANES;
    // Few tiles gain less by what stays than the sums that are held cost.
    if tiles < 4 || inputs.is_multiple_of(CLASH) {
        return whole;
    }
    whole.div_ceil(whole.div_ceil(RUN).max(1)).next_multiple_of(LANES)
}

/// What a tile fetches for the columns after it: `step` bytes at each of its steps.
#[derive(Clone, Copy)]
struct Ahead {
    start: *const u8,
    step: usize,
}

impl Ahead {
    /// The `columns` from `column`, fetched by `tiles` tiles.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "must end up in a function with the features")]
    fn new<W: Columns>(weight: &W, column: usize, columns: usize, tiles: usize) -> Self {
        Self { start: weight.address(column), step: (columns * LANES * W::BITS / 8).div_ceil(tiles) }
    }
}

/// Where a tile begins, and the run of the inner dimension that it multiplies.
#[derive(Clone, Copy)]
struct Place {
    row: usize,
    column: usize,
    start: usize,
    end: usize,
}

/// `R` rows with `4 C` columns; with `FETCH` prefetches at each step. Sums of a run that is not the last are held for
/// the next one, lane by lane, which changes no bit. Returns `R`.
///
/// # Safety
/// Rows and columns are the block's and the weight's.
#[inline(always)]
#[expect(clippy::inline_always, reason = "must end up in a function with the features")]
#[expect(clippy::needless_range_loop, reason = "loops over constants, unrolled into registers")]
unsafe fn tile<V: Vector, W: Columns, const R: usize, const C: usize, const FETCH: usize>(
    block: &Block<'_>,
    weight: &W,
    Place { row, column, start, end }: Place,
    held: &mut [[V; TILE]],
    mut ahead: Ahead,
) -> usize {
    let whole = block.inputs / LANES * LANES;
    let x: [*const f32; R] = std::array::from_fn(|r| block.x[(row + r) * block.inputs..].as_ptr());
    // SAFETY: every k below `inputs` is inside of the rows and of the weight's columns.
    unsafe {
        let mut sums = [[[V::splat(0.0); TILE]; C]; R];
        if start > 0 {
            for r in 0..R {
                sums[r][0] = held[r];
            }
        }
        let mut k = start;
        while k < end {
            let x: [V; R] = std::array::from_fn(|r| V::load(x[r].add(k)));
            for part in 0..FETCH {
                prefetch(ahead.start.wrapping_add(part * ahead.step / FETCH));
            }
            ahead.start = ahead.start.wrapping_add(ahead.step);
            for c in 0..C {
                for t in 0..TILE {
                    let w = weight.load::<V>(column + c * TILE + t, k);
                    for r in 0..R {
                        sums[r][c][t] = x[r].mul_add(w, sums[r][c][t]);
                    }
                }
            }
            k += LANES;
        }
        if end < whole {
            for r in 0..R {
                held[r] = sums[r][0];
            }
            return R;
        }
        for r in 0..R {
            for c in 0..C {
                let (row, column) = (row + r, column + c * TILE);
                let mut values = V::sums(sums[r][c]);
                for (t, value) in values.iter_mut().enumerate() {
                    for k in whole..block.inputs {
                        *value += *x[r].add(k) * weight.get(column + t, k);
                    }
                }
                put(block, row, column, values);
            }
        }
    }
    R
}

/// One element, in the tiles' order of summation.
///
/// # Safety
/// As [`tile`].
#[inline(always)]
#[expect(clippy::inline_always, reason = "must end up in a function with the features")]
unsafe fn single<V: Vector, W: Columns>(block: &Block<'_>, weight: &W, row: usize, column: usize) {
    let whole = block.inputs / LANES * LANES;
    let x = &block.x[row * block.inputs..][..block.inputs];
    // SAFETY: as in `tile`.
    unsafe {
        let mut sum = V::splat(0.0);
        let mut k = 0;
        while k < whole {
            sum = V::load(x.as_ptr().add(k)).mul_add(weight.load::<V>(column, k), sum);
            k += LANES;
        }
        let [mut value, ..] = V::sums([sum; 4]);
        for (k, x) in x.iter().enumerate().skip(whole) {
            value += x * weight.get(column, k);
        }
        put(block, row, column, [value]);
    }
}

/// # Safety
/// The elements are the block's.
#[inline(always)]
#[expect(clippy::inline_always, reason = "must end up in a function with the features")]
unsafe fn put<const N: usize>(block: &Block<'_>, row: usize, column: usize, mut values: [f32; N]) {
    if let Some(bias) = block.bias {
        for (value, bias) in values.iter_mut().zip(&bias[column..][..N]) {
            *value += bias;
        }
    }
    // SAFETY: as the caller promises.
    unsafe {
        let out = block.out.add(row * block.stride + column).cast::<[f32; N]>();
        if block.add {
            for (value, held) in values.iter_mut().zip(&*out) {
                *value += held;
            }
        }
        *out = values;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::values;

    #[test]
    fn products_match_plain_sums_and_do_not_depend_on_their_company() {
        for (rows, inputs, outputs) in [
            (1, 33, 70),
            (2, 64, 9),
            (4, 30, 31),
            (5, 100, 64),
            (70, 96, 130),
            // Several runs of the inner dimension, and one as long as several.
            (13, 779, 9),
            (50, 1600, 12),
            (12, 2048, 8),
        ] {
            let bound = 1e-6 * inputs.max(100) as f64;
            let (x, w, bias) = (values(rows * inputs, 1), values(outputs * inputs, 2), values(outputs, 3));
            let run = |x: &[f32], rows: usize| {
                let mut out = vec![1.0; rows * outputs];
                let weight = Weight::F32(F32::new(&w, outputs, inputs));
                products(x, rows, [Product { weight, bias: Some(&bias), out: &mut out, add: true }]);
                out
            };
            let out = run(&x, rows);
            for row in 0..rows {
                let x = &x[row * inputs..][..inputs];
                for column in 0..outputs {
                    let w = &w[column * inputs..][..inputs];
                    let sum: f64 = x.iter().zip(w).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                    let expected = sum + f64::from(bias[column]) + 1.0;
                    let got = f64::from(out[row * outputs + column]);
                    assert!((got - expected).abs() < bound, "{rows}x{inputs}x{outputs}: {got} {expected}");
                }
                assert_eq!(run(x, 1), out[row * outputs..][..outputs], "row {row} alone");
            }
        }
    }
}
