//! Phi 3: Llama with one linear for queries, keys and values, and one for the gate and what it gates (Abdin et
//! al. 2024, arXiv:2404.14219).

use super::{llama, mistral};
use crate::model::ModelConfig;
use crate::model::config::Fields;
use crate::model::family::{Defaults, Family, InGguf, Keys, MlpNames, Parts, Qkv};

pub(super) static FAMILY: Family =
    Family { model_type: "phi3", class: "Phi3", keys: KEYS, parts: PARTS, gguf: InGguf::plain("phi3") };

const KEYS: Keys = Keys {
    defaults: Defaults { norm_epsilon: 1e-5, max_positions: 4096, ..llama::KEYS.defaults },
    read: |fields: &mut Fields<'_>, config: &mut ModelConfig| fields.read_window(config, None, |_| true),
    ..mistral::KEYS
};

const PARTS: Parts = Parts {
    qkv: Qkv::Fused("self_attn.qkv_proj"),
    mlp: MlpNames::Fused(["mlp.gate_up_proj", "mlp.down_proj"]),
    ..llama::PARTS
};
