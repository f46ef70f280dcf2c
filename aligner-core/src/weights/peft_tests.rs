use std::fs;
use std::sync::Arc;

use serde_json::json;

use super::*;
use crate::model::CausalLm;
use crate::ops::host::to_vec;
use crate::{Device, Policy as _};
use burn::tensor::Tensor;

fn model(layers: usize) -> CausalLm {
    let json = json!({
        "model_type": "llama", "vocab_size": 10, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
    });
    CausalLm::init(ModelConfig::from_json("tiny".as_ref(), &json).unwrap(), 1, &Device::flex()).unwrap()
}

fn config() -> LoraConfig {
    LoraConfig {
        r: 3,
        alpha: 4.5,
        targets: Targets::Names(vec!["q_proj".into(), "layers.1.mlp.up_proj".into()]),
        rslora: true,
        dropout: 0.25,
        rank_pattern: vec![("up_proj".into(), 2)],
        alpha_pattern: vec![("up_proj".into(), 6.0)],
        dora: true,
        modules_to_save: Vec::new(),
    }
}

fn saved(dir: &Path) -> CausalLm {
    let model = model(2).with_adapter(config(), 3).unwrap();
    save_adapter(dir, model.config(), model.params(), "org/base", SaveDtype::F32).unwrap();
    model
}

/// Changes keys of the adapter's settings.
fn edit(dir: &Path, changes: &Value) {
    let path = dir.join(CONFIG);
    let mut value: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for (key, change) in changes.as_object().unwrap() {
        value[key] = change.clone();
    }
    fs::write(path, value.to_string()).unwrap();
}

#[test]
fn what_is_written_is_read_again() {
    let dir = tempfile::tempdir().unwrap();
    let written = saved(dir.path());
    let file = AdapterCheckpoint::open(dir.path()).unwrap();
    assert_eq!((file.base(), file.score()), (Some("org/base"), None));
    let read = model(2).with_adapter_from(&file).unwrap();
    let (one, other) = (written.config().adapter.as_ref().unwrap(), read.config().adapter.as_ref().unwrap());
    assert_eq!(one.modules, other.modules);
    for ((a, b), place) in written.params().iter().zip(read.params().iter()).zip(0..) {
        assert_eq!((&a.name, a.trainable), (&b.name, b.trainable), "{place}");
        assert_eq!(to_vec(&a.value), to_vec(&b.value), "{}", a.name);
    }
    let text = fs::read_to_string(dir.path().join(CONFIG)).unwrap();
    let json: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["target_modules"].as_array().unwrap().len(), 3, "up_proj of one layer needs whole names");
    assert_eq!(
        (json["lora_alpha"].as_f64(), json["alpha_pattern"]["up_proj"].as_i64()),
        (Some(4.5), Some(6))
    );
}

#[test]
fn a_score_head_goes_with_the_adapter() {
    let dir = tempfile::tempdir().unwrap();
    let scored = || model(2).with_score_head(1, 5).unwrap();
    let written = scored().with_adapter(config(), 3).unwrap();
    let trained: Vec<&str> =
        written.params().iter().filter(|param| param.trainable).map(|param| param.name.as_str()).collect();
    assert!(
        trained.contains(&"score.weight")
            && trained.iter().all(|name| *name == SCORE || name.contains(".lora_"))
    );
    save_adapter(dir.path(), written.config(), written.params(), "base", SaveDtype::F32).unwrap();
    let file = AdapterCheckpoint::open(dir.path()).unwrap();
    assert_eq!(file.score(), Some(vec![1, 16]));
    let other = model(2).with_score_head(1, 6).unwrap().with_adapter_from(&file).unwrap();
    let score = |model: &CausalLm| to_vec(&model.params().by_name(SCORE).unwrap().value);
    assert_eq!(score(&other), score(&written));
    let message = model(2).with_adapter_from(&file).unwrap_err().to_string();
    assert!(message.contains("the model has none"), "{message}");
}

