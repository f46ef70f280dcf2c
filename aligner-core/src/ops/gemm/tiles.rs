//! The product in register tiles of 6 x 16, for processors with AVX2 and FMA.
//!
//! The scheme is Goto's (Goto and van de Geijn 2008): B is packed into strips of 16 columns, once for
//! all threads; a row-major A is read where it lies, a transposed one is packed into strips of 6 rows.
//! A library's product would pack both operands on every thread, which costs a training step a tenth of
//! its time. Each element is summed over k in blocks of [`DEPTH`], whatever the number of rows.

use std::arch::x86_64::{
    _MM_HINT_T0, _mm_prefetch, _mm256_add_ps, _mm256_broadcast_ss, _mm256_fmadd_ps, _mm256_loadu_ps,
    _mm256_mul_ps, _mm256_set1_ps, _mm256_setzero_ps, _mm256_storeu_ps,
};

use rayon::prelude::*;

use super::{Mat, Output};
use crate::ops::kernel::{Shared, unfilled};

/// Rows and columns of a register tile: 12 accumulators, two vectors of B, one broadcast of A.
const ROWS: usize = 6;
const COLUMNS: usize = 16;
/// Block of the inner dimension: a strip of B of this depth (32 KiB) is read from the second-level cache.
const DEPTH: usize = 512;
/// Rows of a task: the largest of these that leaves the threads evenly busy.
const BLOCKS: [usize; 3] = [48, 42, 36];
/// Columns that are packed at a time.
const PANEL: usize = 2048;
/// How many k a packed strip's source is fetched ahead.
const AHEAD: usize = 12;
/// Strips that one task packs.
const PACKED_STRIPS: usize = 4;

/// Whether this processor has what the tiles need.
pub(super) fn available() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

/// Where a product goes: rows of C lie `stride` elements apart.
#[derive(Clone, Copy)]
pub(super) struct Target<'a> {
    pub(super) c: Shared<'a>,
    pub(super) stride: usize,
    pub(super) output: Output,
    /// Factor of the product, not of what C holds.
    pub(super) alpha: f32,
}

/// `C (+)= alpha A B`; call only where [`available`].
pub(super) fn gemm(a: Mat<'_>, b: Mat<'_>, target: Target<'_>, parallel: bool) {
    let (inner, n) = (b.rows, b.cols);
    if a.rows == 0 || n == 0 {
        return;
    }
    let mut data = unfilled(PANEL.min(n).next_multiple_of(COLUMNS) * DEPTH.min(inner));
    for first in (0..n).step_by(PANEL) {
        for start in (0..inner).step_by(DEPTH) {
            let (columns, depth) = (PANEL.min(n - first), DEPTH.min(inner - start));
            let data = &mut data[..columns.next_multiple_of(COLUMNS) * depth];
            let panel = Panel::pack(data, b, [first, columns], [start, depth], parallel);
            let output = if start > 0 { Output::Add } else { target.output };
            let tasks = panel.tasks(a, parallel);
            let run = |task: &Task| panel.multiply(a, task, Target { output, ..target });
            if parallel { tasks.par_iter().for_each(run) } else { tasks.iter().for_each(run) }
        }
    }
}

/// The block of rows with which `threads` that take turns are done first.
fn block(rows: usize, threads: usize) -> usize {
    // The last block is smaller: it starts with the last round of whole ones, or after it.
    let last = |&block: &usize| {
        let (whole, rest) = (rows / block, rows % block);
        let rounds = whole / threads * block;
        rounds + if whole.is_multiple_of(threads) { rest } else { block }
    };
    BLOCKS.into_iter().min_by_key(last).unwrap_or(BLOCKS[0])
}

/// A block of B in strips: `[strips, depth, 16]`.
struct Panel<'a> {
    data: &'a [f32],
    first: usize,
    columns: usize,
    start: usize,
    depth: usize,
}

/// What one thread multiplies: some rows of A with some strips of the panel.
struct Task {
    row: usize,
    rows: usize,
    strip: usize,
    strips: usize,
}

impl<'a> Panel<'a> {
    fn pack(
        data: &'a mut [f32],
        b: Mat<'_>,
        [first, columns]: [usize; 2],
        [start, depth]: [usize; 2],
        parallel: bool,
    ) -> Self {
        let fill = |(group, strips): (usize, &mut [f32])| {
            let column = first + group * PACKED_STRIPS * COLUMNS;
            let end = (first + columns).min(column + PACKED_STRIPS * COLUMNS);
            pack::<COLUMNS>(strips, b.t(), column..end, start, depth);
        };
        let group = PACKED_STRIPS * COLUMNS * depth;
        if parallel {
            data.par_chunks_mut(group).enumerate().for_each(fill);
        } else {
            data.chunks_mut(group).enumerate().for_each(fill);
        }
        Self { data, first, columns, start, depth }
    }

