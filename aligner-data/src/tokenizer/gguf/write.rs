//! GGUF's metadata of a tokenizer.

mod unigram;

use std::collections::{BTreeMap, BTreeSet};

use aligner_core::weights::{Gguf, GgufValue};
use aligner_core::{Error, Result};
use serde_json::Value;

use super::{byte_level, of_metadata};
use crate::Tokenizer;
use crate::tokenizer::call;
use crate::tokenizer::vocabulary::{BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED};

type Metadata = Vec<(String, GgufValue)>;

/// What both tokenizers must read alike before the metadata is trusted.
const PROBES: [&str; 8] = [
    "Hello, world! It's 12345 o'clock -- isn't it?",
    "  two  spaces,\ttabs\nand lines\r\n\r\n  end ",
    "naïve café, Ünïcödé, e\u{301} and ﬁ",
    "数学和中文 日本語のテキスト 한국어",
    "Привет, мир! שלום مرحبا",
    "fn main() { let x = 0x1F_u32 << 3; } // => [1, 2.5e-3]",
    "🦀🚀 👩‍👩‍👧 ½ ² ①",
    "I'LL WE'VE they're 1,000,000.00% A1b2C3",
];

/// The score of tokens that nothing is merged into, as llama.cpp's converter has it.
const NEVER: f64 = -1e9;

pub(in crate::tokenizer) fn metadata(tokenizer: &Tokenizer, rows: usize) -> Result<Metadata> {
    let json = call(|| tokenizer.inner.to_string(false))?;
    let json: Value = serde_json::from_str(&json).map_err(|error| refused(error.to_string()))?;
    let kind = json["model"]["type"].as_str().unwrap_or("none");
    if !["BPE", "Unigram"].contains(&kind) {
        let known = "known are BPE, on bytes and as in SentencePiece, and Unigram";
        return Err(refused(format!("its model is {kind}; {known}")));
    }
    let vocabulary = Vocabulary::of(tokenizer, &json, rows)?;
    if kind == "Unigram" {
        return unigram::metadata(tokenizer, &json, &vocabulary);
    }
    let merges = merges(&json)?;
    let bytes_apart = json["model"]["byte_fallback"].as_bool().unwrap_or(false);
    if bytes_apart {
        return sentencepiece(tokenizer, &json, &vocabulary, &merges);
    }
    let name = byte_level::name_of(&json).ok_or_else(|| {
        let known = byte_level::NAMES.join(", ");
        refused(format!("it splits or normalises text in a way that has no name there; known are {known}"))
    })?;
    let mut metadata = vec![
        text("tokenizer.ggml.model", "gpt2"),
        text("tokenizer.ggml.pre", name),
        ("tokenizer.ggml.tokens".into(), GgufValue::Texts(vocabulary.tokens)),
        ("tokenizer.ggml.token_type".into(), GgufValue::Integers(vocabulary.types)),
    ];
    let merges = merges.into_iter().map(|[left, right]| format!("{left} {right}")).collect();
    metadata.push(("tokenizer.ggml.merges".into(), GgufValue::Texts(merges)));
    metadata.extend(roles(tokenizer));
    let (read, probes) = (read_again(&metadata)?, Probes::of(&json));
    match probes.difference(tokenizer, &read) {
        None => {
            probes.warn_of_spaces(tokenizer, &read);
            Ok(metadata)
        }
        Some(place) => Err(probes.refused(place)),
    }
}

