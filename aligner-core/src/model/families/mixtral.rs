//! Mixtral: Mistral with mixtures of experts (Jiang et al. 2024, arXiv:2401.04088).

use super::{llama, mistral};
use crate::model::config::Fields;
use crate::model::family::{Defaults, ExpertNames, Family, Keys, Parts};
use crate::model::{ExpertsConfig, ModelConfig};

pub(super) static FAMILY: Family =
    Family { model_type: "mixtral", class: "Mixtral", keys: KEYS, parts: PARTS, gguf: llama::GGUF };

const KEYS: Keys = Keys {
    defaults: Defaults { norm_epsilon: 1e-5, rope_theta: 1e6, ..mistral::KEYS.defaults },
    own: &["sliding_window", "num_local_experts", "num_experts_per_tok"],
    read,
    ..mistral::KEYS
};

const PARTS: Parts = Parts {
    experts: Some(ExpertNames {
        router: "block_sparse_moe.gate",
        experts: "block_sparse_moe.experts",
        linears: ["w1", "w3", "w2"],
        shared: None,
    }),
    ..llama::PARTS
};

fn read(fields: &mut Fields<'_>, config: &mut ModelConfig) {
    fields.read_window(config, None, |_| true);
    config.experts = Some(ExpertsConfig {
        count: fields.size("num_local_experts"),
        per_token: fields.optional_size("num_experts_per_tok").unwrap_or(2),
        intermediate_size: config.intermediate_size,
        normalized: true,
        shared_intermediate_size: None,
        dense_layers: Vec::new(),
        balance_loss: fields.balance_loss(),
    });
}
