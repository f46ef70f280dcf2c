//! The metadata of a GGUF file, of a configuration.

use super::expert_sizes;
use crate::model::config::ModelConfig;
use crate::weights::GgufValue;

/// Keys with their values, in the order of a file.
pub(crate) type Metadata = Vec<(String, GgufValue)>;

impl ModelConfig {
    /// What a GGUF file says of a model, its tokenizer left out. It need not be all that the configuration says:
    /// [`ModelConfig::unlike`] compares the two.
    pub(crate) fn gguf_metadata(&self) -> Metadata {
        let family = self.family;
        let architecture = family.gguf.architecture;
        let mut metadata = vec![("general.architecture".into(), GgufValue::Text(architecture.into()))];
        let mut put = |key: &str, value: GgufValue| metadata.push((format!("{architecture}.{key}"), value));
        let size = |size: usize| GgufValue::Integer(size as i64);
        let real = |value: f32| GgufValue::Float(value.into());
        let has = |key: &str| !family.keys.absent.contains(&key);
        let owns = |key: &str| family.keys.own.contains(&key);
        put("vocab_size", size(self.vocab_size));
        put("context_length", size(self.max_positions));
        put("embedding_length", size(self.hidden_size));
        put("block_count", size(self.num_layers));
        put("feed_forward_length", size(self.intermediate_size));
        put("attention.head_count", size(self.num_heads));
        if has("num_key_value_heads") {
            put("attention.head_count_kv", size(self.num_kv_heads));
        }
        if has("head_dim") {
            put("attention.key_length", size(self.head_dim));
            put("attention.value_length", size(self.head_dim));
        }
        put(family.gguf_epsilon(), real(self.rms_norm_eps));
        if family.parts.rotary {
            put("rope.dimension_count", size(self.head_dim));
            put("rope.freq_base", real(self.rope.theta));
        }
        if let Some(scaling) = self.rope.scaling {
            put("rope.scaling.original_context_length", size(scaling.original_max_positions));
        }
        if let Some(local) = &self.local_rope {
            put("rope.freq_base_swa", real(local.theta));
        }
        if owns("sliding_window") && !owns("use_sliding_window") {
            put("attention.sliding_window", size(self.window.unwrap_or(0)));
            if owns("layer_types") && self.window.is_some() {
                put("attention.sliding_window_pattern", pattern(&self.local_layers));
            }
        }
        let caps = [self.attention_softcap, self.logit_softcap];
        for (key, cap) in ["attn_logit_softcapping", "final_logit_softcapping"].into_iter().zip(caps) {
            if let Some(cap) = cap {
                put(key, real(cap));
            }
        }
        for (key, own) in expert_sizes(family) {
            if let Some(value) = self.expert_size(own) {
                put(key, size(value));
            }
        }
        metadata
    }

    fn expert_size(&self, key: &str) -> Option<usize> {
        let experts = self.experts.as_ref()?;
        match key {
            "num_experts_per_tok" => Some(experts.per_token),
            "moe_intermediate_size" => Some(experts.intermediate_size),
            "shared_expert_intermediate_size" => experts.shared_intermediate_size,
            _ => Some(experts.count),
        }
    }

    /// Keys of `config.json` whose values change what a model computes, and that differ in `other`.
    pub fn unlike(&self, other: &Self) -> Vec<&'static str> {
        let experts = |config: &Self| {
            let mut experts = config.experts.clone();
            // It is for training, and no part of what is computed.
            if let Some(experts) = &mut experts {
                experts.balance_loss = None;
                if !experts.dense_layers.contains(&true) {
                    experts.dense_layers.clear();
                }
            }
            experts
        };
        let [local, other_local] = [self, other]
            .map(|config| (0..config.num_layers.min(1 << 14)).map(|layer| config.is_local(layer)));
        let window = |config: &Self| config.window.filter(|_| config.local_layers.contains(&true));
        let alike = [
            ("vocab_size", self.vocab_size == other.vocab_size),
            ("hidden_size", self.hidden_size == other.hidden_size),
            ("intermediate_size", self.intermediate_size == other.intermediate_size),
            ("num_hidden_layers", self.num_layers == other.num_layers),
            ("num_attention_heads", self.num_heads == other.num_heads),
            ("num_key_value_heads", self.num_kv_heads == other.num_kv_heads),
            ("head_dim", self.head_dim == other.head_dim),
            ("max_position_embeddings", self.max_positions == other.max_positions),
            ("rms_norm_eps", self.rms_norm_eps.to_bits() == other.rms_norm_eps.to_bits()),
            ("rope_parameters", self.rope == other.rope && self.local_rope == other.local_rope),
            ("sliding_window", window(self) == window(other)),
            ("layer_types", local.eq(other_local)),
            (
                "query_pre_attn_scalar",
                self.attention_shape().scale.to_bits() == other.attention_shape().scale.to_bits(),
            ),
            ("attn_logit_softcapping", self.attention_softcap == other.attention_softcap),
            ("final_logit_softcapping", self.logit_softcap == other.logit_softcap),
            ("num_experts, norm_topk_prob, mlp_only_layers or decoder_sparse_step", {
                experts(self) == experts(other)
            }),
            ("tie_word_embeddings", self.tie_embeddings == other.tie_embeddings),
            ("attention_bias", self.attention_bias == other.attention_bias),
            ("attention_bias", self.output_bias == other.output_bias),
            ("mlp_bias", self.mlp_bias == other.mlp_bias),
            ("num_labels", self.num_labels == other.num_labels),
        ];
        alike.into_iter().filter(|(_, alike)| !alike).map(|(key, _)| key).collect()
    }
}

/// The layers with a window: every so many layers one has none, or a flag for each.
fn pattern(local: &[bool]) -> GgufValue {
    let is = |period: usize| local.iter().enumerate().all(|(layer, &is)| is == (layer % period < period - 1));
    match (1..=local.len() + 1).find(|&period| is(period)) {
        Some(period) => GgufValue::Integer(period as i64),
        None => GgufValue::Flags(local.to_vec()),
    }
}
