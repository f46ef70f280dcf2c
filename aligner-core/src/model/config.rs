//! What a model looks like: sizes, heads, rotary embedding, special tokens.

use std::path::Path;
use std::sync::Arc;

use super::lora::Adapter;
use crate::{Error, Result};

mod fields;
mod gguf;
mod json;

/// The model types that can be loaded.
pub const MODEL_TYPES: [&str; 1] = ["llama"];

/// Largest accepted value of any one dimension: far above every real model, and low enough that a
/// product of two of them fits 64 bits.
const MAX_DIMENSION: usize = 1 << 26;
/// Most accepted layers.
const MAX_LAYERS: usize = 1 << 14;
/// Most accepted parameters: sixteen trillion.
const MAX_PARAMS: usize = 1 << 44;

/// The shape of a decoder-only language model, as in Hugging Face's `config.json`.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The family: `llama`.
    pub model_type: String,
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
    /// Added to the mean square in `RMSNorm`.
    pub rms_norm_eps: f32,
    /// Rotary position embedding.
    pub rope: RopeConfig,
    /// Whether the language-model head is the embedding.
    pub tie_embeddings: bool,
    /// Whether the attention's four projections have biases.
    pub attention_bias: bool,
    /// Whether the MLP's three projections have biases.
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

/// Rotary position embedding (Su et al. 2021, arXiv:2104.09864).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies `theta^(-2i / head_dim)`.
    pub theta: f32,
    /// Stretches the low frequencies, as Llama 3.1 does.
    pub scaling: Option<Llama3Scaling>,
}

/// Llama 3.1's scaling of rotary frequencies for long contexts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Llama3Scaling {
    /// Low frequencies are divided by it.
    pub factor: f32,
    /// Wavelengths above `original_max_positions / low_freq_factor` are divided by `factor`.
    pub low_freq_factor: f32,
    /// Wavelengths below `original_max_positions / high_freq_factor` stay; between, interpolated.
    pub high_freq_factor: f32,
    /// Context, in tokens, before the scaling.
    pub original_max_positions: usize,
}

impl RopeConfig {
    /// What each frequency is divided by, `[head_dim / 2]`: 1 everywhere without scaling.
    pub fn frequency_divisors(&self, head_dim: usize) -> Vec<f32> {
        (0..head_dim / 2).map(|i| self.divisor(i, head_dim)).collect()
    }

    fn divisor(&self, index: usize, head_dim: usize) -> f32 {
        let Some(scaling) = self.scaling else { return 1.0 };
        let frequency = 1.0 / self.theta.powf(2.0 * index as f32 / head_dim as f32);
        let wavelength = 2.0 * std::f32::consts::PI / frequency;
        let original = scaling.original_max_positions as f32;
        if wavelength < original / scaling.high_freq_factor {
            return 1.0;
        }
        if wavelength > original / scaling.low_freq_factor {
            return scaling.factor;
        }
        let smooth = (original / wavelength - scaling.low_freq_factor)
            / (scaling.high_freq_factor - scaling.low_freq_factor);
        1.0 / ((1.0 - smooth) / scaling.factor + smooth)
    }
}

impl ModelConfig {
    /// Heads and their width, with the usual scale `1 / sqrt(head_dim)`.
    pub fn attention_shape(&self) -> crate::ops::AttentionShape {
        crate::ops::AttentionShape {
            heads: self.num_heads,
            kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            scale: 1.0 / (self.head_dim as f32).sqrt(),
        }
    }

