//! A tokenizer from the files of a Hugging Face model directory.

use std::path::Path;

use aligner_core::{Error, Result};
use serde_json::{Map, Value};

use super::{Specials, Tokenizer};

/// Keys of `tokenizer_config.json` and `special_tokens_map.json` that templates may read.
const ROLES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

pub(super) fn read(dir: &Path) -> Result<Tokenizer> {
    let path = dir.join("tokenizer.json");
    let bytes = std::fs::read(&path).map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => {
            Error::format(dir, "no tokenizer: expected a file `tokenizer.json` beside the model's config")
        }
        _ => Error::Io { path: path.clone(), cause: source },
    })?;
    let mut inner =
        parse(&bytes).map_err(|error| Error::format(&path, format!("not a tokenizer: {error}")))?;
    // Lengths are the data set's to limit: a file's own settings would cut and pad rows silently.
    inner.with_padding(None);
    inner.with_truncation(None).map_err(|error| Error::format(&path, error.to_string()))?;

    let config = object(&dir.join("tokenizer_config.json"))?;
    let map = object(&dir.join("special_tokens_map.json"))?;
    let generation = object(&dir.join("generation_config.json"))?;
    let model = object(&dir.join("config.json"))?;
    let specials = specials(&inner, [&config, &map], [&generation, &model]);
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

/// Parses a tokenizer and uses it once: the library panics on some files that contradict themselves.
fn parse(bytes: &[u8]) -> Result<tokenizers::Tokenizer, String> {
    let parse = || -> tokenizers::Result<tokenizers::Tokenizer> {
        let tokenizer = tokenizers::Tokenizer::from_bytes(bytes)?;
        tokenizer.encode("", true)?;
        Ok(tokenizer)
    };
    match std::panic::catch_unwind(parse) {
        Ok(parsed) => parsed.map_err(|error| error.to_string()),
        Err(_) => Err("its parts contradict each other".into()),
    }
}

/// The object in a JSON file, empty if the file is not there.
fn object(path: &Path) -> Result<Map<String, Value>> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Map::new()),
        Err(source) => return Err(Error::Io { path: path.to_path_buf(), cause: source }),
    };
    serde_json::from_slice(&bytes)
        .map_err(|error| Error::format(path, format!("expected a JSON object: {error}")))
}

/// Roles by name from the tokenizer's files; where those are silent, by id from the model's.
fn specials(
    inner: &tokenizers::Tokenizer,
    named: [&Map<String, Value>; 2],
    numbered: [&Map<String, Value>; 2],
) -> Specials {
    let mut names = Map::new();
    for role in ROLES {
        if let Some(text) = named.iter().find_map(|file| token_text(file.get(role)?)) {
            names.insert(role.to_owned(), text.into());
        }
    }
    let ids = |key: &str| numbered.iter().find_map(|file| token_ids(file.get(key)?)).unwrap_or_default();
    let by_role = |names: &mut Map<String, Value>, role: &str| {
        let named = names.get(role).and_then(Value::as_str).and_then(|text| inner.token_to_id(text));
        named.or_else(|| {
            let id = ids(&format!("{role}_id")).first().copied()?;
            names.insert(role.to_owned(), inner.id_to_token(id)?.into());
            Some(id)
        })
    };
    let bos = by_role(&mut names, "bos_token");
    let eos = by_role(&mut names, "eos_token");
    let pad = by_role(&mut names, "pad_token");
    let mut stops: Vec<u32> = eos.into_iter().collect();
    stops.extend(ids("eos_token_id").into_iter().filter(|&id| Some(id) != eos));
    Specials { names, bos, eos, pad, stops }
}

/// A token is written as its text or as an object with `content`.
fn token_text(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned)
}

/// An id is written alone or in a list.
fn token_ids(value: &Value) -> Option<Vec<u32>> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Value::Array(items) => items.iter().map(id).collect(),
        single => Some(vec![id(single)?]),
    }
}

/// `chat_template.jinja`, else the config's `chat_template`: one text, or several by name.
fn template(dir: &Path, config: &Map<String, Value>) -> Result<Option<String>> {
    let path = dir.join("chat_template.jinja");
    match std::fs::read_to_string(&path) {
        Ok(source) => return Ok(Some(source)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(source) => return Err(Error::Io { path, cause: source }),
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
