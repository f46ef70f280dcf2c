//! Paths and tokenizers that the tests share.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use aligner_data::{Dataset, DatasetConfig, Tokenizer};

/// A template that marks the model's turns, and one that renders the same text without marks.
pub(crate) const MARKED: &str = "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}\
    {%- if m.role == 'assistant' %}{%- generation %}{{ m.content + '<|im_end|>\\n' }}{%- endgeneration %}\
    {%- else %}{{ m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}\
    {%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}";
pub(crate) const UNMARKED: &str = "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}\
    {%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}";

pub(crate) fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The golden set that `ALIGNER_GOLDEN` names, else the repository's own.
pub(crate) fn golden() -> PathBuf {
    std::env::var_os("ALIGNER_GOLDEN").map_or_else(|| workspace().join("tests/golden"), PathBuf::from)
}

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// The golden set's small tokenizer, without a template.
pub(crate) fn bare_tokenizer() -> Tokenizer {
    Tokenizer::from_dir(&golden().join("chat/tokenizer")).unwrap()
}

pub(crate) fn tokenizer() -> Tokenizer {
    bare_tokenizer().with_template(MARKED).unwrap()
}

pub(crate) fn open(name: &str) -> Dataset {
    Dataset::open(&DatasetConfig::new(fixture(name)), &tokenizer()).unwrap()
}

/// The text of the tokens that `mask` marks.
pub(crate) fn learnt(tokenizer: &Tokenizer, tokens: &[u32], mask: &[bool]) -> String {
    let marked: Vec<u32> = tokens.iter().zip(mask).filter(|(_, learn)| **learn).map(|(&id, _)| id).collect();
    tokenizer.decode_with_specials(&marked).unwrap()
}

/// Says on standard error that a test has nothing to run on, past the capture of a passing test's output.
pub(crate) fn skip(test: &str, why: &str) {
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {why}");
}
