//! BPE as `SentencePiece` has it, `llama` in GGUF: the merges follow from the tokens' scores.

use std::collections::HashMap;

use aligner_core::weights::Gguf;
use aligner_core::{Error, Result};
use serde_json::{Map, Value, json};

use super::{Parts, UNKNOWN, Vocabulary, required};

/// What `SentencePiece` writes for a space.
const SPACE: &str = "\u{2581}";

/// The longest token that is taken apart, in characters: the work grows with the square.
const LONGEST: usize = 256;

pub(super) fn parts(gguf: &Gguf, vocabulary: &Vocabulary<'_>) -> Result<Parts> {
    let scores = required(gguf, "tokenizer.ggml.scores", gguf.numbers("tokenizer.ggml.scores")?)?;
    if scores.len() != vocabulary.tokens.len() {
        let (tokens, scores) = (vocabulary.tokens.len(), scores.len());
        let message = format!("tokenizer.ggml.scores: expected {tokens} entries, one a token, got {scores}");
        return Err(Error::format(gguf.path(), message));
    }
    let unknown = vocabulary.types.iter().position(|&kind| kind == UNKNOWN);
    let mut model = Map::new();
    model.insert("type".into(), "BPE".into());
    model.insert("unk_token".into(), unknown.map(|id| vocabulary.tokens[id].clone()).into());
    model.insert("fuse_unk".into(), true.into());
    model.insert("byte_fallback".into(), true.into());
    model.insert("merges".into(), merges(vocabulary.tokens, scores));
    let prefix = gguf.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
    let mut normalizers = vec![replace];
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": SPACE}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    Ok(Parts {
        normalizer: json!({"type": "Sequence", "normalizers": normalizers}),
        pre_tokenizer: Value::Null,
        decoder: json!({"type": "Sequence", "decoders": decoders}),
        model,
    })
}

/// Every way to make a token of two others, the token with the best score first: the order in which
/// `SentencePiece` merges, and transformers' conversion of it.
fn merges(tokens: &[String], scores: &[f64]) -> Value {
    let ids: HashMap<&str, usize> =
        tokens.iter().enumerate().map(|(id, token)| (token.as_str(), id)).collect();
    let mut found = Vec::new();
    for (token, &score) in tokens.iter().zip(scores) {
        if token.chars().count() > LONGEST {
            continue;
        }
        let splits = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        let known = splits.filter_map(|(left, right)| Some((*ids.get(left)?, *ids.get(right)?)));
        let mut known: Vec<_> = known.map(|(left, right)| (score, left, right)).collect();
        known.sort_by_key(|&(_, left, right)| (left, right));
        found.extend(known);
    }
    let length = |id: usize| tokens[id].chars().count();
    found.sort_by(|a, b| {
        let by_score = b.0.total_cmp(&a.0);
        by_score.then_with(|| (length(b.1), length(b.2)).cmp(&(length(a.1), length(a.2))))
    });
    found.into_iter().map(|(_, left, right)| json!([tokens[left], tokens[right]])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_come_best_score_first_then_longest_left_part() {
        let tokens = ["a", "b", "c", "ab", "bc", "abc"].map(String::from);
        let scores = [-9.0, -9.0, -9.0, -1.0, -2.0, -0.5];
        let expected = json!([["ab", "c"], ["a", "bc"], ["a", "b"], ["b", "c"]]);
        assert_eq!(merges(&tokens, &scores), expected);
    }

    #[test]
    fn scores_that_are_no_numbers_do_not_break_the_sort() {
        let tokens = ["a", "aa", "aaa"].map(String::from);
        assert_eq!(merges(&tokens, &[f64::NAN, f64::NAN, 0.0]).as_array().map(Vec::len), Some(3));
    }
}
