//! The seams of a model: where a rank's part of it meets the other ranks.
//!
//! Model code calls these hooks; with one rank each is the identity or the plain operation. Tensor
//! parallelism overrides what surrounds a block's linears, context parallelism what surrounds rows.

use std::fmt::Debug;
use std::sync::Arc;

use burn::tensor::Tensor;

use crate::ops::{AttentionShape, LogitCap, TargetScores, attention, capped_linear_cross_entropy, embedding};
use crate::{Result, Segment};

/// A block's last linear: adds what it is given, a residual `[tokens, hidden]` and its own bias `[hidden]`.
pub type Projection<'a> = dyn Fn(Option<Tensor<2>>, Option<Tensor<1>>) -> Result<Tensor<2>> + 'a;

/// How the ranks of a tensor-parallel group share a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// Every rank has all of it, and the same gradient: a scalar head, a router.
    Whole,
    /// Every rank has all of it and applies it to the residual stream: the same gradient, or where the
    /// stream's rows are split, that of its own rows.
    Stream,
    /// Every rank has all of it, and the gradient of its own part of a block.
    Inside,
    /// Rows of `[out, in]`, and elements of a bias: the outputs of a linear, the tokens of a vocabulary.
    Outputs,
    /// Columns of `[out, in]`: the inputs of a linear.
    Inputs,
}

/// Who reads the final hidden states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reader {
    /// The language head, of which a rank may have a part.
    Vocabulary,
    /// A scalar head, which every rank has.
    Score,
}

/// What happens at a model's seams.
///
/// A hook fails where a collective does, or the plain operation.
#[allow(clippy::missing_errors_doc)]
pub trait Shard: Debug + Send + Sync {
    /// The rows of a packed batch that this rank computes, ascending, at least one; none where it
    /// computes all.
    fn rows(&self, segments: &Arc<[Segment]>) -> Result<Option<Arc<[u32]>>> {
        let _ = segments;
        Ok(None)
    }

    /// Whether the residual stream's rows are split, while a block computes all.
    fn splits_stream(&self) -> bool {
        false
    }

    /// Rows of the embedding `[vocab, hidden]` for `tokens`: the residual stream `[tokens, hidden]`.
    fn embed(&self, table: Tensor<2>, tokens: &[u32]) -> Result<Tensor<2>> {
        embedding(table, tokens)
    }

    /// From the residual stream, normed, to a block's linears, which compute `rows`.
    fn enter(&self, x: Tensor<2>, rows: usize) -> Result<Tensor<2>> {
        let _ = rows;
        Ok(x)
    }

    /// Adds a block's output to the residual stream, both `[tokens, hidden]`.
    ///
    /// A rank that holds part of the last linear takes the partial sum `project(None, None)`, reduces it
    /// over the ranks, and adds residual and bias once, afterwards.
    fn exit(
        &self,
        residual: Tensor<2>,
        bias: Option<Tensor<1>>,
        project: &Projection<'_>,
    ) -> Result<Tensor<2>> {
        project(Some(residual), bias)
    }

    /// Attention: q `[rows, heads * head_dim]` with rotated k and v `[rows, kv_heads * head_dim]`, of the
    /// rows that this rank computes; `segments` are the batch's.
    fn attend(
        &self,
        [q, k, v]: [Tensor<2>; 3],
        segments: &Arc<[Segment]>,
        shape: AttentionShape,
    ) -> Result<Tensor<2>> {
        attention(q, k, v, segments, shape)
    }

    /// From the residual stream, after the final norm, to a head, which sees `rows`.
    fn leave(&self, x: Tensor<2>, rows: usize, reader: Reader) -> Result<Tensor<2>> {
        let _ = (rows, reader);
        Ok(x)
    }

    /// What the language head says of `targets` in `rows` of `hidden` `[rows, hidden]`, where `cap` may bound
    /// its logits.
    fn scores(
        &self,
        hidden: Tensor<2>,
        weight: Tensor<2>,
        rows: &[u32],
        targets: &[u32],
        cap: Option<LogitCap>,
    ) -> Result<TargetScores> {
        capped_linear_cross_entropy(hidden, weight, rows, targets, cap)
    }

    /// Sends rows of a mixture to the ranks that have their experts: `rows` `[slots, hidden]` are sorted by
    /// expert, of which `counts` says how many each has. What comes back is for the experts that this rank has,
    /// sorted by expert too.
    fn dispatch(&self, rows: Tensor<2>, counts: &[usize]) -> Result<Dispatched> {
        Ok(Dispatched::here(rows, counts))
    }

    /// Sends what experts made of [`Shard::dispatch`]'s rows back to where they came from, in the order in
    /// which they went: `[slots, hidden]`. `dispatched` is what came, but for its rows, and `counts` is what
    /// went.
    fn combine(&self, rows: Tensor<2>, dispatched: &Dispatched, counts: &[usize]) -> Result<Tensor<2>> {
        let _ = (dispatched, counts);
        Ok(rows)
    }

    /// From values `[own, columns]` of some of a batch's `total` entries to all of them,
    /// `[total, columns]`: the i-th row is that of entry `entries[i]`. Rows past `entries` are dropped.
    fn collect(&self, values: Tensor<2>, entries: &[u32], total: usize) -> Result<Tensor<2>> {
        let _ = (entries, total);
        Ok(values)
    }
}

/// Rows that have come to their experts.
#[derive(Debug, Clone)]
pub struct Dispatched {
    /// Sorted by expert, `[slots, hidden]`.
    pub rows: Tensor<2>,
    /// How many rows each of this rank's experts has.
    pub counts: Vec<usize>,
    /// The same by the rank that they came from, `[ranks, experts]`.
    pub by_rank: Vec<Vec<usize>>,
}

impl Dispatched {
    /// Rows that stay where they are, since all experts are here.
    pub fn here(rows: Tensor<2>, counts: &[usize]) -> Self {
        Self { rows, counts: counts.to_vec(), by_rank: vec![counts.to_vec()] }
    }
}

/// One rank that holds the whole model.
#[derive(Debug, Clone, Copy, Default)]
pub struct Whole;

impl Shard for Whole {}
