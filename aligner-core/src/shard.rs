//! The seams of a model: where a rank's part of it meets the other ranks, or a cache.
//!
//! Model code calls these hooks; with one rank and no cache each is the identity or the plain
//! operation. Tensor parallelism overrides `enter` and `exit`, context parallelism and the engine's
//! KV cache override `attend`.

use std::sync::Arc;

use burn::tensor::Tensor;

use crate::ops::{AttentionShape, attention};
use crate::{Result, Segment};

/// A block's last linear, plus what it is given: `[tokens, hidden]`.
pub type Projection<'a> = dyn Fn(Option<Tensor<2>>) -> Result<Tensor<2>> + 'a;

/// What happens at a model's seams.
pub trait Shard {
    /// Before a block's sharded linears: `[tokens, hidden]` to the same.
    ///
    /// # Errors
    /// A failed collective.
    fn enter(&self, x: Tensor<2>) -> Result<Tensor<2>> {
        Ok(x)
    }

    /// Adds a block's output to the residual stream, both `[tokens, hidden]`.
    ///
    /// `project` is the block's last linear; it adds what it is given in the same pass. A rank that
    /// holds part of the linear takes the partial sum `project(None)`, reduces it over the ranks, and
    /// adds the residual once, afterwards.
    ///
    /// # Errors
    /// Those of `project`; a failed collective.
    fn exit(&self, residual: Tensor<2>, project: &Projection<'_>) -> Result<Tensor<2>> {
        project(Some(residual))
    }

    /// Attention of layer `layer`: q `[tokens, heads * head_dim]` with rotated k and v
    /// `[tokens, kv_heads * head_dim]`.
    ///
    /// # Errors
    /// Those of [`attention`].
    fn attend(
        &self,
        layer: usize,
        [q, k, v]: [Tensor<2>; 3],
        segments: &Arc<[Segment]>,
        shape: AttentionShape,
    ) -> Result<Tensor<2>> {
        let _ = layer;
        attention(q, k, v, segments, shape)
    }
}

/// One rank that holds the whole model, without a cache.
#[derive(Debug, Clone, Copy, Default)]
pub struct Whole;

impl Shard for Whole {}
