//! The optimizer against trajectories, norms and schedules recorded from `PyTorch` and transformers.
#![expect(clippy::print_stdout, reason = "the errors that were seen are read from the tests' output")]

use std::collections::BTreeMap;
use std::path::Path;

use aligner_core::optim::{
    AdamW, AdamWConfig, LearningRate, Norm, Schedule, ScheduleOptions, clip_coefficient, global_norm,
};
use aligner_core::{Device, ParamSet, Tensor};
use serde_json::Value;

fn fixture() -> Value {
    let default = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden");
    let root = std::env::var("ALIGNER_GOLDEN").unwrap_or_else(|_| default.into());
    let path = Path::new(&root).join("optim/optim.json");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap()
}

fn flat(value: &Value) -> Vec<f32> {
    match value {
        Value::Array(items) => items.iter().flat_map(flat).collect(),
        number => vec![number.as_f64().unwrap() as f32],
    }
}

fn shape(value: &Value) -> Vec<usize> {
    match value {
        Value::Array(items) => [vec![items.len()], shape(&items[0])].concat(),
        _ => Vec::new(),
    }
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

fn params(init: &Value) -> ParamSet {
    let mut params = ParamSet::default();
    for (name, values) in init.as_object().unwrap() {
        params.insert_data(name, &shape(values), flat(values), &Device::flex()).unwrap();
    }
    params
}

fn grads(params: &ParamSet, values: &Value) -> Vec<Option<Tensor<1>>> {
    let tensor = |name: &str| Tensor::from_floats(flat(&values[name]).as_slice(), &Device::flex());
    params.iter().map(|param| Some(tensor(&param.name))).collect()
}

/// Largest difference over the largest magnitude of what was expected.
fn error(got: &Tensor<1>, expected: &Value) -> f64 {
    let (got, expected) = (aligner_core::ops::host::to_vec(got), flat(expected));
    assert_eq!(got.len(), expected.len());
    let scale = expected.iter().fold(0.0_f32, |most, v| most.max(v.abs()));
    let gap = got.iter().zip(&expected).fold(0.0_f32, |most, (a, b)| most.max((a - b).abs()));
    f64::from(gap / scale.max(f32::MIN_POSITIVE))
}

fn config(hyper: &Value) -> AdamWConfig {
    AdamWConfig {
        betas: (number(&hyper["betas"][0]), number(&hyper["betas"][1])),
        eps: number(&hyper["eps"]),
        weight_decay: number(&hyper["weight_decay"]),
        decay_vectors: true,
        amsgrad: hyper["amsgrad"].as_bool().unwrap_or(false),
    }
}

#[test]
fn adamw_follows_torch_with_its_moments() {
    let mut worst = BTreeMap::new();
    for case in list(&fixture()["adamw"]) {
        let mut params = params(&case["init"]);
        let mut optimizer = AdamW::new(config(&case["hyper"])).unwrap();
        for step in list(&case["steps"]) {
            let grads = grads(&params, &step["grads"]);
            optimizer.step(&mut params, &grads, number(&case["hyper"]["lr"]), 1.0).unwrap();
            let mut check = |kind: &'static str, name: &str, got: &Tensor<1>| {
                let error = error(got, &step[kind][name]);
                assert!(error < 1e-6, "{}: {kind} of {name} is off by {error:e}", case["hyper"]);
                let most = worst.entry(kind).or_insert(0.0_f64);
                *most = most.max(error);
            };
            for param in params.iter() {
                check("params", &param.name, &param.value);
            }
            for (name, _, tensor) in optimizer.tensors(&params) {
                match name.split_once('.').unwrap() {
                    ("exp_avg", name) => check("exp_avg", name, &tensor),
                    ("exp_avg_sq", name) => check("exp_avg_sq", name, &tensor),
                    _ => {}
                }
            }
        }
    }
    assert_eq!(worst.len(), 3, "every kind of tensor is compared");
    println!("worst relative errors: {worst:?}");
}

#[test]
fn clipped_steps_on_a_cosine_follow_torch() {
    let fixture = fixture();
    let case = &fixture["train_loop"];
    let steps = list(&case["steps"]);
    let peak = steps.iter().map(|step| number(&step["lr"])).fold(0.0, f64::max);
    let rate =
        LearningRate::new(Schedule::Cosine, ScheduleOptions::default(), peak, 2, steps.len() as u64).unwrap();
    let mut params = params(&case["init"]);
    // The recording does not state its betas; these, and no others in common use, reproduce all six
    // steps to rounding.
    let config = AdamWConfig { betas: (0.9, 0.99), weight_decay: 0.1, ..AdamWConfig::default() };
    let mut optimizer = AdamW::new(config).unwrap();
    for (at, step) in steps.iter().enumerate() {
        let grads = grads(&params, &step["grads"]);
        let norm = global_norm(&grads, Norm::L2);
        assert!((norm - number(&step["total_norm"])).abs() < 1e-6 * norm);
        let learning_rate = rate.at(at as u64);
        assert!((learning_rate - number(&step["lr"])).abs() < 1e-12, "step {at}: rate {learning_rate}");
        optimizer.step(&mut params, &grads, learning_rate, clip_coefficient(norm, 1.0)).unwrap();
        for param in params.iter() {
            let error = error(&param.value, &step["params"][&param.name]);
            assert!(error < 1e-6, "step {at}: {} is off by {error:e}", param.name);
        }
    }
}

#[test]
fn norms_and_clipping_are_those_of_torch() {
    for case in list(&fixture()["clip"]) {
        let params = params(&case["grads"]);
        let grads = grads(&params, &case["grads"]);
        let norm = match &case["norm_type"] {
            Value::String(_) => Norm::Max,
            order if order.as_f64().is_some_and(|order| order < 1.5) => Norm::L1,
            _ => Norm::L2,
        };
        let total = global_norm(&grads, norm);
        assert!((total - number(&case["total_norm"])).abs() < 1e-6 * total, "{norm:?}: {total}");
        let scale = clip_coefficient(total, number(&case["max_norm"])) as f32;
        for (param, grad) in params.iter().zip(grads) {
            let error = error(&(grad.unwrap() * scale), &case["clipped"][&param.name]);
            assert!(error < 1e-6, "{norm:?}: {} is off by {error:e}", param.name);
        }
    }
}

#[test]
fn schedules_are_those_of_transformers() {
    let fixture = fixture();
    let cases = list(&fixture["schedules"]);
    assert!(!cases.is_empty());
    for case in cases {
        let schedule: Schedule = serde_json::from_value(case["name"].clone()).unwrap();
        let options: ScheduleOptions = serde_json::from_value(case["kwargs"].clone()).unwrap();
        let [warmup, total] = ["warmup", "total"].map(|key| case[key].as_u64().unwrap());
        let peak = number(&case["lr"]);
        let rate = LearningRate::new(schedule, options, peak, warmup, total).unwrap();
        for (step, expected) in list(&case["lrs"]).iter().enumerate() {
            let (got, expected) = (rate.at(step as u64), number(expected));
            assert!((got - expected).abs() < 1e-9 * peak, "{schedule:?} at {step}: {got} for {expected}");
        }
    }
}
