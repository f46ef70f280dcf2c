//! Attention of a few query rows straight over the pages of a key-value cache.
//!
//! A cube takes a tile of rows of one sequence, heads that share a key-value head, and one [`SPAN`] of
//! positions; it leaves the span's largest score, its sum of exponentials and its weighted sum of values. A
//! second kernel combines the spans of each row, from the first one on (Dao et al. 2023, flash decoding). The
//! spans lie at fixed positions and every sum has a fixed shape: nothing depends on the tiles, nor on what else
//! is in the batch.

use cubecl::prelude::*;

use super::shared::{max_lines, sum_lines};
use super::{Accelerator, Buffer, KvPages};
use crate::ops::AttentionShape;
use crate::ops::rows::{PAGE, Span};
use crate::{Error, Result};

/// Positions that one cube attends to: whole pages.
pub const SPAN: usize = 4 * PAGE;

/// Query heads times rows of a tile, at most.
const LINES: usize = 16;
/// Bytes of partial results at most; a batch of more is cut.
const PARTIAL_BYTES: usize = 1 << 28;
/// More positions than a cache has; sums with it fit 32 bits.
const NO_WINDOW: usize = 1 << 30;
/// A masked score: its exponential is set to 0.
const MASKED: f32 = -1e30;

/// The rows of a batch as tiles of neighbours in one sequence, on the accelerator.
#[derive(Debug)]
pub struct Tiles {
    /// `[tiles, 4]`: first row, rows, position of the first row, start in the page table.
    places: Buffer<u32>,
    /// The position of each row, `[rows]`.
    positions: Buffer<u32>,
    table: Buffer<u32>,
    /// Tiles of each cut with its first row, rows and spans.
    cuts: Vec<Cut>,
    shape: AttentionShape,
    tile_rows: usize,
    rows: usize,
    pages: usize,
}

#[derive(Debug)]
struct Cut {
    first_tile: usize,
    tiles: usize,
    first_row: usize,
    rows: usize,
    spans: usize,
}

impl Tiles {
    /// Cuts the rows of all spans, which follow one another, into tiles; `table` holds the spans' pages.
    ///
    /// # Errors
    /// [`Error::Invalid`] where a sequence has fewer pages than its positions fill.
    pub fn new(
        device: &Accelerator,
        (spans, table): (&[Span], &[u32]),
        shape: AttentionShape,
    ) -> Result<Self> {
        let group = group_of(shape);
        let longest = spans.iter().map(|span| span.rows.len()).max().unwrap_or(0);
        let tile_rows = (LINES / group).min(longest.next_power_of_two().max(1));
        let (mut tiles, mut positions, mut cuts) = (Vec::new(), Vec::new(), Vec::<Cut>::new());
        for span in spans {
            let end = span.position + span.rows.len();
            let pages = table.get(span.pages.clone()).unwrap_or_default();
            if span.rows.start != positions.len() {
                return Err(Error::Invalid(format!("row {} of a batch follows no other", span.rows.start)));
            }
            if end > pages.len() * PAGE {
                return Err(Error::Invalid(format!("{end} positions in {} cache pages", pages.len())));
            }
            positions.extend((span.position..end).map(|position| position as u32));
            for first in span.rows.clone().step_by(tile_rows) {
                let rows = tile_rows.min(span.rows.end - first);
                let position = span.position + first - span.rows.start;
                let spans = (position + rows).div_ceil(SPAN);
                let bytes = |rows: usize, spans: usize| rows * spans * shape.heads * shape.head_dim * 4;
                let fits = |cut: &&mut Cut| bytes(cut.rows + rows, cut.spans.max(spans)) <= PARTIAL_BYTES;
                if let Some(cut) = cuts.last_mut().filter(fits) {
                    (cut.tiles, cut.rows, cut.spans) = (cut.tiles + 1, cut.rows + rows, cut.spans.max(spans));
                } else {
                    let first_tile = tiles.len() / 4;
                    cuts.push(Cut { first_tile, tiles: 1, first_row: first, rows, spans });
                }
                tiles.extend([first, rows, position, span.pages.start].map(|value| value as u32));
            }
        }
        let pages = table.iter().map(|&page| page as usize + 1).max().unwrap_or(0);
        Ok(Self {
            places: device.upload(&tiles),
            rows: positions.len(),
            positions: device.upload(&positions),
            table: device.upload(table),
            cuts,
            shape,
            tile_rows,
            pages,
        })
    }
}

