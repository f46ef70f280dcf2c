//! The Llama family: `RMSNorm`, rotary positions, grouped-query attention, `SwiGLU` (Touvron et al. 2023,
//! arXiv:2302.13971).

use crate::model::exec::NormKind;
use crate::model::family::{Around, Defaults, Family, InGguf, Keys, MlpNames, Parts, Qkv};
use crate::ops::Activation;

pub(super) static FAMILY: Family =
    Family { model_type: "llama", class: "Llama", keys: KEYS, parts: PARTS, gguf: GGUF };

/// Mistral and Mixtral are of this architecture too.
pub(super) const GGUF: InGguf = InGguf { interleaved: true, ..InGguf::plain("llama") };

pub(super) const KEYS: Keys = Keys {
    language_class: "ForCausalLM",
    score_class: "ForSequenceClassification",
    defaults: Defaults {
        norm_epsilon: 1e-6,
        max_positions: 2048,
        rope_theta: 10_000.0,
        head_dim: None,
        tie_embeddings: false,
    },
    spelling: &[],
    absent: &[],
    own: &[],
    read: |_, _| {},
};

pub(super) const PARTS: Parts = Parts {
    base: "model",
    embedding: "embed_tokens",
    scaled_embedding: false,
    positions: None,
    rotary: true,
    layers: "layers",
    last_norm: "norm",
    norm: NormKind::Rms,
    attention_norms: Around { before: Some("input_layernorm"), after: None },
    qkv: Qkv::Apart(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    head_norms: None,
    output: "self_attn.o_proj",
    mlp_norms: Around { before: Some("post_attention_layernorm"), after: None },
    mlp: MlpNames::Gated(["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]),
    experts: None,
    activation: Activation::Silu,
    transposed: false,
    buffers: &["rotary_emb.inv_freq"],
};