#[test]
fn modules_that_are_trained_in_full_go_with_the_adapter_and_leave_the_base() {
    let dir = tempfile::tempdir().unwrap();
    let names = ["embed_tokens", "lm_head", "model.norm"].map(String::from);
    let settings = LoraConfig { modules_to_save: names.to_vec(), ..config() };
    let base = model(2);
    let mut written = model(2).with_adapter(settings, 3).unwrap();
    let trained = |model: &CausalLm| -> Vec<String> {
        let trained = model.params().iter().filter(|param| param.trainable && !Adapter::owns(&param.name));
        trained.map(|param| param.name.clone()).collect()
    };
    assert_eq!(trained(&written), ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]);
    for param in written.params_mut().iter_mut().filter(|param| param.trainable) {
        param.value = param.value.clone() + 0.25;
    }
    save_adapter(dir.path(), written.config(), written.params(), "base", SaveDtype::F32).unwrap();
    let file = AdapterCheckpoint::open(dir.path()).unwrap();
    let read = model(2).with_adapter_from(&file).unwrap();
    assert_eq!(trained(&read), trained(&written));
    for (a, b) in written.params().iter().zip(read.params().iter()) {
        assert_eq!(to_vec(&a.value), to_vec(&b.value), "{}", a.name);
    }
    // The reference is the base as it was; what is merged is what was trained.
    let (plain, merged) = (read.without_adapter().unwrap(), read.merged().unwrap());
    for (a, b) in base.params().iter().zip(plain.params().iter()) {
        assert_eq!(to_vec(&a.value), to_vec(&b.value), "{}", a.name);
    }
    let head = |model: &CausalLm| to_vec(&model.params().by_name("lm_head.weight").unwrap().value);
    assert_eq!(head(&merged), head(&written));
    let stored = SafetensorsFile::open(&dir.path().join(TENSORS)).unwrap();
    assert_eq!(stored.shape("base_model.model.lm_head.weight"), Some(&[10, 16][..]));
    // Names that PEFT adds for heads of other models, and a module whose tensor is not there.
    edit(dir.path(), &json!({"modules_to_save": ["embed_tokens", "lm_head", "norm", "classifier"]}));
    let message = model(2).with_adapter_from(&AdapterCheckpoint::open(dir.path()).unwrap()).unwrap_err();
    assert!(message.to_string().contains("input_layernorm.weight is missing"), "{message}");
    edit(dir.path(), &json!({"modules_to_save": ["embed_tokens", "lm_head", "model.norm", "classifier"]}));
    assert!(model(2).with_adapter_from(&AdapterCheckpoint::open(dir.path()).unwrap()).is_ok());
}

#[test]
fn what_is_not_supported_is_refused_by_its_key() {
    let dir = tempfile::tempdir().unwrap();
    for (changes, parts) in [
        (json!({"peft_type": "LOHA"}), &["peft_type: expected \"LORA\""][..]),
        (json!({"bias": "all"}), &["bias: expected \"none\""]),
        (json!({"lora_bias": true}), &["lora_bias"]),
        (json!({"fan_in_fan_out": "yes"}), &["fan_in_fan_out"]),
        (json!({"modules_to_save": "embed_tokens"}), &["modules_to_save: expected a list of names"]),
        (json!({"init_lora_weights": "pissa"}), &["init_lora_weights", "pissa"]),
        (json!({"layer_replication": [[0, 2]]}), &["layer_replication"]),
        (json!({"target_parameters": ["x"], "use_qalora": true}), &["target_parameters", "use_qalora"]),
        (json!({"a_method_of_tomorrow": {"x": 1}}), &["a_method_of_tomorrow"]),
        (json!({"r": 0}), &["r: expected a whole number, 1 or more, got 0"]),
        (json!({"lora_alpha": "8"}), &["lora_alpha: expected a number"]),
        (json!({"lora_alpha": 1e300}), &["lora_alpha: expected a number"]),
        (json!({"target_modules": [1]}), &["target_modules: expected a list of names"]),
        (json!({"rank_pattern": {".*_proj": 2}}), &["rank_pattern: `.*_proj`: only names are read"]),
    ] {
        saved(dir.path());
        edit(dir.path(), &changes);
        let message = AdapterCheckpoint::open(dir.path()).unwrap_err().to_string();
        assert!(message.contains(CONFIG), "{message}");
        for part in parts {
            assert!(message.contains(part), "no `{part}` in: {message}");
        }
    }
    saved(dir.path());
    let idle =
        json!({"a_method_of_tomorrow": null, "qalora_group_size": 16, "megatron_core": "megatron.core"});
    edit(dir.path(), &idle);
    assert!(AdapterCheckpoint::open(dir.path()).is_ok());
    saved(dir.path());
    edit(dir.path(), &json!({"fan_in_fan_out": true}));
    let file = AdapterCheckpoint::open(dir.path()).unwrap();
    let message = model(2).with_adapter_from(&file).unwrap_err().to_string();
    assert!(message.contains("fan_in_fan_out") && message.contains(CONFIG), "{message}");
}

