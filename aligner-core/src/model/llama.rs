//! The Llama family: `RMSNorm`, rotary positions, grouped-query attention, `SwiGLU` (Touvron et al. 2023,
//! arXiv:2302.13971).

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Tensor;

use super::exec::{Exec, Linear, Tensors};
use super::lora::{self, Adapter, Lora};
use super::{ModelConfig, Stage};
use crate::ops::{Dropout, RotaryTable, rms_norm};
use crate::shard::{Shard, Split};
use crate::{Error, ParamId, ParamSet, Result, Segment};

/// Where the pieces of a batch stand, shared by all layers.
#[derive(Debug, Clone)]
pub struct Layout {
    /// The packed segments.
    pub segments: Arc<[Segment]>,
    /// How many of the batch's rows are computed here.
    pub rows: usize,
    /// Rotary angles of the batch's positions.
    pub rotary: RotaryTable,
    /// The rows whose final hidden states are asked for, ascending; absent, all. The last layer computes
    /// no more than these once it has attended.
    pub kept: Option<Arc<[u32]>>,
    /// What an adapter drops of each row; absent outside of training.
    pub dropout: Option<Dropout>,
}

/// The model's structure: which parameter of a set stands where.
#[derive(Debug, Clone)]
pub struct Llama {
    config: ModelConfig,
    frequencies: Vec<f32>,
    /// On the first stage, and on the last where it is the head.
    embed: Option<ParamId>,
    /// Those of the stage, the first of which is `first_layer`.
    layers: Vec<Layer>,
    first_layer: usize,
    /// On the last stage.
    norm: Option<ParamId>,
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

    /// Names of the layers' linears, without `.weight`, and `[out, in]` of each, in the parameters' order.
    pub fn linears(config: &ModelConfig) -> Vec<(String, [usize; 2])> {
        let linear = |(name, shape): (String, Vec<usize>)| match shape[..] {
            [outputs, inputs] => {
                let name = name.strip_suffix(".weight").filter(|name| name.starts_with("model.layers."))?;
                Some((name.to_string(), [outputs, inputs]))
            }
            _ => None,
        };
        Self::parameters(config).into_iter().filter_map(linear).collect()
    }

    /// How tensor-parallel ranks share the parameter `name`, a head's and an adapter's too.
    pub fn split(name: &str) -> Split {
        let (module, part) = name.rsplit_once('.').unwrap_or((name, ""));
        for end in [lora::A, lora::B, lora::MAGNITUDE] {
            let Some(linear) = name.strip_suffix(end) else { continue };
            return match (Self::split(&format!("{linear}.weight")), end) {
                (Split::Outputs, lora::A) | (Split::Inputs, lora::B) => Split::Inside,
                (Split::Inputs, lora::MAGNITUDE) => Split::Stream,
                (split, _) => split,
            };
        }
        match module.rsplit('.').next().unwrap_or_default() {
            "q_proj" | "k_proj" | "v_proj" | "gate_proj" | "up_proj" | "embed_tokens" | "lm_head" => {
                Split::Outputs
            }
            "o_proj" | "down_proj" if part == "weight" => Split::Inputs,
            "score" => Split::Whole,
            _ => Split::Stream,
        }
    }

