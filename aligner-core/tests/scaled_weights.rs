//! Checkpoints whose weights are in eight bits with scales beside them.

#[path = "scaled_weights/eight_bits.rs"]
mod eight_bits;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aligner_core::model::CausalLm;
use aligner_core::ops::host::to_vec;
use aligner_core::weights::{Checkpoint, SaveDtype, Unread, read_tensors, save_checkpoint, save_model};
use aligner_core::{Device, Policy as _};
use eight_bits::Form;
use serde_json::{Value, json};

fn model(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/models")).join(name)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn forms() -> [(&'static str, Form); 4] {
    use eight_bits::{blocks, rows, whole};
    [("blocks", blocks(false)), ("blocks, short scales", blocks(true)), ("rows", rows()), ("whole", whole())]
}

#[test]
fn weights_are_the_stored_numbers_times_their_scales() {
    for (what, form) in forms() {
        for name in ["llama_gqa_untied", "qwen3_moe", "phi3"] {
            let dir = tempfile::tempdir().unwrap();
            let expected = eight_bits::write(&model(name), dir.path(), &form);
            let checkpoint = Checkpoint::open(dir.path()).unwrap();
            assert_eq!(checkpoint.names().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
            for (tensor, (shape, values)) in &expected {
                let (read_shape, read) = checkpoint.read(tensor).unwrap();
                assert_eq!((&read_shape, bits(&read)), (shape, bits(values)), "{what}: {tensor} of {name}");
            }
            let loaded = CausalLm::load(&checkpoint, &Device::flex()).unwrap();
            for param in loaded.params().iter() {
                assert_eq!(to_vec(&param.value), expected[&param.name].1, "{what}: {}", param.name);
            }
        }
    }
}

#[test]
fn eight_bits_are_near_the_weights_that_they_were_made_of() {
    let (dir, from) = (tempfile::tempdir().unwrap(), model("llama_gqa_untied"));
    let original = read_tensors(&from.join("model.safetensors")).unwrap();
    let (_, values) = &eight_bits::write(&from, dir.path(), &eight_bits::blocks(false))["lm_head.weight"];
    let largest =
        original["lm_head.weight"].1.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
    let differs = |(a, b): (&f32, &f32)| (a - b).abs();
    let worst = values.iter().zip(&original["lm_head.weight"].1).map(differs).fold(0.0, f32::max);
    assert!(worst > 0.0 && worst < largest / 16.0, "{worst} of {largest}");
}

#[test]
fn parts_of_a_weight_are_read_with_their_own_scales_alone() {
    for (what, form) in forms() {
        let dir = tempfile::tempdir().unwrap();
        let expected = eight_bits::write(&model("llama_gqa_untied"), dir.path(), &form);
        let checkpoint = Arc::new(Checkpoint::open(dir.path()).unwrap());
        let specs = CausalLm::parameters_in(&checkpoint).unwrap();
        let spec = specs.into_iter().find(|spec| spec.name == "lm_head.weight").unwrap();
        let (shape, values) = &expected[&spec.name];
        let [rows, columns] = [shape[0], shape[1]];
        let unread = Unread::parameter(Arc::clone(&checkpoint), spec);
        let columns_of =
            |from: usize, to: usize| (0..rows).map(|row| row * columns + from..row * columns + to).collect();
        let cuts: [Vec<Range<usize>>; 4] = [
            std::iter::once(rows / 2 * columns..rows * columns).collect(),
            columns_of(0, columns / 2),
            columns_of(columns / 2, columns),
            vec![700..701, 5..90],
        ];
        for cut in cuts {
            let own: Vec<f32> = cut.iter().flat_map(|range| &values[range.clone()]).copied().collect();
            let before = checkpoint.bytes_read();
            assert_eq!(bits(&unread.part(&cut).read().unwrap()), bits(&own), "{what}: {:?}", &cut[..1]);
            // Of the scales, those of the rows of blocks.
            let block = (form.block)([rows, columns]);
            let all_rows = cut.iter().flat_map(|range| [range.start / columns, (range.end - 1) / columns]);
            let (first, last) = (all_rows.clone().min().unwrap(), all_rows.max().unwrap());
            let below = last / block[0] - first / block[0] + 1;
            let width = if form.short { 2 } else { 4 };
            let scales = below * columns.div_ceil(block[1]) * width;
            assert_eq!(checkpoint.bytes_read() - before, (own.len() + scales) as u64, "{what}");
        }
    }
}

#[test]
fn a_saved_model_is_plain() {
    let (dir, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let expected = eight_bits::write(&model("llama_gqa_untied"), dir.path(), &eight_bits::blocks(false));
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let loaded = CausalLm::load(&checkpoint, &Device::flex()).unwrap();
    let [converted, saved] = ["converted", "saved"].map(|name| out.path().join(name));
    save_checkpoint(&converted, &checkpoint, SaveDtype::F32, &mut |_, _| {}).unwrap();
    save_model(&saved, loaded.config(), loaded.params(), SaveDtype::F32).unwrap();
    for path in [converted, saved] {
        let config: Value =
            serde_json::from_slice(&std::fs::read(path.join("config.json")).unwrap()).unwrap();
        assert_eq!(config.get("quantization_config"), None);
        assert_eq!(read_tensors(&path.join("model.safetensors")).unwrap(), expected);
    }
}

/// The message of opening a model with these tensors, of which each is of zeros.
fn message(quantization: &Value, tensors: &[(&str, &'static str, &[usize])]) -> Result<(), String> {
    let dir = tempfile::tempdir().unwrap();
    let config = json!({"model_type": "llama", "vocab_size": 4, "hidden_size": 4, "intermediate_size": 4,
        "num_hidden_layers": 1, "num_attention_heads": 2, "quantization_config": quantization});
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let tensor = |&(name, dtype, shape): &(&str, &'static str, &[usize])| {
        let width = match dtype {
            "F8_E4M3" => 1,
            "BF16" => 2,
            _ => 4,
        };
        let bytes = vec![0; shape.iter().product::<usize>() * width];
        (name.to_owned(), (dtype, shape.to_vec(), bytes))
    };
    let tensors: BTreeMap<_, _> = tensors.iter().map(tensor).collect();
    eight_bits::write_file(&dir.path().join("model.safetensors"), &tensors);
    Checkpoint::open(dir.path()).map(drop).map_err(|error| error.to_string())
}

#[test]
fn scales_that_do_not_fit_are_named() {
    let blocks = json!({"quant_method": "fp8", "weight_block_size": [2, 3]});
    let whole = json!({"quant_method": "fp8"});
    let weight: (&str, &str, &[usize]) = ("a.weight", "F8_E4M3", &[4, 4]);
    let scale = |end: &'static str, shape: &'static [usize]| (end, "F32", shape);
    let good = [
        weight,
        scale("a.weight_scale_inv", &[2, 2]),
        scale("a.input_scale", &[1]),
        scale("b.k_scale", &[1]),
    ];
    assert_eq!(message(&blocks, &good), Ok(()));
    for shape in [&[] as &[usize], &[1], &[1, 1]] {
        assert_eq!(message(&whole, &[weight, ("a.weight_scale", "BF16", shape)]), Ok(()));
    }
    for (quantization, tensors, parts) in [
        (&blocks, vec![weight], ["a.weight has eight bits", "no a.weight_scale_inv"]),
        (
            &blocks,
            vec![weight, scale("a.weight_scale_inv", &[2, 1])],
            ["a.weight_scale_inv: expected shape [2, 2]", "got [2, 1]"],
        ),
        (&whole, vec![weight, scale("a.weight_scale", &[1, 4])], ["expected shape [1, 1]", "got [1, 4]"]),
        (
            &whole,
            vec![weight, scale("a.weight_scale", &[1]), scale("a.weight_scale_inv", &[1])],
            ["a.weight has both", "a.weight_scale_inv"],
        ),
        (
            &whole,
            vec![("a.weight", "BF16", &[4, 4]), scale("a.weight_scale", &[1])],
            ["a.weight does not have eight bits", "a.weight_scale is beside it"],
        ),
        (
            &whole,
            vec![("a.weight", "F8_E4M3", &[4]), scale("a.weight_scale", &[1])],
            ["a.weight: expected a matrix", "got shape [4]"],
        ),
        (&json!({"quant_method": "gptq"}), vec![], ["config.json: quantization_config", "\"gptq\""]),
    ] {
        let message = message(quantization, &tensors).unwrap_err();
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
}

#[test]
fn pickled_weights_have_no_scales() {
    let dir = tempfile::tempdir().unwrap();
    let golden = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/pytorch/model"));
    for entry in std::fs::read_dir(golden).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(golden.join("config.json")).unwrap()).unwrap();
    config["quantization_config"] = json!({"quant_method": "fp8"});
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let message = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(message.contains("pytorch_model.bin") && message.contains("safetensors alone"), "{message}");
}
