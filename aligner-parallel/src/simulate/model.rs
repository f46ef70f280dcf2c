//! What a dense model of a given shape holds and computes.

use std::path::Path;

use aligner_core::model::ModelConfig;
use aligner_core::{Error, Result};

/// Bytes of a number in bf16, in which models compute and travel.
pub(super) const HALF: f64 = 2.0;

/// Names of the shapes that are built in.
pub const SHAPES: [&str; 3] = ["llama3-8b", "llama3-70b", "llama3-405b"];

/// A shape by its name, with the sizes of its published `config.json` (Llama Team 2024, arXiv:2407.21783, table 3).
///
/// # Errors
/// Another name.
pub fn shape(name: &str) -> Result<ModelConfig> {
    let [hidden, mlp, layers, heads] = match name {
        "llama3-8b" => [4096, 14_336, 32, 32],
        "llama3-70b" => [8192, 28_672, 80, 64],
        "llama3-405b" => [16_384, 53_248, 126, 128],
        _ => {
            let known = SHAPES.join(", ");
            return Err(Error::setting("model.shape", format!("expected one of {known}, got {name}")));
        }
    };
    let json = serde_json::json!({
        "model_type": "llama", "vocab_size": 128_256, "hidden_size": hidden, "intermediate_size": mlp,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8,
        "max_position_embeddings": 131_072, "tie_word_embeddings": false
    });
    ModelConfig::from_json(Path::new(name), &json)
}

/// Parameters of one decoder layer.
pub(super) fn layer_params(model: &ModelConfig) -> f64 {
    let (hidden, mlp) = (model.hidden_size as f64, model.intermediate_size as f64);
    let queries = (model.num_heads * model.head_dim) as f64;
    let keys = (model.num_kv_heads * model.head_dim) as f64;
    hidden * (2.0 * queries + 2.0 * keys + 3.0 * mlp + 2.0)
}

/// Parameters of the embedding, as many as those of the head.
pub(super) fn embedding_params(model: &ModelConfig) -> f64 {
    (model.vocab_size * model.hidden_size) as f64
}

/// Floating-point operations of a layer's forward pass over `tokens` tokens in sequences of `length` tokens: two for each
/// weight and token, and in causal attention two products of half of `length` squared for each head's width (Narayanan
/// et al. 2021, appendix).
pub(super) fn layer_flops(model: &ModelConfig, tokens: f64, length: f64) -> f64 {
    let width = (model.num_heads * model.head_dim) as f64;
    tokens * (2.0 * layer_params(model) + 2.0 * length * width)
}

/// Floating-point operations of the head's forward pass over `tokens` tokens.
pub(super) fn head_flops(model: &ModelConfig, tokens: f64) -> f64 {
    2.0 * tokens * embedding_params(model)
}

/// Floating-point operations of the whole forward pass.
pub(super) fn forward_flops(model: &ModelConfig, tokens: f64, length: f64) -> f64 {
    model.num_layers as f64 * layer_flops(model, tokens, length) + head_flops(model, tokens)
}

/// Bytes of a token's keys and values in all layers.
pub(super) fn cache_bytes(model: &ModelConfig) -> f64 {
    2.0 * HALF * (model.num_layers * model.num_kv_heads * model.head_dim) as f64
}

/// Bytes that a layer keeps of a token for its backward pass, on one of `tp` ranks, where what is outside the matrices
/// is split too (Korthikanti et al. 2022, section 4): both norms' inputs and outputs; queries, keys and values before and
/// after the rotation; the attention's output; the MLP's gate, up and product. Attention weights are computed again.
pub(super) fn activation_bytes(model: &ModelConfig, tp: f64) -> f64 {
    let (hidden, mlp) = (model.hidden_size as f64, model.intermediate_size as f64);
    let queries = (model.num_heads * model.head_dim) as f64;
    let keys = (model.num_kv_heads * model.head_dim) as f64;
    HALF * (4.0 * hidden + 3.0 * queries + 3.0 * keys + 3.0 * mlp) / tp
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_shapes_have_their_published_sizes() {
        for (name, billions) in SHAPES.into_iter().zip([8.03, 70.55, 405.85]) {
            let model = shape(name).unwrap();
            let params = model.num_params() as f64;
            assert!((params / 1e9 - billions).abs() < 0.01, "{name}: {params}");
            let ours = model.num_layers as f64 * layer_params(&model) + 2.0 * embedding_params(&model);
            // The last norm is left out.
            assert!((params - ours - model.hidden_size as f64).abs() < 1.0, "{name}: {ours}");
        }
        let message = shape("llama").unwrap_err().to_string();
        assert!(message.contains("llama3-405b") && message.contains("got llama"), "{message}");
    }

    #[test]
    fn forward_takes_two_operations_for_each_weight_and_attention_grows_with_the_length() {
        let model = shape("llama3-8b").unwrap();
        let weights = model.num_params() as f64 - embedding_params(&model);
        let short = forward_flops(&model, 1.0, 0.0);
        assert!((short / (2.0 * weights) - 1.0).abs() < 1e-5, "{short}");
        let long = forward_flops(&model, 1.0, 8192.0) - short;
        assert!((long / (32.0 * 2.0 * 8192.0 * 4096.0) - 1.0).abs() < 1e-9, "{long}");
        // Llama 3 8B: 128 KiB a token.
        assert!((cache_bytes(&model) - 131_072.0).abs() < 1e-9);
    }
}
