//! A tokenizer as the files that transformers loads.

use std::fs;
use std::path::Path;

use aligner_core::weights::atomic_write;
use aligner_core::{Error, Result};
use serde_json::Value;

use super::Tokenizer;

pub(super) fn write(tokenizer: &Tokenizer, dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).map_err(Error::io(dir))?;
    let json = super::call(|| tokenizer.inner.to_string(true))?;
    replace(&dir.join("tokenizer.json"), &json)?;
    let path = dir.join("tokenizer_config.json");
    let config = serde_json::to_string_pretty(&config(tokenizer))
        .map_err(|error| Error::format(&path, error.to_string()))?;
    replace(&path, &config)?;
    // Readers prefer this file to the config's template, so an old one must not stay behind.
    let old = dir.join("chat_template.jinja");
    match &tokenizer.template {
        Some(template) if old.exists() => replace(&old, template.source()),
        _ => Ok(()),
    }
}

/// The config as it was read, with the special tokens and the template that are in force.
fn config(tokenizer: &Tokenizer) -> Value {
    let mut config = tokenizer.config.clone();
    // An object (with `content`, `lstrip` and so on) says more than the text: it stays.
    for (role, text) in &tokenizer.specials.names {
        if config.get(role).is_none_or(Value::is_null) {
            config.insert(role.clone(), text.clone());
        }
    }
    config.entry("tokenizer_class").or_insert_with(|| "PreTrainedTokenizerFast".into());
    if let Some(template) = &tokenizer.template {
        config.insert("chat_template".into(), template.source().into());
    }
    Value::Object(config)
}

fn replace(path: &Path, text: &str) -> Result<()> {
    atomic_write(path, |file| file.write_all(text.as_bytes()))
}
