//! The CPU kernel: tasks are (tree of segments, query head); tiles of scores fit a core's cache.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use rayon::prelude::*;

use super::{AttentionShape, ancestors};
use crate::Segment;
use crate::ops::gemm::{Mat, Output, gemm_at, gemm_serial};
use crate::ops::kernel::{Grad, INPUTS, Kernel, NO_GRADS, Shared, unfilled};
use crate::ops::simd::{self, add, dot, exp, vectorized};

/// Query rows and keys of a tile.
const QUERIES: usize = 48;
const KEYS: usize = 256;

#[derive(Debug)]
pub(super) struct Attention {
    segments: Arc<[Segment]>,
    shape: AttentionShape,
    tokens: usize,
    /// Log-sum-exp of each row's scores, `[heads, tokens]`; written by the forward pass.
    log_sums: OnceLock<Vec<f32>>,
}

/// A tile of queries with a tile of the keys that some of them see.
struct Tile {
    queries: Range<usize>,
    keys: Range<usize>,
    /// Whether the keys are the queries' own segment: each row then sees them up to itself.
    causal: bool,
}

impl Tile {
    /// How many of the tile's keys its `row`-th query sees.
    fn visible(&self, row: usize) -> usize {
        if !self.causal {
            return self.keys.len();
        }
        (self.queries.start + row + 1).saturating_sub(self.keys.start).min(self.keys.len())
    }
}

impl Attention {
    pub(super) fn new(segments: Arc<[Segment]>, shape: AttentionShape) -> Self {
        let tokens = segments.iter().map(|s| s.len).sum();
        Self { segments, shape, tokens, log_sums: OnceLock::new() }
    }

    /// Segment indices of each tree: a prompt with everything that continues it.
    fn trees(&self) -> Vec<Vec<usize>> {
        let mut tree_of = Vec::with_capacity(self.segments.len());
        let mut trees: Vec<Vec<usize>> = Vec::new();
        for (index, segment) in self.segments.iter().enumerate() {
            let tree = segment.parent.map_or(trees.len(), |parent| tree_of[parent]);
            tree_of.push(tree);
            if tree == trees.len() {
                trees.push(Vec::new());
            }
            trees[tree].push(index);
        }
        trees
    }

    fn tasks(&self) -> Vec<(Vec<usize>, usize)> {
        let heads = self.shape.heads;
        self.trees().into_iter().flat_map(|tree| (0..heads).map(move |head| (tree.clone(), head))).collect()
    }