    fn tasks(&self, a: Mat<'_>, parallel: bool) -> Vec<Task> {
        let all = self.columns.div_ceil(COLUMNS);
        let threads = if parallel { rayon::current_num_threads() } else { 1 };
        let block = block(a.rows, threads);
        let wanted = if parallel { 4 * threads } else { 1 };
        // Tasks that only read A are cut once more, so that the last ones end together.
        let parts =
            wanted.div_ceil(a.rows.div_ceil(block)).max(1 + usize::from(parallel && a.col_stride == 1));
        let step = all.div_ceil(parts);
        let of_row = |row: usize| {
            let rows = block.min(a.rows - row);
            (0..all).step_by(step).map(move |strip| Task { row, rows, strip, strips: step.min(all - strip) })
        };
        (0..a.rows).step_by(block).flat_map(of_row).collect()
    }

    /// One task's part of the product.
    fn multiply(&self, a: Mat<'_>, task: &Task, target: Target<'_>) {
        let stride = target.stride;
        let (row, rows, depth) = (task.row, task.rows, self.depth);
        let in_place = a.col_stride == 1 && rows.is_multiple_of(ROWS);
        let mut packed = Vec::new();
        if !in_place {
            packed = unfilled(rows.next_multiple_of(ROWS) * depth);
            pack::<ROWS>(&mut packed, a, row..row + rows, self.start, depth);
        }
        let strips = self.data.chunks_exact(COLUMNS * depth).enumerate().skip(task.strip).take(task.strips);
        for (strip, b) in strips {
            let column = strip * COLUMNS;
            let width = COLUMNS.min(self.columns - column);
            for tile in (0..rows).step_by(ROWS) {
                let height = ROWS.min(rows - tile);
                let operand = if in_place {
                    let at = (row + tile) * a.row_stride + self.start;
                    let data = &a.data[at..][..(ROWS - 1) * a.row_stride + depth];
                    Rows { data, row: a.row_stride, k: 1 }
                } else {
                    Rows { data: &packed[tile * depth..][..ROWS * depth], row: 1, k: ROWS }
                };
                let c =
                    target.c.at((row + tile) * stride + self.first + column, (height - 1) * stride + width);
                let out = Out { c, stride, alpha: target.alpha, add: target.output == Output::Add };
                // SAFETY: `available` was checked, and no other task has these rows and columns.
                unsafe {
                    if height == ROWS && width == COLUMNS {
                        tile_product(operand, b, out);
                    } else {
                        edge_product(operand, b, out, [height, width]);
                    }
                }
            }
        }
    }
}

/// Six rows of A: element (i, k) is `data[i * row + k * self.k]`.
#[derive(Clone, Copy)]
struct Rows<'a> {
    data: &'a [f32],
    row: usize,
    k: usize,
}

/// A tile's place in C, and what is done with the product.
#[derive(Clone, Copy)]
struct Out {
    c: *mut f32,
    stride: usize,
    alpha: f32,
    add: bool,
}

/// Packs rows `lead` of `source`, columns `start..start + depth`, into strips of `W` rows, each
/// `[depth, W]`; rows past the end are zero.
fn pack<const W: usize>(
    strips: &mut [f32],
    source: Mat<'_>,
    lead: std::ops::Range<usize>,
    start: usize,
    depth: usize,
) {
    let (row_stride, col_stride) = (source.row_stride, source.col_stride);
    let beside = if row_stride == 1 { lead.len() / W * W } else { 0 };
    for k in 0..depth {
        // Rows that lie side by side: each k is read once, for all strips. No hardware prefetcher
        // follows such strides.
        let at = (start + k) * col_stride + lead.start;
        for line in (0..beside).step_by(16) {
            let ahead = source.data.as_ptr().wrapping_add(at + AHEAD * col_stride + line);
            // SAFETY: a prefetch reads nothing; any address will do.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(ahead.cast()) }
        }
        for (strip, from) in
            strips.chunks_exact_mut(W * depth).zip(source.data[at..][..beside].chunks_exact(W))
        {
            strip[k * W..][..W].copy_from_slice(from);
        }
    }
    for (index, strip) in strips.chunks_exact_mut(W * depth).enumerate().skip(beside / W) {
        let first = lead.start + index * W;
        let width = W.min(lead.end.saturating_sub(first));
        if col_stride == 1 && width == W {
            let rows: [&[f32]; W] =
                std::array::from_fn(|i| &source.data[(first + i) * row_stride + start..][..depth]);
            transpose(strip, rows, depth);
        } else {
            strip.fill(0.0);
            for k in 0..depth {
                for i in 0..width {
                    strip[k * W + i] = source.data[(first + i) * row_stride + (start + k) * col_stride];
                }
            }
        }
    }
}