    /// Finds the parameters of a stage of the family in `params`, and those of the configuration's adapter.
    ///
    /// # Errors
    /// [`Error::Invalid`] names a parameter that is absent.
    pub fn new(config: &ModelConfig, params: &ParamSet, stage: &Stage) -> Result<Self> {
        let id =
            |name: &str| params.id(name).ok_or_else(|| Error::Invalid(format!("the parameters lack {name}")));
        let layer = |index: usize| {
            let name = |part: &str| format!("model.layers.{index}.{part}");
            let linear = |part: &str, bias: bool| -> Result<Linear> {
                let weight = id(&name(&format!("{part}.weight")))?;
                let bias = bias.then(|| id(&name(&format!("{part}.bias")))).transpose()?;
                let lora = (config.adapter.as_deref()).map(|adapter| addition(adapter, &name(part), &id));
                Ok(Linear { weight, bias, lora: lora.transpose()?.flatten() })
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
        let is_tied = config.tie_embeddings && config.num_labels.is_none();
        let has_table = stage.first || (stage.last && is_tied);
        let divisors = config.rope.frequency_divisors(config.head_dim);
        let frequency = |(i, divisor): (usize, f32)| {
            1.0 / config.rope.theta.powf(2.0 * i as f32 / config.head_dim as f32) / divisor
        };
        Ok(Self {
            config: config.clone(),
            frequencies: divisors.into_iter().enumerate().map(frequency).collect(),
            embed: has_table.then(|| id("model.embed_tokens.weight")).transpose()?,
            layers: stage.layers.clone().map(layer).collect::<Result<_>>()?,
            first_layer: stage.layers.start,
            norm: stage.last.then(|| id("model.norm.weight")).transpose()?,
        })
    }

    /// The layers that it has.
    pub fn layers(&self) -> Range<usize> {
        self.first_layer..self.first_layer + self.layers.len()
    }

    /// The final norm's parameter.
    ///
    /// # Errors
    /// [`Error::Invalid`] on a stage before the last.
    pub fn norm_id(&self) -> Result<ParamId> {
        self.norm.ok_or_else(|| Error::Invalid("this stage of the model has no final norm".into()))
    }

    /// Rotary frequencies in radians per position, `[head_dim / 2]`.
    pub fn frequencies(&self) -> &[f32] {
        &self.frequencies
    }

    /// The embedding table's parameter, which a tied head shares.
    ///
    /// # Errors
    /// [`Error::Invalid`] on a stage that does not need it.
    pub fn embedding_id(&self) -> Result<ParamId> {
        self.embed.ok_or_else(|| Error::Invalid("this stage of the model has no embedding".into()))
    }

    /// Layout of a packed batch: `positions` is `[tokens]`.
    pub fn layout(&self, positions: &[u32], segments: Arc<[Segment]>) -> Layout {
        Layout {
            segments,
            rows: positions.len(),
            rotary: RotaryTable::new(positions, &self.frequencies, 1.0),
            kept: None,
            dropout: None,
        }
    }

    /// Embeds token ids `[tokens]`: `[tokens, hidden]`.
    ///
    /// # Errors
    /// An id past the vocabulary; a stage after the first.
    pub fn embed(&self, params: &ParamSet, tokens: &[u32], shard: &dyn Shard) -> Result<Tensor<2>> {
        shard.embed(params.matrix(self.embedding_id()?), tokens)
    }

    /// Layer `index` of the stage on the residual stream, `[tokens, hidden]` to the same; the last one to the rows that
    /// the layout keeps.
    ///
    /// # Errors
    /// Those of `exec`.
    pub fn layer<E: Exec>(&self, exec: &mut E, index: usize, x: E::Rows) -> Result<E::Rows> {
        let (layer, config) = (&self.layers[index - self.first_layer], &self.config);
        let normed = exec.norm(&x, layer.attention_norm, config.rms_norm_eps)?;
        let [q, k, v] = exec.linears(normed, [layer.q, layer.k, layer.v])?;
        let qkv = [exec.rotate(q)?, exec.rotate(k)?, v];
        let attended = exec.attend(index, qkv, config.attention_shape())?;
        let x = exec.exit(x, attended, layer.o)?;
        let normed = exec.norm(&x, layer.mlp_norm, config.rms_norm_eps)?;
        let [gate, up] = exec.linears(normed, [layer.gate, layer.up])?;
        let gated = exec.gate(gate, up)?;
        exec.exit(x, gated, layer.down)
    }

    /// The final norm, `[tokens, hidden]` to the same.
    ///
    /// # Errors
    /// Shapes that do not fit; a stage before the last.
    pub fn norm(&self, params: &ParamSet, x: Tensor<2>) -> Result<Tensor<2>> {
        rms_norm(x, params.vector(self.norm_id()?), self.config.rms_norm_eps)
    }

    /// The stage's layers on the residual stream, `[tokens, hidden]` to the same, or to the kept rows.
    ///
    /// # Errors
    /// Those of the parts.
    pub fn run(
        &self,
        params: &ParamSet,
        mut x: Tensor<2>,
        layout: &Layout,
        shard: &dyn Shard,
    ) -> Result<Tensor<2>> {
        let mut exec = Tensors::new(params, layout, shard, self.config.num_layers);
        for index in self.layers() {
            x = self.layer(&mut exec, index, x)?;
        }
        Ok(x)
    }
}

/// The addition to a linear; none where the adapter leaves it alone.
fn addition(adapter: &Adapter, linear: &str, id: &dyn Fn(&str) -> Result<ParamId>) -> Result<Option<Lora>> {
    let place = adapter.modules.iter().position(|module| module.name == linear);
    let Some(module) = place else { return Ok(None) };
    let part = |end: &str| id(&format!("{linear}{end}"));
    Ok(Some(Lora {
        a: part(lora::A)?,
        b: part(lora::B)?,
        magnitude: adapter.config.dora.then(|| part(lora::MAGNITUDE)).transpose()?,
        scale: adapter.modules[module].scale,
        module,
    }))
}
