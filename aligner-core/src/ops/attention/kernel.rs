//! The CPU kernel: tasks are (tree of runs, query head); tiles of scores fit a core's cache.

use std::ops::Range;
use std::sync::OnceLock;

use rayon::prelude::*;

use super::AttentionShape;
use super::plan::{Plan, Run};
use crate::ops::gemm::{Mat, Output, gemm_at, gemm_serial};
use crate::ops::kernel::{Grad, INPUTS, Kernel, NO_GRADS, Shared, unfilled};
use crate::ops::simd::{self, add, dot, exp, tanh, vectorized};

/// Query rows and keys of a tile.
const QUERIES: usize = 48;
const KEYS: usize = 256;

/// Attention over the runs of a plan: q is `[queries, heads * head_dim]`, k and v are
/// `[keys, kv_heads * head_dim]`. A part of an attention where other keys are elsewhere.
#[derive(Debug, Clone)]
pub struct AttentionPart {
    plan: Plan,
    shape: AttentionShape,
}

/// What queries get from keys.
#[derive(Debug, Clone)]
pub struct Attended {
    /// `[queries, heads * head_dim]`; 0 in rows that see no key.
    pub out: Vec<f32>,
    /// Log-sum-exp of each row's scores, `[heads, queries]`; minus infinity in rows that see no key.
    pub log_sums: Vec<f32>,
}

#[derive(Debug)]
pub(super) struct Attention {
    part: AttentionPart,
    /// Written by the forward pass.
    log_sums: OnceLock<Vec<f32>>,
}

impl Attention {
    pub(super) fn new(plan: Plan, shape: AttentionShape) -> Self {
        Self { part: AttentionPart::new(plan, shape), log_sums: OnceLock::new() }
    }
}

/// A tile of queries with a tile of the keys that some of them see.
struct Tile {
    queries: Range<usize>,
    keys: Range<usize>,
    /// The key row that is the first query's own, where the keys are the queries' own run: each row
    /// then sees them up to itself.
    own: Option<usize>,
    /// Positions of the first query and of the first key, and how many tokens a token sees; none without a
    /// window.
    window: Option<[usize; 3]>,
}

impl Tile {
    /// Which of the tile's keys its `row`-th query sees.
    fn visible(&self, row: usize) -> Range<usize> {
        let end = match self.own {
            Some(own) => (own + row + 1).saturating_sub(self.keys.start).min(self.keys.len()),
            None => self.keys.len(),
        };
        let before = self
            .window
            .map_or(0, |[query, key, window]| (query + row + 1).saturating_sub(window).saturating_sub(key));
        before.min(end)..end
    }
}

impl AttentionPart {
    /// The attention of a plan whose runs lie within its rows.
    pub fn new(plan: Plan, shape: AttentionShape) -> Self {
        Self { plan, shape }
    }

    fn tasks(&self) -> Vec<(&[Run], usize)> {
        let heads = self.shape.heads;
        self.plan.trees.iter().flat_map(|tree| (0..heads).map(move |head| (tree.as_slice(), head))).collect()
    }

    /// Calls `visit` for each block of a run's queries with the tiles of keys that it sees.
    fn blocks(&self, run: &Run, mut visit: impl FnMut(Range<usize>, &[Tile])) {
        for start in run.queries.clone().step_by(QUERIES) {
            let queries = start..(start + QUERIES).min(run.queries.end);
            let position = run.position + start - run.queries.start;
            let first_seen = self.shape.first_seen(position);
            let seen = run.seen.iter().map(|keys| (keys.rows.clone(), keys.position, None));
            let own = run.own.map(|own| {
                let keys = own..own + (queries.end - run.queries.start);
                (keys, run.position, Some(own + (queries.start - run.queries.start)))
            });
            let mut tiles = Vec::new();
            for (keys, of_keys, own) in seen.chain(own) {
                // Tiles that lie before the window of all queries: cut off whole, so that a row's sums have
                // the same shape wherever its block of queries begins.
                let skipped = first_seen.saturating_sub(of_keys) / KEYS * KEYS;
                tiles.extend((keys.start + skipped..keys.end).step_by(KEYS).map(|first| Tile {
                    queries: queries.clone(),
                    keys: first..(first + KEYS).min(keys.end),
                    own,
                    window: self.shape.window.map(|window| [position, of_keys + first - keys.start, window]),
                }));
            }
            visit(queries, &tiles);
        }
    }

