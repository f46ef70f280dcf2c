//! Qwen 1.5 and 2 with mixtures of experts, and one expert that every token has (Yang et al. 2024,
//! arXiv:2407.10671).

use super::{llama, qwen2};
use crate::model::config::Fields;
use crate::model::family::{ExpertNames, Family, InGguf, Keys, Parts, SharedNames};
use crate::model::{ExpertsConfig, ModelConfig};

pub(super) static FAMILY: Family = Family {
    model_type: "qwen2_moe",
    class: "Qwen2Moe",
    keys: KEYS,
    parts: PARTS,
    gguf: InGguf { flags: &[("norm_topk_prob", false)], ..InGguf::plain("qwen2moe") },
};

const KEYS: Keys = Keys { own: OWN, read, ..qwen2::KEYS };

/// The keys of Qwen's mixtures, beside those of its dense models.
pub(super) const OWN: &[&str] = &[
    "qkv_bias",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "shared_expert_intermediate_size",
];

pub(super) const EXPERTS: ExpertNames = ExpertNames {
    router: "mlp.gate",
    experts: "mlp.experts",
    linears: ["gate_proj", "up_proj", "down_proj"],
    shared: Some(SharedNames {
        linears: ["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"],
        opening: "mlp.shared_expert_gate",
    }),
};

const PARTS: Parts = Parts { experts: Some(EXPERTS), ..llama::PARTS };

fn read(fields: &mut Fields<'_>, config: &mut ModelConfig) {
    config.attention_bias = fields.get("qkv_bias").is_none() || fields.flag("qkv_bias");
    let last = fields.optional_size("max_window_layers").unwrap_or(28);
    if fields.flag("use_sliding_window") {
        fields.read_window(config, Some(4096), |layer| layer % 2 == 0 && layer < last);
    }
    read_experts(fields, config);
    if let Some(experts) = &mut config.experts {
        experts.shared_intermediate_size = Some(fields.size("shared_expert_intermediate_size"));
    }
}

/// Experts in every `decoder_sparse_step`-th layer that is not one of `mlp_only_layers`.
pub(super) fn read_experts(fields: &mut Fields<'_>, config: &mut ModelConfig) {
    // transformers writes the second spelling for some of the families.
    let key = if fields.get("num_experts").is_some() { "num_experts" } else { "num_local_experts" };
    let count = fields.size(key);
    let (step, only) = (fields.optional_size("decoder_sparse_step").unwrap_or(1).max(1), "mlp_only_layers");
    let dense = fields.sizes(only);
    let is_dense = |layer: usize| dense.contains(&layer) || !(layer + 1).is_multiple_of(step);
    config.experts = Some(ExpertsConfig {
        count,
        per_token: fields.size("num_experts_per_tok"),
        intermediate_size: fields.size("moe_intermediate_size"),
        normalized: fields.flag("norm_topk_prob"),
        shared_intermediate_size: None,
        dense_layers: config.by_layer(is_dense),
        balance_loss: fields.balance_loss(),
    });
}
