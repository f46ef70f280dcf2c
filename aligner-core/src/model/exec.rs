//! What runs a model's operations: tensors with gradients in training, plain slices in generation.
//!
//! A family's code is written once against [`Exec`]; a new family thereby trains and generates.

use burn::tensor::Tensor;

use super::llama::Layout;
use super::lora::Lora;
use crate::ops::host::HostTensor;
use crate::ops::{
    AdaptedRows, AttentionShape, Dropout, LowRank, embedding, linear, lora_linear, rms_norm, rotary, swiglu,
};
use crate::shard::Shard;
use crate::{ParamId, ParamSet, Result, constant};

/// The parameters of a linear: `x W^T + b`, and of what an adapter adds.
#[derive(Debug, Clone, Copy)]
pub struct Linear {
    /// `[out, in]`.
    pub weight: ParamId,
    /// `[out]`.
    pub bias: Option<ParamId>,
    /// The low-rank addition.
    pub lora: Option<Lora>,
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
    /// The dropout of the rows that there are.
    dropout: Option<Dropout>,
}

impl<'a> Tensors<'a> {
    pub(crate) fn new(params: &'a ParamSet, layout: &'a Layout, shard: &'a dyn Shard, layers: usize) -> Self {
        let dropout = layout.dropout.clone();
        Self { params, layout, shard, last_layer: layers.saturating_sub(1), behind: false, dropout }
    }

    fn bias(&self, layer: Linear) -> Option<Tensor<1>> {
        layer.bias.map(|bias| self.params.vector(bias))
    }

    fn linear(
        &self,
        x: &Tensor<2>,
        layer: Linear,
        residual: Option<Tensor<2>>,
        bias: Option<Tensor<1>>,
    ) -> Result<Tensor<2>> {
        let (x, weight) = (x.clone(), self.params.matrix(layer.weight));
        let Some(lora) = layer.lora else { return linear(x, weight, bias, residual) };
        let dropout = self.dropout.as_ref().map(|dropout| dropout.for_module(lora.module));
        let (a, b) = (self.params.matrix(lora.a), self.params.matrix(lora.b));
        let low = LowRank { a, b, scale: lora.scale, dropout };
        let Some(magnitude) = lora.magnitude else { return lora_linear(x, weight, low, bias, residual) };
        let magnitude = self.params.vector(magnitude);
        // A constant, as the paper has it (section 4.3): no gradient flows through the lengths.
        let gains = magnitude.clone() / constant(&self.lengths(layer, lora), &magnitude);
        let mut out = lora_linear(x, weight, low, None, None)? * gains.unsqueeze::<2>();
        if let Some(bias) = bias {
            out = out + bias.unsqueeze::<2>();
        }
        Ok(residual.map_or_else(|| out.clone(), |residual| out.clone() + residual))
    }

    /// The lengths of an adapted linear's rows, `[out]`.
    fn lengths(&self, layer: Linear, lora: Lora) -> Vec<f32> {
        let values = |id: ParamId| {
            let value = self.params.vector(id);
            HostTensor::new(&if value.is_autodiff() { value.inner() } else { value })
        };
        let (weight, a, b) = (values(layer.weight), values(lora.a), values(lora.b));
        let [outputs, inputs] = self.params.matrix(layer.weight).dims();
        let (weight, a, b) = (weight.as_slice(), a.as_slice(), b.as_slice());
        AdaptedRows { weight, a, b, scale: lora.scale, shape: [outputs, inputs] }.lengths()
    }
}

impl Exec for Tensors<'_> {
    type Rows = Tensor<2>;

    fn norm(&mut self, x: &Tensor<2>, weight: ParamId, epsilon: f32) -> Result<Tensor<2>> {
        self.shard.enter(rms_norm(x.clone(), self.params.vector(weight), epsilon)?, self.layout.rows)
    }

    fn linears<const N: usize>(&mut self, x: Tensor<2>, layers: [Linear; N]) -> Result<[Tensor<2>; N]> {
        let mut out = Vec::with_capacity(N);
        for layer in layers {
            out.push(self.linear(&x, layer, None, self.bias(layer))?);
        }
        Ok(out.try_into().expect("one output for each layer"))
    }

    fn rotate(&mut self, x: Tensor<2>) -> Result<Tensor<2>> {
        rotary(x, &self.layout.rotary)
    }

    fn attend(&mut self, layer: usize, qkv: [Tensor<2>; 3], shape: AttentionShape) -> Result<Tensor<2>> {
        let attended = self.shard.attend(qkv, &self.layout.segments, shape)?;
        match &self.layout.kept {
            Some(kept) if layer == self.last_layer => {
                self.behind = true;
                self.dropout = self.dropout.as_ref().map(|dropout| dropout.select(kept));
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
        self.shard.exit(residual, self.bias(layer), &|residual, bias| self.linear(&x, layer, residual, bias))
    }
}
