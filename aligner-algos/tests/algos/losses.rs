//! Losses and their gradients against `PyTorch`, transformers and TRL.

use crate::fixture::{assert_gradient, assert_value, cases, flat, leaf};
use aligner_algos::{Dpo, DpoConfig, DpoLoss, RewardModel, RewardModelConfig, Sft};
use aligner_core::{Algorithm, Batch, Device, Forward, Group, Sample, Tensor, ops};
use burn::tensor::{Int, TensorData};
use serde_json::Value;

fn rows(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

fn scalar(sum: &Tensor<1>) -> f64 {
    f64::from(sum.clone().into_scalar::<f32>())
}

/// Each row of labels as a sample: what is not ignored is a target.
fn labelled(labels: &Value) -> Vec<Group> {
    let sample = |row: &Value| {
        let labels = row.as_array().unwrap().iter().map(|label| label.as_i64().unwrap());
        Sample::new(
            labels.clone().map(|label| label.max(0) as u32).collect(),
            labels.map(|l| l >= 0).collect(),
        )
    };
    let rows = rows(labels).iter().enumerate();
    rows.map(|(at, row)| Group::single(format!("row {at}"), sample(row))).collect()
}

/// The loss of some rows through the fused head: with the identity for a weight, hidden states are
/// logits. `first` is the number of rows before them.
fn head_loss(logits: &Tensor<1>, vocab: usize, groups: &[Group], first: usize) -> Tensor<1> {
    let batch = Batch::collate(groups).unwrap();
    let tokens = groups[0].samples[0].tokens.len();
    let at: Vec<u32> = batch.rows.iter().map(|row| row + (first * tokens) as u32).collect();
    let hidden = logits.clone().reshape([logits.dims()[0] / vocab, vocab]);
    let identity = Tensor::<2>::eye(vocab, &logits.device());
    let scores = ops::linear_cross_entropy(hidden, identity, &at, &batch.targets).unwrap();
    let out = Forward { logps: Some(scores.logps), correct: Some(scores.correct), ..Forward::default() };
    Sft::default().loss(&out, &batch).unwrap().sum
}

#[test]
fn sft_is_the_cross_entropy_of_transformers() {
    for case in cases("sft", |name| name.starts_with("causal_ce")) {
        let (inputs, groups) = (&case["inputs"], labelled(&case["inputs"]["labels"]));
        let vocab = flat(&inputs["logits"][0][0]).len();
        let logits = leaf(&inputs["logits"]);
        let loss = head_loss(&logits, vocab, &groups, 0) / Sft::default().per().count(&groups);
        assert_value(&case, scalar(&loss), &case["outputs"]["loss"]);
        assert_gradient(&case, &logits.grad(&loss.backward()).unwrap(), &case["grads"]["logits"]);
    }
}

#[test]
fn micro_batches_share_one_normaliser() {
    for case in cases("sft", |name| name.starts_with("grad_accum_token_normalised")) {
        let (inputs, groups) = (&case["inputs"], labelled(&case["inputs"]["labels"]));
        let vocab = flat(&inputs["logits"][0][0]).len();
        let logits = leaf(&inputs["logits"]);
        let count = Sft::default().per().count(&groups);
        let micro_batches = case["params"]["micro_batches"].as_u64().unwrap() as usize;
        let size = groups.len() / micro_batches;
        let (mut total, mut gradient) = (0.0, Tensor::<1>::zeros(logits.dims(), &Device::flex()));
        for (at, part) in groups.chunks(size).enumerate() {
            let loss = head_loss(&logits, vocab, part, at * size) / count;
            assert_value(&case, scalar(&loss), &case["outputs"]["micro_losses"][at]);
            total += scalar(&loss);
            gradient = gradient + logits.grad(&loss.backward()).unwrap();
        }
        assert_value(&case, total, &case["outputs"]["loss"]);
        assert_gradient(&case, &gradient, &case["grads"]["logits"]);
    }
}

fn dpo(params: &Value) -> Dpo {
    let number = |key: &str| params[key].as_f64();
    let loss_type = params
        .get("loss_type")
        .map_or(DpoLoss::Sigmoid, |name| serde_json::from_value(name.clone()).unwrap());
    Dpo::new(DpoConfig {
        beta: number("beta").unwrap(),
        label_smoothing: number("label_smoothing").unwrap_or(0.0),
        loss_type,
    })
    .unwrap()
}

#[test]
fn dpo_is_that_of_trl() {
    let wanted = |name: &str| {
        name.starts_with("robust") || (name.starts_with("sigmoid_") && !name.starts_with("sigmoid_norm"))
    };
    for case in cases("dpo", wanted) {
        let inputs = &case["inputs"];
        let (masks, references) = (rows(&inputs["mask"]), rows(&inputs["ref_logps"]));
        let (pairs, tokens) = (masks.len() / 2, flat(&masks[0]).len());
        let answer = |row: usize| {
            let mask: Vec<bool> = flat(&masks[row]).iter().map(|&m| m > 0.0).collect();
            // A prompt of one token, which is not scored; the answers differ from the first token on.
            let ids = (0..tokens as u32).map(|at| 2 + row as u32 * 100 + at);
            let mut sample =
                Sample::new(std::iter::once(1).chain(ids).collect(), [&[false], mask.as_slice()].concat());
            sample.ref_logps = [&[0.0], flat(&references[row]).as_slice()].concat();
            sample
        };
        let group = |at: usize| Group::pair(format!("pair {at}"), answer(at), answer(pairs + at));
        let groups: Vec<Group> = (0..pairs).map(group).collect();
        let batch = Batch::collate(&groups).unwrap();
        // Place of each target in the recorded `[2 pairs, tokens]`.
        let places: Vec<i64> = (batch.sequences.iter())
            .flat_map(|sequence| {
                let row = sequence.sample * pairs + sequence.group;
                let mask = flat(&masks[row]);
                (0..tokens).filter(move |&at| mask[at] > 0.0).map(move |at| (row * tokens + at) as i64)
            })
            .collect();
        let logps = leaf(&inputs["policy_logps"]);
        let places = Tensor::<1, Int>::from_data(TensorData::from(places.as_slice()), &logps.device());
        let out = Forward { logps: Some(logps.clone().select(0, places)), ..Forward::default() };
        let algorithm = dpo(&case["params"]);
        let loss = algorithm.loss(&out, &batch).unwrap().sum / algorithm.per().count(&groups);
        assert_value(&case, scalar(&loss), &case["outputs"]["loss"]);
        assert_gradient(&case, &logps.grad(&loss.backward()).unwrap(), &case["grads"]["policy_logps"]);
    }
}

#[test]
fn label_smoothing_is_conservative_dpo() {
    for case in cases("dpo_seq", |name| name.starts_with("cdpo")) {
        let inputs = &case["inputs"];
        let references = [flat(&inputs["ref_chosen"]), flat(&inputs["ref_rejected"])];
        let answer = |side: usize, at: usize| {
            let mut sample = Sample::response(&[1], &[2 + side as u32]);
            sample.ref_logps = vec![0.0, references[side][at]];
            sample
        };
        let group = |at: usize| Group::pair(format!("pair {at}"), answer(0, at), answer(1, at));
        let groups: Vec<Group> = (0..references[0].len()).map(group).collect();
        let batch = Batch::collate(&groups).unwrap();
        let (chosen, rejected) = (leaf(&inputs["policy_chosen"]), leaf(&inputs["policy_rejected"]));
        let logps: Tensor<2> = Tensor::stack(vec![chosen.clone(), rejected.clone()], 1);
        let out = Forward { logps: Some(logps.reshape([batch.targets.len()])), ..Forward::default() };
        let algorithm = dpo(&case["params"]);
        let result = algorithm.loss(&out, &batch).unwrap();
        for (metric, key) in [("rewards/chosen", "chosen_rewards"), ("rewards/rejected", "rejected_rewards")]
        {
            let expected = flat(&case["outputs"][key]);
            let mean = expected.iter().map(|&v| f64::from(v)).sum::<f64>() / expected.len() as f64;
            assert!((result.metrics.get(metric).unwrap() - mean).abs() < 1e-6, "{metric}");
        }
        let loss = result.sum / algorithm.per().count(&groups);
        assert_value(&case, scalar(&loss), &case["outputs"]["loss"]);
        let grads = loss.backward();
        for (leaf, key) in [(chosen, "policy_chosen"), (rejected, "policy_rejected")] {
            assert_gradient(&case, &leaf.grad(&grads).unwrap(), &case["grads"][key]);
        }
    }
}

#[test]
fn bradley_terry_is_that_of_trl() {
    for case in cases("reward", |name| name.starts_with("bradley_terry")) {
        let inputs = &case["inputs"];
        let (chosen, rejected) = (leaf(&inputs["r_chosen"]), leaf(&inputs["r_rejected"]));
        let margins = inputs.get("margin").map(flat);
        let pairs = chosen.dims()[0];
        let group = |at: usize| {
            let mut pair =
                Group::pair(format!("pair {at}"), Sample::response(&[1], &[2]), Sample::response(&[1], &[3]));
            if let Some(margins) = &margins {
                pair.samples[0].reward = Some(margins[at]);
                pair.samples[1].reward = Some(0.0);
            }
            pair
        };
        let groups: Vec<Group> = (0..pairs).map(group).collect();
        let batch = Batch::collate(&groups).unwrap();
        let scores: Tensor<2> = Tensor::stack(vec![chosen.clone(), rejected.clone()], 1);
        let out = Forward { scores: Some(scores.reshape([2 * pairs, 1])), ..Forward::default() };
        let coefficient = case["params"]["center_rewards_coefficient"].as_f64().unwrap_or(0.0);
        let config = RewardModelConfig { center_rewards_coefficient: coefficient, margin: true };
        let algorithm = RewardModel::new(config).unwrap();
        let loss = algorithm.loss(&out, &batch).unwrap().sum / algorithm.per().count(&groups);
        assert_value(&case, scalar(&loss), &case["outputs"]["loss"]);
        let grads = loss.backward();
        for (leaf, key) in [(chosen, "r_chosen"), (rejected, "r_rejected")] {
            assert_gradient(&case, &leaf.grad(&grads).unwrap(), &case["grads"][key]);
        }
    }
}
