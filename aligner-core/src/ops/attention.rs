//! Causal attention with grouped queries over a packed batch whose segments may continue a shared
//! prompt. No `[tokens, tokens]` matrix: scores live in tiles of [`kernel`].

mod kernel;
mod plan;

use std::sync::Arc;

use burn::tensor::{DType, Tensor, TensorData, activation};

use super::kernel::{on_host, run};
use super::linear::product;
use crate::{Error, Result, Segment};

pub use kernel::{Attended, AttentionPart};
pub use plan::{Keys, Plan, Run, trees};

/// Heads of an attention, and the factor that scores are multiplied by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Columns of a head.
    pub head_dim: usize,
    /// Usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Keeps the scaled scores below it: `cap tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// How many tokens a token sees, itself included; none where it sees all before it.
    pub window: Option<usize>,
}

impl AttentionShape {
    /// An attention to all tokens before each, with scores as they are.
    pub const fn new(heads: usize, kv_heads: usize, head_dim: usize, scale: f32) -> Self {
        Self { heads, kv_heads, head_dim, scale, softcap: None, window: None }
    }

    /// The first of the positions that one at `position` sees.
    pub fn first_seen(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }
}

/// `softmax(scale q k^T) v` over what each token sees: its segment's ancestors, and its own segment
/// up to itself.
///
/// q is `[tokens, heads * head_dim]`, k and v are `[tokens, kv_heads * head_dim]`; the result has
/// q's shape. Forward and backward follow Dao 2023 (arXiv:2307.08691): online softmax, log-sum-exp
/// kept by row, probabilities computed again in the backward pass.
///
/// # Errors
/// [`Error::Shape`] where an operand does not fit, [`Error::Invalid`] for segments that do not tile
/// the batch or continue a later one.
pub fn attention(
    q: Tensor<2>,
    k: Tensor<2>,
    v: Tensor<2>,
    segments: &Arc<[Segment]>,
    shape: AttentionShape,
) -> Result<Tensor<2>> {
    let tokens = check_segments(segments)?;
    for (what, tensor, heads) in
        [("q", &q, shape.heads), ("k", &k, shape.kv_heads), ("v", &v, shape.kv_heads)]
    {
        let expected = [tokens, heads * shape.head_dim];
        if tensor.dims() != expected {
            return Err(Error::shape(
                format!("{what} of an attention"),
                format!("{expected:?}"),
                &tensor.dims(),
            ));
        }
    }
    if shape.kv_heads == 0 || !shape.heads.is_multiple_of(shape.kv_heads) {
        let (heads, kv_heads) = (shape.heads, shape.kv_heads);
        return Err(Error::Invalid(format!(
            "{heads} query heads are not a multiple of {kv_heads} key heads"
        )));
    }
    if !on_host(&q) {
        return Ok(reference(q, k, v, segments, shape));
    }
    let kernel = kernel::Attention::new(Plan::new(segments), shape);
    Ok(run(kernel, vec![q.into_dispatch(), k.into_dispatch(), v.into_dispatch()]))
}

fn check_segments(segments: &[Segment]) -> Result<usize> {
    let mut tokens = 0;
    for (at, segment) in segments.iter().enumerate() {
        if segment.start != tokens || segment.parent.is_some_and(|parent| parent >= at) {
            return Err(Error::Invalid(format!(
                "segment {at} does not follow the earlier ones: {segment:?}"
            )));
        }
        tokens += segment.len;
    }
    Ok(tokens)
}

/// Ancestors of a segment, the oldest first.
fn ancestors(segments: &[Segment], index: usize) -> Vec<usize> {
    let mut chain: Vec<usize> =
        std::iter::successors(segments[index].parent, |&at| segments[at].parent).collect();
    chain.reverse();
    chain
}

/// The composition of Burn operations, one segment at a time.
pub fn reference(
    q: Tensor<2>,
    k: Tensor<2>,
    v: Tensor<2>,
    segments: &[Segment],
    shape: AttentionShape,
) -> Tensor<2> {
    planned(q, k, v, Plan::new(segments), shape)
}

