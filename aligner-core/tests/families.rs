//! Every family: gradients against differences, saving and loading, adapters, the use of experts.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use aligner_core::model::{CausalLm, LoraConfig, MODEL_TYPES, ModelConfig, Role, Targets};
use aligner_core::ops::host::to_vec;
use aligner_core::weights::{
    AdapterCheckpoint, Checkpoint, SaveDtype, save_adapter, save_model, save_tensors,
};
use aligner_core::{
    Batch, Device, Forward, Group, LossOutput, Needs, Param, ParamSet, Policy, Result, Sample, Tensor,
};
use serde_json::{Value, json};

/// One golden model of each family.
const MODELS: [&str; 13] = [
    "llama_bias_mha",
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_moe_steps",
    "mistral_sw",
    "mixtral",
    "gemma2",
    "gemma3",
    "gpt2",
    "phi3",
    "olmo2",
];

fn directory(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/models").join(name)
}

fn model(name: &str) -> CausalLm {
    CausalLm::load(&Checkpoint::open(&directory(name)).unwrap(), &Device::flex()).unwrap()
}

/// Two answers to one prompt, and a text that is longer than the golden models' windows.
fn batch() -> Batch {
    let answers = [vec![17, 9, 300, 44], vec![5, 6]].map(|answer| Sample::response(&[8, 120, 7], &answer));
    let pair = Group { id: "pair".into(), samples: answers.into(), ..Group::default() };
    let long: Vec<u32> = (0..14).map(|at| 3 + at * 23 % 300).collect();
    let text = Group::single("text", Sample::new(long.clone(), vec![true; long.len()]));
    Batch::collate([&pair, &text]).unwrap()
}

/// A loss in which no two targets count alike.
fn loss(out: &Forward, batch: &Batch) -> Result<LossOutput> {
    let weights: Vec<f32> = (0..batch.targets.len()).map(|at| 0.5 + (at as f32 * 0.37).sin()).collect();
    let weights = Tensor::from_floats(weights.as_slice(), &out.logps()?.device());
    let sum = (out.logps()?.clone() * weights).sum();
    Ok(LossOutput::new(match &out.balance_loss {
        Some(uneven) => sum + uneven.clone() * 3.0,
        None => sum,
    }))
}

/// The loss with one parameter moved along a direction.
fn moved(model: &CausalLm, at: usize, direction: &[f32], step: f32) -> f64 {
    let mut params: ParamSet = model.params().clone();
    let param = params.iter_mut().nth(at).unwrap();
    let values = to_vec(&param.value);
    let values: Vec<f32> = values.iter().zip(direction).map(|(value, along)| value + step * along).collect();
    param.value = Tensor::from_floats(values.as_slice(), &Device::flex());
    // As in training, so that what is only there in training counts.
    let moved = CausalLm::new(model.config().clone(), params, &Device::flex()).unwrap();
    moved.accumulate(&[batch()], Needs::NOTHING, &loss).unwrap().loss_sum
}

/// Along the gradient of a parameter, the loss changes by the gradient's square.
fn check_gradients(name: &str, model: &CausalLm) {
    let gradients = model.accumulate(&[batch()], Needs::NOTHING, &loss).unwrap();
    let mut checked = 0;
    for (at, param) in model.params().iter().enumerate() {
        let Some(gradient) = &gradients.values[at] else {
            panic!("{name}: {} has no gradient", param.name);
        };
        let gradient = to_vec(gradient);
        let square: f64 = gradient.iter().map(|g| f64::from(*g) * f64::from(*g)).sum();
        if square == 0.0 {
            assert!(param.name.contains("experts"), "{name}: the gradient of {} is zero", param.name);
            continue;
        }
        let norm = square.sqrt();
        let direction: Vec<f32> = gradient.iter().map(|g| (f64::from(*g) / norm) as f32).collect();
        let difference = |step: f32| {
            (moved(model, at, &direction, step) - moved(model, at, &direction, -step))
                / (2.0 * f64::from(step))
        };
        // The smallest of a few steps' errors: far steps bend, near ones round; a router also jumps.
        let error = |step: f32| (difference(step) - norm).abs() / norm.max(0.05);
        let best = [3e-3, 1e-3, 1e-2].map(error).into_iter().fold(f64::INFINITY, f64::min);
        assert!(best < 1e-2, "{name}: {}: off by {best:.1e} of {norm:.3}", param.name);
        checked += 1;
    }
    assert!(checked > 10, "{name}: {checked} parameters");
}

