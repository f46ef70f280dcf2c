//! A `model.safetensors.index.json` of any bytes, beside shards that are good.
#![no_main]

use std::sync::LazyLock;

use aligner_core::weights::Checkpoint;
use aligner_fuzz::Scratch;
use libfuzzer_sys::fuzz_target;

static SCRATCH: LazyLock<Scratch> = LazyLock::new(|| {
    let scratch = Scratch::new();
    scratch.golden("models/llama_gqa_tied/config.json", "config.json");
    for shard in ["a.safetensors", "b.safetensors"] {
        scratch.golden("gguf/tiny.safetensors", shard);
    }
    scratch
});

fuzz_target!(|bytes: &[u8]| {
    SCRATCH.write("model.safetensors.index.json", bytes);
    let Ok(checkpoint) = Checkpoint::open(SCRATCH.dir()) else { return };
    for name in checkpoint.names() {
        let _ = checkpoint.read(name);
    }
});
