//! The product in register tiles of 6 x 16, for processors with AVX2 and FMA.
//!
//! The scheme is Goto's (Goto and van de Geijn 2008): B is packed into strips of 16 columns, once for
//! all threads, and each task packs its rows of A into strips of 6. Read where it lies, A would save the
//! packing and lose more than that in the tiles: six streams, often a power of two apart, for one. Each
//! element is summed over k in blocks of [`DEPTH`], whatever the number of rows.

use std::arch::x86_64::{
    __m256, _MM_HINT_T0, _mm_prefetch, _mm256_add_ps, _mm256_broadcast_ss, _mm256_fmadd_ps, _mm256_loadu_ps,
    _mm256_mul_ps, _mm256_permute2f128_ps, _mm256_set1_ps, _mm256_setzero_ps, _mm256_shuffle_ps,
    _mm256_storeu_ps, _mm256_unpackhi_ps, _mm256_unpacklo_ps,
};

use rayon::prelude::*;

use super::{Mat, Output, Side};
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
pub(super) fn gemm(a: Mat<'_>, b: Side<'_>, target: Target<'_>, parallel: bool) {
    let [inner, n] = b.shape();
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
        b: Side<'_>,
        [first, columns]: [usize; 2],
        [start, depth]: [usize; 2],
        parallel: bool,
    ) -> Self {
        let fill = |(group, strips): (usize, &mut [f32])| {
            let column = first + group * PACKED_STRIPS * COLUMNS;
            let end = (first + columns).min(column + PACKED_STRIPS * COLUMNS);
            match b {
                Side::Values(b) => pack::<COLUMNS>(strips, b.t(), column..end, start, depth),
                Side::Packed { .. } => b.block(start..start + depth, column..end, |block| {
                    pack::<COLUMNS>(strips, block.t(), 0..end - column, 0, depth);
                }),
            }
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
        let step = all.div_ceil(wanted.div_ceil(a.rows.div_ceil(block)));
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
        let mut packed = unfilled(rows.next_multiple_of(ROWS) * depth);
        pack::<ROWS>(&mut packed, a, row..row + rows, self.start, depth);
        let strips = self.data.chunks_exact(COLUMNS * depth).enumerate();
        for (strip, b) in strips.skip(task.strip).take(task.strips) {
            let column = strip * COLUMNS;
            let width = COLUMNS.min(self.columns - column);
            for (tile, a) in packed.chunks_exact(ROWS * depth).enumerate() {
                let tile = tile * ROWS;
                let height = ROWS.min(rows - tile);
                let c =
                    target.c.at((row + tile) * stride + self.first + column, (height - 1) * stride + width);
                let (alpha, add) = (target.alpha, target.output == Output::Add);
                let out = Out { c, stride, alpha, add, fetch: tile == 0 };
                // SAFETY: `available` was checked, and no other task has these rows and columns.
                unsafe {
                    if height == ROWS && width == COLUMNS {
                        tile_product(a, b, out);
                    } else {
                        edge_product(a, b, out, [height, width]);
                    }
                }
            }
        }
    }
}

