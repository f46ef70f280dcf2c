//! What a model looks like: sizes, heads, rotary embedding, special tokens.

use std::path::Path;
use std::sync::Arc;

use super::family::Family;
use super::lora::Adapter;
use super::parameters;
use crate::ops::AttentionShape;
use crate::weights::read_whole;
use crate::{Error, Result};

mod experts;
mod fields;
mod gguf;
mod json;
mod quantization;
mod rope;

pub use experts::ExpertsConfig;
pub(crate) use fields::Fields;
pub(crate) use gguf::ROPE_DIVISORS;
pub(crate) use quantization::{Grid, grids};
pub use rope::{Llama3Scaling, RopeConfig};

/// Largest accepted value of any one dimension: far above every real model, and low enough that a
/// product of two of them fits 64 bits.
const MAX_DIMENSION: usize = 1 << 26;
/// Most accepted layers.
const MAX_LAYERS: usize = 1 << 14;
/// Largest `config.json` that is read.
const MAX_BYTES: u64 = 1 << 26;
/// Most accepted tensors: of small ones, a list of names takes more memory than the parameters.
const MAX_TENSORS: usize = 1 << 19;
/// Most accepted parameters: sixteen trillion.
const MAX_PARAMS: usize = 1 << 44;

/// The shape of a decoder-only language model, as in Hugging Face's `config.json`.
#[derive(Debug, Clone, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a key of `config.json`")]
pub struct ModelConfig {
    /// The family, which `model_type` names.
    pub family: &'static Family,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; each serves `num_heads / num_kv_heads` query heads.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Longest sequence, in tokens, that the model was made for.
    pub max_positions: usize,
    /// Added to the mean square, or to the variance, in norms.
    pub rms_norm_eps: f32,
    /// Rotary position embedding.
    pub rope: RopeConfig,
    /// That of the local layers, where it is another.
    pub local_rope: Option<RopeConfig>,
    /// How many tokens a token of a local layer sees, itself included.
    pub window: Option<usize>,
    /// Whether each layer is local; empty where none is.
    pub local_layers: Vec<bool>,
    /// What scores of queries and keys are multiplied by; none for `1 / sqrt(head_dim)`.
    pub attention_scale: Option<f32>,
    /// Keeps an attention's scores below it: `cap tanh(score / cap)`.
    pub attention_softcap: Option<f32>,
    /// Keeps the logits below it.
    pub logit_softcap: Option<f32>,
    /// Mixtures of experts in place of MLPs.
    pub experts: Option<ExpertsConfig>,
    /// Whether the language-model head is the embedding.
    pub tie_embeddings: bool,
    /// Whether queries, keys and values have biases.
    pub attention_bias: bool,
    /// Whether the attention's output projection has one.
    pub output_bias: bool,
    /// Whether the MLP's projections have biases.
    pub mlp_bias: bool,
    /// Token that begins a text.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a response; may be empty.
    pub eos_token_ids: Vec<u32>,
    /// Token that fills a batch elsewhere; not needed here.
    pub pad_token_id: Option<u32>,
    /// Outputs of the scalar head; none for a language model.
    pub num_labels: Option<usize>,
    /// The low-rank adapter on the model. It is no part of `config.json`, which describes the base alone.
    pub adapter: Option<Arc<Adapter>>,
    /// The JSON that the configuration was read from, kept for [`ModelConfig::to_json`].
    pub extra: serde_json::Value,
}

