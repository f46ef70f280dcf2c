//! Losses of reinforcement learning and their gradients, through the algorithms, against `PyTorch` and TRL.

use crate::fixture::{assert_close, assert_gradient, assert_value, cases, leaf};
use crate::padded::{Padded, everywhere, field};
use aligner_algos::{
    Baseline, Grpo, GrpoConfig, Mean, Ppo, PpoConfig, Reinforce, ReinforceConfig, Rloo, RlooConfig,
    ValueLoss, ValueLossConfig,
};
use aligner_core::ops::host::to_vec;
use aligner_core::{Algorithm, Forward, Group, Metrics, Sample, Tensor};
use serde_json::{Value, json};

/// The loss, its gradient and its metrics, for a case whose gradient is by `key`.
fn assert_loss(
    case: &Value,
    key: &str,
    algorithm: &dyn Algorithm,
    groups: &[Group],
    forward: impl Fn(Tensor<1>) -> Forward,
) -> Metrics {
    let (padded, leaf) = (Padded::new(&case["inputs"]), leaf(&case["inputs"][key]));
    let batch = Padded::batch(groups);
    let out = algorithm.loss(&forward(padded.targets(&leaf)), &batch).unwrap();
    let loss = out.sum / algorithm.per().count(groups);
    assert_value(case, f64::from(loss.clone().into_scalar::<f32>()), &case["outputs"]["loss"]);
    assert_gradient(case, &leaf.grad(&loss.backward()).unwrap(), &case["grads"][key]);
    out.metrics
}

fn logps(logps: Tensor<1>) -> Forward {
    Forward { logps: Some(logps), ..Forward::default() }
}

fn assert_metric(case: &Value, metrics: &Metrics, name: &str, expected: &Value) {
    let (got, expected) = (metrics.get(name).unwrap(), expected.as_f64().unwrap());
    assert!((got - expected).abs() <= 1e-6 + 1e-5 * expected.abs(), "{}: {name} {got}", case["name"]);
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap()
}

#[test]
fn ppo_is_that_of_its_paper() {
    for case in cases("ppo", |name| name.starts_with("ppo_")) {
        let (inputs, params) = (&case["inputs"], &case["params"]);
        // The bound of the dual clip is told by the source's text alone.
        let dual = case["source"]
            .as_str()
            .unwrap()
            .split_once("c=")
            .map(|(_, rest)| rest.split_whitespace().next().unwrap().parse::<f64>().unwrap());
        let ppo = Ppo::new(PpoConfig {
            clip_low: number(&params["clip_low"]),
            clip_high: number(&params["clip_high"]),
            dual_clip: dual,
            ..PpoConfig::default()
        });
        let padded = Padded::new(inputs);
        let groups = padded.groups(1, |row, sample| {
            sample.old_logps = field(&inputs["old_logp"], row);
            sample.weights = field(&inputs["adv"], row);
        });
        let metrics = assert_loss(&case, "logp", &ppo.unwrap(), &groups, logps);
        assert_metric(&case, &metrics, "policy/clipfrac_avg", &case["outputs"]["clipfrac"]);
        let ratio = aligner_algos::ops::ratio::log_ratio(
            &padded.targets(&leaf(&inputs["logp"])),
            &Padded::batch(&groups),
        );
        assert_close(&case, "ratio", &to_vec(&ratio.unwrap().exp()), &padded.of(&case["outputs"]["ratio"]));
    }
}

#[test]
fn the_critics_loss_is_that_of_ppo2() {
    for case in cases("ppo", |name| name.starts_with("value_")) {
        let inputs = &case["inputs"];
        let clip = case["params"]["clip_value"].as_f64().unwrap_or(0.0);
        let groups = Padded::new(inputs).groups(1, |row, sample| {
            sample.returns = field(&inputs["returns"], row);
            if clip > 0.0 {
                sample.values = field(&inputs["v_old"], row);
            }
        });
        let values = |values: Tensor<1>| Forward { values: Some(values), ..Forward::default() };
        let metrics =
            assert_loss(&case, "v", &ValueLoss::new(ValueLossConfig { clip }).unwrap(), &groups, values);
        assert_metric(&case, &metrics, "loss/value_avg", &case["outputs"]["loss"]);
    }
}

/// Samples with old and reference log-probabilities and one advantage a row.
fn with_advantages(inputs: &Value, use_old: bool) -> Vec<Group> {
    Padded::new(inputs).groups(1, |row, sample: &mut Sample| {
        if use_old && inputs.get("old_logp").is_some() {
            sample.old_logps = field(&inputs["old_logp"], row);
        }
        if inputs.get("ref_logp").is_some() {
            sample.ref_logps = field(&inputs["ref_logp"], row);
        }
        sample.weights = everywhere(&inputs["advantages"], row, sample.tokens.len());
    })
}

#[test]
fn rloo_is_that_of_trl() {
    for case in cases("rloo", |name| name.starts_with("rloo_")) {
        let config = RlooConfig {
            clip_low: number(&case["params"]["clip_low"]),
            clip_high: number(&case["params"]["clip_high"]),
            ..RlooConfig::default()
        };
        let groups = with_advantages(&case["inputs"], true);
        assert_loss(&case, "logp", &Rloo::new(config).unwrap(), &groups, logps);
    }
}

#[test]
fn reinforce_is_the_gradient_of_the_expected_return() {
    for case in cases("rloo", |name| name == "reinforce") {
        let config = ReinforceConfig {
            baseline: Baseline::None,
            average: Mean::Sequence,
            ..ReinforceConfig::default()
        };
        let groups = with_advantages(&case["inputs"], true);
        assert_loss(&case, "logp", &Reinforce::new(config).unwrap(), &groups, logps);
    }
}

/// The settings under our names.
fn grpo(params: &Value) -> Grpo {
    let config: GrpoConfig = serde_json::from_value(json!({
        "loss_type": params["loss_type"],
        "level": params["level"],
        "clip_low": params["el"],
        "clip_high": params["eh"],
        "beta": params["beta"],
        "delta": params.get("delta"),
        "max_completion_length": params.get("max_len"),
        "use_bias_correction_kl": params.get("bias_kl").is_some_and(|flag| flag == true),
    }))
    .unwrap();
    Grpo::new(config).unwrap()
}

#[test]
fn grpo_and_its_kin_are_those_of_trl() {
    for case in cases("grpo", |name| !["sapo", "luspo", "vespo"].contains(&name)) {
        let (params, outputs) = (&case["params"], &case["outputs"]);
        let groups = with_advantages(&case["inputs"], params.get("use_old") != Some(&json!(false)));
        let metrics = assert_loss(&case, "logp", &grpo(params), &groups, logps);
        for (name, key) in [
            ("kl", "kl"),
            ("clip_ratio/low_mean", "clip_ratio_low_mean"),
            ("clip_ratio/high_mean", "clip_ratio_high_mean"),
        ] {
            if let Some(expected) = outputs.get(key) {
                assert_metric(&case, &metrics, name, expected);
            }
        }
    }
}
