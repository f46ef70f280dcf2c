//! A `tokenizer.json` of any bytes.
#![no_main]

use std::sync::LazyLock;

use aligner_data::Tokenizer;
use aligner_fuzz::{Scratch, let_panics_unwind, use_tokenizer};
use libfuzzer_sys::fuzz_target;

static SCRATCH: LazyLock<Scratch> = LazyLock::new(Scratch::new);

fuzz_target!(init: let_panics_unwind(), |bytes: &[u8]| {
    SCRATCH.write("tokenizer.json", bytes);
    if let Ok(tokenizer) = Tokenizer::from_dir(SCRATCH.dir()) {
        use_tokenizer(&tokenizer);
    }
});
