//! Adapters that PEFT has made: logits, loss, gradients, greedy continuations and merged weights.
#![expect(clippy::print_stdout, reason = "the errors that were seen are read from the tests' output")]

use std::path::{Path, PathBuf};

use aligner_core::model::{CausalLm, LoraConfig, Targets};
use aligner_core::ops::host::to_vec;
use aligner_core::weights::{AdapterCheckpoint, Checkpoint, SaveDtype, save_adapter};
use aligner_core::{Batch, Device, Forward, Group, LossOutput, Needs, Policy, Sample, Segment};
use safetensors::{Dtype, SafeTensors};

const BUNDLED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden");
/// Suppressed in the golden greedy continuations.
const EOS: usize = 2;

/// An adapter with what PEFT computes with it.
struct Case {
    name: String,
    model: CausalLm,
    base: CausalLm,
    expected: Vec<u8>,
}

impl Case {
    fn open(path: &Path) -> Self {
        let file = AdapterCheckpoint::open(path).unwrap();
        let base = path.parent().unwrap().join(file.base().unwrap());
        let base = CausalLm::load(&Checkpoint::open(&base).unwrap(), &Device::flex()).unwrap();
        Self {
            name: path.file_name().unwrap().to_string_lossy().into_owned(),
            // PEFT's values are those of evaluation.
            model: base.clone().with_adapter_from(&file).unwrap().with_dropout(0.0).unwrap(),
            base,
            expected: std::fs::read(path.join("expected.safetensors")).unwrap(),
        }
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.expected).unwrap();
        let tensor = file.tensor(name).unwrap();
        assert_eq!(tensor.dtype(), Dtype::F32, "{name}");
        tensor.data().as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
    }

    /// Rows of token ids; labels that are not targets are negative.
    fn integers(&self, name: &str) -> Vec<Vec<i64>> {
        let file = SafeTensors::deserialize(&self.expected).unwrap();
        let tensor = file.tensor(name).unwrap();
        let row = tensor.shape().last().copied().unwrap();
        let all: Vec<i64> =
            tensor.data().as_chunks().0.iter().map(|&bytes| i64::from_le_bytes(bytes)).collect();
        all.chunks_exact(row).map(<[i64]>::to_vec).collect()
    }

    fn ids(&self, name: &str) -> Vec<Vec<u32>> {
        let rows = self.integers(name);
        rows.into_iter().map(|row| row.into_iter().map(|id| id as u32).collect()).collect()
    }

    fn batch(&self) -> Batch {
        let labels = self.integers("labels");
        let group = |(tokens, labels): (Vec<u32>, Vec<i64>)| {
            let mask = labels.into_iter().map(|label| label >= 0).collect();
            Group::single("golden", Sample::new(tokens, mask))
        };
        let groups: Vec<Group> = self.ids("input_ids").into_iter().zip(labels).map(group).collect();
        Batch::collate(&groups).unwrap()
    }
}

/// The bundled adapters, or those of another set.
fn cases() -> Vec<Case> {
    let other = std::env::var_os("ALIGNER_GOLDEN").map(PathBuf::from);
    let least = if other.is_some() { 1 } else { 5 };
    let golden = other.unwrap_or_else(|| BUNDLED.into()).join("lora");
    let entries = std::fs::read_dir(&golden).unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<PathBuf> = entries.filter(|path| AdapterCheckpoint::is_adapter(path)).collect();
    paths.sort();
    assert!(paths.len() >= least, "{} adapters in {}", paths.len(), golden.display());
    paths.iter().map(|path| Case::open(path)).collect()
}

fn logits(model: &CausalLm, tokens: &[u32]) -> Vec<f32> {
    let positions: Vec<u32> = (0..tokens.len() as u32).collect();
    let segment = Segment { start: 0, len: tokens.len(), position: 0, parent: None };
    let layout = model.layout(&positions, &[segment]).unwrap();
    to_vec(&model.logits(model.hidden(tokens, &layout).unwrap()).unwrap())
}

fn all_logits(model: &CausalLm, case: &Case) -> Vec<f32> {
    case.ids("input_ids").iter().flat_map(|tokens| logits(model, tokens)).collect()
}

fn assert_close(what: &str, got: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let worst = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    println!("{what}: worst difference {worst:.1e}");
    assert!(worst < tolerance, "{what}: {worst}");
}

