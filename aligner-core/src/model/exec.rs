//! What runs a model's operations: tensors with gradients in training, plain slices in generation.
//!
//! A family's code is written once against [`Exec`]; a new family thereby trains and generates.

use std::sync::Arc;

use burn::tensor::{Tensor, activation};

use super::balance::Balance;
use super::decoder::Layout;
use super::lora::Lora;
use crate::ops::host::HostTensor;
use crate::ops::rows::{F32, Weight};
use crate::ops::{
    Activation, AdaptedRows, AttentionShape, Dropout, ExpertWeights, LowRank, Routes, WeightOperand,
    activate, combine, dispatch, embedding, experts, gated, layer_norm, linear, lora_linear, rms_norm,
    rms_norm_plus_one, rotary, routing_weights,
};
use crate::shard::Shard;
use crate::{Error, Param, ParamId, ParamSet, Result, constant};

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

/// A mixture of gated experts, of which each token has the few that its router chooses.
#[derive(Debug, Clone)]
pub struct Mixture {
    /// Its outputs are the experts' logits.
    pub router: Linear,
    /// Gate, up and down of each expert.
    pub experts: Vec<[Linear; 3]>,
    /// Experts of a token.
    pub per_token: usize,
    /// Whether the weights of a token's experts are made to sum to 1.
    pub normalized: bool,
    /// Of the experts' gates.
    pub activation: Activation,
}

/// A norm of rows, or of equal parts of rows.
#[derive(Debug, Clone, Copy)]
pub struct Norm {
    /// `[hidden]`.
    pub weight: ParamId,
    /// `[hidden]`.
    pub bias: Option<ParamId>,
    /// What it computes.
    pub kind: NormKind,
    /// Added to the mean square, or to the variance.
    pub epsilon: f32,
}

/// What a norm computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// `RMSNorm`.
    Rms,
    /// `RMSNorm` that scales by one more than its weight.
    RmsPlusOne,
    /// `LayerNorm`.
    Layer,
}

impl Norm {
    /// Of each row of `x` `[tokens, columns]`, or of each part of a row that is as long as the weight.
    pub(super) fn of(&self, params: &ParamSet, x: Tensor<2>) -> Result<Tensor<2>> {
        let (weight, shape) = (params.vector(self.weight), x.dims());
        let [width] = weight.dims();
        let parts = shape[1] != width && width > 0 && shape[1].is_multiple_of(width);
        let x = if parts { x.reshape([shape[0] * (shape[1] / width), width]) } else { x };
        let out = match self.kind {
            NormKind::Rms => rms_norm(x, weight, self.epsilon)?,
            NormKind::RmsPlusOne => rms_norm_plus_one(x, weight, self.epsilon)?,
            NormKind::Layer => {
                let bias = self.bias.map_or_else(|| weight.zeros_like(), |bias| params.vector(bias));
                layer_norm(x, weight, bias, self.epsilon)?
            }
        };
        Ok(if parts { out.reshape(shape) } else { out })
    }
}

/// The operations of a decoder layer. An operand that is passed by value is not used again.
///
/// An operation fails where shapes do not fit, or where a collective does.
#[allow(clippy::missing_errors_doc)]
pub trait Exec {
    /// Activations, `[tokens, columns]`.
    type Rows;

    /// What a block's linears see of the residual stream: its norm, or all of it.
    fn enter(&mut self, x: &Self::Rows, norm: Option<Norm>) -> Result<Self::Rows>;

    /// The norm of each row, or of each part of a row that is as long as the norm's weight.
    fn norm(&mut self, x: Self::Rows, norm: Norm) -> Result<Self::Rows>;

    /// Several linears of the same input.
    fn linears<const N: usize>(&mut self, x: Self::Rows, layers: [Linear; N]) -> Result<[Self::Rows; N]>;

    /// Columns `[tokens, sum of columns]`, one part after the other.
    fn split<const N: usize>(&mut self, x: Self::Rows, columns: [usize; N]) -> Result<[Self::Rows; N]>;