/// A tile's place in C, and what is done with the product.
#[derive(Clone, Copy)]
struct Out {
    c: *mut f32,
    stride: usize,
    alpha: f32,
    add: bool,
    /// Whether to fetch the strip of B that follows.
    fetch: bool,
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
            transpose(strip, rows, W * row_stride);
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

/// Interleaves rows into a strip `[depth, W]`. The rows of the next strip lie `ahead` elements further.
fn transpose<const W: usize>(strip: &mut [f32], rows: [&[f32]; W], ahead: usize) {
    let (depth, pointers) = (rows[0].len(), rows.map(<[f32]>::as_ptr));
    assert!(strip.len() >= depth * W && rows.iter().all(|row| row.len() == depth), "rows to interleave");
    let whole = depth / 8 * 8;
    for k in (0..whole).step_by(8) {
        if k % 16 == 0 {
            for row in pointers {
                // SAFETY: a prefetch reads nothing; any address will do.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(ahead + k).cast()) }
            }
        }
        for first in (0..W).step_by(8) {
            // SAFETY: whoever packs has checked `available`; each row has eight more elements, and the
            // strip as many lines of `W`.
            unsafe {
                let block: [_; 8] = std::array::from_fn(|i| pointers[(first + i).min(W - 1)].add(k));
                transpose_block::<W>(strip.as_mut_ptr().add(k * W + first), block);
            }
        }
    }
    for k in whole..depth {
        for (out, row) in strip[k * W..][..W].iter_mut().zip(rows) {
            *out = row[k];
        }
    }
}

/// Eight rows of eight, transposed, `W` elements apart; where `W` is less than eight, `W` of each.
///
/// # Safety
/// The processor has AVX2; each row has eight elements; from `out`, seven times `W` and the smaller of
/// `W` and eight.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn transpose_block<const W: usize>(out: *mut f32, rows: [*const f32; 8]) {
    // SAFETY: as the caller promises.
    unsafe {
        let r = rows.map(|row| _mm256_loadu_ps(row));
        // Pairs of rows, then fours, then all eight.
        let pair = |i: usize| (_mm256_unpacklo_ps(r[i], r[i + 1]), _mm256_unpackhi_ps(r[i], r[i + 1]));
        let ((a0, a1), (b0, b1), (c0, c1), (d0, d1)) = (pair(0), pair(2), pair(4), pair(6));
        let four = |low: __m256, high: __m256| {
            (_mm256_shuffle_ps::<0x44>(low, high), _mm256_shuffle_ps::<0xEE>(low, high))
        };
        let ((t0, t1), (t2, t3)) = (four(a0, b0), four(a1, b1));
        let ((u0, u1), (u2, u3)) = (four(c0, d0), four(c1, d1));
        let (top, bottom) = ([t0, t1, t2, t3], [u0, u1, u2, u3]);
        for i in 0..4 {
            _mm256_storeu_ps(out.add(i * W), _mm256_permute2f128_ps::<0x20>(top[i], bottom[i]));
        }
        for i in 0..3 {
            _mm256_storeu_ps(out.add((4 + i) * W), _mm256_permute2f128_ps::<0x31>(top[i], bottom[i]));
        }
        // A narrow strip's stores overlap: the next one repairs what each writes too much. Not the last.
        let last = _mm256_permute2f128_ps::<0x31>(top[3], bottom[3]);
        if W < 8 {
            let mut values = [0.0f32; 8];
            _mm256_storeu_ps(values.as_mut_ptr(), last);
            std::ptr::copy_nonoverlapping(values.as_ptr(), out.add(7 * W), W);
        } else {
            _mm256_storeu_ps(out.add(7 * W), last);
        }
    }
}

/// A tile at the border of C, through a buffer.
///
/// # Safety
/// As [`tile_product`], for `height` rows of `width`.
unsafe fn edge_product(a: &[f32], b: &[f32], out: Out, [height, width]: [usize; 2]) {
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

/// `C (+)= alpha A B` for one tile; A is a strip `[depth, 6]`, B one `[depth, 16]`.
///
/// # Safety
/// The processor has AVX2 and FMA; `out` has six rows of 16.
unsafe fn tile_product(a: &[f32], b: &[f32], out: Out) {
    let depth = b.len() / COLUMNS;
    assert!(a.len() == depth * ROWS, "six rows of A");
    // SAFETY: as the caller promises; A's size was checked just now.
    unsafe {
        if out.fetch {
            tile::<true>(a.as_ptr(), b.as_ptr(), depth, out);
        } else {
            tile::<false>(a.as_ptr(), b.as_ptr(), depth, out);
        }
    }
}

/// The innermost loop. With `FETCH`, the strip after B is brought into the first-level cache meanwhile:
/// the tile that starts it would wait for each line.
///
/// # Safety
/// As [`tile_product`].
#[target_feature(enable = "avx2,fma")]
unsafe fn tile<const FETCH: bool>(mut a: *const f32, mut b: *const f32, depth: usize, out: Out) {
    let mut sums = [[_mm256_setzero_ps(); 2]; ROWS];
    // Spelt out: a loop over the six rows is not always unrolled into registers.
    macro_rules! multiply_row {
        ($i:literal, $low:ident, $high:ident) => {
            let x = _mm256_broadcast_ss(&*a.add($i));
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
            a = a.wrapping_add(ROWS);
            b = b.wrapping_add(COLUMNS);
        };
    }
    // SAFETY: step k reads row k of both strips, k < depth; the stores are inside the tile; a prefetch
    // reads nothing.
    unsafe {
        for i in 0..ROWS {
            _mm_prefetch::<_MM_HINT_T0>(out.c.add(i * out.stride).cast());
        }
        for _ in 0..depth / 4 {
            if FETCH {
                for line in 0..4 {
                    let ahead = b.wrapping_add(COLUMNS * depth + line * COLUMNS);
                    _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
                }
            }
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