/// `softmax(scale q k^T) v` for the rows of all tiles: q and the result are `[rows, heads * head_dim]`. A row
/// sees the positions up to its own, from the first one in the window of `shape` on; heads and widths are those
/// of the tiles.
///
/// # Errors
/// [`Error::Shape`] where the queries are not the tiles' rows, [`Error::Invalid`] where a page is not there.
pub fn paged_attention(
    device: &Accelerator,
    q: &Buffer<f32>,
    pages: &KvPages,
    tiles: &Tiles,
    shape: AttentionShape,
) -> Result<Buffer<f32>> {
    let AttentionShape { heads, kv_heads, head_dim, .. } = tiles.shape;
    let AttentionShape { scale, softcap, window, .. } = shape;
    // No window is one that no cache fills.
    let (window, capped) = (window.unwrap_or(NO_WINDOW).min(NO_WINDOW), softcap.is_some());
    let cap = softcap.unwrap_or(1.0);
    let columns = heads * head_dim;
    if q.len() != tiles.rows * columns {
        return Err(Error::shape("queries", format!("[{}, {columns}]", tiles.rows), &[q.len()]));
    }
    if tiles.pages > pages.pages(tiles.shape) {
        let (page, has) = (tiles.pages - 1, pages.pages(tiles.shape));
        return Err(Error::Invalid(format!("page {page} of a cache of {has} pages")));
    }
    let out = device.empty(q.len());
    let units = device.units(if head_dim > 64 { 128 } else { 64 });
    let group = group_of(tiles.shape);
    for cut in &tiles.cuts {
        let partial = device.empty::<f32>(cut.rows * heads * cut.spans * head_dim);
        let stats = device.empty::<f32>(cut.rows * heads * cut.spans * 2);
        let count = CubeCount::Static(cut.tiles as u32, (heads / group) as u32, cut.spans as u32);
        // SAFETY: rows, positions and pages were checked when the tiles were made and above; partial
        // results have a place for each row, head and span.
        unsafe {
            attend::launch_unchecked(
                device.client(),
                count,
                CubeDim::new_1d(units as u32),
                q.arg(),
                pages.keys.arg(),
                pages.values.arg(),
                tiles.table.arg(),
                tiles.places.arg(),
                partial.arg(),
                stats.arg(),
                scale,
                cap,
                window,
                cut.first_tile,
                cut.first_row,
                cut.spans,
                heads,
                kv_heads,
                group,
                head_dim,
                tiles.tile_rows,
                capped,
                units,
            );
            let (count, dim) = device.flat(cut.rows * columns);
            combine::launch_unchecked(
                device.client(),
                count,
                dim,
                partial.arg(),
                stats.arg(),
                tiles.positions.arg(),
                out.arg(),
                window,
                cut.first_row,
                cut.rows,
                cut.spans,
                heads,
                head_dim,
            );
        }
    }
    Ok(out)
}

/// Heads of a cube: all that share a key-value head, or an equal part of them.
fn group_of(shape: AttentionShape) -> usize {
    let sharing = shape.heads / shape.kv_heads.max(1);
    (1..=LINES).rev().find(|&part| sharing.is_multiple_of(part)).unwrap_or(1)
}