/// Scores in place of merges: those of a token come the earlier, the better its score.
fn sentencepiece(
    tokenizer: &Tokenizer,
    json: &Value,
    vocabulary: &Vocabulary,
    merges: &[[String; 2]],
) -> Result<Metadata> {
    let probes = Probes::of(json);
    let mut ranks = BTreeMap::new();
    for (rank, [left, right]) in merges.iter().enumerate() {
        ranks.entry(format!("{left}{right}")).or_insert(rank);
    }
    let score = |token: &String| ranks.get(token).map_or(NEVER, |&rank| -(rank as f64));
    let scores: Vec<f64> = vocabulary.tokens.iter().map(score).collect();
    // Of the ways that there are, the one that fits best says what is wrong.
    let mut farthest = 0;
    for prefix in [true, false] {
        let mut metadata = vec![
            text("tokenizer.ggml.model", "llama"),
            text("tokenizer.ggml.pre", "default"),
            ("tokenizer.ggml.tokens".into(), GgufValue::Texts(vocabulary.tokens.clone())),
            ("tokenizer.ggml.scores".into(), GgufValue::Floats(scores.clone())),
            ("tokenizer.ggml.token_type".into(), GgufValue::Integers(vocabulary.types.clone())),
            ("tokenizer.ggml.add_space_prefix".into(), GgufValue::Flag(prefix)),
        ];
        metadata.extend(roles(tokenizer));
        let read = read_again(&metadata)?;
        check_merges(merges, &read)?;
        let Some(place) = probes.difference(tokenizer, &read) else {
            probes.warn_of_spaces(tokenizer, &read);
            return Ok(metadata);
        };
        farthest = farthest.max(place);
    }
    Err(probes.refused(farthest))
}

/// The merges that follow from the scores must be the same, and make the same tokens in the same order.
fn check_merges(merges: &[[String; 2]], read: &Tokenizer) -> Result<()> {
    let json = call(|| read.inner.to_string(false))?;
    let json: Value = serde_json::from_str(&json).map_err(|error| refused(error.to_string()))?;
    let again = self::merges(&json)?;
    let made = |merges: &[[String; 2]]| {
        let mut made: Vec<String> = merges.iter().map(|[left, right]| format!("{left}{right}")).collect();
        made.dedup();
        made
    };
    let set = |merges: &[[String; 2]]| merges.iter().cloned().collect::<BTreeSet<_>>();
    if made(merges) == made(&again) && set(merges) == set(&again) {
        return Ok(());
    }
    Err(refused("its merges do not follow from scores of its tokens, as those of SentencePiece do"))
}

fn refused(message: impl Into<String>) -> Error {
    let message = message.into();
    Error::Invalid(format!("the tokenizer cannot be written to GGUF: {message}"))
}

fn text(key: &str, value: &str) -> (String, GgufValue) {
    (key.into(), GgufValue::Text(value.into()))
}

/// Tokens by id, with their types.
struct Vocabulary {
    tokens: Vec<String>,
    types: Vec<i64>,
}

impl Vocabulary {
    /// As many as the embedding has rows: those without a token are unused.
    fn of(tokenizer: &Tokenizer, json: &Value, rows: usize) -> Result<Self> {
        let known = tokenizer.vocab_size();
        if known > rows {
            return Err(refused(format!("it has ids up to {}, the model {rows} rows", known - 1)));
        }
        let mut tokens: Vec<String> = (0..rows).map(|id| format!("[PAD{id}]")).collect();
        let mut types = vec![UNUSED; rows];
        let model = &json["model"];
        for (token, id) in tokenizer.inner.get_vocab(true) {
            let is_byte = token.len() == 6 && token.starts_with("<0x") && token.ends_with('>');
            let is_unknown = model["unk_token"] == token.as_str() || model["unk_id"] == id;
            types[id as usize] = match is_unknown {
                true => UNKNOWN,
                false if is_byte && model["byte_fallback"] == true => BYTE,
                false => NORMAL,
            };
            tokens[id as usize] = token;
        }
        for added in json["added_tokens"].as_array().into_iter().flatten() {
            let id = added["id"].as_u64().and_then(|id| usize::try_from(id).ok());
            if let Some(kind) = id.and_then(|id| types.get_mut(id)).filter(|kind| **kind != UNKNOWN) {
                *kind = if added["special"] == true { CONTROL } else { USER_DEFINED };
            }
        }
        Ok(Self { tokens, types })
    }
}

fn merges(json: &Value) -> Result<Vec<[String; 2]>> {
    let pair = |merge: &Value| match merge {
        Value::String(both) => both.split_once(' ').map(|(left, right)| [left.into(), right.into()]),
        Value::Array(both) => match both.as_slice() {
            [Value::String(left), Value::String(right)] => Some([left.clone(), right.clone()]),
            _ => None,
        },
        _ => None,
    };
    let list = json["model"]["merges"].as_array().map(Vec::as_slice).unwrap_or_default();
    list.iter().map(pair).collect::<Option<_>>().ok_or_else(|| refused("a merge is not a pair"))
}

