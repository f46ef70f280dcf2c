//! Gemma 2: norms before and after each block, capped scores and logits, and windows in every second layer
//! (Gemma Team 2024, arXiv:2408.00118).

use super::llama;
use crate::model::ModelConfig;
use crate::model::config::Fields;
use crate::model::exec::NormKind;
use crate::model::family::{Around, Defaults, Family, InGguf, Keys, Parts};
use crate::ops::Activation;

pub(super) static FAMILY: Family = Family {
    model_type: "gemma2",
    class: "Gemma2",
    keys: KEYS,
    parts: PARTS,
    gguf: InGguf { wide_scores: Some(46), ..InGguf::plain("gemma2") },
};

pub(super) const KEYS: Keys = Keys {
    defaults: Defaults {
        max_positions: 8192,
        head_dim: Some(256),
        tie_embeddings: true,
        ..llama::KEYS.defaults
    },
    spelling: &[("hidden_act", "hidden_activation")],
    absent: &["mlp_bias"],
    own: &[
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "sliding_window",
        "layer_types",
    ],
    read: |fields: &mut Fields<'_>, config: &mut ModelConfig| {
        read_caps(fields, config, [Some(50.0), Some(30.0)]);
        fields.read_window(config, Some(4096), |layer| layer % 2 == 0);
    },
    ..llama::KEYS
};

pub(super) const PARTS: Parts = Parts {
    scaled_embedding: true,
    norm: NormKind::RmsPlusOne,
    attention_norms: Around { before: Some("input_layernorm"), after: Some("post_attention_layernorm") },
    mlp_norms: Around {
        before: Some("pre_feedforward_layernorm"),
        after: Some("post_feedforward_layernorm"),
    },
    activation: Activation::GeluTanh,
    ..llama::PARTS
};

/// The scale of scores, and the caps on scores and logits with what they are in a file that does not speak of
/// them.
pub(super) fn read_caps(
    fields: &mut Fields<'_>,
    config: &mut ModelConfig,
    [of_scores, of_logits]: [Option<f32>; 2],
) {
    let scalar = fields.optional_number("query_pre_attn_scalar").unwrap_or(256.0);
    config.attention_scale = Some(1.0 / scalar.sqrt());
    config.attention_softcap = fields.stated_number("attn_logit_softcapping", of_scores);
    config.logit_softcap = fields.stated_number("final_logit_softcapping", of_logits);
}
