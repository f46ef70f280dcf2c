//! GPT-2: `LayerNorm`, learned positions, and linears that files have as `[in, out]` (Radford et al. 2019).
//!
//! What its files say of dropout is left out: fine-tuning here has none but an adapter's.

use super::llama;
use crate::model::ModelConfig;
use crate::model::config::Fields;
use crate::model::exec::NormKind;
use crate::model::family::{Around, Defaults, Family, InGguf, Keys, MlpNames, Parts, Qkv};
use crate::ops::Activation;

pub(super) static FAMILY: Family =
    Family { model_type: "gpt2", class: "GPT2", keys: KEYS, parts: PARTS, gguf: InGguf::plain("gpt2") };

const KEYS: Keys = Keys {
    language_class: "LMHeadModel",
    defaults: Defaults {
        norm_epsilon: 1e-5,
        max_positions: 1024,
        tie_embeddings: true,
        ..llama::KEYS.defaults
    },
    spelling: &[
        ("hidden_size", "n_embd"),
        ("intermediate_size", "n_inner"),
        ("num_hidden_layers", "n_layer"),
        ("num_attention_heads", "n_head"),
        ("hidden_act", "activation_function"),
        ("max_position_embeddings", "n_positions"),
        ("rms_norm_eps", "layer_norm_epsilon"),
    ],
    absent: &["num_key_value_heads", "head_dim", "intermediate_size", "attention_bias", "mlp_bias"],
    own: &["attn_pdrop", "resid_pdrop", "embd_pdrop"],
    read: |fields: &mut Fields<'_>, config: &mut ModelConfig| {
        let width = fields.optional_size("intermediate_size");
        config.intermediate_size = width.unwrap_or(config.hidden_size.saturating_mul(4));
        (config.attention_bias, config.output_bias, config.mlp_bias) = (true, true, true);
    },
    ..llama::KEYS
};

const PARTS: Parts = Parts {
    base: "transformer",
    embedding: "wte",
    scaled_embedding: false,
    positions: Some("wpe"),
    rotary: false,
    layers: "h",
    last_norm: "ln_f",
    norm: NormKind::Layer,
    attention_norms: Around { before: Some("ln_1"), after: None },
    qkv: Qkv::Fused("attn.c_attn"),
    head_norms: None,
    output: "attn.c_proj",
    mlp_norms: Around { before: Some("ln_2"), after: None },
    mlp: MlpNames::Plain(["mlp.c_fc", "mlp.c_proj"]),
    experts: None,
    activation: Activation::GeluTanh,
    transposed: true,
    // The causal mask, and what it masks with.
    buffers: &[".attn.bias", ".attn.masked_bias"],
};
