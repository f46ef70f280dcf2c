//! Attention of a few query rows straight over the pages of a key-value cache.
//!
//! Each query's scores are summed over the head's columns in order, its softmax over its positions from
//! the first, its output over its positions in order: nothing depends on how the queries were cut into
//! chunks, nor on what else is in the batch.

use std::cell::RefCell;
use std::ops::Range;

use rayon::prelude::*;

use super::vector::{LANES, Vector, dispatched, prefetch};
use crate::ops::AttentionShape;
use crate::ops::kernel::Shared;
use crate::ops::simd;

/// Positions of a page.
pub const PAGE: usize = 32;
/// Queries of a task.
const QUERIES: usize = 8;

/// One layer's keys and values.
#[derive(Debug, Clone, Copy)]
pub struct PagedKv<'a> {
    /// `[pages, kv_heads, head_dim, PAGE]`.
    pub keys: &'a [f32],
    /// `[pages, kv_heads, PAGE, head_dim]`.
    pub values: &'a [f32],
}

/// Rows of one sequence in a batch.
#[derive(Debug, Clone)]
pub struct Span {
    /// Its rows of the batch, which stand at consecutive positions.
    pub rows: Range<usize>,
    /// Position of the first row.
    pub position: usize,
    /// Where its pages stand in the batch's page table.
    pub pages: Range<usize>,
}

/// Elements of keys, or of values, in a page of one layer.
pub fn page_elements(shape: AttentionShape) -> usize {
    shape.kv_heads * shape.head_dim * PAGE
}

/// Writes a row's keys and values `[kv_heads * head_dim]` to a position of a page.
///
/// # Panics
/// Where a slice is too short.
pub fn write_kv(
    keys: &mut [f32],
    values: &mut [f32],
    (page, offset): (u32, usize),
    k: &[f32],
    v: &[f32],
    shape: AttentionShape,
) {
    let start = page as usize * page_elements(shape);
    let heads = k.chunks_exact(shape.head_dim).zip(v.chunks_exact(shape.head_dim));
    for (head, (k, v)) in heads.enumerate() {
        let at = start + head * shape.head_dim * PAGE;
        for (d, &value) in k.iter().enumerate() {
            keys[at + d * PAGE + offset] = value;
        }
        values[at + offset * shape.head_dim..][..shape.head_dim].copy_from_slice(v);
    }
}

/// `softmax(scale q k^T) v` for the rows of all spans: q and out are `[rows, heads * head_dim]`; `table`
/// holds the spans' pages. A row sees the positions up to its own, from the first one in its window on.
///
/// # Panics
/// Where a slice does not have the size that the spans and the shape ask for: the caller's mistake.
pub fn paged_attention(
    q: &[f32],
    kv: PagedKv<'_>,
    (spans, table): (&[Span], &[u32]),
    shape: AttentionShape,
    out: &mut [f32],
) {
    let columns = shape.heads * shape.head_dim;
    assert!(q.len() == out.len(), "queries of a paged attention");
    for span in spans {
        let last = span.position + span.rows.len();
        let pages = &table[span.pages.clone()];
        assert!(span.rows.end * columns <= q.len(), "rows of a paged attention");
        assert!(last <= pages.len() * PAGE, "pages of a paged attention");
        let limit = kv.keys.len().min(kv.values.len()) / page_elements(shape);
        assert!(pages.iter().all(|&page| (page as usize) < limit), "page of a paged attention");
    }
    let shared = Shared::new(out);
    let blocks: usize = spans.iter().map(|span| span.rows.len().div_ceil(QUERIES)).sum();
    let work: usize = spans.iter().map(|span| span.rows.len() * (span.position + span.rows.len())).sum();
    let run = |task: usize| {
        let (block, kv_head) = (task / shape.kv_heads, task % shape.kv_heads);
        let mut first = 0;
        for span in spans {
            let here = span.rows.len().div_ceil(QUERIES);
            if block < first + here {
                let start = (block - first) * QUERIES;
                let rows = start..(start + QUERIES).min(span.rows.len());
                let task = Task { q, kv, pages: &table[span.pages.clone()], shape, kv_head, out: shared };
                return rows.for_each(|row| task.row(span.rows.start + row, span.position + row));
            }
            first += here;
        }
    };
    let tasks = blocks * shape.kv_heads;
    if work * columns < 1 << 14 {
        (0..tasks).for_each(run);
    } else {
        (0..tasks).into_par_iter().for_each(run);
    }
}

struct Task<'a> {
    q: &'a [f32],
    kv: PagedKv<'a>,
    pages: &'a [u32],
    shape: AttentionShape,
    kv_head: usize,
    out: Shared<'a>,
}

