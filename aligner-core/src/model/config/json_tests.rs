use super::*;

fn minimal() -> Value {
    json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 320,
        "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4
    })
}

fn with(changes: &Value) -> Value {
    let mut value = minimal();
    let changes = changes.as_object().unwrap().clone();
    value.as_object_mut().unwrap().extend(changes);
    value
}

fn read_config(changes: &Value) -> Result<ModelConfig> {
    ModelConfig::from_json(Path::new("config.json"), &with(changes))
}

fn message(changes: &Value) -> String {
    read_config(changes).unwrap_err().to_string()
}

#[test]
fn absent_keys_take_the_defaults_of_transformers() {
    let config = read_config(&json!({})).unwrap();
    assert_eq!((config.num_kv_heads, config.head_dim, config.max_positions), (4, 12, 2048));
    assert_eq!(config.rope, RopeConfig { theta: 10_000.0, scaling: None });
    assert!(!config.tie_embeddings && config.eos_token_ids.is_empty());
}

#[test]
fn unknown_model_type_names_the_known_ones() {
    let message = message(&json!({"model_type": "mamba"}));
    assert!(message.contains("\"mamba\"") && message.contains("llama"), "{message}");
}

#[test]
fn all_problems_come_in_one_message() {
    let message = message(&json!({
        "vocab_size": "many", "hidden_act": "gelu", "num_hidden_layers": 0,
        "rope_scaling": {"type": "yarn", "factor": 4.0}, "num_key_value_heads": 3
    }));
    for part in
        ["config.json", "vocab_size", "hidden_act", "num_hidden_layers", "yarn", "num_key_value_heads"]
    {
        assert!(message.contains(part), "{part} is not in: {message}");
    }
}

#[test]
fn settings_that_change_the_mathematics_are_refused_and_harmless_ones_ignored() {
    for changes in [
        json!({"pretraining_tp": 2}),
        json!({"attention_dropout": 0.1}),
        json!({"quantization_config": {"quant_method": "gptq"}}),
        json!({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
        json!({"architectures": ["LlamaForTokenClassification"]}),
        json!({"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    ] {
        assert!(read_config(&changes).is_err(), "{changes}");
    }
    let harmless = json!({"pretraining_tp": 1, "use_cache": false, "attention_dropout": 0, "whatever": 7});
    assert!(read_config(&harmless).is_ok());
}

#[test]
fn what_is_written_of_a_quantised_configuration_is_plain() {
    let fp8 = json!({"quant_method": "fp8", "weight_block_size": [128, 128]});
    let config = read_config(&json!({"quantization_config": fp8, "whatever": 7})).unwrap();
    let written = config.to_json();
    assert_eq!((written.get("quantization_config"), &written["whatever"]), (None, &json!(7)));
    let message = message(&json!({"quantization_config": {"quant_method": "awq"}, "num_hidden_layers": 0}));
    assert!(message.contains("\"awq\"") && message.contains("num_hidden_layers"), "{message}");
}

#[test]
fn end_tokens_may_be_one_many_or_none() {
    let eos = |value: Value| read_config(&json!({"eos_token_id": value})).unwrap().eos_token_ids;
    assert_eq!(eos(json!(2)), [2]);
    assert_eq!(eos(json!([2, 5])), [2, 5]);
    assert_eq!(eos(json!(null)), [] as [u32; 0]);
    assert!(message(&json!({"eos_token_id": "x"})).contains("eos_token_id"));
}

#[test]
fn classifier_without_labels_has_the_default_two() {
    let labels = |changes: Value| read_config(&changes).unwrap().num_labels;
    let architectures = json!(["LlamaForSequenceClassification"]);
    assert_eq!(labels(json!({"architectures": architectures})), Some(2));
    let one = json!({"architectures": architectures, "id2label": {"0": "LABEL_0"}});
    assert_eq!(labels(one), Some(1));
}

#[test]
fn written_configuration_reads_back_with_unknown_keys_kept() {
    let scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32});
    let config = read_config(
        &json!({"rope_scaling": scaling, "rope_theta": 5e5, "whatever": 7, "rms_norm_eps": 1e-5}),
    )
    .unwrap();
    let written = config.to_json();
    assert_eq!(written["whatever"], 7);
    assert_eq!(written["rms_norm_eps"], json!(1e-5));
    assert_eq!(written["rope_parameters"]["rope_theta"], json!(5e5));
    assert_eq!(written["rope_scaling"]["factor"], json!(8.0));
    let again = ModelConfig::from_json(Path::new("again"), &written).unwrap();
    assert_eq!(ModelConfig { extra: Value::Null, ..again }, ModelConfig { extra: Value::Null, ..config });
}

#[test]
fn new_scalar_head_is_written_with_its_labels() {
    let config = ModelConfig { num_labels: Some(3), ..read_config(&json!({})).unwrap() };
    let written = config.to_json();
    assert_eq!(written["architectures"], json!(["LlamaForSequenceClassification"]));
    assert_eq!(ModelConfig::from_json(Path::new("x"), &written).unwrap().num_labels, Some(3));
    let back = ModelConfig { num_labels: None, ..config };
    assert_eq!(ModelConfig::from_json(Path::new("x"), &back.to_json()).unwrap().num_labels, None);
}
