//! Qwen 2 and 2.5: Llama with biases on queries, keys and values (Yang et al. 2024, arXiv:2407.10671).

use super::llama;
use crate::model::ModelConfig;
use crate::model::config::Fields;
use crate::model::family::{Defaults, Family, InGguf, Keys};

pub(super) static FAMILY: Family = Family {
    model_type: "qwen2",
    class: "Qwen2",
    keys: KEYS,
    parts: llama::PARTS,
    gguf: InGguf::plain("qwen2"),
};

pub(super) const KEYS: Keys = Keys {
    defaults: Defaults { max_positions: 32_768, ..llama::KEYS.defaults },
    absent: &["attention_bias", "mlp_bias"],
    own: &["sliding_window", "use_sliding_window", "max_window_layers", "layer_types"],
    read,
    ..llama::KEYS
};

fn read(fields: &mut Fields<'_>, config: &mut ModelConfig) {
    config.attention_bias = true;
    read_window(fields, config);
}

/// A window on the layers from `max_window_layers` on, where `use_sliding_window` says so.
pub(super) fn read_window(fields: &mut Fields<'_>, config: &mut ModelConfig) {
    let first = fields.optional_size("max_window_layers").unwrap_or(28);
    if fields.flag("use_sliding_window") {
        fields.read_window(config, Some(4096), |layer| layer >= first);
    }
}