thread_local! {
    /// Scores of a group of heads; grows to the longest context and stays.
    static SCORES: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

impl Task<'_> {
    /// The heads of one group for one row, at most four at a time.
    fn row(&self, row: usize, position: usize) {
        let AttentionShape { heads, kv_heads, head_dim, .. } = self.shape;
        let group = heads / kv_heads;
        // Pages before the window are not looked at: where the sums begin depends on the position alone.
        let first_seen = self.shape.first_seen(position);
        let skipped = first_seen / PAGE;
        let pages = &self.pages[skipped..=position / PAGE];
        SCORES.with_borrow_mut(|scores| {
            let padded = pages.len() * PAGE;
            if scores.len() < 4 * padded {
                scores.resize(4 * padded, 0.0);
            }
            for first in (0..group).step_by(4) {
                let count = 4.min(group - first);
                let start = row * heads * head_dim + (self.kv_head * group + first) * head_dim;
                let heads = Heads {
                    q: &self.q[start..][..count * head_dim],
                    count,
                    head_dim,
                    scale: self.shape.scale,
                    keys: self.kv.keys,
                    values: self.kv.values,
                    pages,
                    page: page_elements(self.shape),
                    head: self.kv_head * head_dim * PAGE,
                    seen: first_seen - skipped * PAGE..position + 1 - skipped * PAGE,
                    softcap: self.shape.softcap,
                };
                // SAFETY: `paged_attention` checked rows and pages; this task alone has these heads of
                // the row.
                unsafe {
                    let out = self.out.part(start, count * head_dim);
                    attend(&heads, &mut scores[..count * padded], out);
                }
            }
        });
    }
}

/// Up to four query heads that share a key-value head, for one row.
struct Heads<'a> {
    q: &'a [f32],
    count: usize,
    head_dim: usize,
    scale: f32,
    keys: &'a [f32],
    values: &'a [f32],
    pages: &'a [u32],
    /// Elements of a page, and where the key-value head starts in it.
    page: usize,
    head: usize,
    /// What the row sees of the pages' positions.
    seen: Range<usize>,
    softcap: Option<f32>,
}

/// Fetches the lines of `N` vectors.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a few instructions")]
fn fetch<const N: usize>(from: *const f32) {
    for vector in (0..N).step_by(2) {
        prefetch(from.wrapping_add(vector * LANES));
    }
}