    /// Reads a `config.json` from disk.
    ///
    /// # Errors
    /// A file that is not there or not JSON, and those of [`ModelConfig::from_json`].
    pub fn from_file(path: &Path) -> Result<Self> {
        let text = std::fs::read(path).map_err(Error::io(path))?;
        let value = serde_json::from_slice(&text)
            .map_err(|error| Error::format(path, format!("not valid JSON: {error}")))?;
        Self::from_json(path, &value)
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

    /// How many parameters the model has, its adapter's left out; a tied head counts once.
    pub fn num_params(&self) -> usize {
        self.checked_num_params().unwrap_or(usize::MAX)
    }

    fn checked_num_params(&self) -> Option<usize> {
        let (hidden, mlp) = (self.hidden_size, self.intermediate_size);
        let heads = self.num_heads.checked_mul(self.head_dim)?;
        let kv_heads = self.num_kv_heads.checked_mul(self.head_dim)?;
        let linear = |rows: usize, columns: usize, bias: bool| {
            rows.checked_mul(columns)?.checked_add(if bias { rows } else { 0 })
        };
        let parts = [
            linear(heads, hidden, self.attention_bias)?,
            linear(kv_heads, hidden, self.attention_bias)?.checked_mul(2)?,
            linear(hidden, heads, self.attention_bias)?,
            linear(mlp, hidden, self.mlp_bias)?.checked_mul(2)?,
            linear(hidden, mlp, self.mlp_bias)?,
            hidden.checked_mul(2)?,
        ];
        let layer = parts.into_iter().try_fold(0usize, usize::checked_add)?;
        let embedding = self.vocab_size.checked_mul(hidden)?;
        let head = match self.num_labels {
            Some(labels) => labels.checked_mul(hidden)?,
            None if self.tie_embeddings => 0,
            None => embedding,
        };
        layer.checked_mul(self.num_layers)?.checked_add(embedding)?.checked_add(hidden)?.checked_add(head)
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
        self.rope_problems(&mut problems);
        if problems.is_empty() && self.checked_num_params().is_none_or(|params| params > MAX_PARAMS) {
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

    fn rope_problems(&self, problems: &mut Vec<String>) {
        let theta = self.rope.theta;
        if !(theta > 1.0 && theta.is_finite()) {
            problems.push(format!("rope_theta must be a finite number above 1, got {theta}"));
        }
        let Some(scaling) = self.rope.scaling else { return };
        if !(scaling.factor >= 1.0 && scaling.factor.is_finite()) {
            problems.push(format!("rope_scaling.factor must be at least 1, got {}", scaling.factor));
        }
        let (low, high) = (scaling.low_freq_factor, scaling.high_freq_factor);
        if !(low > 0.0 && high > low && high.is_finite()) {
            problems.push(format!(
                "rope_scaling.low_freq_factor {low} must be above 0 and below high_freq_factor {high}"
            ));
        }
        if scaling.original_max_positions == 0 {
            problems.push("rope_scaling.original_max_position_embeddings must be at least 1".into());
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A valid configuration of 8 hidden units.
    pub(in crate::model) fn tiny() -> ModelConfig {
        ModelConfig {
            model_type: "llama".into(),
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
            tie_embeddings: false,
            attention_bias: false,
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
    fn parameters_are_counted_by_hand() {
        // Embedding and head 16*8 each, final norm 8, per layer: q 64, k 32, v 32, o 64, three
        // times 96 for the MLP, two norms of 8.
        assert_eq!(tiny().num_params(), 2 * 128 + 8 + 2 * (64 + 32 + 32 + 64 + 288 + 16));
        let tied = ModelConfig { tie_embeddings: true, ..tiny() };
        assert_eq!(tied.num_params(), tiny().num_params() - 128);
        let biased = ModelConfig { attention_bias: true, mlp_bias: true, ..tiny() };
        assert_eq!(biased.num_params(), tiny().num_params() + 2 * (8 + 4 + 4 + 8 + 12 + 12 + 8));
    }

    #[test]
    fn llama3_divisors_keep_high_and_divide_low_frequencies() {
        let scaling = Llama3Scaling {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_positions: 8192,
        };
        let rope = RopeConfig { theta: 500_000.0, scaling: Some(scaling) };
        let divisors = rope.frequency_divisors(128);
        assert_eq!((divisors[0], divisors[63]), (1.0, 8.0));
        assert!(divisors.is_sorted());
        assert!(divisors.iter().any(|&d| d > 1.0 && d < 8.0), "no interpolated band");
    }
}
