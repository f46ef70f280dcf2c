//! A tokenizer from the metadata of a GGUF file, and that metadata of a tokenizer.
//!
//! The metadata holds the vocabulary, and by name the rules that llama.cpp has in code. Both become
//! the `tokenizer.json` that the model's own repository would have, so that there is one encoder.

mod byte_level;
mod sentencepiece;
mod write;

pub(super) use write::metadata;

use std::path::Path;

use aligner_core::weights::Gguf;
use aligner_core::{Error, Result};
use serde_json::{Map, Value, json};

use super::{Specials, Tokenizer};

/// What `tokenizer.ggml.token_type` says of a token.
const NORMAL: i64 = 1;
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const UNUSED: i64 = 5;
const BYTE: i64 = 6;

pub(super) fn read(path: &Path) -> Result<Tokenizer> {
    of_metadata(&Gguf::open(path)?)
}

fn of_metadata(gguf: &Gguf) -> Result<Tokenizer> {
    let path = gguf.path();
    let vocabulary = Vocabulary::read(gguf)?;
    let specials = specials(gguf, &vocabulary)?;
    let (kind, adds_bos) = match gguf.text("tokenizer.ggml.model")? {
        Some("gpt2") => (byte_level::parts(gguf)?, false),
        Some("llama") => (sentencepiece::parts(gguf, &vocabulary)?, true),
        other => {
            let other = other.unwrap_or("none");
            return Err(Error::format(
                path,
                format!("tokenizer.ggml.model: expected gpt2 or llama, got {other}"),
            ));
        }
    };
    let adds_bos = gguf.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(adds_bos);
    let bos = specials.bos.filter(|_| adds_bos).and_then(|id| vocabulary.token(id).map(|token| (id, token)));
    let inner = build(kind, &vocabulary, bos)
        .map_err(|error| Error::format(path, format!("the metadata's tokenizer cannot be built: {error}")))?;
    let template = gguf.text("tokenizer.chat_template")?.map(str::to_owned);
    let config = config(gguf, &specials, adds_bos)?;
    Tokenizer::new(inner, specials, config, template).map_err(|error| Error::format(path, error.to_string()))
}

/// The tokens by id, with their types.
struct Vocabulary<'a> {
    tokens: &'a [String],
    types: &'a [i64],
}

impl<'a> Vocabulary<'a> {
    fn read(gguf: &'a Gguf) -> Result<Self> {
        let tokens = required(gguf, "tokenizer.ggml.tokens", gguf.texts("tokenizer.ggml.tokens")?)?;
        let types = gguf.integers("tokenizer.ggml.token_type")?.unwrap_or_default();
        if !types.is_empty() && types.len() != tokens.len() {
            let (tokens, types) = (tokens.len(), types.len());
            let message =
                format!("tokenizer.ggml.token_type: expected {tokens} entries, one a token, got {types}");
            return Err(Error::format(gguf.path(), message));
        }
        Ok(Self { tokens, types })
    }

    fn token(&self, id: u32) -> Option<&'a str> {
        self.tokens.get(id as usize).map(String::as_str)
    }

    /// Token to id, as `tokenizer.json` has it.
    fn by_token(&self) -> Map<String, Value> {
        self.tokens.iter().enumerate().map(|(id, token)| (token.clone(), id.into())).collect()
    }

    /// The tokens that are cut out of the text before anything else.
    fn added(&self) -> Vec<Value> {
        let typed = self.tokens.iter().zip(self.types).enumerate();
        let added = typed.filter(|(_, (_, kind))| [UNKNOWN, CONTROL, USER_DEFINED].contains(kind));
        added
            .map(|(id, (token, &kind))| {
                json!({
                    "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": kind != USER_DEFINED
                })
            })
            .collect()
    }
}

/// The parts of `tokenizer.json` that differ between kinds of tokenizers.
struct Parts {
    normalizer: Value,
    pre_tokenizer: Value,
    decoder: Value,
    /// All of the model but its vocabulary.
    model: Map<String, Value>,
}

fn build(
    parts: Parts,
    vocabulary: &Vocabulary<'_>,
    bos: Option<(u32, &str)>,
) -> tokenizers::Result<tokenizers::Tokenizer> {
    let mut model = parts.model;
    model.insert("vocab".into(), Value::Object(vocabulary.by_token()));
    let post_processor = bos.map(|(id, token)| {
        json!({
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {token: {"id": token, "ids": [id], "tokens": [token]}}
        })
    });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": vocabulary.added(),
        "normalizer": parts.normalizer, "pre_tokenizer": parts.pre_tokenizer,
        "post_processor": post_processor, "decoder": parts.decoder, "model": model
    });
    tokenizers::Tokenizer::from_bytes(serde_json::to_vec(&tokenizer)?)
}

fn specials(gguf: &Gguf, vocabulary: &Vocabulary<'_>) -> Result<Specials> {
    let mut names = Map::new();
    let mut role = |key: &str, role: &str| -> Result<Option<u32>> {
        let key = format!("tokenizer.ggml.{key}_token_id");
        let Some(id) = gguf.token(&key)? else { return Ok(None) };
        let Some(token) = vocabulary.token(id) else {
            let message = format!("{key}: expected an id below {}, got {id}", vocabulary.tokens.len());
            return Err(Error::format(gguf.path(), message));
        };
        names.insert(format!("{role}_token"), token.into());
        Ok(Some(id))
    };
    let bos = role("bos", "bos")?;
    let eos = role("eos", "eos")?;
    let pad = role("padding", "pad")?;
    role("unknown", "unk")?;
    let mut stops: Vec<u32> = eos.into_iter().collect();
    let end_of_turn = gguf.token("tokenizer.ggml.eot_token_id")?;
    stops.extend(end_of_turn.filter(|&id| Some(id) != eos && vocabulary.token(id).is_some()));
    Ok(Specials { names, bos, eos, pad, stops })
}

/// What `tokenizer_config.json` would say.
fn config(gguf: &Gguf, specials: &Specials, adds_bos: bool) -> Result<Map<String, Value>> {
    let mut config = specials.names.clone();
    config.insert("tokenizer_class".into(), "PreTrainedTokenizerFast".into());
    config.insert("clean_up_tokenization_spaces".into(), false.into());
    config.insert("add_bos_token".into(), adds_bos.into());
    let context = match gguf.text("general.architecture")? {
        Some(architecture) => gguf.size(&format!("{architecture}.context_length"))?,
        None => None,
    };
    if let Some(context) = context {
        config.insert("model_max_length".into(), context.into());
    }
    Ok(config)
}

fn required<T>(gguf: &Gguf, key: &str, value: Option<T>) -> Result<T> {
    value.ok_or_else(|| {
        Error::format(gguf.path(), format!("the metadata has no `{key}`: expected a tokenizer"))
    })
}
