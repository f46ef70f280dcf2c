//! A tokenizer from its parts, as `tokenizer.json` has them.

use serde_json::{Map, Value, json};
use tokenizers::normalizers::{Precompiled, Sequence};

/// The parts of `tokenizer.json` that differ between kinds of tokenizers.
pub(super) struct Parts {
    pub(super) normalizer: Value,
    /// `SentencePiece`'s own table of normal forms, which comes before the normalizer.
    pub(super) charsmap: Option<Vec<u8>>,
    pub(super) pre_tokenizer: Value,
    pub(super) decoder: Value,
    pub(super) model: Map<String, Value>,
    /// The tokens that are cut out of the text before anything else.
    pub(super) added: Vec<Value>,
}

/// A token that is cut out of the text as it is.
pub(super) fn added_token(id: usize, content: &str, special: bool) -> Value {
    json!({
        "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": special
    })
}

/// Builds a tokenizer; where there is a `bos`, it begins every document.
pub(super) fn build(parts: Parts, bos: Option<(u32, &str)>) -> tokenizers::Result<tokenizers::Tokenizer> {
    let post_processor = bos.map(|(id, token)| {
        json!({
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {token: {"id": token, "ids": [id], "tokens": [token]}}
        })
    });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": parts.added,
        "normalizer": parts.normalizer, "pre_tokenizer": parts.pre_tokenizer,
        "post_processor": post_processor, "decoder": parts.decoder, "model": parts.model
    });
    let mut tokenizer = tokenizers::Tokenizer::from_bytes(serde_json::to_vec(&tokenizer)?)?;
    if let Some(charsmap) = parts.charsmap {
        let first = Precompiled::from(&charsmap).map_err(|error| error.to_string())?;
        let rest = tokenizer.get_normalizer().cloned();
        let all = [Some(first.into()), rest].into_iter().flatten().collect();
        tokenizer.with_normalizer(Some(Sequence::new(all)));
    }
    Ok(tokenizer)
}