    /// The rows of one head in a `[tokens, heads * head_dim]` slice.
    fn head<'a>(&self, data: &'a [f32], rows: &Range<usize>, head: usize, heads: usize) -> Mat<'a> {
        let (dim, stride) = (self.shape.head_dim, heads * self.shape.head_dim);
        let start = (rows.start * stride + head * dim).min(data.len());
        Mat::strided(&data[start..], rows.len(), dim, stride)
    }

    fn row<'a>(&self, data: &'a [f32], row: usize, head: usize, heads: usize) -> &'a [f32] {
        let dim = self.shape.head_dim;
        &data[(row * heads + head) * dim..][..dim]
    }

    /// Where one head's rows start in a `[tokens, heads * head_dim]` output.
    fn head_start(&self, data: Shared<'_>, rows: &Range<usize>, head: usize) -> *mut f32 {
        let (dim, stride) = (self.shape.head_dim, self.shape.heads * self.shape.head_dim);
        let extent = if rows.is_empty() { 0 } else { (rows.len() - 1) * stride + dim };
        data.at(rows.start * stride + head * dim, extent)
    }

    fn kv_head(&self, head: usize) -> usize {
        head / (self.shape.heads / self.shape.kv_heads)
    }

    fn forward_block(&self, inputs: [&[f32]; 3], head: usize, tiles: &[Tile], rows: &mut Rows) {
        let AttentionShape { heads, kv_heads, head_dim, scale, .. } = self.shape;
        let kv_head = self.kv_head(head);
        for tile in tiles {
            let width = tile.keys.len();
            let queries = self.head(inputs[0], &tile.queries, head, heads);
            let keys = self.head(inputs[1], &tile.keys, kv_head, kv_heads);
            let values = self.head(inputs[2], &tile.keys, kv_head, kv_heads);
            let scores = &mut rows.scores[..tile.queries.len() * width];
            gemm_serial(scale, queries, keys.t(), scores, width, Output::Overwrite);
            for (row, scores) in scores.chunks_exact_mut(width).enumerate() {
                let visible = tile.visible(row);
                let (seen, after) = scores.split_at_mut(visible.end);
                let (before, seen) = seen.split_at_mut(visible.start);
                before.fill(0.0);
                after.fill(0.0);
                if seen.is_empty() {
                    continue;
                }
                if let Some(cap) = self.shape.softcap {
                    simd::softcap(seen, cap);
                }
                let largest = rows.largest[row].max(simd::max(seen));
                let correction = (rows.largest[row] - largest).exp();
                rows.sum[row] = rows.sum[row] * correction + simd::exp_sum(seen, largest);
                rows.largest[row] = largest;
                if correction < 1.0 {
                    rows.out[row * head_dim..][..head_dim].iter_mut().for_each(|o| *o *= correction);
                }
            }
            let weights = Mat::new(scores, tile.queries.len(), width);
            gemm_serial(1.0, weights, values, &mut rows.out, head_dim, Output::Add);
        }
    }
}

/// Running state of a block of query rows.
struct Rows {
    scores: Vec<f32>,
    out: Vec<f32>,
    largest: [f32; QUERIES],
    sum: [f32; QUERIES],
}

impl Rows {
    fn new(head_dim: usize) -> Self {
        Self {
            scores: unfilled(QUERIES * KEYS),
            out: vec![0.0; QUERIES * head_dim],
            largest: [f32::NEG_INFINITY; QUERIES],
            sum: [0.0; QUERIES],
        }
    }

    fn reset(&mut self) {
        self.out.fill(0.0);
        self.largest.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
    }
}

