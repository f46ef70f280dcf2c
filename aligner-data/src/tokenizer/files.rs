//! A tokenizer from the files of a Hugging Face model directory.

use std::path::Path;

use aligner_core::weights::read_whole;
use aligner_core::{Error, Result};
use serde_json::{Map, Value};

use super::added::AddedTokens;
use super::specials::Specials;
use super::{Tokenizer, guarded, hostile, model_file};

/// The two files that hold a vocabulary, the preferred one first.
pub(super) const VOCABULARIES: [&str; 2] = ["tokenizer.json", "tokenizer.model"];

/// The largest file of settings and the largest `tokenizer.json` that are read, in bytes; the largest known are a
/// twentieth.
const MOST_SETTINGS_BYTES: u64 = 1 << 26;
const MOST_BYTES: u64 = 1 << 30;

pub(super) fn read(dir: &Path) -> Result<Tokenizer> {
    let config = object(&dir.join("tokenizer_config.json"))?;
    let map = object(&dir.join("special_tokens_map.json"))?;
    let numbered = object(&dir.join("added_tokens.json"))?;
    let generation = object(&dir.join("generation_config.json"))?;
    let model = object(&dir.join("config.json"))?;
    let added = AddedTokens::read(dir, &config, &numbered, [&config, &map])?;

    let [json, pieces] = VOCABULARIES.map(|name| dir.join(name));
    let (mut inner, own) = if json.exists() {
        (from_json(&json)?, Map::new())
    } else if pieces.exists() {
        model_file::read(&pieces, &config, &added)?
    } else {
        let [json, pieces] = VOCABULARIES;
        let message = format!(
            "no tokenizer: looked for `{json}` and for `{pieces}` (SentencePiece) beside the model's config, and \
             found neither"
        );
        return Err(Error::format(dir, message));
    };
    added.complete(&mut inner, dir)?;
    let specials = Specials::read(&inner, &[&config, &map, &own], [&generation, &model]);
    for (role, id) in [("bos_token", specials.bos), ("eos_token", specials.eos)] {
        if let (Some(text), None) = (specials.names.get(role), id) {
            return Err(Error::format(
                dir,
                format!("`{role}` is {text}, which the vocabulary does not have"),
            ));
        }
    }
    let template = template(dir, &config)?;
    Tokenizer::new(inner, specials, config, template).map_err(|error| Error::format(dir, error.to_string()))
}

fn from_json(path: &Path) -> Result<tokenizers::Tokenizer> {
    let bytes = read_whole(path, MOST_BYTES)?;
    let wrong = |error: String| Error::format(path, format!("not a tokenizer: {error}"));
    hostile::check(&bytes).map_err(wrong)?;
    let mut inner = guarded(|| tokenizers::Tokenizer::from_bytes(&bytes)).map_err(wrong)?;
    // Lengths are the data set's to limit: a file's own settings would cut and pad rows silently.
    inner.with_padding(None);
    inner.with_truncation(None).map_err(|error| wrong(error.to_string()))?;
    Ok(inner)
}

/// The object in a JSON file, empty if the file is not there.
fn object(path: &Path) -> Result<Map<String, Value>> {
    if !path.exists() {
        return Ok(Map::new());
    }
    serde_json::from_slice(&read_whole(path, MOST_SETTINGS_BYTES)?)
        .map_err(|error| Error::format(path, format!("expected a JSON object: {error}")))
}

/// `chat_template.jinja`, else the config's `chat_template`: one text, or several by name.
fn template(dir: &Path, config: &Map<String, Value>) -> Result<Option<String>> {
    let path = dir.join("chat_template.jinja");
    if path.exists() {
        let source = String::from_utf8(read_whole(&path, MOST_SETTINGS_BYTES)?);
        return source.map(Some).map_err(|error| Error::format(&path, format!("not UTF-8: {error}")));
    }
    match config.get("chat_template") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(source)) => Ok(Some(source.clone())),
        Some(Value::Array(named)) => {
            let default = named.iter().find(|entry| entry["name"] == "default").or_else(|| named.first());
            Ok(default.and_then(|entry| entry["template"].as_str()).map(str::to_owned))
        }
        Some(_) => Err(Error::format(
            dir.join("tokenizer_config.json"),
            "`chat_template`: expected a text or a list of named texts",
        )),
    }
}
