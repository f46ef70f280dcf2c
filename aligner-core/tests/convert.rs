//! Models of every family written as GGUF and back, and as safetensors of other types.

use std::path::{Path, PathBuf};

use aligner_core::Policy as _;
use aligner_core::model::CausalLm;
use aligner_core::weights::{
    Checkpoint, Gguf, GgufDtype, GgufValue, SaveDtype, read_tensors, save_checkpoint, save_gguf,
};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden");

fn directories() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(Path::new(GOLDEN).join("models")).unwrap();
    let mut found: Vec<PathBuf> =
        entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()).collect();
    found.sort();
    found
}

fn name(path: &Path) -> String {
    path.file_stem().unwrap().to_string_lossy().into_owned()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn unwatched() -> impl FnMut(usize, usize) {
    |_, _| {}
}

fn to_gguf(checkpoint: &Checkpoint, dtype: GgufDtype) -> aligner_core::Result<(tempfile::TempDir, PathBuf)> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    save_gguf(&path, checkpoint, &[], dtype, &mut unwatched())?;
    Ok((dir, path))
}

#[test]
fn every_family_is_the_same_after_a_turn_through_gguf_and_back() {
    let (mut turned, mut refused) = (Vec::new(), Vec::new());
    for path in directories() {
        let original = Checkpoint::open(&path).unwrap();
        let (_kept, file) = match to_gguf(&original, GgufDtype::F32) {
            Ok(written) => written,
            Err(error) => {
                refused.push((name(&path), error.to_string()));
                continue;
            }
        };
        let gguf = Checkpoint::open(&file).unwrap();
        assert_eq!(original.config().unlike(gguf.config()), [] as [&str; 0], "{}", name(&path));
        let dir = tempfile::tempdir().unwrap();
        save_checkpoint(dir.path(), &gguf, SaveDtype::F32, &mut unwatched()).unwrap();
        let back = Checkpoint::open(dir.path()).unwrap();
        assert_eq!(original.config().unlike(back.config()), [] as [&str; 0], "{}", name(&path));
        assert!(original.names().eq(back.names()), "{}", name(&path));
        let shifts = original.config().model_type().starts_with("gemma");
        for tensor in original.names() {
            let ((shape, mut values), (back_shape, back)) =
                (original.read(tensor).unwrap(), back.read(tensor).unwrap());
            // In a GGUF file, Gemma's norms have one added.
            if shifts && tensor.ends_with("norm.weight") {
                for value in &mut values {
                    *value = (*value + 1.0) - 1.0;
                }
            }
            assert_eq!((shape, bits(&values)), (back_shape, bits(&back)), "{}: {tensor}", name(&path));
        }
        turned.push(original.config().model_type());
    }
    turned.sort_unstable();
    turned.dedup();
    assert_eq!(turned.len(), aligner_core::model::MODEL_TYPES.len(), "{turned:?}");
    let expected = [
        ("llama_rm", "head of scores"),
        ("llama_rm_multi", "head of scores"),
        ("qwen3_moe_steps", "norm_topk_prob"),
    ];
    assert_eq!(refused.len(), expected.len(), "{refused:?}");
    for ((model, message), (expected, part)) in refused.iter().zip(expected) {
        assert!(model == expected && message.contains(part) && message.contains("model.gguf"), "{message}");
    }
}

/// Files of the `gguf` package, read and written again: the same tensors under the same names, as they are stored.
#[test]
fn a_golden_file_that_is_written_again_has_the_same_tensors() {
    let dtypes = [("F32", GgufDtype::F32), ("F16", GgufDtype::F16), ("BF16", GgufDtype::Bf16)];
    let files = [
        ("llama", "F32"),
        ("qwen2", "F32"),
        ("gpt2", "F32"),
        ("olmo2", "F32"),
        ("gemma2", "F32"),
        ("mistral", "F16"),
        ("gemma3", "F16"),
        ("phi3", "F16"),
        ("qwen3", "BF16"),
        ("qwen2_moe", "F32"),
        ("mixtral", "F32"),
        ("qwen3_moe", "F32"),
    ];
    for (family, dtype) in files {
        let path = Path::new(GOLDEN).join(format!("gguf/families/{family}.gguf"));
        let dtype = dtypes.iter().find(|(name, _)| *name == dtype).unwrap().1;
        let (_kept, again) = to_gguf(&Checkpoint::open(&path).unwrap(), dtype).unwrap();
        let (golden, again) = (Gguf::open(&path).unwrap(), Gguf::open(&again).unwrap());
        assert!(golden.tensor_names().eq(again.tensor_names()), "{family}");
        for tensor in golden.tensor_names() {
            let ((shape, values), (again_shape, again)) =
                (golden.read(tensor).unwrap(), again.read(tensor).unwrap());
            assert_eq!(shape, again_shape, "{family}: {tensor}");
            // What a shift of one rounds away.
            let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-7 * (1.0 + a.abs());
            let shifts = family.starts_with("gemma") && tensor.ends_with("norm.weight");
            let same =
                if shifts { values.iter().zip(&again).all(close) } else { bits(&values) == bits(&again) };
            assert!(same, "{family}: {tensor}");
        }
        for key in golden.keys().filter(|key| !key.starts_with("tokenizer") && !key.ends_with("_pattern")) {
            assert_eq!(golden.value(key), again.value(key), "{family}: {key}");
        }
    }
}

