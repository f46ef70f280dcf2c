//! The seams of a model: where a rank's part of it meets the other ranks, or a cache.
//!
//! Model code calls these hooks; with one rank and no cache each is the identity or the plain
//! operation. Tensor parallelism overrides `enter` and `exit`, context parallelism and the engine's
//! KV cache override `attend`.

use std::sync::Arc;

use burn::tensor::Tensor;

use crate::ops::{AttentionShape, attention};
use crate::{Result, Segment};

/// What happens at a model's seams.
pub trait Shard {
    /// Before a block's sharded linears: `[tokens, hidden]` to the same.
    ///
    /// # Errors
    /// A failed collective.
    fn enter(&self, x: Tensor<2>) -> Result<Tensor<2>> {
        Ok(x)
    }

    /// After a block's sharded linears, which left a partial sum: `[tokens, hidden]` to the same.
    ///
    /// # Errors
    /// A failed collective.
    fn exit(&self, x: Tensor<2>) -> Result<Tensor<2>> {
        Ok(x)
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
