//! The Llama family: `RMSNorm`, rotary positions, grouped-query attention, `SwiGLU` (Touvron et al. 2023,
//! arXiv:2302.13971).

use std::sync::Arc;

use burn::tensor::Tensor;

use super::ModelConfig;
use crate::ops::{AttentionShape, RotaryTable, embedding, linear, rms_norm, rotary, swiglu};
use crate::shard::Shard;
use crate::{Error, ParamId, ParamSet, Result, Segment};

/// Where the pieces of a batch stand, shared by all layers.
#[derive(Debug, Clone)]
pub struct Layout {
    /// The packed segments.
    pub segments: Arc<[Segment]>,
    /// Rotary angles of the batch's positions.
    pub rotary: RotaryTable,
    /// The rows whose final hidden states are asked for, ascending; absent, all. The last layer computes
    /// no more than these once it has attended.
    pub kept: Option<Arc<[u32]>>,
}

/// The model's structure: which parameter of a set stands where.
#[derive(Debug, Clone)]
pub struct Llama {
    config: ModelConfig,
    frequencies: Vec<f32>,
    embed: ParamId,
    layers: Vec<Layer>,
    norm: ParamId,
}

#[derive(Debug, Clone)]
struct Layer {
    attention_norm: ParamId,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    mlp_norm: ParamId,
    gate: Linear,
    up: Linear,
    down: Linear,
}

#[derive(Debug, Clone, Copy)]
struct Linear {
    weight: ParamId,
    bias: Option<ParamId>,
}

impl Linear {
    fn forward(self, params: &ParamSet, x: &Tensor<2>, residual: Option<Tensor<2>>) -> Result<Tensor<2>> {
        linear(x.clone(), params.matrix(self.weight), self.bias.map(|bias| params.vector(bias)), residual)
    }
}