vectorized! {
    /// Turns a row's scores into probabilities, and the gradients of the probabilities into those of
    /// the scores before scaling.
    fn backward_row(scores: &mut [f32], grads: &mut [f32], log_sum: f32, along: f32, scale: f32) {
        for (score, grad) in scores.iter_mut().zip(grads) {
            let p = exp(*score - log_sum);
            *score = p;
            *grad = p * (*grad - along) * scale;
        }
    }
}

vectorized! {
    /// The same where the scores are capped: the cap's slope is one less the square of its tanh. `row` is
    /// log-sum, along, scale and cap.
    fn backward_capped_row(scores: &mut [f32], grads: &mut [f32], row: [f32; 4]) {
        let [log_sum, along, scale, cap] = row;
        for (score, grad) in scores.iter_mut().zip(grads) {
            let tanh = tanh(*score / cap);
            let p = exp(cap * tanh - log_sum);
            *score = p;
            *grad = p * (*grad - along) * (1.0 - tanh * tanh) * scale;
        }
    }
}

impl AttentionPart {
    /// What the queries get from the keys; `inputs` are q, k and v.
    pub fn forward(&self, inputs: [&[f32]; 3]) -> Attended {
        let AttentionShape { heads, head_dim, .. } = self.shape;
        let queries = self.plan.queries;
        let mut out = unfilled(queries * heads * head_dim);
        let mut log_sums = unfilled(heads * queries);
        let (shared_out, shared_sums) = (Shared::new(&mut out), Shared::new(&mut log_sums));
        self.tasks().into_par_iter().for_each(|(tree, head)| {
            let mut rows = Rows::new(head_dim);
            for run in tree {
                self.blocks(run, |block, tiles| {
                    rows.reset();
                    self.forward_block(inputs, head, tiles, &mut rows);
                    for (row, token) in block.enumerate() {
                        // SAFETY: this task alone has this head of this tree's rows.
                        let (out, log_sum) = unsafe {
                            (
                                shared_out.part((token * heads + head) * head_dim, head_dim),
                                shared_sums.part(head * queries + token, 1),
                            )
                        };
                        // Without a key both are zero: what is divided then stays 0.
                        let sum = if rows.sum[row] > 0.0 { rows.sum[row] } else { 1.0 };
                        for (out, value) in out.iter_mut().zip(&rows.out[row * head_dim..]) {
                            *out = value / sum;
                        }
                        log_sum[0] = rows.largest[row] + sum.ln();
                    }
                });
            }
        });
        Attended { out, log_sums }
    }

