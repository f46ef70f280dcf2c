//! Every family on two ranks along each axis: log-probabilities and gradients are those of one rank.

#[path = "../../aligner-core/tests/scaled_weights/eight_bits.rs"]
mod eight_bits;

use std::path::{Path, PathBuf};
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

fn directory(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/models")).join(name)
}

fn model(name: &str) -> CausalLm {
    loaded(&directory(name))
}

fn loaded(directory: &Path) -> CausalLm {
    CausalLm::load(&Checkpoint::open(directory).unwrap(), &Device::flex()).unwrap()
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

/// A rank's parameters of a model that it cuts as it reads it, with the bytes that it read.
fn read_own(directory: &Path, comms: &MeshComms, cut: Cut) -> Result<(ParamSet, u64)> {
    let checkpoint = Arc::new(Checkpoint::open(directory)?);
    let unread = CausalLm::open(&checkpoint, &Device::flex())?;
    let message = unread.forward(&batch(), Needs::NOTHING).unwrap_err().to_string();
    assert!(message.contains("has not been read"), "{message}");
    let policy = ParallelLm::new(&unread, comms, cut)?;
    Ok((policy.params().clone(), checkpoint.bytes_read()))
}

/// What ranks read, as elements and bytes, when they cut a model as they read it; it has to be what they have of a model that they
/// cut afterwards.
fn read_by_ranks(directory: &Path, mesh: [usize; 5], cut: Cut) -> Vec<(u64, u64)> {
    let whole = loaded(directory);
    let results = ThreadComm::run(mesh.iter().product(), |comm| {
        let comms = MeshComms::new(Mesh::new(mesh)?, Arc::new(comm))?;
        let expected = ParallelLm::new(&whole, &comms, cut)?;
        let (own, bytes) = read_own(directory, &comms, cut)?;
        assert_eq!(own.len(), expected.params().len());
        for (own, expected) in own.iter().zip(expected.params().iter()) {
            assert_eq!((&own.name, &own.shape), (&expected.name, &expected.shape));
            let [values, expected] = [&own.value, &expected.value].map(to_vec);
            assert_eq!(values, expected, "{}: {}", directory.display(), own.name);
        }
        Ok((own.elements(false) as u64, bytes))
    });
    let unwrapped = |result: Result<_>| {
        result.unwrap_or_else(|error| panic!("{} on {mesh:?}: {error}", directory.display()))
    };
    results.into_iter().map(unwrapped).collect()
}

#[test]
fn ranks_read_weights_in_eight_bits_with_their_own_scales() {
    let shared = Cut { share_parameters: true, ..Cut::default() };
    for (mesh, cut) in
        [([2, 1, 1, 1, 1], Cut::default()), ([1, 1, 1, 1, 2], Cut::default()), ([1, 1, 1, 2, 1], shared)]
    {
        for form in [eight_bits::blocks(false), eight_bits::rows(), eight_bits::whole()] {
            let dir = tempfile::tempdir().unwrap();
            eight_bits::write(&directory("llama_gqa_untied"), dir.path(), &form);
            let all = std::fs::metadata(dir.path().join("model.safetensors")).unwrap().len();
            for (rank, (_, bytes)) in read_by_ranks(dir.path(), mesh, cut).into_iter().enumerate() {
                assert!(bytes < all * 3 / 4, "{mesh:?}: rank {rank} read {bytes} of {all} bytes");
            }
        }
    }
}

#[test]
fn a_rank_reads_its_own_bytes_alone() {
    let shared = Cut { share_parameters: true, ..Cut::default() };
    for (mesh, cut) in [
        ([2, 1, 1, 1, 1], Cut::default()),
        ([1, 1, 2, 1, 1], Cut::default()),
        ([1, 1, 1, 1, 2], Cut::default()),
        ([1, 1, 1, 2, 1], shared),
        ([2, 1, 1, 2, 1], shared),
    ] {
        for name in ["llama_bias_mha", "qwen3_moe", "phi3", "gemma2", "gpt2"] {
            let is_moe = name.ends_with("moe");
            if is_moe != (mesh[2] > 1) && mesh != [1, 1, 1, 1, 2] {
                continue;
            }
            let read = read_by_ranks(&directory(name), mesh, cut);
            for (rank, (elements, bytes)) in read.into_iter().enumerate() {
                // Files of this family have matrices the other way round, which are read whole.
                let exact = name != "gpt2" || mesh[4] > 1;
                assert!(
                    !exact || bytes == 4 * elements,
                    "{name} on {mesh:?}: rank {rank} read {bytes} bytes"
                );
            }
        }
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
