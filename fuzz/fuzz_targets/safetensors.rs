//! A `model.safetensors` of any bytes.
#![no_main]

use std::sync::LazyLock;

use aligner_core::weights::{Checkpoint, read_metadata, read_tensors};
use aligner_fuzz::Scratch;
use libfuzzer_sys::fuzz_target;

static SCRATCH: LazyLock<Scratch> = LazyLock::new(|| {
    let scratch = Scratch::new();
    scratch.golden("models/llama_gqa_tied/config.json", "config.json");
    scratch
});

fuzz_target!(|bytes: &[u8]| {
    let path = SCRATCH.write("model.safetensors", bytes);
    let _ = (read_metadata(&path), read_tensors(&path));
    let Ok(checkpoint) = Checkpoint::open(SCRATCH.dir()) else { return };
    for name in checkpoint.names() {
        let _ = checkpoint.read(name);
    }
});
