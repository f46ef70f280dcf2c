//! Mistral: Llama whose tokens may see a window only (Jiang et al. 2023, arXiv:2310.06825).

use super::llama;
use crate::model::ModelConfig;
use crate::model::config::Fields;
use crate::model::family::{Defaults, Family, Keys};

pub(super) static FAMILY: Family =
    Family { model_type: "mistral", class: "Mistral", keys: KEYS, parts: llama::PARTS, gguf: llama::GGUF };

pub(super) const KEYS: Keys = Keys {
    defaults: Defaults { max_positions: 131_072, ..llama::KEYS.defaults },
    absent: &["attention_bias", "mlp_bias"],
    own: &["sliding_window"],
    read: |fields: &mut Fields<'_>, config: &mut ModelConfig| {
        fields.read_window(config, Some(4096), |_| true);
    },
    ..llama::KEYS
};