/// Interleaves rows, in blocks of eight columns that stay in the first-level cache.
fn transpose<const W: usize>(strip: &mut [f32], rows: [&[f32]; W], depth: usize) {
    let whole = depth / 8 * 8;
    for k in (0..whole).step_by(8) {
        let mut block = [[0.0f32; 8]; W];
        for (block, row) in block.iter_mut().zip(rows) {
            block.copy_from_slice(&row[k..k + 8]);
        }
        for (offset, out) in strip[k * W..][..8 * W].chunks_exact_mut(W).enumerate() {
            for (out, block) in out.iter_mut().zip(&block) {
                *out = block[offset];
            }
        }
    }
    for k in whole..depth {
        for (out, row) in strip[k * W..][..W].iter_mut().zip(rows) {
            *out = row[k];
        }
    }
}

/// A tile at the border of C, through a buffer.
///
/// # Safety
/// As [`tile_product`], for `height` rows of `width`.
unsafe fn edge_product(a: Rows<'_>, b: &[f32], out: Out, [height, width]: [usize; 2]) {
    let mut tile = [0.0; ROWS * COLUMNS];
    // SAFETY: the buffer is a whole tile, and C's part is the caller's.
    unsafe {
        tile_product(a, b, Out { c: tile.as_mut_ptr(), stride: COLUMNS, add: false, ..out });
        for (row, values) in tile.chunks_exact(COLUMNS).take(height).enumerate() {
            for (column, value) in values.iter().take(width).enumerate() {
                let c = out.c.add(row * out.stride + column);
                *c = if out.add { value + *c } else { *value };
            }
        }
    }
}

/// `C (+)= alpha A B` for one tile; B is a strip `[depth, 16]`.
///
/// # Safety
/// The processor has AVX2 and FMA; `a` has six rows as deep as the strip; `out` has six rows of 16.
unsafe fn tile_product(a: Rows<'_>, b: &[f32], out: Out) {
    let depth = b.len() / COLUMNS;
    assert!(depth == 0 || (ROWS - 1) * a.row + (depth - 1) * a.k < a.data.len(), "six rows of A");
    // SAFETY: as the caller promises; the rows were checked just now.
    unsafe {
        if a.row == 1 && a.k == ROWS {
            tile::<true>(a.data.as_ptr(), 1, b.as_ptr(), depth, out);
        } else {
            tile::<false>(a.data.as_ptr(), a.row, b.as_ptr(), depth, out);
        }
    }
}

/// The innermost loop. `PACKED` rows of A are interleaved, others lie `row` apart.
///
/// # Safety
/// As [`tile_product`].
#[target_feature(enable = "avx2,fma")]
unsafe fn tile<const PACKED: bool>(mut a: *const f32, row: usize, mut b: *const f32, depth: usize, out: Out) {
    let row = if PACKED { 1 } else { row };
    let mut sums = [[_mm256_setzero_ps(); 2]; ROWS];
    // Spelt out: a loop over the six rows is not always unrolled into registers.
    macro_rules! multiply_row {
        ($i:literal, $low:ident, $high:ident) => {
            let x = _mm256_broadcast_ss(&*a.add($i * row));
            sums[$i][0] = _mm256_fmadd_ps(x, $low, sums[$i][0]);
            sums[$i][1] = _mm256_fmadd_ps(x, $high, sums[$i][1]);
        };
    }
    macro_rules! step {
        () => {
            let (low, high) = (_mm256_loadu_ps(b), _mm256_loadu_ps(b.add(8)));
            multiply_row!(0, low, high);
            multiply_row!(1, low, high);
            multiply_row!(2, low, high);
            multiply_row!(3, low, high);
            multiply_row!(4, low, high);
            multiply_row!(5, low, high);
            a = a.wrapping_add(if PACKED { ROWS } else { 1 });
            b = b.wrapping_add(COLUMNS);
        };
    }
    // SAFETY: step k reads row k of the strip and column k of the six rows, k < depth; the stores are
    // inside the tile.
    unsafe {
        for i in 0..ROWS {
            _mm_prefetch::<_MM_HINT_T0>(out.c.add(i * out.stride).cast());
        }
        for _ in 0..depth / 4 {
            step!();
            step!();
            step!();
            step!();
        }
        for _ in 0..depth % 4 {
            step!();
        }
        let alpha = _mm256_set1_ps(out.alpha);
        for (i, sums) in sums.into_iter().enumerate() {
            for (half, sum) in sums.into_iter().enumerate() {
                let c = out.c.add(i * out.stride + half * 8);
                let sum = _mm256_mul_ps(sum, alpha);
                let sum = if out.add { _mm256_add_ps(sum, _mm256_loadu_ps(c)) } else { sum };
                _mm256_storeu_ps(c, sum);
            }
        }
    }
}