impl Llama {
    /// Names and shapes of the family's parameters, heads excepted, in a fixed order.
    pub fn parameters(config: &ModelConfig) -> Vec<(String, Vec<usize>)> {
        let hidden = config.hidden_size;
        let (q, kv) = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim);
        let mut all = vec![("model.embed_tokens.weight".into(), vec![config.vocab_size, hidden])];
        for layer in 0..config.num_layers {
            let mut add = |name: &str, shape: &[usize]| {
                all.push((format!("model.layers.{layer}.{name}"), shape.to_vec()));
            };
            add("input_layernorm.weight", &[hidden]);
            for (name, rows, columns, bias) in [
                ("self_attn.q_proj", q, hidden, config.attention_bias),
                ("self_attn.k_proj", kv, hidden, config.attention_bias),
                ("self_attn.v_proj", kv, hidden, config.attention_bias),
                ("self_attn.o_proj", hidden, q, config.attention_bias),
                ("mlp.gate_proj", config.intermediate_size, hidden, config.mlp_bias),
                ("mlp.up_proj", config.intermediate_size, hidden, config.mlp_bias),
                ("mlp.down_proj", hidden, config.intermediate_size, config.mlp_bias),
            ] {
                add(&format!("{name}.weight"), &[rows, columns]);
                if bias {
                    add(&format!("{name}.bias"), &[rows]);
                }
            }
            add("post_attention_layernorm.weight", &[hidden]);
        }
        all.push(("model.norm.weight".into(), vec![hidden]));
        all
    }

    /// Finds the family's parameters in `params`.
    ///
    /// # Errors
    /// [`Error::Invalid`] names a parameter that is absent.
    pub fn new(config: &ModelConfig, params: &ParamSet) -> Result<Self> {
        let id =
            |name: &str| params.id(name).ok_or_else(|| Error::Invalid(format!("the parameters lack {name}")));
        let layer = |index: usize| {
            let name = |part: &str| format!("model.layers.{index}.{part}");
            let linear = |part: &str, bias: bool| -> Result<Linear> {
                let weight = id(&name(&format!("{part}.weight")))?;
                let bias = bias.then(|| id(&name(&format!("{part}.bias")))).transpose()?;
                Ok(Linear { weight, bias })
            };
            Ok(Layer {
                attention_norm: id(&name("input_layernorm.weight"))?,
                q: linear("self_attn.q_proj", config.attention_bias)?,
                k: linear("self_attn.k_proj", config.attention_bias)?,
                v: linear("self_attn.v_proj", config.attention_bias)?,
                o: linear("self_attn.o_proj", config.attention_bias)?,
                mlp_norm: id(&name("post_attention_layernorm.weight"))?,
                gate: linear("mlp.gate_proj", config.mlp_bias)?,
                up: linear("mlp.up_proj", config.mlp_bias)?,
                down: linear("mlp.down_proj", config.mlp_bias)?,
            })
        };
        let divisors = config.rope.frequency_divisors(config.head_dim);
        let frequency = |(i, divisor): (usize, f32)| {
            1.0 / config.rope.theta.powf(2.0 * i as f32 / config.head_dim as f32) / divisor
        };
        Ok(Self {
            config: config.clone(),
            frequencies: divisors.into_iter().enumerate().map(frequency).collect(),
            embed: id("model.embed_tokens.weight")?,
            layers: (0..config.num_layers).map(layer).collect::<Result<_>>()?,
            norm: id("model.norm.weight")?,
        })
    }

    /// How many layers it has.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// The embedding table's parameter, which a tied head shares.
    pub fn embedding_id(&self) -> ParamId {
        self.embed
    }

    /// Layout of a packed batch: `positions` is `[tokens]`.
    pub fn layout(&self, positions: &[u32], segments: Arc<[Segment]>) -> Layout {
        Layout { segments, rotary: RotaryTable::new(positions, &self.frequencies, 1.0), kept: None }
    }

    /// Embeds token ids `[tokens]`: `[tokens, hidden]`.
    ///
    /// # Errors
    /// An id past the vocabulary.
    pub fn embed(&self, params: &ParamSet, tokens: &[u32]) -> Result<Tensor<2>> {
        embedding(params.matrix(self.embed), tokens)
    }

    /// Layer `index` on the residual stream, `[tokens, hidden]` to the same; the last one to the rows that
    /// the layout keeps.
    ///
    /// # Errors
    /// Shapes that do not fit, a failed collective.
    pub fn layer(
        &self,
        params: &ParamSet,
        index: usize,
        mut x: Tensor<2>,
        layout: &Layout,
        shard: &dyn Shard,
    ) -> Result<Tensor<2>> {
        let layer = &self.layers[index];
        let config = &self.config;
        let shape = AttentionShape {
            heads: config.num_heads,
            kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            scale: 1.0 / (config.head_dim as f32).sqrt(),
        };
        let normed = rms_norm(x.clone(), params.vector(layer.attention_norm), config.rms_norm_eps)?;
        let normed = shard.enter(normed)?;
        let q = rotary(layer.q.forward(params, &normed, None)?, &layout.rotary)?;
        let k = rotary(layer.k.forward(params, &normed, None)?, &layout.rotary)?;
        let v = layer.v.forward(params, &normed, None)?;
        let mut attended = shard.attend(index, [q, k, v], &layout.segments, shape)?;
        if let Some(kept) = layout.kept.as_ref().filter(|_| index + 1 == self.layers.len()) {
            (x, attended) = (embedding(x, kept)?, embedding(attended, kept)?);
        }
        let x = shard.exit(x, &|residual| layer.o.forward(params, &attended, residual))?;
        let normed = rms_norm(x.clone(), params.vector(layer.mlp_norm), config.rms_norm_eps)?;
        let normed = shard.enter(normed)?;
        let gated =
            swiglu(layer.gate.forward(params, &normed, None)?, layer.up.forward(params, &normed, None)?)?;
        shard.exit(x, &|residual| layer.down.forward(params, &gated, residual))
    }

    /// The final norm, `[tokens, hidden]` to the same.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn norm(&self, params: &ParamSet, x: Tensor<2>) -> Result<Tensor<2>> {
        rms_norm(x, params.vector(self.norm), self.config.rms_norm_eps)
    }

    /// Embedding, all layers and the final norm: `[tokens, hidden]`.
    ///
    /// # Errors
    /// Those of the parts.
    pub fn hidden(
        &self,
        params: &ParamSet,
        tokens: &[u32],
        layout: &Layout,
        shard: &dyn Shard,
    ) -> Result<Tensor<2>> {
        let mut x = self.embed(params, tokens)?;
        for index in 0..self.layers.len() {
            x = self.layer(params, index, x, layout, shard)?;
        }
        self.norm(params, x)
    }
}