/// A span of one tile and one group of heads.
#[cube(launch_unchecked)]
#[expect(clippy::too_many_arguments, reason = "a kernel's arguments")]
fn attend(
    q: &[f32],
    keys: &[f32],
    values: &[f32],
    table: &[u32],
    tiles: &[u32],
    partial: &mut [f32],
    stats: &mut [f32],
    scale: f32,
    cap: f32,
    window: usize,
    first_tile: usize,
    first_row: usize,
    spans: usize,
    #[comptime] heads: usize,
    #[comptime] kv_heads: usize,
    #[comptime] group: usize,
    #[comptime] head_dim: usize,
    #[comptime] tile_rows: usize,
    #[comptime] capped: bool,
    #[comptime] units: usize,
) {
    let lines = comptime!(tile_rows * group);
    let unit = UNIT_POS as usize;
    let first_head = CUBE_POS_Y as usize * group;
    let kv_head = first_head / comptime!(heads / kv_heads);
    let span = CUBE_POS_Z as usize;
    let tile = (first_tile + CUBE_POS_X as usize) * 4;
    let row = tiles[tile] as usize;
    let rows = tiles[tile + 1] as usize;
    let position = tiles[tile + 2] as usize;
    let pages = tiles[tile + 3] as usize;
    let begin = span * SPAN;
    let end = clamp_max(begin + SPAN, position + rows);
    // A span that lies before the window of the tile's first row is nobody's.
    if begin < end && begin + SPAN + window > position + 1 {
        // The queries, `[lines, head_dim]`; lines of rows that are not there repeat the last one.
        let mut queries = Shared::<[f32]>::new_slice(comptime!(lines * head_dim));
        let mut at = unit;
        while at < comptime!(lines * head_dim) {
            let line = at / head_dim;
            let from = row + clamp_max(line / group, rows - 1);
            queries[at] = q[(from * heads + first_head + line % group) * head_dim + at % head_dim];
            at += units;
        }
        sync_cube();
        // Scores, `[lines, SPAN]`, and the largest that this unit has seen.
        let mut scores = Shared::<[f32]>::new_slice(comptime!(lines * SPAN));
        let mut reduced = Shared::<[f32]>::new_slice(comptime!(lines * units));
        let mut largest = Array::<f32>::new(lines);
        #[unroll]
        for line in 0..lines {
            largest[line] = MASKED;
        }
        let mut at = unit;
        while at < SPAN {
            let mut sums = Array::<f32>::new(lines);
            #[unroll]
            for line in 0..lines {
                sums[line] = 0.0;
            }
            if begin + at < end {
                let page = table[pages + (begin + at) / PAGE] as usize;
                let base = (page * kv_heads + kv_head) * comptime!(head_dim * PAGE) + at % PAGE;
                for d in 0..head_dim {
                    let key = keys[base + d * PAGE];
                    #[unroll]
                    for line in 0..lines {
                        sums[line] = fma(queries[line * head_dim + d], key, sums[line]);
                    }
                }
            }
            #[unroll]
            for line in 0..lines {
                let own = position + line / group;
                let visible = begin + at <= own && begin + at + window > own && begin + at < end;
                let mut score = sums[line] * scale;
                if comptime!(capped) {
                    score = cap * (score / cap).tanh();
                }
                let score = select(visible, score, MASKED);
                scores[line * SPAN + at] = score;
                if score > largest[line] {
                    largest[line] = score;
                }
            }
            at += units;
        }
        #[unroll]
        for line in 0..lines {
            reduced[line * units + unit] = largest[line];
        }
        max_lines::<f32>(&mut reduced, lines, units);
        #[unroll]
        for line in 0..lines {
            largest[line] = reduced[line * units];
        }
        sync_cube();
        #[unroll]
        for line in 0..lines {
            let mut sum = f32::new(0.0);
            let mut at = unit;
            while at < SPAN {
                let score = scores[line * SPAN + at];
                // A score that is NaN spreads.
                let weight = select(score == MASKED, 0.0, (score - largest[line]).exp());
                scores[line * SPAN + at] = weight;
                sum += weight;
                at += units;
            }
            reduced[line * units + unit] = sum;
        }
        sum_lines::<f32>(&mut reduced, lines, units);
        // The weighted values, each unit some columns.
        let mut d = unit;
        while d < head_dim {
            let mut sums = Array::<f32>::new(lines);
            #[unroll]
            for line in 0..lines {
                sums[line] = 0.0;
            }
            for at in 0..end - begin {
                let page = table[pages + (begin + at) / PAGE] as usize;
                let base = (page * kv_heads + kv_head) * comptime!(head_dim * PAGE);
                let value = values[base + at % PAGE * head_dim + d];
                #[unroll]
                for line in 0..lines {
                    sums[line] = fma(scores[line * SPAN + at], value, sums[line]);
                }
            }
            #[unroll]
            for line in 0..lines {
                if line / group < rows {
                    let head = first_head + line % group;
                    let to = ((row - first_row + line / group) * heads + head) * spans + span;
                    partial[to * head_dim + d] = sums[line];
                    if d == 0 {
                        stats[2 * to] = largest[line];
                        stats[2 * to + 1] = reduced[line * units];
                    }
                }
            }
            d += units;
        }
    }
}

/// The spans of each row and head, combined from the first in its window to the one of its position.
#[cube(launch_unchecked)]
#[expect(clippy::too_many_arguments, reason = "a kernel's arguments")]
fn combine(
    partial: &[f32],
    stats: &[f32],
    positions: &[u32],
    out: &mut [f32],
    window: usize,
    first_row: usize,
    rows: usize,
    spans: usize,
    #[comptime] heads: usize,
    #[comptime] head_dim: usize,
) {
    let at = ABSOLUTE_POS;
    if at < rows * comptime!(heads * head_dim) {
        let line = at / head_dim;
        let row = line / heads;
        let position = positions[first_row + row] as usize;
        let seen = position / SPAN + 1;
        // The first span that has a position of the row's window in it.
        let first = (position + 1 - clamp_max(window, position + 1)) / SPAN;
        let base = line * spans;
        let mut largest = f32::new(MASKED);
        for span in first..seen {
            let here = stats[2 * (base + span)];
            if here > largest {
                largest = here;
            }
        }
        let mut total = f32::new(0.0);
        let mut sum = f32::new(0.0);
        for span in first..seen {
            let factor = (stats[2 * (base + span)] - largest).exp();
            total = fma(stats[2 * (base + span) + 1], factor, total);
            sum = fma(partial[(base + span) * head_dim + at % head_dim], factor, sum);
        }
        out[first_row * comptime!(heads * head_dim) + at] = sum / total;
    }
}