/// The composition of Burn operations on any device, one run of a plan at a time: q is
/// `[plan.queries, heads * head_dim]`, k and v are `[plan.keys, kv_heads * head_dim]`.
///
/// # Errors
/// [`Error::Shape`] for operands of other sizes, [`Error::Invalid`] for a plan whose runs are not all rows of q, or
/// one of them without keys.
pub fn planned_attention(
    q: Tensor<2>,
    k: Tensor<2>,
    v: Tensor<2>,
    plan: Plan,
    shape: AttentionShape,
) -> Result<Tensor<2>> {
    let AttentionShape { heads, kv_heads, head_dim, .. } = shape;
    for (name, x, rows, columns) in [
        ("q", &q, plan.queries, heads * head_dim),
        ("k", &k, plan.keys, kv_heads * head_dim),
        ("v", &v, plan.keys, kv_heads * head_dim),
    ] {
        if x.dims() != [rows, columns] {
            return Err(Error::shape(name, format!("[{rows}, {columns}]"), &x.dims()));
        }
    }
    let runs = || plan.trees.iter().flatten().filter(|run| !run.queries.is_empty());
    let rows: usize = runs().map(|run| run.queries.len()).sum();
    if rows == 0 || rows != plan.queries {
        let message = format!("the runs of an attention have {rows} rows of {}", plan.queries);
        return Err(Error::Invalid(message));
    }
    if let Some(run) =
        runs().find(|run| run.own.is_none() && run.seen.iter().all(|keys| keys.rows.is_empty()))
    {
        return Err(Error::Invalid(format!("the rows {:?} of an attention see no key", run.queries)));
    }
    Ok(planned(q, k, v, plan, shape))
}

