//! Qwen 3 with mixtures of experts (Yang et al. 2025, arXiv:2505.09388).

use super::{qwen2_moe, qwen3};
use crate::model::ModelConfig;
use crate::model::config::Fields;
use crate::model::family::{ExpertNames, Family, InGguf, Keys, Parts};

pub(super) static FAMILY: Family = Family {
    model_type: "qwen3_moe",
    class: "Qwen3Moe",
    keys: KEYS,
    parts: PARTS,
    gguf: InGguf { flags: &[("norm_topk_prob", true)], ..InGguf::plain("qwen3moe") },
};

const KEYS: Keys = Keys { own: qwen2_moe::OWN, read, ..qwen3::KEYS };

const PARTS: Parts =
    Parts { experts: Some(ExpertNames { shared: None, ..qwen2_moe::EXPERTS }), ..qwen3::PARTS };

fn read(fields: &mut Fields<'_>, config: &mut ModelConfig) {
    if fields.flag("use_sliding_window") {
        fields.read_window(config, Some(4096), |_| true);
    }
    qwen2_moe::read_experts(fields, config);
}
