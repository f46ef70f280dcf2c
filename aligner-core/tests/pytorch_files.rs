//! Files of `torch.save` and of torch's eight-bit numbers, read bit for bit.

use std::path::{Path, PathBuf};

use aligner_core::model::CausalLm;
use aligner_core::weights::{Checkpoint, WEIGHT_FILES, read_tensors};
use aligner_core::{Device, Policy as _, Result};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/pytorch");

fn golden(name: &str) -> PathBuf {
    Path::new(GOLDEN).join(name)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// A model's directory with one golden file as its weights.
fn directory(file: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(golden("model/config.json"), dir.path().join("config.json")).unwrap();
    std::fs::copy(golden(file), dir.path().join("pytorch_model.bin")).unwrap();
    dir
}

fn opened(file: &str) -> Result<(tempfile::TempDir, Checkpoint)> {
    let dir = directory(file);
    let checkpoint = Checkpoint::open(dir.path())?;
    Ok((dir, checkpoint))
}

#[test]
fn every_kind_of_tensor_is_read_in_row_major_order() {
    let (_dir, checkpoint) = opened("mixed.bin").unwrap();
    let expected = read_tensors(&golden("mixed.safetensors")).unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    assert_eq!(expected.len(), 14);
    for (name, (shape, values)) in expected {
        assert_eq!(checkpoint.shape(&name), Some(shape.clone()), "{name}");
        let (read_shape, read) = checkpoint.read(&name).unwrap();
        assert_eq!((read_shape, bits(&read)), (shape, bits(&values)), "{name}");
    }
}

#[test]
fn shards_with_a_tied_head_make_a_model() {
    let checkpoint = Checkpoint::open(&golden("model")).unwrap();
    let expected = read_tensors(&golden("model.safetensors")).unwrap();
    assert!(expected.contains_key("lm_head.weight"));
    assert_eq!(checkpoint.names().count(), expected.len());
    let model = CausalLm::load(&checkpoint, &Device::flex()).unwrap();
    for param in model.params().iter() {
        let values = aligner_core::ops::host::to_vec(&param.value);
        assert_eq!(bits(&values), bits(&expected[&param.name].1), "{}", param.name);
    }
}

#[test]
fn safetensors_are_read_where_both_are_there() {
    let (dir, checkpoint) = opened("mixed.bin").unwrap();
    assert!(checkpoint.shape("f32").is_some());
    std::fs::copy(golden("model.safetensors"), dir.path().join(WEIGHT_FILES[0])).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert!(checkpoint.shape("f32").is_none() && checkpoint.shape("lm_head.weight").is_some());
}

#[test]
fn what_is_no_dictionary_of_tensors_is_refused_by_name() {
    for (file, parts) in [
        ("nested.bin", ["key \"model\"", "a dictionary of 14"]),
        ("old.bin", ["before 1.6", "pytorch_model.bin"]),
        ("mixed.safetensors", ["expected a zip archive", "pytorch_model.bin"]),
    ] {
        let message = opened(file).unwrap_err().to_string();
        assert!(parts.iter().all(|part| message.contains(part)), "{file}: {message}");
    }
    let (_dir, checkpoint) = opened("whole_numbers.bin").unwrap();
    assert_eq!(checkpoint.shape("step"), Some(vec![1]));
    let message = checkpoint.read("step").unwrap_err().to_string();
    assert!(message.contains("tensor step is int64"), "{message}");
}

#[test]
fn eight_bit_numbers_are_those_of_torch() {
    let read = read_tensors(&golden("f8.safetensors")).unwrap();
    let expected = read_tensors(&golden("f8_expected.safetensors")).unwrap();
    for name in ["e4m3", "e5m2"] {
        let (got, expected) = (&read[name].1, &expected[name].1);
        assert_eq!(got.len(), 256);
        for (byte, (got, expected)) in got.iter().zip(expected).enumerate() {
            let same = got.to_bits() == expected.to_bits() || (got.is_nan() && expected.is_nan());
            assert!(same, "{name} {byte:#04x}: {got}, expected {expected}");
        }
    }
}
