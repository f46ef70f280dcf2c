//! `OLMo` 2: norms after each block rather than before, and norms over all queries and all keys (the `OLMo`
//! team 2025, arXiv:2501.00656).

use super::llama;
use crate::model::family::{Around, Defaults, Family, HeadNorms, InGguf, Keys, Parts};

pub(super) static FAMILY: Family =
    Family { model_type: "olmo2", class: "Olmo2", keys: KEYS, parts: PARTS, gguf: InGguf::plain("olmo2") };

const KEYS: Keys = Keys {
    defaults: Defaults { norm_epsilon: 1e-5, ..llama::KEYS.defaults },
    absent: &["mlp_bias"],
    ..llama::KEYS
};

const PARTS: Parts = Parts {
    attention_norms: Around { before: None, after: Some("post_attention_layernorm") },
    head_norms: Some(HeadNorms { query: "self_attn.q_norm", key: "self_attn.k_norm", whole_width: true }),
    mlp_norms: Around { before: None, after: Some("post_feedforward_layernorm") },
    ..llama::PARTS
};
