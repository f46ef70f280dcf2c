//! Configurations as the hub has them, of one published model of each family: they are read, and count the
//! parameters that the model has.

use aligner_core::model::{MODEL_TYPES, ModelConfig};
use serde_json::{Value, json};

fn published() -> Vec<(&'static str, Value, usize, usize)> {
    let rows = vec![
        (
            "TinyLlama-1.1B",
            json!({
                "architectures": ["LlamaForCausalLM"], "attention_bias": false, "hidden_act": "silu",
                "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 2048,
                "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 22,
                "num_key_value_heads": 4, "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_scaling": null,
                "tie_word_embeddings": false, "vocab_size": 32000,
            }),
            1_100_048_384,
        ),
        (
            "Qwen2.5-0.5B",
            json!({
                "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu",
                "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
                "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
                "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
                "rope_theta": 1_000_000.0, "sliding_window": 32768, "tie_word_embeddings": true,
                "use_mrope": false, "use_sliding_window": false, "vocab_size": 151_936,
            }),
            494_032_768,
        ),
        (
            "Qwen3-0.6B",
            json!({
                "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "head_dim": 128,
                "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
                "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
                "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
                "rms_norm_eps": 1e-6, "rope_scaling": null, "rope_theta": 1_000_000, "sliding_window": null,
                "tie_word_embeddings": true, "use_sliding_window": false, "vocab_size": 151_936,
            }),
            596_049_920,
        ),
        (
            "Mistral-7B-v0.1",
            json!({
                "architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
                "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
                "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
                "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 4096,
                "tie_word_embeddings": false, "vocab_size": 32000,
            }),
            7_241_732_096,
        ),
        (
            "gemma-2-2b",
            json!({
                "architectures": ["Gemma2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
                "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid",
                "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
                "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "intermediate_size": 9216,
                "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8,
                "num_hidden_layers": 26, "num_key_value_heads": 4, "query_pre_attn_scalar": 256,
                "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 256_000,
            }),
            2_614_341_888,
        ),
        (
            "gemma-3-1b-it",
            json!({
                "architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
                "attn_logit_softcapping": null, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
                "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
                "hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768,
                "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26,
                "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
                "rope_local_base_freq": 10000, "rope_scaling": null, "rope_theta": 1_000_000,
                "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262_144,
            }),
            999_885_952,
        ),
        (
            "gpt2",
            json!({
                "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
                "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "layer_norm_epsilon": 1e-5,
                "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
                "n_positions": 1024, "resid_pdrop": 0.1, "summary_first_dropout": 0.1, "vocab_size": 50257,
            }),
            124_439_808,
        ),
        (
            "Phi-3-mini-4k",
            json!({
                "architectures": ["Phi3ForCausalLM"], "attention_dropout": 0.0, "embd_pdrop": 0.0,
                "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192,
                "max_position_embeddings": 4096, "model_type": "phi3", "num_attention_heads": 32,
                "num_hidden_layers": 32, "num_key_value_heads": 32, "original_max_position_embeddings": 4096,
                "resid_pdrop": 0.0, "rms_norm_eps": 1e-5, "rope_scaling": null, "rope_theta": 10000.0,
                "sliding_window": 2047, "tie_word_embeddings": false, "vocab_size": 32064,
            }),
            3_821_079_552,
        ),
        (
            "OLMo-2-0425-1B",
            json!({
                "architectures": ["Olmo2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
                "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192,
                "max_position_embeddings": 4096, "model_type": "olmo2", "num_attention_heads": 16,
                "num_hidden_layers": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-6, "rope_scaling": null,
                "rope_theta": 500_000, "tie_word_embeddings": false, "vocab_size": 100_352,
            }),
            1_484_916_736,
        ),
    ];
    let dense = rows.into_iter().map(|(name, config, count)| (name, config, count, count));
    dense.chain(mixtures()).collect()
}

fn mixtures() -> Vec<(&'static str, Value, usize, usize)> {
    vec![
        (
            "Mixtral-8x7B-v0.1",
            json!({
                "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu",
                "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
                "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
                "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
                "output_router_logits": false, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0,
                "router_aux_loss_coef": 0.02, "sliding_window": null, "tie_word_embeddings": false,
                "vocab_size": 32000,
            }),
            46_702_792_704,
            12_879_925_248,
        ),
        (
            "Qwen1.5-MoE-A2.7B",
            json!({
                "architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "decoder_sparse_step": 1,
                "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5632,
                "max_position_embeddings": 8192, "max_window_layers": 21, "model_type": "qwen2_moe",
                "moe_intermediate_size": 1408, "norm_topk_prob": false, "num_attention_heads": 16,
                "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24,
                "num_key_value_heads": 16, "output_router_logits": false, "rms_norm_eps": 1e-6,
                "rope_theta": 1_000_000.0, "router_aux_loss_coef": 0.001,
                "shared_expert_intermediate_size": 5632, "sliding_window": 32768,
                "tie_word_embeddings": false, "use_sliding_window": false, "vocab_size": 151_936,
            }),
            14_315_784_192,
            2_689_173_504,
        ),
        (
            "Qwen3-30B-A3B",
            json!({
                "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
                "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
                "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
                "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
                "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128,
                "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
                "output_router_logits": false, "rms_norm_eps": 1e-6, "rope_scaling": null,
                "rope_theta": 1_000_000.0, "router_aux_loss_coef": 0.001, "sliding_window": null,
                "tie_word_embeddings": false, "use_sliding_window": false, "vocab_size": 151_936,
            }),
            30_532_122_624,
            3_353_032_704,
        ),
    ]
}

#[test]
fn published_models_have_their_published_sizes() {
    let mut seen = Vec::new();
    for (name, json, count, active) in published() {
        let config = ModelConfig::from_json(name.as_ref(), &json).unwrap();
        assert_eq!((config.num_params(), config.num_active_params()), (count, active), "{name}");
        seen.push(config.model_type());
    }
    assert!(MODEL_TYPES.iter().all(|known| seen.contains(known)), "{seen:?}");
}

#[test]
fn windows_and_local_layers_are_where_the_families_have_them() {
    let read = |name: &str| {
        let (_, json, ..) = published().into_iter().find(|(own, ..)| *own == name).unwrap();
        ModelConfig::from_json(name.as_ref(), &json).unwrap()
    };
    let local = |name: &str| read(name).local_layers.iter().filter(|local| **local).count();
    assert_eq!((read("gemma-2-2b").window, local("gemma-2-2b")), (Some(4096), 13));
    // Every sixth layer of 26 sees all.
    assert_eq!((read("gemma-3-1b-it").window, local("gemma-3-1b-it")), (Some(512), 22));
    assert_eq!((read("Mistral-7B-v0.1").window, local("Mistral-7B-v0.1")), (Some(4096), 32));
    assert_eq!((local("Qwen2.5-0.5B"), local("Mixtral-8x7B-v0.1")), (0, 0));
    let gemma = read("gemma-3-1b-it");
    assert_eq!((gemma.rope.theta, gemma.local_rope.unwrap().theta), (1e6, 1e4));
    assert!((gemma.attention_shape().scale - 1.0 / 16.0).abs() < 1e-7 && gemma.attention_softcap.is_none());
}
