//! Tokens by id with what each is for, as `SentencePiece` and GGUF number it.

use serde_json::{Map, Value};

use super::parts::added_token;

pub(super) const NORMAL: i64 = 1;
pub(super) const UNKNOWN: i64 = 2;
pub(super) const CONTROL: i64 = 3;
pub(super) const USER_DEFINED: i64 = 4;
pub(super) const UNUSED: i64 = 5;
pub(super) const BYTE: i64 = 6;

/// The tokens by id, with their types: as many, or none where all are normal.
#[derive(Debug, Clone, Copy)]
pub(super) struct Vocabulary<'a> {
    pub(super) tokens: &'a [String],
    pub(super) types: &'a [i64],
}

impl<'a> Vocabulary<'a> {
    pub(super) fn token(self, id: u32) -> Option<&'a str> {
        self.tokens.get(id as usize).map(String::as_str)
    }

    pub(super) fn kind(self, id: usize) -> i64 {
        self.types.get(id).copied().unwrap_or(NORMAL)
    }

    /// Token to id, as `tokenizer.json` has it.
    pub(super) fn by_token(self) -> Map<String, Value> {
        self.tokens.iter().enumerate().map(|(id, token)| (token.clone(), id.into())).collect()
    }

    /// Ids and texts of the tokens of a kind.
    pub(super) fn of_kind(self, kind: i64) -> impl Iterator<Item = (usize, &'a str)> {
        let tokens = self.tokens.iter().enumerate().filter(move |&(id, _)| self.kind(id) == kind);
        tokens.map(|(id, token)| (id, token.as_str()))
    }

    /// The tokens of these kinds, as tokens that are cut out of the text; all but the user's are special.
    pub(super) fn added(self, kinds: &[i64]) -> Vec<Value> {
        let ids = (0..self.tokens.len()).filter(|&id| kinds.contains(&self.kind(id)));
        ids.map(|id| added_token(id, &self.tokens[id], self.kind(id) != USER_DEFINED)).collect()
    }
}
