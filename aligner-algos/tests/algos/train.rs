//! A whole model against `PyTorch` and transformers: gradients, and several steps of SFT and DPO.

use crate::fixture::{self, flat};
use crate::ranks;
use aligner_algos::{Dpo, DpoConfig, Learner, LearnerConfig, Reference, Sft};
use aligner_core::model::CausalLm;
use aligner_core::ops::host::to_vec;
use aligner_core::optim::{Norm, Schedule, global_norm};
use aligner_core::weights::{Checkpoint, read_tensors};
use aligner_core::{Algorithm, Batch, Device, Group, Needs, Policy, Sample};
use serde_json::Value;

fn model(name: &str) -> Box<dyn Policy> {
    let checkpoint = Checkpoint::open(&fixture::path(&format!("models/{name}"))).unwrap();
    Box::new(CausalLm::load(&checkpoint, &Device::flex()).unwrap())
}

fn ids(row: &Value) -> Vec<u32> {
    row.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn rows(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap()
}

fn assert_close(what: &str, got: f64, expected: f64, limit: f64) {
    let error = (got - expected).abs() / expected.abs();
    println!("{what}: off by {error:.1e} relative");
    assert!(error <= limit, "{what}: {got} for {expected}");
}

/// Right-padded rows with labels, without the padding.
fn labelled(case: &Value) -> Vec<Group> {
    let row = |at: usize| {
        let len = flat(&case["attention_mask"][at]).iter().filter(|&&seen| seen > 0.0).count();
        let mask = flat(&case["labels"][at]).iter().map(|&label| label >= 0.0).take(len).collect();
        let mut tokens = ids(&case["input_ids"][at]);
        tokens.truncate(len);
        Group::single(format!("row {at}"), Sample::new(tokens, mask))
    };
    (0..rows(&case["input_ids"]).len()).map(row).collect()
}

#[test]
fn parameter_gradients_are_those_of_transformers() {
    for name in ["llama_gqa_untied", "qwen3", "gemma2", "gpt2", "mixtral"] {
        compare_gradients(name);
    }
}

fn compare_gradients(name: &str) {
    let case = &fixture::json("train/train.json")[name];
    let (policy, groups) = (model(name), labelled(case));
    let count = Sft::default().per().count(&groups);
    let micro = [Batch::collate(&groups).unwrap()];
    let gradients =
        policy.accumulate(&micro, Needs::NOTHING, &|out, batch| Sft::default().loss(out, batch)).unwrap();
    assert_close("loss", gradients.loss_sum / count, number(&case["loss"]), 1e-5);
    let norm = global_norm(&gradients.values, Norm::L2) / count;
    assert_close("gradient norm", norm, number(&case["grad_norm"]), 1e-5);
    let expected = read_tensors(&fixture::path(&format!("train/{name}_grads.safetensors"))).unwrap();
    let mut worst = 0.0_f32;
    for (param, grad) in policy.params().iter().zip(&gradients.values) {
        let (shape, expected) = &expected[&format!("grad.{}", param.name)];
        let mut got = to_vec(grad.as_ref().unwrap());
        if name == "gpt2" && param.shape.len() == 2 && param.name.contains(".h.") {
            // Its files have the linears' weights as [in, out].
            let (outputs, inputs) = (param.shape[0], param.shape[1]);
            assert_eq!(*shape, [inputs, outputs], "{}", param.name);
            got = (0..got.len()).map(|at| got[at % outputs * inputs + at / outputs]).collect();
        }
        let scale = expected.iter().fold(0.0_f32, |most, v| most.max(v.abs()));
        let gap = got.iter().zip(expected).map(|(got, v)| (got / count as f32 - v).abs()).fold(0.0, f32::max);
        worst = worst.max(gap / scale);
        assert!(gap <= 1e-5 * scale, "{}: off by {gap:e}, largest {scale:e}", param.name);
    }
    assert_eq!(policy.params().len(), expected.len(), "every parameter is compared");
    println!("worst gradient error over the largest magnitude: {worst:e}");
}

#[test]
fn sft_follows_the_recorded_trajectory() {
    let case = &fixture::json("train/train.json")["sft_trajectory"];
    let config = LearnerConfig {
        learning_rate: 1e-3,
        schedule: Schedule::Constant,
        betas: (0.9, 0.95),
        weight_decay: 0.1,
        decay_vectors: true,
        max_grad_norm: 1.0,
        ..LearnerConfig::default()
    };
    let policy = model(case["model"].as_str().unwrap());
    let mut learner = Learner::new(policy, config, 100, ranks::alone()).unwrap();
    for (at, (batch, step)) in rows(&case["batches"]).iter().zip(rows(&case["steps"])).enumerate() {
        let group = |(at, row): (usize, &Value)| {
            let tokens = ids(row);
            let mask = vec![true; tokens.len()];
            Group::single(format!("row {at}"), Sample::new(tokens, mask))
        };
        let groups = rows(batch).iter().enumerate().map(group).collect();
        let metrics = learner.step(&Sft::default(), groups).unwrap();
        assert_close(
            &format!("loss of step {at}"),
            metrics.get("loss").unwrap(),
            number(&step["loss"]),
            1e-5,
        );
        let norm = metrics.get("grad_norm").unwrap();
        assert_close(&format!("gradient norm of step {at}"), norm, number(&step["grad_norm"]), 1e-5);
    }
}

#[test]
fn dpo_follows_the_recorded_trajectory() {
    let case = &fixture::json("train/train.json")["dpo_trajectory"];
    let prompt = case["prompt_len"].as_u64().unwrap() as usize;
    let rows_of_tokens: Vec<Vec<u32>> = rows(&case["chosen_then_rejected"]).iter().map(ids).collect();
    let pairs = rows_of_tokens.len() / 2;
    let answer =
        |row: usize| Sample::response(&rows_of_tokens[row][..prompt], &rows_of_tokens[row][prompt..]);
    let group = |at: usize| Group::pair(format!("pair {at}"), answer(at), answer(pairs + at));
    let mut groups: Vec<Group> = (0..pairs).map(group).collect();
    Reference::live(model(case["ref"].as_str().unwrap()), 2048).fill(&mut groups).unwrap();
    let recorded = flat(&case["ref_logps"]);
    for (at, group) in groups.iter().enumerate() {
        for (side, sample) in group.samples.iter().enumerate() {
            let sum: f32 = sample.ref_logps.iter().sum();
            assert_close("reference", f64::from(sum), f64::from(recorded[side * pairs + at]), 1e-5);
        }
    }
    let config = LearnerConfig {
        learning_rate: 5e-4,
        schedule: Schedule::Constant,
        max_grad_norm: 0.0,
        ..LearnerConfig::default()
    };
    let dpo = Dpo::new(DpoConfig { beta: number(&case["beta"]), ..DpoConfig::default() }).unwrap();
    let policy = model(case["policy"].as_str().unwrap());
    let mut learner = Learner::new(policy, config, 100, ranks::alone()).unwrap();
    let batch = Batch::collate(&groups).unwrap();
    for (at, step) in rows(&case["steps"]).iter().enumerate() {
        let logps = learner.policy().forward(&batch, Needs::NOTHING).unwrap().logps.unwrap();
        let sums = to_vec(&batch.sum_per_sequence(logps));
        let recorded = flat(&step["policy_logps"]);
        for (sequence, sum) in batch.sequences.iter().zip(sums) {
            let expected = recorded[sequence.sample * pairs + sequence.group];
            assert_close(&format!("log-probability at step {at}"), f64::from(sum), f64::from(expected), 1e-5);
        }
        let metrics = learner.step(&dpo, groups.clone()).unwrap();
        assert_close(
            &format!("loss of step {at}"),
            metrics.get("loss").unwrap(),
            number(&step["loss"]),
            1e-5,
        );
        for (name, key) in [("rewards/chosen", "chosen_rewards"), ("rewards/rejected", "rejected_rewards")] {
            let recorded = flat(&step[key]);
            let mean = recorded.iter().map(|&v| f64::from(v)).sum::<f64>() / recorded.len() as f64;
            let gap = (metrics.get(name).unwrap() - mean).abs();
            assert!(gap < 1e-4, "{name} of step {at} is off by {gap:e}");
        }
    }
}