    /// Rotates each head by its token's position, at the `rope`-th of the decoder's frequencies.
    fn rotate(&mut self, x: Self::Rows, rope: usize) -> Result<Self::Rows>;

    /// Causal attention of layer `layer`; q `[tokens, heads * head_dim]` with k and v
    /// `[tokens, kv_heads * head_dim]`.
    fn attend(&mut self, layer: usize, qkv: [Self::Rows; 3], shape: AttentionShape) -> Result<Self::Rows>;

    /// `activation(gate) * up`.
    fn gate(&mut self, gate: Self::Rows, up: Self::Rows, activation: Activation) -> Result<Self::Rows>;

    /// `activation(x)`.
    fn activate(&mut self, x: Self::Rows, activation: Activation) -> Result<Self::Rows>;

    /// The residual stream with what a mixture's experts make of `x` added to it.
    fn mix(&mut self, residual: Self::Rows, x: &Self::Rows, mixture: &Mixture) -> Result<Self::Rows>;

    /// Rows of `x` times the sigmoid of `opening` `[tokens, 1]`.
    fn open(&mut self, x: Self::Rows, opening: Self::Rows) -> Result<Self::Rows>;

    /// A block's last linear, normed where there is a norm after it, added to the residual stream.
    fn exit(
        &mut self,
        residual: Self::Rows,
        x: Self::Rows,
        layer: Linear,
        after: Option<Norm>,
    ) -> Result<Self::Rows>;
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
    /// How evenly the experts are used, where the layout asks.
    balance: Option<Balance>,
}

impl<'a> Tensors<'a> {
    pub(crate) fn new(params: &'a ParamSet, layout: &'a Layout, shard: &'a dyn Shard, layers: usize) -> Self {
        let dropout = layout.dropout.clone();
        let balance = layout.balance.then(Balance::default);
        Self { params, layout, shard, last_layer: layers.saturating_sub(1), behind: false, dropout, balance }
    }

    /// How evenly the experts of the layers that ran were used, where the layout asks.
    pub(crate) fn balance(&self) -> Option<&Balance> {
        self.balance.as_ref()
    }

    /// A weight in the type that it is multiplied in.
    fn operand<const D: usize>(&self, weight: WeightOperand<D>) -> WeightOperand<D> {
        match self.layout.products {
            Some(dtype) => weight.cast(dtype),
            None => weight,
        }
    }

    fn expert(&self, [gate, up, down]: [Linear; 3]) -> ExpertWeights {
        let [gate, up, down] =
            [gate, up, down].map(|linear| self.operand(self.params.flat_weight(linear.weight)));
        ExpertWeights { gate, up, down }
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
        let (x, weight) = (x.clone(), self.operand(self.params.weight(layer.weight)));
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
        let values = |id: ParamId| HostTensor::without_graph(&self.params.vector(id));
        let (a, b) = (values(lora.a), values(lora.b));
        let shape = self.params.weight(layer.weight).shape();
        with_weight(self.params.get(layer.weight), shape, |weight| {
            AdaptedRows { weight, a: a.as_slice(), b: b.as_slice(), scale: lora.scale, shape }.lengths()
        })
    }
}