/// Special tokens, whether the first is put before every text, and the chat template.
fn roles(tokenizer: &Tokenizer) -> Metadata {
    let mut metadata = Vec::new();
    let specials = &tokenizer.specials;
    let unknown = specials.names.get("unk_token").and_then(Value::as_str);
    let turn = specials.stops.iter().copied().find(|&id| Some(id) != specials.eos);
    for (role, id) in [
        ("bos", specials.bos),
        ("eos", specials.eos),
        ("eot", turn),
        ("padding", specials.pad),
        ("unknown", unknown.and_then(|token| tokenizer.token_id(token))),
    ] {
        if let Some(id) = id {
            metadata.push((format!("tokenizer.ggml.{role}_token_id"), GgufValue::Integer(id.into())));
        }
    }
    metadata.push(("tokenizer.ggml.add_bos_token".into(), GgufValue::Flag(tokenizer.adds_bos)));
    if let Some(template) = &tokenizer.template {
        metadata.push(text("tokenizer.chat_template", template.source()));
    }
    metadata
}

fn read_again(metadata: &Metadata) -> Result<Tokenizer> {
    of_metadata(&Gguf::unwritten("tokenizer".as_ref(), metadata.iter().cloned(), []))
}

/// Texts that two tokenizers must read alike to be the same.
struct Probes {
    texts: Vec<String>,
    /// Tokens that stand beside the vocabulary, each with spaces around it.
    spaced: Vec<(String, String)>,
}

impl Probes {
    /// Those of all, and what a tokenizer itself speaks of: the texts that it replaces, and its added tokens.
    fn of(json: &Value) -> Self {
        let mut texts: Vec<String> = PROBES.map(String::from).to_vec();
        replaced(&json["normalizer"], &mut texts);
        let added: Vec<&str> = json["added_tokens"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|added| added["content"].as_str())
            .collect();
        texts.extend(added.iter().map(|token| format!("x{token}y{token}{token}")));
        let spaced =
            added.iter().map(|token| ((*token).to_owned(), format!("x {token} y{token}\n"))).collect();
        Self { texts, spaced }
    }

    /// The place of a text that the two do not read alike.
    fn difference(&self, one: &Tokenizer, other: &Tokenizer) -> Option<usize> {
        let specials = one.specials.names.values().filter_map(Value::as_str).collect::<String>();
        let differs = |text: &&String| {
            let whole = format!("{specials}{text}");
            [text.as_str(), whole.as_str()].iter().any(|text| differ(one, other, text))
        };
        self.texts.iter().position(|text| differs(&text))
    }

    /// Says which text has other tokens, by its place.
    fn refused(&self, place: usize) -> Error {
        refused(format!("read again, it splits {:?} into other tokens", self.texts[place]))
    }

    /// GGUF has no place for spaces that a token takes: its readers go by the model's name, if at all.
    fn warn_of_spaces(&self, one: &Tokenizer, other: &Tokenizer) {
        let differs = |(_, text): &&(String, String)| differ(one, other, text);
        let tokens: Vec<&str> = self.spaced.iter().filter(differs).map(|(token, _)| token.as_str()).collect();
        if let Some(first) = tokens.first() {
            let count = tokens.len();
            tracing::warn!(
                "GGUF cannot say that {first:?} ({count} such tokens) takes spaces beside it: its readers split those apart"
            );
        }
    }
}

fn differ(one: &Tokenizer, other: &Tokenizer, text: &str) -> bool {
    match (one.encode(text), other.encode(text)) {
        (Ok(one), Ok(other)) => one != other,
        _ => true,
    }
}

/// Texts with what a normalizer, and those that it is made of, replace.
fn replaced(normalizer: &Value, texts: &mut Vec<String>) {
    if let Some(pattern) = normalizer["pattern"]["String"].as_str() {
        texts.push(format!("x{pattern}y {pattern}"));
    }
    normalizer["normalizers"].as_array().into_iter().flatten().for_each(|inner| replaced(inner, texts));
}
