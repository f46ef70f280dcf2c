//! The rules of `SentencePiece` as the parts of a `tokenizer.json`: those of `tokenizer.model`, and of `llama` and `t5`
//! in GGUF.
//!
//! The parts are those of transformers' conversion (`build_tokenizer_from_spm_proto`), so that ids are those of
//! `SentencePiece` itself.

mod merges;

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use self::merges::merges;
use super::parts::Parts;
use super::vocabulary::{CONTROL, UNKNOWN, USER_DEFINED, Vocabulary};

/// What `SentencePiece` writes for a space.
const SPACE: &str = "\u{2581}";

/// How pieces are found in a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Algorithm {
    /// Two neighbours become one, the best score first.
    Bpe,
    /// The split with the best sum of scores.
    Unigram,
}

/// Where a space is put that the text does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Prefix {
    Never,
    /// Before the text.
    First,
    /// Before each stretch of text between special tokens.
    Always,
}

/// A vocabulary with its rules.
pub(super) struct Rules<'a> {
    pub(super) algorithm: Algorithm,
    pub(super) vocabulary: Vocabulary<'a>,
    /// A score for each token.
    pub(super) scores: &'a [f64],
    /// Whether what no piece has becomes the pieces of its bytes.
    pub(super) byte_fallback: bool,
    pub(super) prefix: Prefix,
    /// Whether spaces at both ends, and all but one of several, are dropped.
    pub(super) drops_spaces: bool,
    pub(super) charsmap: Option<Vec<u8>>,
}

/// What would make another tokenizer than these pieces describe.
pub(super) fn check(pieces: &[String], scores: &[f64]) -> Result<(), String> {
    let mut ids: HashMap<&str, usize> = HashMap::new();
    for (id, (piece, score)) in pieces.iter().zip(scores).enumerate() {
        if let Some(first) = ids.insert(piece, id) {
            return Err(format!("piece {piece:?} is there twice, as {first} and as {id}"));
        }
        if !score.is_finite() {
            return Err(format!("piece {id}, {piece:?}: expected a finite score, got {score}"));
        }
    }
    Ok(())
}

impl Rules<'_> {
    pub(super) fn parts(self) -> Parts {
        let whole = self.whole_pieces();
        Parts {
            normalizer: self.normalizer(),
            pre_tokenizer: self.pre_tokenizer(whole.as_deref()),
            decoder: self.decoder(),
            model: self.model(whole.is_some()),
            added: self.vocabulary.added(&[UNKNOWN, CONTROL]),
            charsmap: self.charsmap,
        }
    }

    fn normalizer(&self) -> Value {
        let replace = |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
        let mut normalizers = Vec::new();
        if self.drops_spaces {
            normalizers.push(replace(json!({"Regex": r"\A +| +\z"}), ""));
            normalizers.push(replace(json!({"Regex": " {2,}"}), " "));
        }
        if self.prefix == Prefix::Always {
            normalizers.push(json!({"type": "Prepend", "prepend": SPACE}));
        }
        normalizers.push(replace(json!({"String": " "}), SPACE));
        json!({"type": "Sequence", "normalizers": normalizers})
    }

    /// The user's pieces are whole wherever they stand, and nothing is merged across their borders.
    fn pre_tokenizer(&self, whole: Option<&str>) -> Value {
        let first = (self.prefix == Prefix::First).then(
            || json!({"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": false}),
        );
        let whole = whole.map(|pattern| {
            json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
        });
        let all: Vec<Value> = first.into_iter().chain(whole).collect();
        if all.is_empty() { Value::Null } else { json!({"type": "Sequence", "pretokenizers": all}) }
    }

    /// A pattern for the user's pieces, longest first; none where there is none.
    fn whole_pieces(&self) -> Option<String> {
        let mut pieces: Vec<&str> = self.vocabulary.of_kind(USER_DEFINED).map(|(_, piece)| piece).collect();
        pieces.retain(|piece| !piece.is_empty());
        pieces.sort_by_key(|piece| std::cmp::Reverse(piece.len()));
        let escaped: Vec<String> = pieces.into_iter().map(escape).collect();
        (!escaped.is_empty()).then(|| escaped.join("|"))
    }

    fn decoder(&self) -> Value {
        let mut decoders = vec![json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "})];
        if self.byte_fallback {
            decoders.push(json!({"type": "ByteFallback"}));
        }
        decoders.push(json!({"type": "Fuse"}));
        if self.prefix != Prefix::Never {
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        json!({"type": "Sequence", "decoders": decoders})
    }

    fn model(&self, has_whole_pieces: bool) -> Map<String, Value> {
        let unknown = self.vocabulary.of_kind(UNKNOWN).next();
        let model = match self.algorithm {
            Algorithm::Bpe => json!({
                "type": "BPE", "unk_token": unknown.map(|(_, piece)| piece), "fuse_unk": true,
                "byte_fallback": self.byte_fallback,
                // No merge leads to the user's pieces.
                "ignore_merges": has_whole_pieces,
                "vocab": self.vocabulary.by_token(), "merges": merges(self.vocabulary, self.scores)
            }),
            Algorithm::Unigram => {
                let scored = self.vocabulary.tokens.iter().zip(self.scores);
                let scored: Vec<Value> = scored.map(|(piece, score)| json!([piece, score])).collect();
                json!({
                    "type": "Unigram", "unk_id": unknown.map(|(id, _)| id),
                    "byte_fallback": self.byte_fallback, "vocab": scored
                })
            }
        };
        match model {
            Value::Object(model) => model,
            _ => Map::new(),
        }
    }
}

/// A pattern that only the text itself matches.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if r"\.+*?()|[]{}^$#&-~".contains(c) {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}
