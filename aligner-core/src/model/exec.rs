//! What runs a model's operations: tensors with gradients in training, plain slices in generation.
//!
//! A family's code is written once against [`Exec`]; a new family thereby trains and generates.

use burn::tensor::Tensor;

use super::llama::Layout;
use crate::ops::{AttentionShape, embedding, linear, rms_norm, rotary, swiglu};
use crate::shard::Shard;
use crate::{ParamId, ParamSet, Result};

/// The parameters of a linear: `x W^T + b`.
#[derive(Debug, Clone, Copy)]
pub struct Linear {
    /// `[out, in]`.
    pub weight: ParamId,
    /// `[out]`.
    pub bias: Option<ParamId>,
}

/// The operations of a decoder layer. An operand that is passed by value is not used again.
pub trait Exec {
    /// Activations, `[tokens, columns]`.
    type Rows;

    /// `RMSNorm` with a parameter `[hidden]`, before a block's linears.
    ///
    /// # Errors
    /// Shapes that do not fit, a failed collective.
    fn norm(&mut self, x: &Self::Rows, weight: ParamId, epsilon: f32) -> Result<Self::Rows>;

    /// Several linears of the same input.
    ///
    /// # Errors
    /// Shapes that do not fit.
    fn linears<const N: usize>(&mut self, x: Self::Rows, layers: [Linear; N]) -> Result<[Self::Rows; N]>;

    /// Rotates each head by its token's position.
    ///
    /// # Errors
    /// Shapes that do not fit.
    fn rotate(&mut self, x: Self::Rows) -> Result<Self::Rows>;

    /// Causal attention of layer `layer`; q `[tokens, heads * head_dim]` with k and v
    /// `[tokens, kv_heads * head_dim]`.
    ///
    /// # Errors
    /// Shapes that do not fit, a failed collective.
    fn attend(&mut self, layer: usize, qkv: [Self::Rows; 3], shape: AttentionShape) -> Result<Self::Rows>;

    /// `silu(gate) * up`.
    ///
    /// # Errors
    /// Shapes that do not fit.
    fn gate(&mut self, gate: Self::Rows, up: Self::Rows) -> Result<Self::Rows>;

    /// A block's last linear, added to the residual stream.
    ///
    /// # Errors
    /// Shapes that do not fit, a failed collective.
    fn exit(&mut self, residual: Self::Rows, x: Self::Rows, layer: Linear) -> Result<Self::Rows>;
}

/// Runs a model on tensors, with gradients where the parameters are tracked.
pub(crate) struct Tensors<'a> {
    params: &'a ParamSet,
    layout: &'a Layout,
    shard: &'a dyn Shard,
    /// The layer after whose attention only the layout's kept rows go on.
    last_layer: usize,
    /// Whether the residual stream still has all rows while what is added to it has the kept ones.
    behind: bool,
}

impl<'a> Tensors<'a> {
    pub(crate) fn new(params: &'a ParamSet, layout: &'a Layout, shard: &'a dyn Shard, layers: usize) -> Self {
        Self { params, layout, shard, last_layer: layers.saturating_sub(1), behind: false }
    }

    fn linear(&self, x: &Tensor<2>, layer: Linear, residual: Option<Tensor<2>>) -> Result<Tensor<2>> {
        let bias = layer.bias.map(|bias| self.params.vector(bias));
        linear(x.clone(), self.params.matrix(layer.weight), bias, residual)
    }
}

impl Exec for Tensors<'_> {
    type Rows = Tensor<2>;

    fn norm(&mut self, x: &Tensor<2>, weight: ParamId, epsilon: f32) -> Result<Tensor<2>> {
        self.shard.enter(rms_norm(x.clone(), self.params.vector(weight), epsilon)?)
    }

    fn linears<const N: usize>(&mut self, x: Tensor<2>, layers: [Linear; N]) -> Result<[Tensor<2>; N]> {
        let mut out = Vec::with_capacity(N);
        for layer in layers {
            out.push(self.linear(&x, layer, None)?);
        }
        Ok(out.try_into().expect("one output for each layer"))
    }

    fn rotate(&mut self, x: Tensor<2>) -> Result<Tensor<2>> {
        rotary(x, &self.layout.rotary)
    }

    fn attend(&mut self, layer: usize, qkv: [Tensor<2>; 3], shape: AttentionShape) -> Result<Tensor<2>> {
        let attended = self.shard.attend(layer, qkv, &self.layout.segments, shape)?;
        match &self.layout.kept {
            Some(kept) if layer == self.last_layer => {
                self.behind = true;
                embedding(attended, kept)
            }
            _ => Ok(attended),
        }
    }

    fn gate(&mut self, gate: Tensor<2>, up: Tensor<2>) -> Result<Tensor<2>> {
        swiglu(gate, up)
    }

    fn exit(&mut self, mut residual: Tensor<2>, x: Tensor<2>, layer: Linear) -> Result<Tensor<2>> {
        if let Some(kept) = self.layout.kept.as_ref().filter(|_| std::mem::take(&mut self.behind)) {
            residual = embedding(residual, kept)?;
        }
        self.shard.exit(residual, &|residual| self.linear(&x, layer, residual))
    }
}
