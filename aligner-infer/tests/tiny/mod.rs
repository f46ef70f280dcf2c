//! A model so small that thousands of requests run in seconds; a page of its cache takes 4 KiB.

use aligner_core::Device;
use aligner_core::model::{CausalLm, ModelConfig};
use serde_json::json;

/// Token ids are below this.
pub(crate) const VOCAB: u64 = 61;

pub(crate) fn model(seed: u64) -> CausalLm {
    let config = ModelConfig::from_json(
        "tiny".as_ref(),
        &json!({
            "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
            "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        }),
    )
    .unwrap();
    CausalLm::init(config, seed, &Device::flex()).unwrap()
}
