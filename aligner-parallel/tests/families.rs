//! Every family on two ranks along each axis: log-probabilities and gradients are those of one rank.

use std::path::Path;
use std::sync::Arc;

use aligner_core::model::CausalLm;
use aligner_core::ops::host::to_vec;
use aligner_core::weights::Checkpoint;
use aligner_core::{
    Batch, Device, Error, Forward, Gradients, Group, LossOutput, Needs, ParamSet, Policy, Result, Sample,
    Tensor,
};
use aligner_parallel::{Cut, Mesh, MeshComms, ParallelLm, ThreadComm};

const MODELS: [&str; 12] = [
    "llama_bias_mha",
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "qwen3_moe",
    "mistral_sw",
    "mixtral",
    "gemma2",
    "gemma3",
    "gpt2",
    "phi3",
    "olmo2",
];

fn model(name: &str) -> CausalLm {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/models");
    CausalLm::load(&Checkpoint::open(&Path::new(golden).join(name)).unwrap(), &Device::flex()).unwrap()
}

/// A shared prompt, and a text that is longer than the golden models' windows.
fn batch() -> Batch {
    let answers = [vec![17, 9, 300, 44], vec![5, 6]].map(|answer| Sample::response(&[8, 120, 7], &answer));
    let pair = Group { id: "pair".into(), samples: answers.into(), ..Group::default() };
    let long: Vec<u32> = (0..21).map(|at| 3 + at * 23 % 300).collect();
    let text = Group::single("text", Sample::new(long.clone(), vec![true; long.len()]));
    Batch::collate([&pair, &text]).unwrap()
}

fn loss(out: &Forward, batch: &Batch) -> Result<LossOutput> {
    let weights: Vec<f32> = (0..batch.targets.len()).map(|at| 0.5 + (at as f32 * 0.37).sin()).collect();
    let weights = Tensor::from_floats(weights.as_slice(), &out.logps()?.device());
    Ok(LossOutput::new((out.logps()?.clone() * weights).sum()))
}

/// Log-probabilities and gradients, by name.
type Outcome = (Vec<f32>, Vec<(String, Vec<f32>)>);

fn named(params: &ParamSet, gradients: Gradients) -> Result<ParamSet> {
    let mut own = ParamSet::default();
    for (param, gradient) in params.iter().zip(gradients.values) {
        let zeros = || Tensor::zeros([param.elements()], &Device::flex());
        own.insert(param.name.as_str(), &param.shape, gradient.unwrap_or_else(zeros))?;
    }
    Ok(own)
}

fn outcome(logps: &Forward, gradients: &ParamSet) -> Result<Outcome> {
    let gradients = gradients.iter().map(|param| (param.name.clone(), to_vec(&param.value))).collect();
    Ok((to_vec(logps.logps()?), gradients))
}

fn on_one(model: &CausalLm) -> Result<Outcome> {
    let gradients = model.accumulate(&[batch()], Needs::NOTHING, &loss)?;
    outcome(&model.forward(&batch(), Needs::NOTHING)?, &named(model.params(), gradients)?)
}

fn on_two(name: &str, mesh: [usize; 5], cut: Cut) -> Vec<Result<Outcome>> {
    ThreadComm::run(2, |comm| {
        let comms = MeshComms::new(Mesh::new(mesh)?, Arc::new(comm))?;
        let policy = ParallelLm::new(&model(name), &comms, cut)?;
        let logps = policy.forward(&batch(), Needs::NOTHING)?;
        let gradients = policy.accumulate(&[batch()], Needs::NOTHING, &loss)?;
        let mut own = named(policy.params(), gradients)?;
        for param in own.iter_mut() {
            let ranks = policy.pieces().comms().gradients();
            let phase = aligner_core::Phase::new("test");
            param.value = ranks.all_reduce(param.value.clone(), aligner_core::Reduce::Sum, phase)?;
        }
        outcome(&logps, &policy.with_params(own).whole()?)
    })
}

fn check(name: &str, mesh: [usize; 5], cut: Cut) {
    let (logps, gradients) = on_one(&model(name)).unwrap();
    for result in on_two(name, mesh, cut) {
        let (own_logps, own_gradients) = result.unwrap_or_else(|error| panic!("{name} on {mesh:?}: {error}"));
        close(&own_logps, &logps, &format!("{name} on {mesh:?}"));
        assert_eq!(own_gradients.len(), gradients.len(), "{name} on {mesh:?}");
        for ((param, own), (expected_param, expected)) in own_gradients.iter().zip(&gradients) {
            assert_eq!(param, expected_param);
            close(own, expected, &format!("{name} on {mesh:?}: gradient of {param}"));
        }
    }
}

/// Within rounding of the largest magnitude.
fn close(own: &[f32], expected: &[f32], what: &str) {
    assert_eq!(own.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
    let error = own.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(error <= 2e-5 * largest, "{what}: off by {error}, largest {largest}");
}

#[test]
fn tensor_parallel_ranks_compute_what_one_does() {
    for name in MODELS.into_iter().filter(|&name| name != "olmo2") {
        check(name, [2, 1, 1, 1, 1], Cut::default());
    }
}

#[test]
fn sequence_parallel_ranks_compute_what_one_does() {
    for name in MODELS.into_iter().filter(|&name| !["olmo2", "gpt2"].contains(&name)) {
        check(name, [2, 1, 1, 1, 1], Cut { sequence: true, ..Cut::default() });
    }
}

#[test]
fn context_parallel_ranks_compute_what_one_does() {
    for name in MODELS {
        check(name, [1, 2, 1, 1, 1], Cut::default());
    }
}

#[test]
fn pipeline_stages_compute_what_one_rank_does() {
    for name in MODELS.into_iter().filter(|&name| name != "gemma3") {
        check(name, [1, 1, 1, 1, 2], Cut::default());
    }
}

#[test]
fn what_cannot_be_split_is_refused() {
    let refused = |name: &str, cut: Cut| {
        let error: Error = on_two(name, [2, 1, 1, 1, 1], cut).remove(0).unwrap_err();
        error.to_string()
    };
    assert!(refused("olmo2", Cut::default()).contains("norms all its heads together"));
    let split_rows = refused("gpt2", Cut { sequence: true, ..Cut::default() });
    assert!(split_rows.contains("learned positions"), "{split_rows}");
}
