//! Random models of known shapes.

use aligner_core::model::{CausalLm, ModelConfig};
use aligner_core::{Device, Error, Result};
use serde_json::json;

/// The sizes that a model can be asked for in.
pub(crate) const SIZES: &str = "`tiny`, `small`, `smollm2` or `1b`";

/// A Llama model with random weights; `smollm2` has the shape of `SmolLM2`-135M.
///
/// # Errors
/// An unknown size.
pub(crate) fn random_model(size: &str, device: &Device) -> Result<CausalLm> {
    let [hidden, intermediate, layers, heads, kv_heads, vocab] = match size {
        "tiny" => [64, 128, 2, 4, 2, 512],
        "small" => [512, 1408, 8, 8, 4, 4096],
        "smollm2" => [576, 1536, 30, 9, 3, 49_152],
        "1b" => [2048, 8192, 16, 32, 8, 128_256],
        _ => return Err(Error::setting("size", format!("expected {SIZES}, got `{size}`"))),
    };
    let config = json!({
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": intermediate,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "vocab_size": vocab, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": true,
    });
    CausalLm::init(ModelConfig::from_json("check".as_ref(), &config)?, 1, device)
}
