//! Qwen 3: Llama with norms of each query and key head (Yang et al. 2025, arXiv:2505.09388).

use super::{llama, qwen2};
use crate::model::ModelConfig;
use crate::model::config::Fields;
use crate::model::family::{Defaults, Family, HeadNorms, InGguf, Keys, Parts};

pub(super) static FAMILY: Family =
    Family { model_type: "qwen3", class: "Qwen3", keys: KEYS, parts: PARTS, gguf: InGguf::plain("qwen3") };

pub(super) const KEYS: Keys = Keys {
    defaults: Defaults { head_dim: Some(128), ..qwen2::KEYS.defaults },
    absent: &["mlp_bias"],
    read: |fields: &mut Fields<'_>, config: &mut ModelConfig| qwen2::read_window(fields, config),
    ..qwen2::KEYS
};

pub(super) const PARTS: Parts = Parts {
    head_norms: Some(HeadNorms { query: "self_attn.q_norm", key: "self_attn.k_norm", whole_width: false }),
    ..llama::PARTS
};