/// Calls `read` with a linear's weight `[out, in]` as it is held.
pub(super) fn with_weight<R>(param: &Param, shape: [usize; 2], read: impl FnOnce(Weight<'_>) -> R) -> R {
    if let Some(packed) = &param.packed {
        return read(packed.view());
    }
    let values = HostTensor::without_graph(&param.value);
    read(Weight::F32(F32::new(values.as_slice(), shape[0], shape[1])))
}

impl Exec for Tensors<'_> {
    type Rows = Tensor<2>;

    fn enter(&mut self, x: &Tensor<2>, norm: Option<Norm>) -> Result<Tensor<2>> {
        let entered = norm.map_or_else(|| Ok(x.clone()), |norm| norm.of(self.params, x.clone()))?;
        self.shard.enter(entered, self.layout.rows)
    }

    fn norm(&mut self, x: Tensor<2>, norm: Norm) -> Result<Tensor<2>> {
        norm.of(self.params, x)
    }

    fn linears<const N: usize>(&mut self, x: Tensor<2>, layers: [Linear; N]) -> Result<[Tensor<2>; N]> {
        let mut out = Vec::with_capacity(N);
        for layer in layers {
            out.push(self.linear(&x, layer, None, self.bias(layer))?);
        }
        Ok(out.try_into().expect("one output for each layer"))
    }

    fn split<const N: usize>(&mut self, x: Tensor<2>, columns: [usize; N]) -> Result<[Tensor<2>; N]> {
        let (expected, got) = (columns.iter().sum::<usize>(), x.dims());
        if got[1] != expected {
            return Err(Error::shape("outputs of a fused linear", format!("[tokens, {expected}]"), &got));
        }
        let mut first = 0;
        Ok(columns.map(|count| {
            first += count;
            x.clone().narrow(1, first - count, count)
        }))
    }

    fn rotate(&mut self, x: Tensor<2>, rope: usize) -> Result<Tensor<2>> {
        rotary(x, &self.layout.rotary[rope])
    }

    fn attend(&mut self, layer: usize, qkv: [Tensor<2>; 3], shape: AttentionShape) -> Result<Tensor<2>> {
        let qkv = match self.layout.products {
            Some(dtype) => qkv.map(|rows| rows.cast(dtype)),
            None => qkv,
        };
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

    fn gate(&mut self, gate: Tensor<2>, up: Tensor<2>, activation: Activation) -> Result<Tensor<2>> {
        gated(gate, up, activation)
    }

    fn activate(&mut self, x: Tensor<2>, activation: Activation) -> Result<Tensor<2>> {
        activate(x, activation)
    }

    fn mix(&mut self, residual: Tensor<2>, x: &Tensor<2>, mixture: &Mixture) -> Result<Tensor<2>> {
        let logits = self.linear(x, mixture.router, None, None)?;
        let on_host = HostTensor::without_graph(&logits);
        let routes = Arc::new(Routes::new(on_host.as_slice(), logits.dims()[1], mixture.per_token)?);
        let weights = routing_weights(logits.clone(), &routes, mixture.normalized)?;
        if let Some(balance) = &mut self.balance {
            balance.add(logits, &routes.counts);
        }
        let sent = dispatch(x.clone(), &routes)?;
        let there = self.shard.dispatch(sent, &routes.counts)?;
        let own: Vec<ExpertWeights> = mixture.experts.iter().map(|&expert| self.expert(expert)).collect();
        let made = experts(there.rows.clone(), &there.counts, &own, mixture.activation)?;
        let made = self.shard.combine(made, &there, &routes.counts)?;
        self.shard
            .exit(residual, None, &|residual, _| combine(made.clone(), weights.clone(), residual, &routes))
    }

    fn open(&mut self, x: Tensor<2>, opening: Tensor<2>) -> Result<Tensor<2>> {
        Ok(x * activation::sigmoid(opening))
    }

    fn exit(
        &mut self,
        mut residual: Tensor<2>,
        x: Tensor<2>,
        layer: Linear,
        after: Option<Norm>,
    ) -> Result<Tensor<2>> {
        if let Some(kept) = self.layout.kept.as_ref().filter(|_| std::mem::take(&mut self.behind)) {
            residual = embedding(residual, kept)?;
        }
        let project = |residual, bias| self.linear(&x, layer, residual, bias);
        let Some(after) = after else {
            return self.shard.exit(residual, self.bias(layer), &project);
        };
        // The norm is of the whole sum over ranks, so the residual comes after it.
        let whole = self.shard.exit(residual.zeros_like(), self.bias(layer), &project)?;
        Ok(residual + after.of(self.params, whole)?)
    }
}