fn planned(q: Tensor<2>, k: Tensor<2>, v: Tensor<2>, plan: Plan, shape: AttentionShape) -> Tensor<2> {
    let AttentionShape { heads, kv_heads, head_dim, scale, .. } = shape;
    let device = q.device();
    let split = |x: Tensor<2>, heads: usize| {
        let [tokens, _] = x.dims();
        x.reshape([tokens, heads, head_dim]).swap_dims(0, 1) // [heads, tokens, head_dim]
    };
    let repeat = |x: Tensor<3>| {
        let [_, tokens, _] = x.dims();
        let wide = x.unsqueeze_dim::<4>(1).expand([kv_heads, heads / kv_heads, tokens, head_dim]);
        wide.reshape([heads, tokens, head_dim])
    };
    let (q, k, v) = (split(q, heads), repeat(split(k, kv_heads)), repeat(split(v, kv_heads)));
    let mut runs: Vec<Run> = plan.trees.into_iter().flatten().filter(|run| !run.queries.is_empty()).collect();
    runs.sort_by_key(|run| run.queries.start);
    let mut outs = Vec::new();
    for Run { queries, position, seen, own } in runs {
        let own = own.map(|own| Keys { rows: own..own + queries.len(), position });
        let keys: Vec<Keys> = seen.into_iter().chain(own).filter(|keys| !keys.rows.is_empty()).collect();
        let gather = |x: &Tensor<3>| {
            let part = |keys: &Keys| x.clone().narrow(1, keys.rows.start, keys.rows.len());
            Tensor::cat(keys.iter().map(part).collect(), 1)
        };
        let (k, v) = (gather(&k), gather(&v));
        let of_keys: Vec<usize> =
            keys.iter().flat_map(|keys| keys.position..keys.position + keys.rows.len()).collect();
        let mask = |i: usize| {
            let (query, key) = (position + i / of_keys.len(), of_keys[i % of_keys.len()]);
            if (shape.first_seen(query)..=query).contains(&key) { 0.0 } else { f32::NEG_INFINITY }
        };
        let mask: Vec<f32> = (0..queries.len() * of_keys.len()).map(mask).collect();
        let mask = TensorData::new(mask, [1, queries.len(), of_keys.len()]);
        let q = q.clone().narrow(1, queries.start, queries.len());
        let mut scores = q.matmul(k.swap_dims(1, 2)).cast(DType::F32) * scale;
        if let Some(cap) = shape.softcap {
            scores = (scores / cap).tanh() * cap;
        }
        let scores = scores + Tensor::<3>::from_data(mask, &device);
        outs.push(product(activation::softmax(scores, 2), v));
    }
    let out = Tensor::cat(outs, 1); // [heads, tokens, head_dim]
    let [_, tokens, _] = out.dims();
    out.swap_dims(0, 1).reshape([tokens, heads * head_dim])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{leaf, relative_error, weighted_sum};

    fn segment(start: usize, len: usize, position: usize, parent: Option<usize>) -> Segment {
        Segment { start, len, position, parent }
    }

    fn compare(segments: Vec<Segment>, heads: usize, kv_heads: usize, head_dim: usize) {
        let shape = AttentionShape::new(heads, kv_heads, head_dim, 0.7);
        let segments: Arc<[Segment]> = segments.into();
        for (softcap, window) in
            [(None, None), (Some(1.5), None), (None, Some(2)), (None, Some(50)), (Some(0.8), Some(300))]
        {
            compare_shape(&segments, AttentionShape { softcap, window, ..shape });
        }
    }

    fn compare_shape(segments: &Arc<[Segment]>, shape: AttentionShape) {
        let AttentionShape { heads, kv_heads, head_dim, .. } = shape;
        let tokens = check_segments(segments).unwrap();
        let q = leaf([tokens, heads * head_dim], 1);
        let k = leaf([tokens, kv_heads * head_dim], 2);
        let v = leaf([tokens, kv_heads * head_dim], 3);
        let fused = attention(q.clone(), k.clone(), v.clone(), segments, shape).unwrap();
        let plain = reference(q.clone(), k.clone(), v.clone(), segments, shape);
        assert!(relative_error(&fused, &plain) < 2e-6);
        let of_fused = weighted_sum(fused, 4).backward();
        let of_plain = weighted_sum(plain, 4).backward();
        for (name, input) in [("q", &q), ("k", &k), ("v", &v)] {
            let error = relative_error(&input.grad(&of_fused).unwrap(), &input.grad(&of_plain).unwrap());
            assert!(error < 5e-6, "gradient of {name}: {error}");
        }
    }

    #[test]
    fn one_short_segment() {
        compare(vec![segment(0, 5, 0, None)], 2, 1, 4);
    }

    #[test]
    fn neighbours_do_not_see_each_other() {
        let segments = vec![segment(0, 70, 0, None), segment(70, 1, 0, None), segment(71, 33, 0, None)];
        compare(segments, 4, 2, 8);
    }

    #[test]
    fn continuations_see_their_prompt_and_give_it_gradients() {
        let segments = vec![
            segment(0, 90, 0, None),
            segment(90, 70, 90, Some(0)),
            segment(160, 5, 90, Some(0)),
            segment(165, 40, 160, Some(1)),
            segment(205, 20, 0, None),
        ];
        compare(segments, 6, 2, 16);
    }

    #[test]
    fn long_segments_cross_key_tiles() {
        compare(vec![segment(0, 700, 0, None)], 1, 1, 8);
    }

    #[test]
    fn empty_segments_are_harmless() {
        compare(vec![segment(0, 3, 0, None), segment(3, 0, 3, Some(0)), segment(3, 2, 3, Some(0))], 1, 1, 4);
    }

    #[test]
    fn wrong_shapes_and_segments_are_refused() {
        let shape = AttentionShape::new(1, 1, 4, 1.0);
        let x = || leaf([3, 4], 1);
        let short: Arc<[Segment]> = vec![segment(0, 2, 0, None)].into();
        assert!(attention(x(), x(), x(), &short, shape).unwrap_err().to_string().contains("[2, 4]"));
        let forward: Arc<[Segment]> = vec![segment(0, 3, 0, Some(0))].into();
        assert!(attention(x(), x(), x(), &forward, shape).is_err());
    }
}