dispatched!(fn attend(heads: &Heads<'_>, scores: &mut [f32], out: &mut [f32]) = attend_with);

#[inline(always)]
#[expect(clippy::inline_always, reason = "must end up in a function with the features")]
unsafe fn attend_with<V: Vector>(heads: &Heads<'_>, scores: &mut [f32], out: &mut [f32]) {
    // SAFETY: as the caller promises.
    unsafe {
        match heads.count {
            1 => attend_heads::<V, 1, 4>(heads, scores, out),
            2 => attend_heads::<V, 2, 4>(heads, scores, out),
            3 => attend_heads::<V, 3, 2>(heads, scores, out),
            _ => attend_heads::<V, 4, 2>(heads, scores, out),
        }
    }
}

/// `G` heads, `N` vectors at a time: enough sums that none waits for another.
///
/// # Safety
/// The pages are the cache's; `scores` is `[G, pages * PAGE]`, `out` `[G, head_dim]`.
#[inline(always)]
#[expect(clippy::inline_always, reason = "must end up in a function with the features")]
unsafe fn attend_heads<V: Vector, const G: usize, const N: usize>(
    heads: &Heads<'_>,
    scores: &mut [f32],
    out: &mut [f32],
) {
    let (dim, padded) = (heads.head_dim, heads.pages.len() * PAGE);
    let start = |page: u32| page as usize * heads.page + heads.head;
    for (at, &page) in heads.pages.iter().enumerate() {
        let keys = &heads.keys[start(page)..][..dim * PAGE];
        let next = match heads.pages.get(at + 1) {
            Some(&page) => heads.keys[start(page)..].as_ptr(),
            None => heads.values[start(heads.pages[0])..].as_ptr(),
        };
        for part in (0..PAGE).step_by(N * LANES) {
            // SAFETY: `keys` has `dim` rows of PAGE, `scores` G rows of `padded`.
            unsafe {
                let mut sums = [[V::splat(0.0); N]; G];
                for d in 0..dim {
                    fetch::<N>(next.wrapping_add(d * PAGE + part));
                    let row = keys.as_ptr().add(d * PAGE + part);
                    let keys: [V; N] = std::array::from_fn(|n| V::load(row.add(n * LANES)));
                    for (g, sums) in sums.iter_mut().enumerate() {
                        let q = V::splat(*heads.q.get_unchecked(g * dim + d));
                        for (sum, key) in sums.iter_mut().zip(keys) {
                            *sum = q.mul_add(key, *sum);
                        }
                    }
                }
                let scale = V::splat(heads.scale);
                for (g, sums) in sums.into_iter().enumerate() {
                    let to = scores.as_mut_ptr().add(g * padded + at * PAGE + part);
                    for (n, sum) in sums.into_iter().enumerate() {
                        sum.mul(scale).store(to.add(n * LANES));
                    }
                }
            }
        }
    }
    let mut inverse = [0.0; G];
    for (scores, inverse) in scores.chunks_exact_mut(padded).zip(&mut inverse) {
        let (seen, after) = scores.split_at_mut(heads.seen.end);
        let (before, seen) = seen.split_at_mut(heads.seen.start);
        if let Some(cap) = heads.softcap {
            simd::softcap(seen, cap);
        }
        let largest = simd::max(seen);
        *inverse = 1.0 / simd::exp_sum(seen, largest);
        before.fill(0.0);
        after.fill(0.0);
    }
    let whole = dim / (N * LANES) * (N * LANES);
    for d in (0..whole).step_by(N * LANES) {
        // SAFETY: as above; a page's values are PAGE rows of `dim`.
        unsafe {
            let mut sums = [[V::splat(0.0); N]; G];
            for (at, &page) in heads.pages.iter().enumerate() {
                let values = &heads.values[start(page)..][..dim * PAGE];
                let next = &heads.values[start(*heads.pages.get(at + 1).unwrap_or(&page))..];
                let first = if at == 0 { heads.seen.start } else { 0 };
                for offset in first..PAGE.min(heads.seen.end - at * PAGE) {
                    fetch::<N>(next.as_ptr().wrapping_add(offset * dim + d));
                    let row = values.as_ptr().add(offset * dim + d);
                    let values: [V; N] = std::array::from_fn(|n| V::load(row.add(n * LANES)));
                    for (g, sums) in sums.iter_mut().enumerate() {
                        let p = V::splat(*scores.get_unchecked(g * padded + at * PAGE + offset));
                        for (sum, value) in sums.iter_mut().zip(values) {
                            *sum = p.mul_add(value, *sum);
                        }
                    }
                }
            }
            for (g, sums) in sums.into_iter().enumerate() {
                let scale = V::splat(inverse[g]);
                let to = out.as_mut_ptr().add(g * dim + d);
                for (n, sum) in sums.into_iter().enumerate() {
                    sum.mul(scale).store(to.add(n * LANES));
                }
            }
        }
    }
    for d in whole..dim {
        for g in 0..G {
            let mut sum = 0.0;
            for position in heads.seen.clone() {
                let start = heads.pages[position / PAGE] as usize * heads.page + heads.head;
                sum += scores[g * padded + position] * heads.values[start + position % PAGE * dim + d];
            }
            out[g * dim + d] = sum * inverse[g];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::values;

    #[test]
    fn paged_rows_match_plain_attention_whatever_the_chunks() {
        for (heads, kv_heads, head_dim) in [(4, 2, 16), (3, 1, 20), (6, 1, 64), (2, 2, 8)] {
            let shape = AttentionShape::new(heads, kv_heads, head_dim, 0.3);
            for (softcap, window) in [(None, None), (Some(0.4), Some(40)), (None, Some(1)), (None, Some(99))]
            {
                compare(AttentionShape { softcap, window, ..shape });
            }
        }
    }

    fn compare(shape: AttentionShape) {
        let AttentionShape { heads, kv_heads, head_dim, .. } = shape;
        let (len, width) = (75, kv_heads * head_dim);
        let (k, v) = (values(len * width, 1), values(len * width, 2));
        let q = values(len * heads * head_dim, 3);
        let table = [2u32, 0, 1];
        let mut keys = vec![f32::NAN; 3 * page_elements(shape)];
        let mut stored = vec![f32::NAN; keys.len()];
        for at in 0..len {
            let row = |data: &'_ [f32]| data[at * width..][..width].to_vec();
            let place = (table[at / PAGE], at % PAGE);
            write_kv(&mut keys, &mut stored, place, &row(&k), &row(&v), shape);
        }
        let kv = PagedKv { keys: &keys, values: &stored };
        let run = |cuts: &[usize]| {
            let mut out = vec![0.0; q.len()];
            for cut in cuts.windows(2) {
                let columns = heads * head_dim;
                let span = Span { rows: 0..cut[1] - cut[0], position: cut[0], pages: 0..3 };
                let part = cut[0] * columns..cut[1] * columns;
                paged_attention(&q[part.clone()], kv, (&[span], &table), shape, &mut out[part]);
            }
            out
        };
        let out = run(&[0, len]);
        assert_eq!(out, run(&[0, 1, 2, 33, 40, 74, len]), "chunks change nothing");
        for (at, out) in out.chunks_exact(heads * head_dim).enumerate() {
            for (head, out) in out.chunks_exact(head_dim).enumerate() {
                let q = &q[(at * heads + head) * head_dim..][..head_dim];
                let of = |data: &[f32], position: usize, d: usize| {
                    f64::from(data[position * width + head / (heads / kv_heads) * head_dim + d])
                };
                let score = |position: usize| {
                    let dot: f64 = (0..head_dim).map(|d| f64::from(q[d]) * of(&k, position, d)).sum();
                    let scaled = dot * f64::from(shape.scale);
                    shape
                        .softcap
                        .map_or(scaled, |cap| (scaled / f64::from(cap)).tanh() * f64::from(cap))
                        .exp()
                };
                let seen = shape.first_seen(at)..=at;
                let sum: f64 = seen.clone().map(score).sum();
                for (d, &got) in out.iter().enumerate() {
                    let expected = seen.clone().map(|p| score(p) / sum * of(&v, p, d)).sum::<f64>();
                    assert!((f64::from(got) - expected).abs() < 1e-5, "{at} {head} {d}: {got} {expected}");
                }
            }
        }
    }
}