#[test]
fn blocks_are_written_where_rows_are_whole_blocks() {
    let checkpoint = Checkpoint::open(&Path::new(GOLDEN).join("models/mixtral")).unwrap();
    let (_kept, path) = to_gguf(&checkpoint, GgufDtype::Q8_0).unwrap();
    let bytes = std::fs::metadata(&path).unwrap().len();
    let (_full, whole) = to_gguf(&checkpoint, GgufDtype::F32).unwrap();
    assert!(bytes < std::fs::metadata(whole).unwrap().len() * 6 / 10, "{bytes}");
    let written = Checkpoint::open(&path).unwrap();
    CausalLm::parameters_in(&written).unwrap();
    for tensor in checkpoint.names() {
        let (one, other) = (checkpoint.read(tensor).unwrap().1, written.read(tensor).unwrap().1);
        let largest = one.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        let worst = one.iter().zip(&other).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        // Half a step of the largest block, and its scale's rounding.
        assert!(worst <= largest / 127.0 * 0.6, "{tensor}: {worst} of {largest}");
    }
}

#[test]
fn metadata_of_every_type_comes_back() {
    let checkpoint = Checkpoint::open(&Path::new(GOLDEN).join("models/gpt2")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let more = [
        ("general.name".to_string(), GgufValue::Text("grüße".into())),
        ("a.large".to_string(), GgufValue::Integer(1 << 40)),
        ("a.negative".to_string(), GgufValue::Integer(-3)),
        ("a.flag".to_string(), GgufValue::Flag(true)),
        ("a.real".to_string(), GgufValue::Float(0.5)),
        ("a.integers".to_string(), GgufValue::Integers(vec![1, -2, 1 << 20])),
        ("a.large_integers".to_string(), GgufValue::Integers(vec![1, 1 << 40])),
        ("a.reals".to_string(), GgufValue::Floats(vec![0.25, -1e9])),
        ("a.flags".to_string(), GgufValue::Flags(vec![true, false])),
        ("a.texts".to_string(), GgufValue::Texts(vec!["a".into(), String::new()])),
        (
            "a.lists".to_string(),
            GgufValue::Lists(vec![GgufValue::Integers(vec![1]), GgufValue::Texts(vec!["b".into()])]),
        ),
    ];
    let mut seen = Vec::new();
    save_gguf(&path, &checkpoint, &more, GgufDtype::F16, &mut |done, all| seen.push((done, all))).unwrap();
    let count = seen.len() - 1;
    assert_eq!((seen[0], seen[count]), ((0, count), (count, count)));
    let file = Gguf::open(&path).unwrap();
    for (key, value) in &more {
        assert_eq!(file.value(key), Some(value), "{key}");
    }
    assert_eq!(file.size("general.file_type").unwrap(), Some(1));
}

#[test]
fn a_directory_of_another_type_is_what_saving_the_model_gives() {
    for model in ["gpt2", "qwen2_moe", "llama_gqa_tied"] {
        let checkpoint = Checkpoint::open(&Path::new(GOLDEN).join("models").join(model)).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let device = aligner_core::Device::flex();
        let loaded = CausalLm::load(&checkpoint, &device).unwrap();
        for dtype in [SaveDtype::F32, SaveDtype::Bf16, SaveDtype::F16] {
            save_checkpoint(dir.path(), &checkpoint, dtype, &mut unwatched()).unwrap();
            let other = tempfile::tempdir().unwrap();
            aligner_core::weights::save_model(other.path(), loaded.config(), loaded.params(), dtype).unwrap();
            for file in ["config.json", "model.safetensors"] {
                let read = |dir: &Path| std::fs::read(dir.join(file)).unwrap();
                assert!(read(dir.path()) == read(other.path()), "{model}: {file} as {dtype:?}");
            }
        }
    }
}

#[test]
fn what_a_type_cannot_hold_is_named_and_the_old_file_stays() {
    let dir = tempfile::tempdir().unwrap();
    let from = Path::new(GOLDEN).join("models/llama_gqa_tied");
    std::fs::copy(from.join("config.json"), dir.path().join("config.json")).unwrap();
    let device = aligner_core::Device::flex();
    let tensors: Vec<_> = read_tensors(&from.join("model.safetensors"))
        .unwrap()
        .into_iter()
        .map(|(name, (shape, mut values))| {
            if name.ends_with("1.mlp.up_proj.weight") {
                values[3] = 1e6;
            }
            (name, shape, burn::tensor::Tensor::from_floats(values.as_slice(), &device))
        })
        .collect();
    let file = dir.path().join("model.safetensors");
    aligner_core::weights::save_tensors(&file, &tensors, &std::collections::BTreeMap::new()).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, "old").unwrap();
    let error = save_gguf(&path, &checkpoint, &[], GgufDtype::F16, &mut unwatched()).unwrap_err();
    let message = error.to_string();
    assert!(message.contains("model.gguf") && message.contains("1.mlp.up_proj.weight"), "{message}");
    assert_eq!(std::fs::read(&path).unwrap(), b"old");
    save_gguf(&path, &checkpoint, &[], GgufDtype::Bf16, &mut unwatched()).unwrap();
    let out = tempfile::tempdir().unwrap();
    let message = save_checkpoint(out.path(), &checkpoint, SaveDtype::F16, &mut unwatched()).unwrap_err();
    assert!(message.to_string().contains("1.mlp.up_proj.weight"), "{message}");
}
