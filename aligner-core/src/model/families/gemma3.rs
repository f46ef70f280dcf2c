//! Gemma 3's text models: Gemma 2 with norms of queries and keys in place of caps, and rotary positions of their
//! own in the layers with a window (Gemma Team 2025, arXiv:2503.19786).

use super::gemma2;
use crate::model::ModelConfig;
use crate::model::config::Fields;
use crate::model::family::{Defaults, Family, HeadNorms, InGguf, Keys, Parts};

pub(super) static FAMILY: Family = Family {
    model_type: "gemma3_text",
    class: "Gemma3",
    keys: KEYS,
    parts: PARTS,
    gguf: InGguf { wide_scores: Some(62), ..InGguf::plain("gemma3") },
};

const KEYS: Keys = Keys {
    score_class: "TextForSequenceClassification",
    defaults: Defaults { max_positions: 131_072, rope_theta: 1e6, ..gemma2::KEYS.defaults },
    own: &[
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "sliding_window",
        "layer_types",
        "rope_local_base_freq",
    ],
    read,
    ..gemma2::KEYS
};

const PARTS: Parts = Parts {
    head_norms: Some(HeadNorms { query: "self_attn.q_norm", key: "self_attn.k_norm", whole_width: false }),
    ..gemma2::PARTS
};

fn read(fields: &mut Fields<'_>, config: &mut ModelConfig) {
    gemma2::read_caps(fields, config, [None, None]);
    let pattern = fields.optional_size("sliding_window_pattern").unwrap_or(6).max(1);
    fields.read_window(config, Some(4096), |layer| !(layer + 1).is_multiple_of(pattern));
    config.local_rope = Some(fields.local_rope(10_000.0));
}