fn loss(out: &Forward, _: &Batch) -> aligner_core::Result<LossOutput> {
    Ok(LossOutput::new(out.logps()?.clone().neg().sum()))
}

#[test]
fn logits_are_those_of_peft_with_and_without_the_adapter() {
    for case in cases() {
        assert_close(
            &format!("{} logits", case.name),
            &all_logits(&case.model, &case),
            &case.floats("logits"),
            1e-4,
        );
        let base = case.model.without_adapter().unwrap();
        assert_close(
            &format!("{} base", case.name),
            &all_logits(&base, &case),
            &case.floats("logits_base"),
            1e-4,
        );
        for (own, other) in base.params().iter().zip(case.base.params().iter()) {
            assert_eq!((&own.name, to_vec(&own.value)), (&other.name, to_vec(&other.value)));
        }
    }
}

#[test]
fn loss_and_gradients_are_those_of_peft() {
    for mut case in cases() {
        for checkpointing in [false, true] {
            case.model.set_gradient_checkpointing(checkpointing);
            let batch = case.batch();
            let gradients =
                case.model.accumulate(std::slice::from_ref(&batch), Needs::NOTHING, &loss).unwrap();
            let count = batch.targets.len() as f32;
            let expected = case.floats("loss")[0];
            let gap = (gradients.loss_sum as f32 / count - expected).abs();
            assert!(gap < 1e-5 * expected.max(1.0), "{}: the loss is off by {gap}", case.name);
            for (param, grad) in case.model.params().iter().zip(&gradients.values) {
                assert_eq!(
                    grad.is_some(),
                    param.trainable,
                    "{}: a frozen weight has no gradient",
                    param.name
                );
                let Some(grad) = grad else { continue };
                let own = param.name.replace("lora_magnitude_vector", "lora_magnitude_vector.weight");
                let expected = case.floats(&format!("grad.base_model.model.{own}"));
                let largest = expected.iter().fold(0f32, |most, value| most.max(value.abs()));
                let got: Vec<f32> = to_vec(grad).iter().map(|value| value / count).collect();
                let what = format!("{} {}, of {largest:.1e}", case.name, param.name);
                assert_close(&what, &got, &expected, 1e-5 * largest);
            }
        }
    }
}

#[test]
fn merged_weights_are_those_of_peft_and_the_same_function() {
    for case in cases() {
        let merged = case.model.merged().unwrap();
        let mut compared = 0;
        for (param, base) in merged.params().iter().zip(case.base.params().iter()) {
            let moved = to_vec(&param.value) != to_vec(&base.value);
            if moved {
                let expected = case.floats(&format!("merged.{}", param.name));
                assert_close(
                    &format!("{} {}", case.name, param.name),
                    &to_vec(&param.value),
                    &expected,
                    1e-5,
                );
                compared += 1;
            }
        }
        let adapter = case.model.config().adapter.as_ref().unwrap();
        assert_eq!(compared, adapter.modules.len() + adapter.saved.len());
        let what = format!("{} merged logits", case.name);
        assert_close(&what, &all_logits(&merged, &case), &all_logits(&case.model, &case), 1e-4);
    }
}

#[test]
fn greedy_continuations_are_those_of_peft() {
    for case in cases() {
        let mut tokens = case.ids("input_ids")[0].clone();
        let expected = &case.ids("greedy")[0];
        let prompt = tokens.len();
        let vocab = case.model.config().vocab_size;
        for _ in 0..expected.len() {
            let all = logits(&case.model, &tokens);
            let last = &all[all.len() - vocab..];
            let best = (0..vocab).filter(|&id| id != EOS).max_by(|&a, &b| last[a].total_cmp(&last[b]));
            tokens.push(best.unwrap() as u32);
        }
        assert_eq!(&tokens[prompt..], expected, "{}", case.name);
    }
}

#[test]
fn a_written_adapter_is_the_one_that_was_read() {
    for case in cases() {
        let dir = tempfile::tempdir().unwrap();
        let (config, params) = (case.model.config(), case.model.params());
        save_adapter(dir.path(), config, params, "base", SaveDtype::F32).unwrap();
        let again =
            case.base.clone().with_adapter_from(&AdapterCheckpoint::open(dir.path()).unwrap()).unwrap();
        for (one, other) in params.iter().zip(again.params().iter()) {
            assert_eq!((&one.name, to_vec(&one.value)), (&other.name, to_vec(&other.value)), "{}", case.name);
        }
        let modules = |model: &CausalLm| model.config().adapter.as_ref().unwrap().modules.clone();
        assert_eq!(modules(&again), modules(&case.model));
    }
}

