//! A tokenizer from the metadata of a GGUF file, and that metadata of a tokenizer.
//!
//! The metadata holds the vocabulary, and by name the rules that llama.cpp has in code. Both become
//! the `tokenizer.json` that the model's own repository would have, so that there is one encoder.

mod byte_level;
mod write;

pub(super) use write::metadata;

use std::path::Path;

use aligner_core::weights::Gguf;
use aligner_core::{Error, Result};
use serde_json::{Map, Value};

use super::parts::build;
use super::sentencepiece::{Algorithm, Prefix, Rules, check};
use super::specials::Specials;
use super::vocabulary::{UNKNOWN, UNUSED, Vocabulary};
use super::{Tokenizer, guarded, hostile};

pub(super) fn read(path: &Path) -> Result<Tokenizer> {
    of_metadata(&Gguf::open(path)?)
}

fn of_metadata(gguf: &Gguf) -> Result<Tokenizer> {
    let path = gguf.path();
    let vocabulary = vocabulary(gguf)?;
    let specials = specials(gguf, vocabulary)?;
    let (parts, adds_bos) = match gguf.text("tokenizer.ggml.model")? {
        Some("gpt2") => (byte_level::parts(gguf, vocabulary)?, false),
        Some("llama") => (sentencepiece(gguf, vocabulary)?.parts(), true),
        Some("t5") => (unigram(gguf, vocabulary)?.parts(), false),
        other => {
            let other = other.unwrap_or("none");
            return Err(Error::format(
                path,
                format!("tokenizer.ggml.model: expected gpt2, llama or t5, got {other}"),
            ));
        }
    };
    let adds_bos = gguf.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(adds_bos);
    let bos = specials.bos.filter(|_| adds_bos).and_then(|id| vocabulary.token(id).map(|token| (id, token)));
    let inner = guarded(|| build(parts, bos))
        .map_err(|error| Error::format(path, format!("the metadata's tokenizer cannot be built: {error}")))?;
    let template = gguf.text("tokenizer.chat_template")?.map(str::to_owned);
    let config = config(gguf, &specials, adds_bos)?;
    Tokenizer::new(inner, specials, config, template).map_err(|error| Error::format(path, error.to_string()))
}

fn vocabulary(gguf: &Gguf) -> Result<Vocabulary<'_>> {
    let tokens = required(gguf, "tokenizer.ggml.tokens", gguf.texts("tokenizer.ggml.tokens")?)?;
    let types = gguf.integers("tokenizer.ggml.token_type")?.unwrap_or_default();
    if !types.is_empty() && types.len() != tokens.len() {
        let (tokens, types) = (tokens.len(), types.len());
        let message =
            format!("tokenizer.ggml.token_type: expected {tokens} entries, one a token, got {types}");
        return Err(Error::format(gguf.path(), message));
    }
    Ok(Vocabulary { tokens, types })
}

/// `llama` in GGUF: BPE, whose merges follow from the tokens' scores.
fn sentencepiece<'a>(gguf: &'a Gguf, vocabulary: Vocabulary<'a>) -> Result<Rules<'a>> {
    let scores = scores(gguf, vocabulary)?;
    let prefix = gguf.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    Ok(Rules {
        algorithm: Algorithm::Bpe,
        vocabulary,
        scores,
        byte_fallback: true,
        prefix: if prefix { Prefix::Always } else { Prefix::Never },
        drops_spaces: false,
        charsmap: None,
    })
}

/// `t5` in GGUF: the split with the best sum of scores.
fn unigram<'a>(gguf: &'a Gguf, vocabulary: Vocabulary<'a>) -> Result<Rules<'a>> {
    let wrong = |message: String| Error::format(gguf.path(), message);
    let scores = scores(gguf, vocabulary)?;
    // What only fills the embedding's rows is no piece.
    let used = (0..scores.len()).rev().find(|&id| vocabulary.kind(id) != UNUSED).map_or(0, |id| id + 1);
    let types = vocabulary.types.get(..used).unwrap_or_default();
    let vocabulary = Vocabulary { tokens: &vocabulary.tokens[..used], types };
    let scores = &scores[..used];
    check(vocabulary.tokens, scores).map_err(|message| wrong(format!("tokenizer.ggml.tokens: {message}")))?;
    if vocabulary.of_kind(UNKNOWN).next().is_none() {
        let message =
            format!("tokenizer.ggml.token_type: expected {UNKNOWN}, the unknown token, for one of them");
        return Err(wrong(message));
    }
    let flag = |name: &str| gguf.flag(&format!("tokenizer.ggml.{name}"));
    let charsmap = gguf.bytes("tokenizer.ggml.precompiled_charsmap")?;
    let charsmap = charsmap.map(|table| hostile::charsmap(&table)).transpose();
    let charsmap = charsmap.map_err(|message| wrong(format!("tokenizer.ggml.{message}")))?.flatten();
    let prefix = flag("add_space_prefix")?.unwrap_or(false);
    Ok(Rules {
        algorithm: Algorithm::Unigram,
        vocabulary,
        scores,
        byte_fallback: false,
        prefix: if prefix { Prefix::Always } else { Prefix::Never },
        drops_spaces: flag("remove_extra_whitespaces")?.unwrap_or(false),
        charsmap,
    })
}

fn scores<'a>(gguf: &'a Gguf, vocabulary: Vocabulary<'_>) -> Result<&'a [f64]> {
    let scores = required(gguf, "tokenizer.ggml.scores", gguf.numbers("tokenizer.ggml.scores")?)?;
    if scores.len() != vocabulary.tokens.len() {
        let (tokens, scores) = (vocabulary.tokens.len(), scores.len());
        let message = format!("tokenizer.ggml.scores: expected {tokens} entries, one a token, got {scores}");
        return Err(Error::format(gguf.path(), message));
    }
    Ok(scores)
}

fn specials(gguf: &Gguf, vocabulary: Vocabulary<'_>) -> Result<Specials> {
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
