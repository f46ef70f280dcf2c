//! A GGUF file of any bytes: metadata, tensors, the model's configuration, the tokenizer.
#![no_main]

use std::sync::LazyLock;

use aligner_core::weights::{Checkpoint, Gguf};
use aligner_data::Tokenizer;
use aligner_fuzz::{Scratch, let_panics_unwind, use_tokenizer};
use libfuzzer_sys::fuzz_target;

static SCRATCH: LazyLock<Scratch> = LazyLock::new(Scratch::new);

fuzz_target!(init: let_panics_unwind(), |bytes: &[u8]| {
    let path = SCRATCH.write("model.gguf", bytes);
    let Ok(file) = Gguf::open(&path) else { return };
    for name in file.tensor_names() {
        let _ = file.read(name);
    }
    if let Ok(checkpoint) = Checkpoint::open(&path) {
        for name in checkpoint.names() {
            let _ = checkpoint.read(name);
        }
    }
    if let Ok(tokenizer) = Tokenizer::from_checkpoint_path(&path) {
        use_tokenizer(&tokenizer);
    }
});