#[test]
fn a_fresh_adapter_changes_nothing_and_learns_in_b_alone() {
    let case = &cases()[0];
    let config = LoraConfig { targets: Targets::AllLinear, dropout: 0.2, ..LoraConfig::default() };
    for dora in [false, true] {
        let model = case.base.clone().with_adapter(LoraConfig { dora, ..config.clone() }, 5).unwrap();
        let (own, base) = (all_logits(&model, case), all_logits(&case.base, case));
        if dora {
            assert_close("a fresh DoRA", &own, &base, 1e-4);
        } else {
            assert_eq!(own, base, "bit for bit");
        }
        let gradients = model.accumulate(&[case.batch()], Needs::NOTHING, &loss).unwrap();
        for (param, grad) in model.params().iter().zip(&gradients.values).filter(|(param, _)| param.trainable)
        {
            let moves = to_vec(grad.as_ref().unwrap()).iter().any(|value| *value != 0.0);
            assert_eq!(moves, !param.name.contains("lora_A"), "{}", param.name);
        }
    }
}

#[test]
fn dropout_follows_seed_and_step_and_no_micro_batch() {
    let case = cases().pop().unwrap();
    let mut model = case.base.clone();
    let config = LoraConfig { targets: Targets::AllLinear, dropout: 0.3, ..LoraConfig::default() };
    model = model.with_adapter(config, 5).unwrap();
    // B off zero, so that what A sees shows.
    for param in model.params_mut().iter_mut().filter(|param| param.name.contains("lora_B")) {
        param.value = param.value.clone() + 0.02;
    }
    let prompt = [5, 9, 100, 7];
    let answers: [&[u32]; 3] = [&[30, 31], &[200, 201, 17], &[8]];
    let samples = || answers.iter().map(|answer| Sample::response(&prompt, answer));
    let group = Group { id: "g".into(), samples: samples().collect(), ..Group::default() };
    let other = Group::single("h", Sample::response(&[8, 8], &[200, 201, 17]));
    let batches = |groups: &[&[&Group]]| -> Vec<Batch> {
        groups.iter().map(|groups| Batch::collate(groups.iter().copied()).unwrap()).collect()
    };
    let run = |model: &CausalLm, batches: &[Batch]| -> Vec<f32> {
        let gradients = model.accumulate(batches, Needs::NOTHING, &loss).unwrap();
        gradients.values.iter().flatten().flat_map(to_vec).collect()
    };
    let distance = |one: &[f32], other: &[f32]| {
        let largest = one.iter().fold(0f32, |most, value| most.max(value.abs()));
        one.iter().zip(other).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / largest
    };
    model.set_dropout_seed(1);
    let together = run(&model, &batches(&[&[&group, &other]]));
    assert_eq!(run(&model, &batches(&[&[&group, &other]])), together, "the same step, the same masks");
    let apart = distance(&together, &run(&model, &batches(&[&[&other], &[&group]])));
    assert!(apart < 1e-5, "micro-batches: {apart}");
    model.set_gradient_checkpointing(true);
    let layerwise = distance(&together, &run(&model, &batches(&[&[&group, &other]])));
    assert!(layerwise < 1e-5, "layer by layer: {layerwise}");
    model.set_gradient_checkpointing(false);
    model.begin_step(1);
    assert!(distance(&together, &run(&model, &batches(&[&[&group, &other]]))) > 1e-2, "another step");
    model.begin_step(0);
    model.set_dropout_seed(2);
    assert!(distance(&together, &run(&model, &batches(&[&[&group, &other]]))) > 1e-2, "another seed");
    let evaluated = |model: &CausalLm| {
        to_vec(model.forward(&batches(&[&[&group, &other]])[0], Needs::NOTHING).unwrap().logps().unwrap())
    };
    let before = evaluated(&model);
    model.begin_step(9);
    assert_eq!(evaluated(&model), before, "no dropout outside of training");
}
