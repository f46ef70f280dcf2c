//! What the targets share: a directory in memory, files that are known to be good, and texts to encode.

use std::fs;
use std::path::{Path, PathBuf};

use aligner_data::Tokenizer;

/// Texts that take a tokenizer through its special cases.
pub const TEXTS: [&str; 6] = [
    "",
    " a  b\tc\r\n\n",
    "Ünïcödé e\u{301} \u{1F469}\u{200D}\u{1F467} 中文",
    "<s>▁<0x0A></s>\0\u{FEFF}",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "The quick brown fox [INST] 12345 <|im_end|>",
];

/// A model directory, written over in each run. Each process has its own.
pub struct Scratch(PathBuf);

impl Scratch {
    /// An empty directory, in memory where the system has such a place.
    pub fn new() -> Self {
        let memory = Path::new("/dev/shm");
        let parent = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
        let dir = parent.join(format!("aligner-fuzz-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("a directory for the files");
        Self(dir)
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.0
    }

    /// Writes a file and says where.
    pub fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, bytes).expect("a file that can be written");
        path
    }

    /// Copies a file of `tests/golden`.
    pub fn golden(&self, from: &str, name: &str) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(from);
        self.write(name, &fs::read(&path).expect("a golden file"));
    }
}

/// Takes a tokenizer through encoding and decoding.
pub fn use_tokenizer(tokenizer: &Tokenizer) {
    for text in TEXTS {
        if let Ok(ids) = tokenizer.encode(text) {
            let _ = tokenizer.decode(&ids);
            let _ = tokenizer.decode_with_specials(&ids);
        }
    }
    let _ = tokenizer.decode(&[0, 1, 2, 3, u32::MAX]);
    let _ = (tokenizer.adds_bos(), tokenizer.stops(), tokenizer.pad(), tokenizer.vocab_size());
}

/// Lets panics unwind that the loader itself catches, as it does around the `tokenizers` crate; any that is
/// not caught still ends the process, where the fuzzer's own code calls the target.
pub fn let_panics_unwind() {
    std::panic::set_hook(Box::new(|_| {}));
}
