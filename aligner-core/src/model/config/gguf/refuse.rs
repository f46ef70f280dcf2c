//! Keys of GGUF that change the mathematics in a way that a family lacks.

use super::Keys;
use crate::Result;

/// Numbers that leave the model alone at 0.
const NEUTRAL_AT_ZERO: [&str; 9] = [
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.shared_kv_layers",
    "attention.q_lora_rank",
    "attention.kv_lora_rank",
    "router_logit_softcapping",
    "leading_dense_block_count",
    "nextn_predict_layers",
    "altup.num_inputs",
];

/// Numbers that leave the model alone at 1. Without `rope.scaling.type`, llama.cpp takes the factor for a linear
/// scaling's; 1 of the gates' functions is the softmax.
const NEUTRAL_AT_ONE: [&str; 10] = [
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "attention.output_scale",
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "expert_weights_scale",
    "expert_group_count",
    "expert_gating_func",
];

impl Keys<'_> {
    fn refuse_unless(&mut self, key: &str, neutral: f32) -> Result<()> {
        let full = self.full(key);
        if let Some(value) = self.file.number(&full)?
            && value.to_bits() != neutral.to_bits()
        {
            self.problems.push(format!("key {full}: {value} changes the model; only {neutral} is supported"));
        }
        Ok(())
    }

    fn refuse_unless_flag(&mut self, key: &str, neutral: bool) -> Result<()> {
        let full = self.full(key);
        if self.file.flag(&full)?.is_some_and(|flag| flag != neutral) {
            let message = format!("key {full}: {} changes the model; only {neutral} is supported", !neutral);
            self.problems.push(message);
        }
        Ok(())
    }

    pub(super) fn refuse_changed_mathematics(&mut self) -> Result<()> {
        NEUTRAL_AT_ZERO.into_iter().try_for_each(|key| self.refuse_unless(key, 0.0))?;
        NEUTRAL_AT_ONE.into_iter().try_for_each(|key| self.refuse_unless(key, 1.0))?;
        self.refuse_what_others_have()?;
        self.refuse_unless_flag("attention.causal", true)?;
        self.refuse_unless_flag("use_parallel_residual", false)?;
        if self.family.parts.experts.is_some() {
            let flags = self.family.gguf.flags;
            let normalized = flags.iter().find(|(key, _)| *key == "norm_topk_prob").is_none_or(|(_, is)| *is);
            self.refuse_unless_flag("expert_weights_norm", normalized)?;
        }
        let full = self.full("rope.scaling.type");
        if let Some(kind) = self.file.text(&full)?.filter(|&kind| kind != "none") {
            let known = "known are \"none\", and Llama 3's in the tensor rope_freqs.weight";
            self.problems.push(format!("key {full}: {kind:?} is not supported; {known}"));
        }
        let full = self.full("rope.dimension_sections");
        if self.file.value(&full).is_some() {
            self.problems.push(format!("key {full}: rotation by sections is not supported"));
        }
        Ok(())
    }

    /// What some of the families have and this one does not.
    fn refuse_what_others_have(&mut self) -> Result<()> {
        if self.family.parts.experts.is_none() {
            self.refuse_unless("expert_count", 0.0)?;
        }
        // Of Qwen's windows, files do not say which layers have them.
        if !self.owns("sliding_window") || self.owns("use_sliding_window") {
            self.refuse_unless("attention.sliding_window", 0.0)?;
        }
        for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
            if !self.owns(key) {
                self.refuse_unless(key, 0.0)?;
            }
        }
        if !self.owns("query_pre_attn_scalar") {
            self.refuse_unless("attention.scale", 0.0)?;
        }
        if !self.owns("rope_local_base_freq") {
            let theta = self.file.number(&self.full("rope.freq_base"))?.unwrap_or(10_000.0);
            self.refuse_unless("rope.freq_base_swa", theta)?;
        }
        Ok(())
    }
}
