//! Logits, log-probabilities, greedy continuations and scores of every `llama*` golden model, made
//! with transformers.

use std::path::{Path, PathBuf};

use aligner_core::model::CausalLm;
use aligner_core::ops::host::to_vec;
use aligner_core::shard::Whole;
use aligner_core::weights::{Checkpoint, read_tensors};
use aligner_core::{Batch, Device, Group, Needs, Policy, Sample, Segment};
use serde_json::Value;

/// Absolute, on logits of magnitude 5 to 13 and on log-probabilities.
const TOLERANCE: f32 = 2e-4;
/// Suppressed in the golden greedy continuations.
const EOS: usize = 2;

fn golden() -> PathBuf {
    let bundled = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden");
    std::env::var_os("ALIGNER_GOLDEN").map_or_else(|| bundled.into(), PathBuf::from).join("models")
}

fn models(wanted: impl Fn(&Value) -> bool) -> Vec<(PathBuf, Value)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(golden()).unwrap() {
        let path = entry.unwrap().path();
        if !path.file_name().unwrap().to_string_lossy().starts_with("llama") {
            continue;
        }
        let expected = std::fs::read(path.join("expected.json")).unwrap();
        let expected: Value = serde_json::from_slice(&expected).unwrap();
        if wanted(&expected) {
            found.push((path, expected));
        }
    }
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
    to_vec(&model.logits(model.hidden(tokens, &layout, &Whole).unwrap()).unwrap())
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
    let models = models(|expected| expected["sequences"][0].get("greedy").is_some());
    assert!(models.len() >= 4, "{} models", models.len());
    for (path, expected) in models {
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
fn a_padded_batch_equals_the_packed_one() {
    for (path, expected) in models(|expected| expected.get("batch").is_some()) {
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
    let models = models(|expected| expected.get("scores").is_some());
    assert!(models.len() >= 2, "{} models", models.len());
    for (path, expected) in models {
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
    for name in ["llama_gqa_tied", "llama_bias_mha"] {
        let mut model = load(&golden().join(name));
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
        assert_eq!(whole.loss_sum, layerwise.loss_sum);
        for ((param, a), b) in model.params().iter().zip(&whole.values).zip(&layerwise.values) {
            let (a, b) = (to_vec(a.as_ref().unwrap()), to_vec(b.as_ref().unwrap()));
            let largest = a.iter().fold(0f32, |m, v| m.max(v.abs()));
            assert!(largest > 0.0, "{name} {}: no gradient", param.name);
            assert_close(&format!("{name} {}", param.name), &b, &a, 1e-6 * largest);
        }
    }
}
