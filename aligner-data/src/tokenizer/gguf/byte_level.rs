//! Byte-level BPE, `gpt2` in GGUF: how text is split before merging is known by a name only.

use aligner_core::weights::Gguf;
use aligner_core::{Error, Result};
use serde_json::{Map, Value, json};

use super::required;
use crate::tokenizer::parts::Parts;
use crate::tokenizer::vocabulary::{CONTROL, UNKNOWN, USER_DEFINED, Vocabulary};

/// Contractions, words with at most one other character before them, numbers of up to `{n}` digits,
/// signs, line ends, spaces: the pattern of Llama 3, and of Qwen 2 with single digits.
const WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{n}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

pub(super) fn parts(gguf: &Gguf, vocabulary: Vocabulary<'_>) -> Result<Parts> {
    let merges = required(gguf, "tokenizer.ggml.merges", gguf.texts("tokenizer.ggml.merges")?)?;
    let name = gguf.text("tokenizer.ggml.pre")?.unwrap_or("gpt-2");
    let rule = Rule::named(name).ok_or_else(|| {
        let known = "gpt-2, smollm, llama-bpe, qwen2 and their kin";
        Error::format(gguf.path(), format!("tokenizer.ggml.pre: expected one of {known}, got {name}"))
    })?;
    let mut model = Map::new();
    model.insert("type".into(), "BPE".into());
    model.insert("ignore_merges".into(), ignores_merges(name).into());
    model.insert("merges".into(), merges.iter().map(|merge| Value::from(merge.as_str())).collect());
    model.insert("vocab".into(), vocabulary.by_token().into());
    let normalizer = normalizer(name);
    let decoder =
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    Ok(Parts {
        normalizer,
        charsmap: None,
        pre_tokenizer: rule.pre_tokenizer(),
        decoder,
        model,
        added: vocabulary.added(&[UNKNOWN, CONTROL, USER_DEFINED]),
    })
}

/// Whether words that are tokens are not made by merging.
fn ignores_merges(name: &str) -> bool {
    !matches!(name, "dbrx" | "smaug-bpe") && Rule::named(name) == Some(Rule::Words { digits: 3 })
}

fn normalizer(name: &str) -> Value {
    if name == "qwen2" { json!({"type": "NFC"}) } else { Value::Null }
}

/// The name of the rule by which a `tokenizer.json` splits text, where it has one.
pub(super) fn name_of(tokenizer: &Value) -> Option<&'static str> {
    let own = steps(&tokenizer["pre_tokenizer"]);
    let ignores = tokenizer["model"]["ignore_merges"].as_bool().unwrap_or(false);
    let is = |name: &&str| {
        let rule = Rule::named(name).map(Rule::pre_tokenizer);
        rule.is_some_and(|rule| steps(&rule) == own)
            && ignores == ignores_merges(name)
            && tokenizer["normalizer"] == normalizer(name)
    };
    NAMES.into_iter().find(is)
}

/// One name for each way of splitting that there is.
pub(super) const NAMES: [&str; 6] = ["gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "stablelm2"];

/// The steps of a splitting, without what is about offsets alone.
fn steps(pre_tokenizer: &Value) -> Vec<Value> {
    if let Some(parts) = pre_tokenizer["pretokenizers"].as_array() {
        return parts.iter().flat_map(steps).collect();
    }
    let mut step = pre_tokenizer.clone();
    if let Some(step) = step.as_object_mut() {
        step.shift_remove("trim_offsets");
        if step.get("type").is_some_and(|kind| kind == "ByteLevel") {
            step.entry("use_regex").or_insert(true.into());
        }
    }
    vec![step]
}

/// A way to split text before merging.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// GPT-2's pattern.
    Gpt2,
    /// Each digit alone, then GPT-2's pattern.
    DigitsThenGpt2,
    /// [`WORDS`], with numbers of up to so many digits.
    Words { digits: usize },
}

impl Rule {
    fn named(name: &str) -> Option<Self> {
        Some(match name {
            "gpt-2" | "default" | "mpt" | "olmo" | "jais" | "phi-2" => Self::Gpt2,
            "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" => Self::DigitsThenGpt2,
            "llama-bpe" | "llama3" | "llama-v3" | "dbrx" | "smaug-bpe" | "falcon3" => {
                Self::Words { digits: 3 }
            }
            "qwen2" | "stablelm2" | "deepseek-r1-qwen" => Self::Words { digits: 1 },
            _ => return None,
        })
    }

    fn pre_tokenizer(self) -> Value {
        let byte_level = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
        let sequence =
            |first: Value, second: Value| json!({"type": "Sequence", "pretokenizers": [first, second]});
        match self {
            Self::Gpt2 => byte_level(true),
            Self::DigitsThenGpt2 => {
                sequence(json!({"type": "Digits", "individual_digits": true}), byte_level(true))
            }
            Self::Words { digits } => {
                let repeat = if digits == 1 { String::new() } else { format!("{{1,{digits}}}") };
                let pattern = WORDS.replace("{n}", &repeat);
                let split = json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
                sequence(split, byte_level(false))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_patterns_differ_in_their_numbers() {
        let pattern = |name: &str| {
            let rule = Rule::named(name).unwrap().pre_tokenizer();
            rule["pretokenizers"][0]["pattern"]["Regex"].as_str().unwrap().to_owned()
        };
        assert!(pattern("llama-bpe").contains(r"|\p{N}{1,3}|"));
        assert!(pattern("qwen2").contains(r"|\p{N}|"));
        assert_eq!(Rule::named("unheard-of"), None);
    }
}