#[test]
fn gradients_of_every_family_are_those_of_differences() {
    for name in MODELS {
        check_gradients(name, &model(name));
    }
}

#[test]
fn products_in_bf16_stay_near_those_in_f32() {
    for name in MODELS {
        let mut model = model(name);
        let exact = model.accumulate(&[batch()], Needs::NOTHING, &loss).unwrap();
        model.set_bf16_products(true);
        let rounded = model.accumulate(&[batch()], Needs::NOTHING, &loss).unwrap();
        let off = (rounded.loss_sum - exact.loss_sum).abs() / exact.loss_sum.abs();
        // Operands have eight bits; a router may choose another expert where two are about as likely.
        assert!(off > 0.0 && off < 1e-2, "{name}: the loss is off by {off:.1e}");
        let mut cosine = [0.0; 3];
        for (param, (exact, rounded)) in model.params().iter().zip(exact.values.iter().zip(&rounded.values)) {
            let (Some(exact), Some(rounded)) = (exact, rounded) else {
                panic!("{name}: {} has no gradient", param.name);
            };
            assert_eq!(rounded.dtype(), exact.dtype(), "{name}: {}", param.name);
            for (a, b) in to_vec(exact).into_iter().zip(to_vec(rounded)) {
                let (a, b) = (f64::from(a), f64::from(b));
                cosine.iter_mut().zip([a * b, a * a, b * b]).for_each(|(sum, term)| *sum += term);
            }
        }
        let cosine = cosine[0] / (cosine[1] * cosine[2]).sqrt();
        assert!(cosine > 0.99, "{name}: the gradients' cosine is {cosine}");
    }
}

#[test]
fn gradients_of_a_balanced_mixture_are_those_of_differences() {
    for name in ["mixtral", "qwen2_moe"] {
        check_gradients(name, &balanced(name));
    }
}

/// The model with a loss on an uneven use of its experts.
fn balanced(name: &str) -> CausalLm {
    let model = model(name);
    let mut config = model.config().clone();
    config.experts.as_mut().unwrap().balance_loss = Some(0.7);
    CausalLm::new(config, model.params().clone(), &Device::flex()).unwrap()
}

#[test]
fn the_balance_loss_and_its_gradients_are_those_of_transformers() {
    let path = directory("../train/balance.json");
    let cases: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    for (name, case) in cases.as_object().unwrap() {
        let model = balanced(name);
        let ids: Vec<u32> = serde_json::from_value(case["input_ids"].clone()).unwrap();
        let group = Group::single("balance", Sample::new(ids.clone(), vec![true; ids.len()]));
        let batch = Batch::collate([&group]).unwrap();
        let alone = |out: &Forward, _: &Batch| Ok(LossOutput::new(out.balance_loss.clone().unwrap() / 0.7));
        for checkpointing in [false, true] {
            let mut model = model.clone();
            model.set_gradient_checkpointing(checkpointing);
            let gradients = model.accumulate(std::slice::from_ref(&batch), Needs::NOTHING, &alone).unwrap();
            let expected = case["loss"].as_f64().unwrap();
            assert!((gradients.loss_sum - expected).abs() < 1e-5, "{name}: {}", gradients.loss_sum);
            for (router, expected) in case["router_grad_norms"].as_object().unwrap() {
                let at = model.params().id(router).unwrap().index();
                let gradient = to_vec(gradients.values[at].as_ref().unwrap());
                let norm = gradient.iter().map(|g| f64::from(g * g)).sum::<f64>().sqrt();
                let expected = expected.as_f64().unwrap();
                assert!((norm - expected).abs() < 1e-4 * expected, "{name}: {router}: {norm} {expected}");
            }
        }
    }
    assert_eq!(cases.as_object().unwrap().len(), 2);
}

#[test]
fn the_balance_loss_is_there_in_training_alone() {
    let out = balanced("mixtral").forward(&batch(), Needs::NOTHING).unwrap();
    assert!(out.balance_loss.is_none());
    let seen = std::cell::Cell::new(false);
    let look = |out: &Forward, batch: &Batch| {
        seen.set(out.balance_loss.is_some());
        loss(out, batch)
    };
    model("mixtral").accumulate(&[batch()], Needs::NOTHING, &look).unwrap();
    assert!(!seen.get(), "output_router_logits is false");
    balanced("mixtral").accumulate(&[batch()], Needs::NOTHING, &look).unwrap();
    assert!(seen.get());
}

