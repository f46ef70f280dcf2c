//! Tokens that the files beside a vocabulary add to it: `added_tokens_decoder` of `tokenizer_config.json`, and
//! `added_tokens.json`.

use std::collections::BTreeMap;
use std::path::Path;

use aligner_core::{Error, Result};
use serde_json::{Map, Value};
use tokenizers::AddedToken;

use super::parts::added_token;
use super::specials::{ROLES, token_text};

/// Added tokens by id, as `tokenizer.json` has them.
#[derive(Debug, Default)]
pub(super) struct AddedTokens(BTreeMap<u32, Value>);

impl AddedTokens {
    /// Of the files' objects; `named` are those that name special tokens.
    ///
    /// # Errors
    /// An id or a token that is none.
    pub(super) fn read(
        dir: &Path,
        config: &Map<String, Value>,
        numbered: &Map<String, Value>,
        named: [&Map<String, Value>; 2],
    ) -> Result<Self> {
        let mut tokens = BTreeMap::new();
        for (content, id) in numbered {
            let id = id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| {
                let message = format!("{content:?}: expected a token id, got {id}");
                Error::format(dir.join("added_tokens.json"), message)
            })?;
            tokens.insert(id, added_token(id as usize, content, is_special(content, named)));
        }
        match config.get("added_tokens_decoder") {
            None | Some(Value::Null) => {}
            Some(Value::Object(decoder)) => {
                for (id, token) in decoder {
                    let (id, token) = declared(id, token).ok_or_else(|| {
                        let message =
                            format!("added_tokens_decoder: {id:?}: expected a token by its id, got {token}");
                        Error::format(dir.join("tokenizer_config.json"), message)
                    })?;
                    tokens.insert(id, token);
                }
            }
            Some(_) => {
                let message = "added_tokens_decoder: expected an object of tokens by their ids";
                return Err(Error::format(dir.join("tokenizer_config.json"), message));
            }
        }
        Ok(Self(tokens))
    }

    /// Gives pieces the names that the files have for their ids.
    pub(super) fn rename(&self, pieces: &mut [String]) {
        for (&id, token) in &self.0 {
            if let (Some(piece), Some(content)) = (pieces.get_mut(id as usize), content(token)) {
                content.clone_into(piece);
            }
        }
    }

    /// These tokens and, where there is none of the same id, those of `own`, in the order of their ids.
    pub(super) fn beside(&self, own: Vec<Value>) -> Vec<Value> {
        let own =
            own.into_iter().filter_map(|token| Some((u32::try_from(token["id"].as_u64()?).ok()?, token)));
        let mut all: BTreeMap<u32, Value> = own.collect();
        all.extend(self.0.clone());
        all.into_values().collect()
    }

    /// Adds what a tokenizer lacks, and checks that every token has its id.
    ///
    /// # Errors
    /// A token that has another id, or that cannot have its own: ids go on from the vocabulary's last.
    pub(super) fn complete(&self, inner: &mut tokenizers::Tokenizer, dir: &Path) -> Result<()> {
        let lacks = |token: &&Value| content(token).is_some_and(|text| inner.token_to_id(text).is_none());
        let missing: Vec<AddedToken> = self.0.values().filter(lacks).filter_map(as_added).collect();
        inner.add_tokens(&missing);
        for (&id, token) in &self.0 {
            let Some(content) = content(token) else { continue };
            let got = inner.token_to_id(content);
            if got != Some(id) {
                let got = got.map_or("none".into(), |got| got.to_string());
                return Err(Error::format(
                    dir,
                    format!(
                        "the added token {content:?} has the id {id} in tokenizer_config.json or added_tokens.json, \
                         but {got} in the tokenizer; ids of added tokens must go on from the vocabulary's last"
                    ),
                ));
            }
        }
        Ok(())
    }
}

fn content(token: &Value) -> Option<&str> {
    token.get("content").and_then(Value::as_str).filter(|content| !content.is_empty())
}

/// An entry of `added_tokens_decoder` as one of `tokenizer.json`.
fn declared(id: &str, token: &Value) -> Option<(u32, Value)> {
    let id: u32 = id.parse().ok()?;
    let flag = |key: &str| token.get(key).and_then(Value::as_bool);
    let special = flag("special").unwrap_or(false);
    let mut entry = added_token(id as usize, content(token)?, special);
    for key in ["single_word", "lstrip", "rstrip"] {
        entry[key] = flag(key).unwrap_or(false).into();
    }
    entry["normalized"] = flag("normalized").unwrap_or(!special).into();
    Some((id, entry))
}

fn as_added(token: &Value) -> Option<AddedToken> {
    let flag = |key: &str| token[key].as_bool().unwrap_or(false);
    let added = AddedToken::from(content(token)?, flag("special"));
    let added = added.single_word(flag("single_word")).lstrip(flag("lstrip")).rstrip(flag("rstrip"));
    Some(added.normalized(flag("normalized")))
}

/// Whether a file gives the token a role.
fn is_special(content: &str, named: [&Map<String, Value>; 2]) -> bool {
    let has_role = |file: &Map<String, Value>| {
        let by_role = ROLES.iter().filter_map(|role| token_text(file.get(*role)?));
        let additional = file.get("additional_special_tokens").and_then(Value::as_array);
        let mut all = by_role.chain(additional.into_iter().flatten().filter_map(token_text));
        all.any(|text| text == content)
    };
    named.into_iter().any(has_role)
}