    /// The gradients of q, k and v from that of the result.
    ///
    /// `attended` is the whole result: where other keys are elsewhere, with theirs in it.
    pub fn backward(
        &self,
        inputs: [&[f32]; 3],
        output: &[f32],
        log_sums: &[f32],
        grad: &[f32],
    ) -> [Vec<f32>; 3] {
        let AttentionShape { heads, kv_heads, head_dim, scale, .. } = self.shape;
        let (rows, keys) = (self.plan.queries, self.plan.keys);
        // Each query head sums its own gradients of keys and values; heads of a group are added
        // afterwards, in order.
        let mut grads = [rows, keys, keys].map(|rows| vec![0.0; rows * heads * head_dim]);
        let [of_q, of_k, of_v] = grads.each_mut().map(|grad| Shared::new(grad));
        self.tasks().into_par_iter().for_each(|(tree, head)| {
            let kv_head = self.kv_head(head);
            let (mut scores, mut of_scores) = (unfilled(QUERIES * KEYS), unfilled(QUERIES * KEYS));
            for run in tree {
                self.blocks(run, |queries, tiles| {
                    let q = self.head(inputs[0], &queries, head, heads);
                    let of_out = self.head(grad, &queries, head, heads);
                    let along: Vec<f32> = (queries.clone())
                        .map(|t| dot(self.row(output, t, head, heads), self.row(grad, t, head, heads)))
                        .collect();
                    for tile in tiles {
                        let width = tile.keys.len();
                        let k = self.head(inputs[1], &tile.keys, kv_head, kv_heads);
                        let v = self.head(inputs[2], &tile.keys, kv_head, kv_heads);
                        let scores = &mut scores[..queries.len() * width];
                        let of_scores = &mut of_scores[..queries.len() * width];
                        gemm_serial(scale, q, k.t(), scores, width, Output::Overwrite);
                        gemm_serial(1.0, of_out, v.t(), of_scores, width, Output::Overwrite);
                        let pairs = scores.chunks_exact_mut(width).zip(of_scores.chunks_exact_mut(width));
                        for (row, (scores, of_scores)) in pairs.enumerate() {
                            let visible = tile.visible(row);
                            for hidden in [0..visible.start, visible.end..width] {
                                scores[hidden.clone()].fill(0.0);
                                of_scores[hidden].fill(0.0);
                            }
                            let log_sum = log_sums[head * rows + queries.start + row];
                            let (seen, of_seen) = (&mut scores[visible.clone()], &mut of_scores[visible]);
                            match self.shape.softcap {
                                None => backward_row(seen, of_seen, log_sum, along[row], scale),
                                Some(cap) => {
                                    backward_capped_row(seen, of_seen, [log_sum, along[row], scale, cap]);
                                }
                            }
                        }
                        let probabilities = Mat::new(scores, queries.len(), width);
                        let of_scores = Mat::new(of_scores, queries.len(), width);
                        let stride = heads * head_dim;
                        let of_q = self.head_start(of_q, &queries, head);
                        let of_k = self.head_start(of_k, &tile.keys, head);
                        let of_v = self.head_start(of_v, &tile.keys, head);
                        // SAFETY: this task alone has this head of this tree's tokens; `head_start`
                        // checked that the rows are inside.
                        unsafe {
                            gemm_at(1.0, of_scores, k, of_q, stride, Output::Add);
                            gemm_at(1.0, of_scores.t(), q, of_k, stride, Output::Add);
                            gemm_at(1.0, probabilities.t(), of_out, of_v, stride, Output::Add);
                        }
                    }
                });
            }
        });
        let [of_q, of_k, of_v] = grads;
        [of_q, self.sum_group(of_k), self.sum_group(of_v)]
    }

    /// Adds the heads of each group: `[keys, heads * head_dim]` to `[keys, kv_heads * head_dim]`.
    fn sum_group(&self, of_heads: Vec<f32>) -> Vec<f32> {
        let AttentionShape { heads, kv_heads, head_dim, .. } = self.shape;
        if heads == kv_heads {
            return of_heads;
        }
        let group = heads / kv_heads * head_dim;
        let mut sums = unfilled(self.plan.keys * kv_heads * head_dim);
        (sums.par_chunks_mut(head_dim).zip(of_heads.par_chunks(group))).with_min_len(256).for_each(
            |(sum, of_group)| {
                let (first, rest) = of_group.split_at(head_dim);
                sum.copy_from_slice(first);
                rest.chunks_exact(head_dim).for_each(|head| add(sum, head));
            },
        );
        sums
    }
}

impl Kernel for Attention {
    fn shape(&self) -> Vec<usize> {
        vec![self.part.plan.queries, self.part.shape.heads * self.part.shape.head_dim]
    }

    fn forward(&self, inputs: &[&[f32]]) -> Vec<f32> {
        let Attended { out, log_sums } = self.part.forward([inputs[0], inputs[1], inputs[2]]);
        // A kernel object serves one call, so the cell is empty.
        let _ = self.log_sums.set(log_sums);
        out
    }

    fn backward(&self, inputs: &[&[f32]], output: &[f32], grad: &[f32], _: [bool; INPUTS]) -> [Grad; INPUTS] {
        let log_sums = self.log_sums.get().expect("the forward pass ran first");
        let of_inputs = self.part.backward([inputs[0], inputs[1], inputs[2]], output, log_sums, grad);
        let mut grads = NO_GRADS;
        for (grad, of_input) in grads.iter_mut().zip(of_inputs) {
            *grad = Grad::Data(of_input);
        }
        grads
    }
}