#[test]
fn a_saved_model_of_every_family_is_the_same_bit_for_bit() {
    for name in MODELS {
        let (dir, model) = (tempfile::tempdir().unwrap(), model(name));
        save_model(dir.path(), model.config(), model.params(), SaveDtype::F32).unwrap();
        let (saved, original) =
            (Checkpoint::open(dir.path()).unwrap(), Checkpoint::open(&directory(name)).unwrap());
        let names = |checkpoint: &Checkpoint| checkpoint.names().map(str::to_string).collect::<Vec<_>>();
        assert_eq!(names(&saved), names(&original), "{name}");
        for tensor in original.names() {
            let ((shape, values), (expected_shape, expected)) =
                (saved.read(tensor).unwrap(), original.read(tensor).unwrap());
            assert_eq!(shape, expected_shape, "{name}: {tensor}");
            assert!(
                values.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()),
                "{name}: {tensor}"
            );
        }
        let plain = |config: &ModelConfig| ModelConfig { extra: Value::Null, ..config.clone() };
        assert_eq!(plain(saved.config()), plain(original.config()), "{name}");
        assert_eq!(original.config().num_params(), model.params().iter().map(Param::elements).sum::<usize>());
    }
}

#[test]
fn names_without_their_beginning_and_buffers_are_read() {
    let (dir, original) = (tempfile::tempdir().unwrap(), Checkpoint::open(&directory("gpt2")).unwrap());
    let tensor = |values: &[f32]| Tensor::from_floats(values, &Device::flex());
    let mut tensors: Vec<_> = (original.names())
        .map(|name| {
            let (shape, values) = original.read(name).unwrap();
            (name.strip_prefix("transformer.").unwrap().to_string(), shape, tensor(&values))
        })
        .collect();
    tensors.push(("h.0.attn.bias".into(), vec![1, 1, 2, 2], tensor(&[1.0, 0.0, 1.0, 1.0])));
    tensors.push(("h.1.attn.masked_bias".into(), vec![1], tensor(&[-1e4])));
    save_tensors(&dir.path().join("model.safetensors"), &tensors, &BTreeMap::default()).unwrap();
    std::fs::copy(directory("gpt2").join("config.json"), dir.path().join("config.json")).unwrap();
    let load = |path: &Path| CausalLm::load(&Checkpoint::open(path).unwrap(), &Device::flex());
    let (short, long) = (load(dir.path()).unwrap(), model("gpt2"));
    for (own, expected) in short.params().iter().zip(long.params().iter()) {
        assert_eq!((&own.name, to_vec(&own.value)), (&expected.name, to_vec(&expected.value)));
    }
    tensors.push(("h.0.attn.rotor".into(), vec![1], tensor(&[1.0])));
    save_tensors(&dir.path().join("model.safetensors"), &tensors, &BTreeMap::default()).unwrap();
    assert!(load(dir.path()).unwrap_err().to_string().contains("h.0.attn.rotor"));
}

#[test]
fn an_adapter_on_every_family_learns_comes_back_and_merges() {
    for name in MODELS {
        let config = LoraConfig { r: 3, targets: Targets::AllLinear, ..LoraConfig::default() };
        let mut adapted = model(name).with_adapter(config, 1).unwrap();
        let gradients = adapted.accumulate(&[batch()], Needs::NOTHING, &loss).unwrap();
        let mut moved = 0;
        for (param, gradient) in adapted.params_mut().iter_mut().zip(&gradients.values) {
            assert_eq!(param.trainable, gradient.is_some(), "{name}: {}", param.name);
            if let Some(gradient) = gradient {
                param.value = param.value.clone() + gradient.clone() * 0.05;
                moved += 1;
            }
        }
        assert!(moved > 0, "{name}");
        let logps =
            |model: &CausalLm| to_vec(model.forward(&batch(), Needs::NOTHING).unwrap().logps().unwrap());
        let (before, after) = (logps(&model(name)), logps(&adapted));
        let gain = |logps: &[f32]| -> f32 {
            logps.iter().enumerate().map(|(at, logp)| logp * (0.5 + (at as f32 * 0.37).sin())).sum()
        };
        assert!(gain(&after) > gain(&before) + 1e-3, "{name}: {} {}", gain(&before), gain(&after));
        let dir = tempfile::tempdir().unwrap();
        save_adapter(dir.path(), adapted.config(), adapted.params(), name, SaveDtype::F32).unwrap();
        let file = AdapterCheckpoint::open(dir.path()).unwrap();
        let again = model(name).with_adapter_from(&file).unwrap();
        assert_eq!(logps(&again), after, "{name}: as it was saved");
        for (a, b) in logps(&adapted.merged().unwrap()).iter().zip(&after) {
            assert!((a - b).abs() < 1e-4, "{name}: {a} {b}");
        }
    }
}

