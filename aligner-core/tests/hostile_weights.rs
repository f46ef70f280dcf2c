//! Broken and hostile weight files: an error or a success, never a panic, never much memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use aligner_core::model::CausalLm;
use aligner_core::weights::{Checkpoint, Gguf, read_tensors};
use proptest::prelude::*;

#[path = "hostile_weights/pickles.rs"]
mod pickles;

/// The largest single allocation of this process.
static LARGEST: AtomicUsize = AtomicUsize::new(0);
/// More than any read of the small files here needs, and far less than a hostile length asks for.
const MOST_BYTES: usize = 4 << 20;

struct Watched;

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's contract is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watched = Watched;

fn assert_little_memory() {
    let largest = LARGEST.load(Ordering::Relaxed);
    assert!(largest < MOST_BYTES, "{largest} bytes were asked for at once");
}

/// A place for one file that is written over and over.
struct Scratch {
    dir: tempfile::TempDir,
    name: &'static str,
}

impl Scratch {
    fn new(name: &'static str) -> Self {
        Self { dir: tempfile::tempdir().unwrap(), name }
    }

    fn write(&self, bytes: &[u8]) -> PathBuf {
        let path = self.dir.path().join(self.name);
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

/// Opens and reads everything; whether it worked does not matter here.
fn read_safetensors(path: &Path) -> bool {
    read_tensors(path).is_ok()
}

fn read_gguf(path: &Path) -> bool {
    let Ok(file) = Gguf::open(path) else { return false };
    let all_read = file.tensor_names().all(|name| file.read(name).is_ok());
    if let Ok(checkpoint) = Checkpoint::open(path) {
        for name in checkpoint.names() {
            drop(checkpoint.read(name));
        }
    }
    all_read
}

fn safetensors_file(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

fn valid_safetensors() -> Vec<u8> {
    let header = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"b":{"dtype":"F16","shape":[3],"data_offsets":[16,22]},"c":{"dtype":"BF16","shape":[0,7],"data_offsets":[22,22]}}"#;
    safetensors_file(header, &[7; 22])
}

/// A GGUF file written by hand.
#[derive(Default)]
struct GgufBytes(Vec<u8>);

impl GgufBytes {
    fn header(version: u32, tensors: u64, keys: u64) -> Self {
        Self([b"GGUF".as_slice(), &version.to_le_bytes()].concat()).u64(tensors).u64(keys)
    }

    fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn text(mut self, text: &str) -> Self {
        self = self.u64(text.len() as u64);
        self.0.extend(text.as_bytes());
        self
    }

    fn size(self, key: &str, value: u32) -> Self {
        self.text(key).u32(4).u32(value)
    }

    fn tensor(self, name: &str, dims: &[u64], kind: u32, offset: u64) -> Self {
        let head = self.text(name).u32(dims.len() as u32);
        dims.iter().fold(head, |bytes, &dim| bytes.u64(dim)).u32(kind).u64(offset)
    }

    fn data(mut self, bytes: usize) -> Vec<u8> {
        self.0.resize(self.0.len().next_multiple_of(32), 0);
        self.0.resize(self.0.len() + bytes, 1);
        self.0
    }
}

/// A whole llama of one layer's worth of keys, two tensors and a nested array.
fn valid_gguf() -> Vec<u8> {
    GgufBytes::header(3, 2, 9)
        .text("general.architecture")
        .u32(8)
        .text("llama")
        .size("llama.embedding_length", 32)
        .size("llama.attention.head_count", 4)
        .size("llama.attention.head_count_kv", 2)
        .size("llama.feed_forward_length", 32)
        .size("llama.block_count", 1)
        .size("llama.context_length", 16)
        .text("some.texts")
        .u32(9)
        .u32(8)
        .u64(2)
        .text("ab")
        .text("c")
        .text("some.lists")
        .u32(9)
        .u32(9)
        .u64(1)
        .u32(5)
        .u64(1)
        .u32(7)
        .tensor("token_embd.weight", &[32, 4], 2, 0)
        .tensor("blk.0.attn_q.weight", &[32, 8], 8, 96)
        .data(96 + 272)
}

/// Every truncation, and at every byte a few changed bits.
fn mutations(valid: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    let cuts = (0..valid.len()).map(|len| valid[..len].to_vec());
    let flips = (0..valid.len()).flat_map(move |at| {
        [0x01, 0x02, 0x10, 0x40, 0x80, 0xFF].into_iter().map(move |mask| {
            let mut bytes = valid.to_vec();
            bytes[at] ^= mask;
            bytes
        })
    });
    cuts.chain(flips)
}

#[test]
fn every_truncation_and_bit_flip_of_safetensors_is_survived() {
    let (scratch, valid) = (Scratch::new("x.safetensors"), valid_safetensors());
    assert!(read_safetensors(&scratch.write(&valid)));
    for len in 0..valid.len() {
        assert!(!read_safetensors(&scratch.write(&valid[..len])), "truncated to {len} bytes");
    }
    for bytes in mutations(&valid) {
        read_safetensors(&scratch.write(&bytes));
    }
    assert_little_memory();
}

#[test]
fn every_truncation_and_bit_flip_of_gguf_is_survived() {
    let (scratch, valid) = (Scratch::new("x.gguf"), valid_gguf());
    assert!(read_gguf(&scratch.write(&valid)));
    assert!(Checkpoint::open(&scratch.write(&valid)).is_ok());
    for len in 0..valid.len() {
        assert!(!read_gguf(&scratch.write(&valid[..len])), "truncated to {len} bytes");
    }
    for bytes in mutations(&valid) {
        read_gguf(&scratch.write(&bytes));
    }
    assert_little_memory();
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

    #[test]
    fn random_bytes_over_valid_files_are_survived(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
        gguf in any::<bool>(),
    ) {
        let scratch = Scratch::new(if gguf { "x.gguf" } else { "x.safetensors" });
        let mut bytes = if gguf { valid_gguf() } else { valid_safetensors() };
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let path = scratch.write(&bytes);
        let _ = if gguf { read_gguf(&path) } else { read_safetensors(&path) };
        assert_little_memory();
    }

    #[test]
    fn random_bytes_over_a_real_header_are_survived(
        changes in prop::collection::vec((0usize..3000, any::<u8>()), 1..6),
    ) {
        let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/gguf/tiny.gguf");
        let mut bytes = std::fs::read(golden).unwrap();
        for (at, value) in changes {
            bytes[at] = value;
        }
        read_gguf(&Scratch::new("x.gguf").write(&bytes));
        assert_little_memory();
    }

    #[test]
    fn random_bytes_over_a_configuration_are_survived(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
    ) {
        let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/models/llama3_rope/config.json");
        let mut bytes = std::fs::read(golden).unwrap();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let _ = aligner_core::model::ModelConfig::from_file(&Scratch::new("config.json").write(&bytes));
        assert_little_memory();
    }
}

/// Opens a file that must be refused, and checks that the message has all `parts`.
fn refused(name: &'static str, bytes: &[u8], parts: &[&str]) {
    let path = Scratch::new(name);
    let path = (path.write(bytes), path);
    let error = match name {
        "x.gguf" => Gguf::open(&path.0).map(drop).unwrap_err(),
        _ => read_tensors(&path.0).map(drop).unwrap_err(),
    };
    let message = error.to_string();
    for part in parts.iter().chain(&[name]) {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
    assert_little_memory();
}

#[test]
fn hostile_safetensors_headers_are_named() {
    let refuse = |header: &str, parts: &[&str]| {
        refused("x.safetensors", &safetensors_file(header, &[0; 16]), parts);
    };
    refused("x.safetensors", &[0xFF; 40], &["18446744073709551615"]);
    refused("x.safetensors", &[1000u64.to_le_bytes().as_slice(), b"{}"].concat(), &["1000", "truncated"]);
    refuse(r#"{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]"#, &["header"]);
    refuse(r#"{"w":{"dtype":"F32","shape":[8],"data_offsets":[0,32]}}"#, &["tensor w", "0..32", "16"]);
    refuse(r#"{"w":{"dtype":"F32","shape":[4],"data_offsets":[16,0]}}"#, &["tensor w"]);
    refuse(r#"{"w":{"dtype":"F32","shape":[5],"data_offsets":[0,16]}}"#, &["tensor w", "[5]", "16 bytes"]);
    refuse(r#"{"w":{"dtype":"F99","shape":[4],"data_offsets":[0,16]}}"#, &["\"w\"", "dtype"]);
    refuse(r#"{"w":{"dtype":"F32","shape":[-4],"data_offsets":[0,16]}}"#, &["\"w\""]);
    refuse(
        r#"{"w":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,16]}}"#,
        &["tensor w", "4294967296"],
    );
    refuse(
        r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},"b":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}"#,
        &["tensor b", "starts at byte 8"],
    );
    refuse(
        r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[3],"data_offsets":[4,16]}}"#,
        &["\"a\" is there twice"],
    );
    refuse(r#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#, &["12 bytes follow"]);
    refuse(
        r#"{"w":{"dtype":"I64","shape":[2],"data_offsets":[0,16]}}"#,
        &["tensor w", "I64", "expected F32"],
    );
    let deep = "[".repeat(100_000);
    refuse(&format!(r#"{{"w":{deep}"#), &["header"]);
}

#[test]
fn hostile_gguf_headers_are_named() {
    let refuse = |bytes: Vec<u8>, parts: &[&str]| refused("x.gguf", &bytes, parts);
    refuse(b"GGML....".to_vec(), &["magic"]);
    refuse(GgufBytes::header(1, 0, 0).0, &["version 1"]);
    refuse(GgufBytes::header(0x0300_0000, 0, 0).0, &["version"]);
    refuse(GgufBytes::header(3, u64::MAX, 0).0, &["truncated"]);
    refuse(GgufBytes::header(3, 0, u64::MAX).0, &["truncated"]);
    refuse(GgufBytes::header(3, 0, 1).u64(u64::MAX).0, &["18446744073709551615"]);
    refuse(GgufBytes::header(3, 0, 1).text("k").u32(99).0, &["key k", "99"]);
    refuse(GgufBytes::header(3, 0, 1).text("k").u32(9).u32(4).u64(u64::MAX / 4).0, &["key k", "elements"]);
    let nested = (0..50).fold(GgufBytes::header(3, 0, 1).text("k").u32(9), |bytes, _| bytes.u32(9).u64(1));
    refuse(nested.u32(4).u64(0).0, &["key k", "nested"]);
    refuse(GgufBytes::header(3, 0, 2).size("k", 1).size("k", 2).0, &["key k is there twice"]);
    refuse(GgufBytes::header(3, 0, 1).size("general.alignment", 0).0, &["general.alignment"]);
    refuse(GgufBytes::header(3, 0, 1).size("general.alignment", 48).0, &["general.alignment", "48"]);
    let one = |dims: &[u64], kind: u32, offset: u64| {
        GgufBytes::header(3, 1, 0).tensor("w", dims, kind, offset).data(64)
    };
    refuse(one(&[1 << 40, 1 << 40], 0, 0), &["tensor w", "impossible"]);
    refuse(one(&[1 << 40], 0, 0), &["tensor w", "within the 64 bytes"]);
    refuse(one(&[4], 0, 64), &["tensor w", "within"]);
    refuse(one(&[4], 0, u64::MAX - 31), &["tensor w", "within"]);
    refuse(one(&[4], 0, 4), &["tensor w", "multiple of 32"]);
    refuse(one(&[16, 2], 2, 0), &["tensor w", "impossible", "Q4_0"]);
    refuse(one(&[4], 18, 0), &["tensor w", "type 18", "Q4_K"]);
    refuse(one(&[1, 1, 1, 1, 1], 0, 0), &["tensor w", "5 dimensions"]);
    let two = |first: &str, second: &str, offset: u64| {
        GgufBytes::header(2, 2, 0).tensor(first, &[12], 0, 0).tensor(second, &[4], 0, offset).data(64)
    };
    refuse(two("a", "b", 32), &["tensor b", "inside another"]);
    refuse(two("a", "a", 32), &["tensor a is there twice"]);
}

#[test]
fn unknown_gguf_tensor_is_refused_rather_than_left_out() {
    let bytes = GgufBytes::header(3, 1, 0).tensor("w", &[4], 0, 0).data(64);
    let message = Checkpoint::open(&Scratch::new("x.gguf").write(&bytes)).unwrap_err().to_string();
    assert!(message.contains("architecture"), "{message}");
    let scratch = Scratch::new("x.gguf");
    let text = valid_gguf();
    let at = text.windows(6).position(|window| window == b"attn_q").unwrap();
    let mut renamed = text.clone();
    renamed[at..at + 6].copy_from_slice(b"attn_z");
    let message = Checkpoint::open(&scratch.write(&renamed)).unwrap_err().to_string();
    assert!(message.contains("blk.0.attn_z.weight"), "{message}");
}

#[test]
fn gguf_tensor_of_other_dimensions_is_refused_by_name() {
    let with = |name: &str, dims: &[u64]| {
        let bytes = GgufBytes::header(3, 2, 7)
            .text("general.architecture")
            .u32(8)
            .text("llama")
            .size("llama.embedding_length", 32)
            .size("llama.attention.head_count", 4)
            .size("llama.attention.head_count_kv", 2)
            .size("llama.feed_forward_length", 32)
            .size("llama.block_count", 1)
            .size("llama.context_length", 16)
            .tensor("token_embd.weight", &[32, 4], 2, 0)
            .tensor(name, dims, 0, 96)
            .data(96 + 4 * dims.iter().product::<u64>() as usize);
        Checkpoint::open(&Scratch::new("x.gguf").write(&bytes)).map(drop)
    };
    with("blk.0.attn_q.weight", &[8, 8]).unwrap();
    for (name, dims) in [
        ("blk.0.attn_q.weight", [].as_slice()),
        ("blk.0.attn_k.bias", &[8, 2]),
        ("output_norm.weight", &[8, 2]),
    ] {
        let message = with(name, dims).unwrap_err().to_string();
        assert!(message.contains(name) && message.contains("dimensions, got"), "{message}");
    }
}

#[test]
fn gguf_settings_that_change_the_model_are_refused_together() {
    let bytes = GgufBytes::header(3, 0, 4)
        .text("general.architecture")
        .u32(8)
        .text("llama")
        .size("llama.leading_dense_block_count", 8)
        .size("llama.embedding_length", 32)
        .text("llama.rope.scaling.type")
        .u32(8)
        .text("yarn")
        .data(0);
    let message = Checkpoint::open(&Scratch::new("x.gguf").write(&bytes)).unwrap_err().to_string();
    for part in ["llama.leading_dense_block_count", "yarn", "block_count is missing", "token_embd"] {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

#[test]
fn gguf_settings_that_another_family_has_are_refused_by_key() {
    let with = |architecture: &str, key: &str, value: u32| {
        let key = format!("{architecture}.{key}");
        let bytes = GgufBytes::header(3, 0, 2)
            .text("general.architecture")
            .u32(8)
            .text(architecture)
            .size(&key, value)
            .data(0);
        let message = Checkpoint::open(&Scratch::new("x.gguf").write(&bytes)).unwrap_err().to_string();
        assert!(message.contains("x.gguf"), "{message}");
        message.contains(&key) && message.contains("changes the model")
    };
    for (architecture, key) in [
        ("qwen2", "attention.sliding_window"),
        ("olmo2", "attention.sliding_window"),
        ("qwen3", "expert_count"),
        ("llama", "final_logit_softcapping"),
        ("gemma3", "rope.scaling.factor"),
        ("qwen3moe", "expert_gating_func"),
        ("phi3", "logit_scale"),
        ("gemma2", "rope.freq_base_swa"),
    ] {
        assert!(with(architecture, key, 3), "{architecture}.{key}");
    }
    for (architecture, key) in [
        ("gemma2", "attention.sliding_window"),
        ("phi3", "attention.sliding_window"),
        ("llama", "attention.sliding_window"),
        ("llama", "expert_count"),
        ("gemma2", "final_logit_softcapping"),
        ("gemma3", "rope.freq_base_swa"),
    ] {
        assert!(!with(architecture, key, 3), "{architecture}.{key}");
    }
    let other = GgufBytes::header(3, 0, 1).text("general.architecture").u32(8).text("rwkv7").data(0);
    let message = Checkpoint::open(&Scratch::new("x.gguf").write(&other)).unwrap_err().to_string();
    assert!(message.contains("rwkv7") && message.contains("gemma2, gemma3, gpt2, llama"), "{message}");
}

#[test]
fn scales_of_eight_bit_weights_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let header = r#"{"model.norm.weight":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]},"model.norm.weight_scale_inv":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#;
    std::fs::write(dir.path().join("config.json"), CONFIG).unwrap();
    std::fs::write(dir.path().join("model.safetensors"), safetensors_file(header, &[0x38; 8])).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.read("model.norm.weight").unwrap().1, [1.0; 4]);
    let message = CausalLm::parameters_in(&checkpoint).unwrap_err().to_string();
    assert!(message.contains("model.norm.weight_scale_inv"), "{message}");
}

#[test]
fn gguf_experts_are_as_many_as_the_file_says() {
    let with = |count: u64, columns: u64| {
        let bytes = GgufBytes::header(3, 2, 9)
            .text("general.architecture")
            .u32(8)
            .text("llama")
            .size("llama.embedding_length", 32)
            .size("llama.attention.head_count", 4)
            .size("llama.attention.head_count_kv", 2)
            .size("llama.feed_forward_length", 32)
            .size("llama.block_count", 1)
            .size("llama.context_length", 16)
            .size("llama.expert_count", 4)
            .size("llama.expert_used_count", 2)
            .tensor("token_embd.weight", &[32, 4], 2, 0)
            .tensor("blk.0.ffn_up_exps.weight", &[columns, 2, count], 0, 96)
            .data(96 + 4 * (columns * 2 * count) as usize);
        Checkpoint::open(&Scratch::new("x.gguf").write(&bytes))
    };
    let checkpoint = with(4, 3).unwrap();
    let name = "model.layers.0.block_sparse_moe.experts.3.w3.weight";
    assert_eq!(checkpoint.read(name).unwrap().0, [2, 3]);
    assert_eq!(checkpoint.names().count(), 5);
    for (count, columns) in [(3, 3), (1 << 20, 0)] {
        let message = with(count, columns).unwrap_err().to_string();
        assert!(message.contains("ffn_up_exps") && message.contains("expected 4 experts"), "{message}");
    }
    assert_little_memory();
}

const CONFIG: &str = r#"{"model_type":"llama","vocab_size":4,"hidden_size":4,"intermediate_size":4,
    "num_hidden_layers":1,"num_attention_heads":2}"#;

/// The message of opening a directory with these files.
fn directory_error(files: &[(&str, &[u8])]) -> String {
    let outer = tempfile::tempdir().unwrap();
    std::fs::write(outer.path().join("outside.safetensors"), valid_safetensors()).unwrap();
    let dir = outer.path().join("model");
    std::fs::create_dir(&dir).unwrap();
    for (name, bytes) in files {
        std::fs::write(dir.join(name), bytes).unwrap();
    }
    Checkpoint::open(&dir).unwrap_err().to_string()
}

#[test]
fn index_may_not_point_outside_its_directory() {
    for shard in ["../outside.safetensors", "/etc/passwd", "a/../../outside.safetensors", "..", ""] {
        let index = format!(r#"{{"weight_map":{{"a":"{shard}"}}}}"#);
        let files = [("config.json", CONFIG.as_bytes()), ("model.safetensors.index.json", index.as_bytes())];
        let message = directory_error(&files);
        assert!(message.contains("tensor a") && message.contains("without a path"), "{message}");
    }
}

#[test]
fn incomplete_directories_say_what_is_missing() {
    let index = |body: &str| {
        let shard = valid_safetensors();
        let files = [
            ("config.json", CONFIG.as_bytes()),
            ("model.safetensors.index.json", body.as_bytes()),
            ("shard.safetensors", &shard),
        ];
        directory_error(&files)
    };
    assert!(directory_error(&[]).contains("config.json"));
    let message = directory_error(&[("config.json", CONFIG.as_bytes())]);
    assert!(message.contains("model.safetensors"), "{message}");
    assert!(directory_error(&[("config.json", b"{")]).contains("not valid JSON"));
    assert!(index(r#"{"weight_map":{"a":"absent.safetensors"}}"#).contains("absent.safetensors"));
    assert!(index(r#"{"weight_map":{"z":"shard.safetensors"}}"#).contains("tensor z is not in"));
    assert!(index(r#"{"weight_map":{"a":"shard.safetensors","a":"shard.safetensors"}}"#).contains("twice"));
    assert!(index(r#"{"weights":{}}"#).contains("weight_map"));
}

#[test]
fn file_that_shrinks_while_it_is_open_gives_an_error() {
    let scratch = Scratch::new("x.gguf");
    let path = scratch.write(&valid_gguf());
    let file = Gguf::open(&path).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(100).unwrap();
    let message = file.read("token_embd.weight").unwrap_err().to_string();
    assert!(message.contains("x.gguf"), "{message}");
}

#[test]
fn shape_that_differs_is_refused_before_anything_is_read() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), CONFIG).unwrap();
    std::fs::write(dir.path().join("model.safetensors"), valid_safetensors()).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.read_shaped("a", &[2, 2]).unwrap().len(), 4);
    let message = checkpoint.read_shaped("a", &[4, 2]).unwrap_err().to_string();
    assert!(
        message.contains("tensor a") && message.contains("[4, 2]") && message.contains("[2, 2]"),
        "{message}"
    );
    assert!(checkpoint.read("absent").unwrap_err().to_string().contains("absent"));
}

#[test]
fn directories_and_pipes_in_place_of_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), CONFIG).unwrap();
    let fault = || Checkpoint::open(dir.path()).unwrap_err().to_string();
    let place = dir.path().join("model.safetensors");
    std::fs::create_dir(&place).unwrap();
    assert!(fault().contains("model.safetensors: expected a file"), "{}", fault());
    std::fs::remove_dir(&place).unwrap();
    let pipe = |path: &Path| {
        assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
    };
    pipe(&place);
    assert!(fault().contains("model.safetensors: expected a file"), "{}", fault());
    std::fs::remove_file(&place).unwrap();
    for index in ["", "[]", "{}", r#"{"weight_map": {"a": "x", "a": "x"}}"#, r#"{"weight_map": 1}"#] {
        std::fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
        match Checkpoint::open(dir.path()) {
            Ok(checkpoint) => panic!("{index}: {:?}", checkpoint.names().collect::<Vec<_>>()),
            Err(error) => assert!(error.to_string().contains("index.json: bad index"), "{index}: {error}"),
        }
    }
    pipe(&dir.path().join("pipe.gguf"));
    let message = Checkpoint::open(&dir.path().join("pipe.gguf")).unwrap_err().to_string();
    assert!(message.contains("pipe.gguf: expected a file"), "{message}");
    std::fs::remove_file(dir.path().join("config.json")).unwrap();
    pipe(&dir.path().join("config.json"));
    assert!(fault().contains("config.json: expected a file"), "{}", fault());
}
