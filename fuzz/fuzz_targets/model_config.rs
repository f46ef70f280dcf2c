//! A `config.json` of any bytes.
#![no_main]

use std::sync::LazyLock;

use aligner_core::model::ModelConfig;
use aligner_fuzz::Scratch;
use libfuzzer_sys::fuzz_target;

static SCRATCH: LazyLock<Scratch> = LazyLock::new(Scratch::new);

/// Layers of a model whose linears are listed: a list for more takes time and no new path.
const MOST_LAYERS: usize = 64;

fuzz_target!(|bytes: &[u8]| {
    let path = SCRATCH.write("config.json", bytes);
    let Ok(config) = ModelConfig::from_file(&path) else { return };
    assert!(config.num_heads > 0 && config.num_kv_heads > 0 && config.head_dim > 0 && config.vocab_size > 0);
    let _ = (config.num_params(), config.num_active_params(), config.attention_shape());
    if config.num_layers <= MOST_LAYERS {
        let _ = config.linears();
    }
    let _ = config.layer_attention(usize::MAX);
    let _ = config.to_json();
});