#[test]
fn routed_experts_and_routers_have_no_adapter() {
    let config = LoraConfig { targets: Targets::AllLinear, ..LoraConfig::default() };
    let adapted = model("qwen2_moe").with_adapter(config, 1).unwrap();
    let names: Vec<&str> =
        adapted.config().adapter.as_ref().unwrap().modules.iter().map(|m| m.name.as_str()).collect();
    assert!(names.contains(&"model.layers.0.mlp.shared_expert.up_proj"));
    assert!(names.iter().all(|name| !name.contains("experts") && !name.ends_with("gate")), "{names:?}");
}

#[test]
fn active_parameters_are_those_of_a_token_s_experts() {
    for (name, experts, each) in [("mixtral", 4, 2), ("qwen2_moe", 4, 2), ("qwen3_moe_steps", 5, 3)] {
        let config = model(name).config().clone();
        let specs = CausalLm::parameters(&config);
        let of_experts: usize = (specs.iter())
            .filter(|spec| matches!(spec.role, Role::Expert(_)))
            .map(|spec| spec.shape.iter().product::<usize>())
            .sum();
        assert!(of_experts > 0);
        let active = config.num_params() - of_experts / experts * (experts - each);
        assert_eq!(config.num_active_params(), active, "{name}");
    }
    let dense = model("gemma2").config().clone();
    assert_eq!(dense.num_active_params(), dense.num_params());
}

#[test]
fn a_sample_has_the_same_bits_in_any_company() {
    for name in MODELS {
        let model = model(name);
        let group = |id: &str, from: u32, len: u32| {
            let tokens: Vec<u32> = (0..len).map(|at| 3 + (from + at * 29) % 300).collect();
            Group::single(id, Sample::new(tokens.clone(), vec![true; tokens.len()]))
        };
        let (one, other) = (group("one", 5, 19), group("other", 90, 33));
        let logps = |groups: &[&Group]| {
            let batch = Batch::collate(groups.iter().copied()).unwrap();
            to_vec(model.forward(&batch, Needs::NOTHING).unwrap().logps().unwrap())
        };
        let (alone, together) = (logps(&[&one]), logps(&[&other, &one]));
        assert_eq!(alone, together[together.len() - alone.len()..], "{name}");
    }
}

#[test]
fn settings_that_a_family_does_not_have_are_refused() {
    let refused = |name: &str, changes: Value| {
        let path = directory(name).join("config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        ModelConfig::from_json(&path, &config).unwrap_err().to_string()
    };
    for (name, changes, part) in [
        ("llama_bias_mha", json!({"sliding_window": 8}), "sliding_window"),
        ("llama_bias_mha", json!({"num_local_experts": 8}), "num_local_experts"),
        ("qwen2", json!({"attention_bias": true}), "attention_bias"),
        ("qwen2", json!({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}), "yarn"),
        ("qwen3", json!({"final_logit_softcapping": 30.0}), "final_logit_softcapping"),
        ("gemma2", json!({"hidden_activation": "gelu"}), "hidden_activation"),
        ("gemma2", json!({"use_bidirectional_attention": true}), "use_bidirectional_attention"),
        ("gemma2", json!({"layer_types": ["sliding_attention"]}), "layer_types has 1 entries for 2"),
        ("gemma3", json!({"layer_types": ["full_attention", "full_attention", "chunked"]}), "chunked"),
        ("gpt2", json!({"scale_attn_by_inverse_layer_idx": true}), "scale_attn_by_inverse_layer_idx"),
        ("gpt2", json!({"n_embd": 50}), "n_embd 50 by n_head 4"),
        ("mixtral", json!({"num_experts_per_tok": 5}), "num_experts_per_tok"),
        ("mixtral", json!({"router_jitter_noise": 0.1}), "router_jitter_noise"),
        ("phi3", json!({"partial_rotary_factor": 0.75}), "partial_rotary_factor"),
    ] {
        let message = refused(name, changes);
        assert!(message.contains(part), "{name}: {part} is not in: {message}");
    }
    let message = refused("qwen2", json!({"model_type": "mamba"}));
    assert!(message.contains("model_type \"mamba\""), "{message}");
    assert!(MODEL_TYPES.iter().all(|known| message.contains(known)), "{message}");
}
