//! GGUF files of every family, made with the `gguf` package, against what transformers says of the same weights.
#![expect(clippy::print_stdout, reason = "the errors that were seen are read from the tests' output")]

use std::path::{Path, PathBuf};

use aligner_core::Device;
use aligner_core::Segment;
use aligner_core::model::{CausalLm, MODEL_TYPES, ModelConfig};
use aligner_core::ops::host::to_vec;
use aligner_core::weights::Checkpoint;
use serde_json::Value;
use sha2::{Digest, Sha256};

/// Absolute, on logits of magnitude 2 to 7.
const TOLERANCE: f32 = 2e-4;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/gguf/families");

/// Each file with what is known of it.
fn files() -> Vec<(PathBuf, Value)> {
    let entries = std::fs::read_dir(GOLDEN).unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|end| end == "gguf")).collect();
    paths.sort();
    let known = |path: &Path| serde_json::from_slice(&std::fs::read(path.with_extension("json")).unwrap());
    paths.into_iter().map(|path| (path.clone(), known(&path).unwrap())).collect()
}

fn name(path: &Path) -> String {
    path.file_stem().unwrap().to_string_lossy().into_owned()
}

#[test]
fn every_family_has_a_file_whose_configuration_is_that_of_its_json() {
    let files = files();
    for (path, golden) in &files {
        let strip = |config: ModelConfig| ModelConfig { extra: Value::Null, ..config };
        let expected = strip(ModelConfig::from_json(path, &golden["config"]).unwrap());
        let checkpoint = Checkpoint::open(path).unwrap();
        assert_eq!(strip(checkpoint.config().clone()), expected, "{}", name(path));
        // What is written of it as `config.json` is the same again.
        let again = ModelConfig::from_json(path, &checkpoint.config().to_json()).unwrap();
        assert_eq!(strip(again), expected, "{}", name(path));
    }
    for model_type in MODEL_TYPES {
        let of_type = |(_, golden): &(PathBuf, Value)| golden["config"]["model_type"] == model_type;
        assert!(files.iter().any(of_type), "no golden file is a {model_type}");
    }
}

#[test]
fn tensors_have_hugging_face_s_names_order_and_bits() {
    for (path, golden) in files() {
        let checkpoint = Checkpoint::open(&path).unwrap();
        let expected = golden["tensors"].as_object().unwrap();
        let names: Vec<&str> = checkpoint.names().collect();
        assert_eq!(names, expected.keys().map(String::as_str).collect::<Vec<_>>(), "{}", name(&path));
        for tensor in names {
            let (shape, values) = checkpoint.read(tensor).unwrap();
            assert_eq!(checkpoint.shape(tensor), Some(shape), "{}: {tensor}", name(&path));
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let hash = format!("{:x}", Sha256::digest(bytes));
            assert_eq!(expected[tensor], hash, "{}: {tensor}", name(&path));
        }
    }
}

#[test]
fn logits_are_those_of_transformers() {
    for (path, golden) in files() {
        let model = CausalLm::load(&Checkpoint::open(&path).unwrap(), &Device::flex()).unwrap();
        let tokens: Vec<u32> =
            golden["input_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        let positions: Vec<u32> = (0..tokens.len() as u32).collect();
        let segment = Segment { start: 0, len: tokens.len(), position: 0, parent: None };
        let layout = model.layout(&positions, &[segment]).unwrap();
        let got = to_vec(&model.logits(model.hidden(&tokens, &layout).unwrap()).unwrap());
        let expected = golden["logits"].as_array().unwrap();
        assert_eq!(got.len(), expected.len(), "{}", name(&path));
        let differences = got.iter().zip(expected).map(|(a, b)| (a - b.as_f64().unwrap() as f32).abs());
        let worst = differences.fold(0.0, f32::max);
        println!("{}: worst difference of {} logits {worst:.1e}", name(&path), got.len());
        assert!(worst < TOLERANCE, "{}: {worst}", name(&path));
    }
}