    /// Calls `visit` for each block of a segment's queries with the tiles of keys that it sees.
    fn blocks(&self, index: usize, mut visit: impl FnMut(Range<usize>, &[Tile])) {
        let segment = self.segments[index];
        let chain = ancestors(&self.segments, index);
        for start in segment.rows().step_by(QUERIES) {
            let queries = start..(start + QUERIES).min(segment.rows().end);
            let seen = chain.iter().map(|&at| (self.segments[at].rows(), false));
            let own = (segment.start..queries.end, true);
            let mut tiles = Vec::new();
            for (keys, causal) in seen.chain([own]) {
                tiles.extend(keys.clone().step_by(KEYS).map(|first| Tile {
                    queries: queries.clone(),
                    keys: first..(first + KEYS).min(keys.end),
                    causal,
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

    fn forward_block(&self, inputs: &[&[f32]], head: usize, tiles: &[Tile], rows: &mut Rows) {
        let AttentionShape { heads, kv_heads, head_dim, scale } = self.shape;
        let kv_head = self.kv_head(head);
        for tile in tiles {
            let width = tile.keys.len();
            let queries = self.head(inputs[0], &tile.queries, head, heads);
            let keys = self.head(inputs[1], &tile.keys, kv_head, kv_heads);
            let values = self.head(inputs[2], &tile.keys, kv_head, kv_heads);
            let scores = &mut rows.scores[..tile.queries.len() * width];
            gemm_serial(scale, queries, keys.t(), scores, width, Output::Overwrite);
            for (row, scores) in scores.chunks_exact_mut(width).enumerate() {
                let (seen, hidden) = scores.split_at_mut(tile.visible(row));
                hidden.fill(0.0);
                if seen.is_empty() {
                    continue;
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

impl Kernel for Attention {
    fn shape(&self) -> Vec<usize> {
        vec![self.tokens, self.shape.heads * self.shape.head_dim]
    }

    fn forward(&self, inputs: &[&[f32]]) -> Vec<f32> {
        let AttentionShape { heads, head_dim, .. } = self.shape;
        let mut out = unfilled(self.tokens * heads * head_dim);
        let mut log_sums = unfilled(heads * self.tokens);
        let (shared_out, shared_sums) = (Shared::new(&mut out), Shared::new(&mut log_sums));
        self.tasks().into_par_iter().for_each(|(tree, head)| {
            let mut rows = Rows::new(head_dim);
            for index in tree {
                self.blocks(index, |queries, tiles| {
                    rows.reset();
                    self.forward_block(inputs, head, tiles, &mut rows);
                    for (row, token) in queries.enumerate() {
                        // SAFETY: this task alone has this head of this tree's tokens.
                        let (out, log_sum) = unsafe {
                            (
                                shared_out.part((token * heads + head) * head_dim, head_dim),
                                shared_sums.part(head * self.tokens + token, 1),
                            )
                        };
                        let sum = rows.sum[row];
                        for (out, value) in out.iter_mut().zip(&rows.out[row * head_dim..]) {
                            *out = value / sum;
                        }
                        log_sum[0] = rows.largest[row] + sum.ln();
                    }
                });
            }
        });
        // A kernel object serves one call, so the cell is empty.
        let _ = self.log_sums.set(log_sums);
        out
    }

    fn backward(&self, inputs: &[&[f32]], output: &[f32], grad: &[f32], _: [bool; INPUTS]) -> [Grad; INPUTS] {
        let AttentionShape { heads, kv_heads, head_dim, scale } = self.shape;
        let log_sums = self.log_sums.get().expect("the forward pass ran first");
        // Each query head sums its own gradients of keys and values; heads of a group are added
        // afterwards, in order.
        let mut grads = [(); 3].map(|()| vec![0.0; self.tokens * heads * head_dim]);
        let [of_q, of_k, of_v] = grads.each_mut().map(|grad| Shared::new(grad));
        self.tasks().into_par_iter().for_each(|(tree, head)| {
            let kv_head = self.kv_head(head);
            let (mut scores, mut of_scores) = (unfilled(QUERIES * KEYS), unfilled(QUERIES * KEYS));
            for index in tree {
                self.blocks(index, |queries, tiles| {
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
                        let rows = scores.chunks_exact_mut(width).zip(of_scores.chunks_exact_mut(width));
                        for (row, (scores, of_scores)) in rows.enumerate() {
                            let visible = tile.visible(row);
                            scores[visible..].fill(0.0);
                            of_scores[visible..].fill(0.0);
                            let log_sum = log_sums[head * self.tokens + queries.start + row];
                            let (seen, of_seen) = (&mut scores[..visible], &mut of_scores[..visible]);
                            backward_row(seen, of_seen, log_sum, along[row], scale);
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
        let mut grads = NO_GRADS;
        grads[0] = Grad::Data(of_q);
        grads[1] = Grad::Data(self.sum_group(of_k));
        grads[2] = Grad::Data(self.sum_group(of_v));
        grads
    }
}

impl Attention {
    /// Adds the heads of each group: `[tokens, heads * head_dim]` to `[tokens, kv_heads * head_dim]`.
    fn sum_group(&self, of_heads: Vec<f32>) -> Vec<f32> {
        let AttentionShape { heads, kv_heads, head_dim, .. } = self.shape;
        if heads == kv_heads {
            return of_heads;
        }
        let group = heads / kv_heads * head_dim;
        let mut sums = unfilled(self.tokens * kv_heads * head_dim);
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