#[test]
fn an_adapter_of_another_base_is_refused_by_its_linear() {
    let dir = tempfile::tempdir().unwrap();
    saved(dir.path());
    let refused = |model: CausalLm| {
        model.with_adapter_from(&AdapterCheckpoint::open(dir.path()).unwrap()).unwrap_err().to_string()
    };
    let message = refused(model(1));
    for part in ["model.layers.1.", "has 1 layers", "another base"] {
        assert!(message.contains(part), "{message}");
    }
    let json = json!({
        "model_type": "llama", "vocab_size": 10, "hidden_size": 32, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
    });
    let wide = ModelConfig::from_json("wide".as_ref(), &json).unwrap();
    let message = refused(CausalLm::init(wide, 1, &Device::flex()).unwrap());
    assert!(
        message.contains("q_proj.lora_A.weight") && message.contains("[3, 32], got [3, 16]"),
        "{message}"
    );
    edit(dir.path(), &json!({"r": 4}));
    assert!(refused(model(2)).contains("for rank 4"));
    saved(dir.path());
    edit(dir.path(), &json!({"target_modules": ["q_proj", "k_proj", "model.layers.1.mlp.up_proj"]}));
    let message = refused(model(2));
    assert!(message.contains("no tensors for model.layers.0.self_attn.k_proj"), "{message}");
}

#[test]
fn tensors_of_other_kinds_are_named() {
    let dir = tempfile::tempdir().unwrap();
    saved(dir.path());
    let stray = Tensor::<1>::zeros([4], &Device::flex());
    let name = "base_model.model.model.embed_tokens.lora_embedding_A".to_string();
    super::super::save_tensors(&dir.path().join(TENSORS), &[(name, vec![4], stray)], &BTreeMap::new())
        .unwrap();
    let message = AdapterCheckpoint::open(dir.path()).unwrap_err().to_string();
    assert!(message.contains("lora_embedding_A") && message.contains(TENSORS), "{message}");
}

#[test]
fn a_model_without_an_adapter_is_not_saved_as_one() {
    let dir = tempfile::tempdir().unwrap();
    let plain = model(1);
    let adapter = Arc::new(Adapter { config: config(), modules: Vec::new(), saved: Vec::new() });
    let with = ModelConfig { adapter: Some(adapter), ..plain.config().clone() };
    assert!(save_adapter(dir.path(), plain.config(), plain.params(), "b", SaveDtype::F32).is_err());
    let message = super::super::save_model(dir.path(), &with, plain.params(), SaveDtype::F32).unwrap_err();
    assert!(message.to_string().contains("merge"), "{message}");
}

#[test]
fn values_that_are_no_numbers_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let mut written = saved(dir.path());
    let name = "model.layers.1.self_attn.q_proj.lora_B.weight";
    let mut tensors = Vec::new();
    for param in written.params_mut().iter_mut().filter(|param| Adapter::owns(&param.name)) {
        if param.name == name {
            param.value = param.value.clone() + f32::INFINITY;
        }
        tensors.push((format!("{PREFIX}{}", param.name), param.shape.clone(), param.value.clone()));
    }
    super::super::save_tensors(&dir.path().join(TENSORS), &tensors, &BTreeMap::new()).unwrap();
    let message = model(2).with_adapter_from(&AdapterCheckpoint::open(dir.path()).unwrap()).unwrap_err();
    assert!(message.to_string().contains(&format!("tensor {name} holds NaN or infinity")), "{message}");
    let refused = save_adapter(dir.path(), written.config(), written.params(), "base", SaveDtype::F32);
    assert!(refused.unwrap_err().to_string().contains("not finite in float32"));
}