impl ModelConfig {
    /// The family's name, `model_type`.
    pub fn model_type(&self) -> &'static str {
        self.family.model_type
    }

    /// Heads and their width, with the scale of their scores and the cap on them: the attention of a layer
    /// that sees all tokens before it.
    pub fn attention_shape(&self) -> AttentionShape {
        let scale = self.attention_scale.unwrap_or(1.0 / (self.head_dim as f32).sqrt());
        let shape = AttentionShape::new(self.num_heads, self.num_kv_heads, self.head_dim, scale);
        AttentionShape { softcap: self.attention_softcap, ..shape }
    }

    /// The attention of a layer.
    pub fn layer_attention(&self, layer: usize) -> AttentionShape {
        let window = self.window.filter(|_| self.is_local(layer));
        AttentionShape { window, ..self.attention_shape() }
    }

    /// A flag for each layer.
    pub(super) fn by_layer(&self, flag: impl Fn(usize) -> bool) -> Vec<bool> {
        // Families ask while the count is not checked yet.
        (0..self.num_layers.min(MAX_LAYERS)).map(flag).collect()
    }

    /// Whether a layer sees a window only.
    pub fn is_local(&self, layer: usize) -> bool {
        self.local_layers.get(layer).copied().unwrap_or(false)
    }

    /// Reads a `config.json` from disk.
    ///
    /// # Errors
    /// A file that is not there or not JSON, and those of [`ModelConfig::from_json`].
    pub fn from_file(path: &Path) -> Result<Self> {
        Self::from_json(path, &read_json(path)?)
    }

    /// Checks every size.
    ///
    /// # Errors
    /// [`Error::Invalid`] lists all violations, each with its key in `config.json`.
    pub fn validate(&self) -> Result<()> {
        let problems = self.problems();
        if problems.is_empty() {
            return Ok(());
        }
        Err(Error::Invalid(format!("unusable model configuration: {}", problems.join("; "))))
    }

    /// Names of the layers' linears that an adapter may add to, without `.weight`, and `[out, in]` of each, in
    /// the parameters' order.
    pub fn linears(&self) -> Vec<(String, [usize; 2])> {
        parameters::linears(self)
    }

    /// Whether files have the linears' weights as `[in, out]`.
    pub fn has_transposed_weights(&self) -> bool {
        self.family.parts.transposed
    }

    /// Whether a norm is over all of a token's query heads together.
    pub fn norms_all_heads(&self) -> bool {
        self.family.parts.head_norms.is_some_and(|norms| norms.whole_width)
    }

    /// How many parameters the model has, its adapter's left out; a tied head counts once.
    pub fn num_params(&self) -> usize {
        parameters::count(self).unwrap_or(usize::MAX)
    }

    /// How many of them a token meets: of a mixture, those of its own experts.
    pub fn num_active_params(&self) -> usize {
        parameters::count_active(self).unwrap_or(usize::MAX)
    }

    /// Every violation, in words.
    fn problems(&self) -> Vec<String> {
        let mut problems = self.size_problems();
        if !self.head_dim.is_multiple_of(2) {
            problems.push(format!("head_dim {} is odd; rotary embedding needs pairs", self.head_dim));
        }
        let (heads, kv_heads) = (self.num_heads, self.num_kv_heads);
        if kv_heads != 0 && !heads.is_multiple_of(kv_heads) {
            problems.push(format!(
                "num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            ));
        }
        if !(self.rms_norm_eps > 0.0 && self.rms_norm_eps < 1.0) {
            problems.push(format!("rms_norm_eps {} is not between 0 and 1", self.rms_norm_eps));
        }
        self.rope.problems(&mut problems);
        self.local_rope.iter().for_each(|rope| rope.problems(&mut problems));
        if self.window == Some(0) {
            problems.push("sliding_window must be at least 1".into());
        }
        for (key, cap) in [
            ("query_pre_attn_scalar", self.attention_scale),
            ("attn_logit_softcapping", self.attention_softcap),
            ("final_logit_softcapping", self.logit_softcap),
        ] {
            if cap.is_some_and(|cap| !(cap > 0.0 && cap.is_finite())) {
                problems.push(format!("{key} must be finite and above 0"));
            }
        }
        if let Some(experts) = &self.experts {
            experts.problems(&mut problems);
        }
        // Three of each expert, and a layer's others are never as many as these.
        let of_layer =
            self.experts.as_ref().map_or(0, |experts| experts.count.saturating_mul(3)).max(16) + 16;
        if problems.is_empty() && self.num_layers.saturating_mul(of_layer) > MAX_TENSORS {
            problems.push(format!(
                "num_hidden_layers and num_experts make a model of more than {MAX_TENSORS} tensors"
            ));
        }
        if problems.is_empty() && parameters::count(self).is_none_or(|params| params > MAX_PARAMS) {
            problems.push(format!("the sizes make a model of more than {MAX_PARAMS} parameters"));
        }
        problems
    }

    fn size_problems(&self) -> Vec<String> {
        let sizes = [
            ("vocab_size", self.vocab_size, MAX_DIMENSION),
            ("hidden_size", self.hidden_size, MAX_DIMENSION),
            ("intermediate_size", self.intermediate_size, MAX_DIMENSION),
            ("num_hidden_layers", self.num_layers, MAX_LAYERS),
            ("num_attention_heads", self.num_heads, MAX_DIMENSION),
            ("num_key_value_heads", self.num_kv_heads, MAX_DIMENSION),
            ("head_dim", self.head_dim, MAX_DIMENSION),
            // Positions are stored in 32 bits; some models declare "no limit" with a huge number.
            ("max_position_embeddings", self.max_positions, u32::MAX as usize),
            ("num_labels", self.num_labels.unwrap_or(1), MAX_DIMENSION),
        ];
        let bad = sizes.into_iter().filter(|&(_, value, most)| value == 0 || value > most);
        bad.map(|(key, value, most)| format!("{key} must be between 1 and {most}, got {value}")).collect()
    }
}

/// The content of a `config.json`.
///
/// # Errors
/// A file that is not there or not JSON.
pub(crate) fn read_json(path: &Path) -> Result<serde_json::Value> {
    let text = read_whole(path, MAX_BYTES)?;
    serde_json::from_slice(&text).map_err(|error| Error::format(path, format!("not valid JSON: {error}")))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A valid configuration of 8 hidden units.
    pub(in crate::model) fn tiny() -> ModelConfig {
        ModelConfig {
            family: Family::of("llama").unwrap(),
            vocab_size: 16,
            hidden_size: 8,
            intermediate_size: 12,
            num_layers: 2,
            num_heads: 4,
            num_kv_heads: 2,
            head_dim: 2,
            max_positions: 64,
            rms_norm_eps: 1e-5,
            rope: RopeConfig { theta: 10_000.0, scaling: None },
            local_rope: None,
            window: None,
            local_layers: Vec::new(),
            attention_scale: None,
            attention_softcap: None,
            logit_softcap: None,
            experts: None,
            tie_embeddings: false,
            attention_bias: false,
            output_bias: false,
            mlp_bias: false,
            bos_token_id: Some(1),
            eos_token_ids: vec![2],
            pad_token_id: None,
            num_labels: None,
            adapter: None,
            extra: serde_json::Value::Null,
        }
    }

    #[test]
    fn every_violation_is_reported_at_once() {
        let config = ModelConfig { vocab_size: 0, num_kv_heads: 3, rms_norm_eps: f32::NAN, ..tiny() };
        let message = config.validate().unwrap_err().to_string();
        for key in ["vocab_size", "num_key_value_heads 3", "rms_norm_eps"] {
            assert!(message.contains(key), "{key} is not in: {message}");
        }
    }

    #[test]
    fn absurd_products_are_refused_without_overflow() {
        let huge = ModelConfig { vocab_size: 1 << 26, hidden_size: 1 << 26, ..tiny() };
        assert!(huge.validate().unwrap_err().to_string().contains("parameters"));
        let beyond = ModelConfig { hidden_size: usize::MAX, ..tiny() };
        assert!(beyond.validate().unwrap_err().to_string().contains("hidden_size"));
        assert_eq!(beyond.num_params(), usize::MAX);
    }

    #[test]
    fn more_tensors_than_any_model_has_are_refused() {
        let of = |num_layers: usize, count: usize| {
            let experts = ExpertsConfig {
                count,
                per_token: 1,
                intermediate_size: 1,
                normalized: true,
                shared_intermediate_size: None,
                dense_layers: Vec::new(),
                balance_loss: None,
            };
            ModelConfig { num_layers, experts: Some(experts), ..tiny() }.validate()
        };
        assert!(of(100, 512).is_ok());
        assert!(of(1 << 14, 1 << 14).unwrap_err().to_string().contains("tensors"));
        assert!(ModelConfig { num_layers: 1 << 14, ..tiny() }.validate().is_ok());
    }

    #[test]
    fn parameters_are_counted_by_hand() {
        // Embedding and head 16*8 each, final norm 8, per layer: q 64, k 32, v 32, o 64, three
        // times 96 for the MLP, two norms of 8.
        assert_eq!(tiny().num_params(), 2 * 128 + 8 + 2 * (64 + 32 + 32 + 64 + 288 + 16));
        let tied = ModelConfig { tie_embeddings: true, ..tiny() };
        assert_eq!(tied.num_params(), tiny().num_params() - 128);
        let biased = ModelConfig { attention_bias: true, output_bias: true, mlp_bias: true, ..tiny() };
        assert_eq!(biased.num_params(), tiny().num_params() + 2 * (8 + 4 + 4 + 8 + 12 + 12 + 8));
    }
}
