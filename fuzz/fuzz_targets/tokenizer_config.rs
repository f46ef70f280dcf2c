//! A `tokenizer_config.json`, or a file like it, of any bytes beside a tokenizer that is good.
#![no_main]

use std::sync::LazyLock;

use aligner_data::{Message, Tokenizer};
use aligner_fuzz::{Scratch, let_panics_unwind, use_tokenizer};
use libfuzzer_sys::fuzz_target;

/// The file that the first byte chooses.
const FILES: [&str; 5] = [
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
];

static SCRATCH: LazyLock<Scratch> = LazyLock::new(|| {
    let scratch = Scratch::new();
    scratch.golden("models/llama_gqa_tied/tokenizer.json", "tokenizer.json");
    scratch
});

fuzz_target!(init: let_panics_unwind(), |bytes: &[u8]| {
    let Some((&first, bytes)) = bytes.split_first() else { return };
    let path = SCRATCH.write(FILES[usize::from(first) % FILES.len()], bytes);
    if let Ok(tokenizer) = Tokenizer::from_dir(SCRATCH.dir()) {
        use_tokenizer(&tokenizer);
        if let Some(template) = tokenizer.template() {
            let _ = template.render(&[Message::new("user", "Hi"), Message::new("assistant", "Ho")], true);
        }
    }
    std::fs::remove_file(path).expect("the file was there");
});
