//! Special tokens by role.

use serde_json::{Map, Value};

/// Keys of `tokenizer_config.json` and `special_tokens_map.json` that templates may read.
pub(super) const ROLES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Special tokens by role: the text of each role, and the ids that code asks for.
#[derive(Debug, Clone, Default)]
pub(super) struct Specials {
    /// `bos_token` and so on, as templates see them.
    pub(super) names: Map<String, Value>,
    pub(super) bos: Option<u32>,
    pub(super) eos: Option<u32>,
    pub(super) pad: Option<u32>,
    /// Every token that ends a response; `eos` first.
    pub(super) stops: Vec<u32>,
}

impl Specials {
    /// Roles by name from the tokenizer's files, the first that speaks of each; where those are silent, by id from
    /// the model's.
    pub(super) fn read(
        inner: &tokenizers::Tokenizer,
        named: &[&Map<String, Value>],
        numbered: [&Map<String, Value>; 2],
    ) -> Self {
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
        Self { names, bos, eos, pad, stops }
    }
}

/// A token is written as its text or as an object with `content`.
pub(super) fn token_text(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

/// An id is written alone or in a list.
fn token_ids(value: &Value) -> Option<Vec<u32>> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Value::Array(items) => items.iter().map(id).collect(),
        single => Some(vec![id(single)?]),
    }
}
