//! Whole steps, and the runs that others have published.

use crate::mesh::Mesh;
use crate::simulate::{Cluster, Job, Order, Scenario, Workload, published, shape, table};

fn scenario(nodes: usize, mesh: [usize; 5], job: Job) -> Scenario {
    let cluster = Cluster { nodes, ..Cluster::default() };
    Scenario { cluster, mesh: Mesh::new(mesh).unwrap(), model: shape("llama3-70b").unwrap(), job }
}

#[test]
fn every_kind_of_step_has_its_phases() {
    let phases = |algorithm| {
        let job = Job { algorithm, prompts: 512, num_generations: 1, ..Job::default() };
        let report = scenario(8, [4, 1, 1, 4, 4], job).simulate().unwrap();
        report.phases.iter().map(|phase| phase.name).collect::<Vec<_>>()
    };
    assert_eq!(phases(Workload::Sft), ["train"]);
    assert_eq!(phases(Workload::Dpo), ["log-probabilities", "train"]);
    assert_eq!(phases(Workload::Grpo), ["generate", "log-probabilities", "train", "refit"]);
    assert_eq!(
        phases(Workload::Ppo),
        ["generate", "reward and values", "log-probabilities", "train", "train critic", "refit"]
    );
}

#[test]
fn bubble_of_a_step_is_that_of_its_schedule() {
    // Without communication and with a head of no work, the pipeline is even, and the bubble (p - 1) / m.
    let mut scenario =
        scenario(4, [8, 1, 1, 1, 4], Job { algorithm: Workload::Sft, prompts: 64, ..Job::default() });
    scenario.job.batch_sequences = 64;
    scenario.model.vocab_size = 1;
    for link in [&mut scenario.cluster.intra, &mut scenario.cluster.inter] {
        link.bytes_per_sec = 1e30;
        link.latency_secs = 0.0;
    }
    scenario.cluster.memory_bytes_per_sec = 1e30;
    let bubble = |order, chunks| {
        let mut scenario = scenario.clone();
        (scenario.job.schedule, scenario.job.chunks) = (order, chunks);
        let phase = scenario.simulate().unwrap().phases[0].clone();
        phase.bubble / (phase.compute + phase.communication)
    };
    assert!((bubble(Order::OneForwardOneBackward, 1) - 3.0 / 64.0).abs() < 1e-5);
    assert!((bubble(Order::Interleaved, 5) - 3.0 / (5.0 * 64.0)).abs() < 1e-5);
    // (p - 1) (F + B - W) over m (F + B + W), all three equal.
    assert!((bubble(Order::ZeroBubble, 1) - 1.0 / 64.0).abs() < 1e-5);
}

#[test]
fn computing_parts_over_ranks_and_memory_follows_the_zero_stage() {
    let job = Job { algorithm: Workload::Sft, prompts: 512, ..Job::default() };
    let small = scenario(8, [8, 1, 1, 4, 2], job).simulate().unwrap();
    let large = scenario(16, [8, 1, 1, 8, 2], job).simulate().unwrap();
    let ratio = small.phases[0].compute / large.phases[0].compute;
    assert!((ratio - 2.0).abs() < 0.02, "{ratio}");
    let peak = |zero_stage| {
        let job = Job { zero_stage, ..job };
        scenario(8, [8, 1, 1, 4, 2], job).simulate().unwrap().memory
    };
    let stages: Vec<f64> = (0..4).map(|stage| peak(stage).peak()).collect();
    assert!(stages.is_sorted_by(|a, b| a > b), "{stages:?}");
    // 18 bytes for each of 70.55 G parameters over 16 ranks, the ends of the pipeline having one embedding each.
    let kinds = peak(0).learning;
    let sum: f64 = kinds.iter().filter(|kind| kind.0 != "activations").map(|kind| kind.1).sum();
    assert!((sum / (18.0 * 70.55e9 / 16.0) - 1.0).abs() < 0.001, "{sum}");
}

#[test]
fn dynamic_balancing_waits_less_than_a_static_split() {
    let waiting = |split| {
        // The longest response must not take as long as an engine's share of all.
        let job = Job {
            split,
            max_running: 8,
            max_response_tokens: 1024,
            response_tokens: 400.0,
            ..Job::default()
        };
        let report = scenario(8, [4, 1, 1, 4, 4], job).simulate().unwrap();
        report.rollout.unwrap().idle()
    };
    let (fixed, stolen) = (waiting(crate::balance::Split::Static), waiting(crate::balance::Split::Stealing));
    assert!(stolen < 0.6 * fixed, "{stolen} of {fixed}");
}

#[test]
fn all_violations_are_listed_at_once() {
    let job = Job { response_sigma: -1.0, batch_sequences: 500, generation_tp: Some(3), ..Job::default() };
    let message = scenario(3, [8, 1, 1, 3, 3], job).simulate().unwrap_err().to_string();
    for part in [
        "pp 3 does not divide num_hidden_layers 80",
        "has 72 ranks, but 3 nodes of 8 have 24",
        "dp times micro_batch_sequences 3 does not divide batch_sequences 500",
        "batch_sequences 500 does not divide the samples of a step 1024",
        "generation_tp 3 does not divide num_attention_heads 64",
        "job.response_sigma: expected 0 to 4, got -1",
    ] {
        assert!(message.contains(part), "no `{part}` in: {message}");
    }
}

#[test]
fn every_line_says_that_it_is_predicted() {
    let scenario = scenario(8, [4, 1, 1, 4, 4], Job::default());
    let text = scenario.simulate().unwrap().describe(&scenario);
    assert!(text.lines().count() > 8 && text.lines().all(|line| line.starts_with("predicted")), "{text}");
}

/// The errors that docs/simulator.md states, in percent; 0 for rows that a rate was fitted to.
const STATED: [f64; 19] = [
    0.0, 0.0, 0.0, -100.0, -31.0, -31.0, -37.0, -96.0, -7.0, 0.0, 0.0, -7.0, 0.0, -8.0, -5.0, -35.0, 2.0,
    169.0, -14.0,
];

#[test]
fn published_runs_are_predicted_with_the_errors_that_the_documentation_states() {
    let (rates, rows) = published().unwrap();
    assert_eq!(table(&rates, &rows).matches("predicted").count(), 2 + rows.len());
    assert_eq!(rows.len(), STATED.len());
    for (row, stated) in rows.iter().zip(STATED) {
        assert!((100.0 * row.error() - stated).abs() < 1.0, "{row:?}, stated {stated} %");
    }
    assert!(rows.iter().all(|row| !row.fitted || row.error().abs() < 1e-6), "{rows:?}");
}
