//! A tokenizer from `tokenizer.model`, `SentencePiece`'s own file, for directories without `tokenizer.json`.

mod protobuf;
mod trained;

use std::path::Path;

use aligner_core::weights::read_whole;
use aligner_core::{Error, Result};
use serde_json::{Map, Value};

use self::trained::Trained;
use super::added::AddedTokens;
use super::guarded;
use super::parts::{Parts, build};
use super::sentencepiece::{Prefix, Rules, check};
use super::vocabulary::{CONTROL, Vocabulary};

/// The largest file that is read, in bytes; the largest vocabularies take five million.
const MOST_BYTES: u64 = 1 << 27;

/// Families whose tokenizers begin every document unless their settings say otherwise.
const BEGINS_DOCUMENTS: [&str; 4] = ["Llama", "CodeLlama", "Gemma", "Mistral"];

/// The tokenizer, and what the file itself says of special tokens, by role.
pub(super) fn read(
    path: &Path,
    config: &Map<String, Value>,
    added: &AddedTokens,
) -> Result<(tokenizers::Tokenizer, Map<String, Value>)> {
    let bytes = read_whole(path, MOST_BYTES)?;
    let wrong = |message: String| Error::format(path, message);
    let mut trained = Trained::parse(&bytes).map_err(wrong)?;
    added.rename(&mut trained.pieces);
    check(&trained.pieces, &trained.scores).map_err(wrong)?;
    let roles = roles(&trained);
    let vocabulary = Vocabulary { tokens: &trained.pieces, types: &trained.types };
    let bos = bos(config, &roles).and_then(|token| {
        let id = trained.pieces.iter().position(|piece| piece == token)?;
        Some((id as u32, token))
    });
    let rules = Rules {
        algorithm: trained.algorithm,
        vocabulary,
        scores: &trained.scores,
        byte_fallback: trained.byte_fallback,
        prefix: prefix(config, trained.prefix),
        drops_spaces: trained.drops_spaces,
        charsmap: trained.charsmap.clone(),
    };
    let parts = rules.parts();
    let parts = Parts { added: added.beside(parts.added), ..parts };
    let built = guarded(|| build(parts, bos));
    let inner = built.map_err(|error| wrong(format!("no tokenizer can be built of it: {error}")))?;
    Ok((inner, roles))
}

/// The tokens of the file's own roles, those of its training.
fn roles(trained: &Trained) -> Map<String, Value> {
    let roles = [
        ("bos_token", trained.bos),
        ("eos_token", trained.eos),
        ("pad_token", trained.pad),
        ("unk_token", trained.unknown),
    ];
    let named = roles.into_iter().filter_map(|(role, id)| {
        let id = usize::try_from(id).ok()?;
        // Without settings of their own, these ids are the format's defaults, where other pieces may stand.
        let is_special = role == "unk_token" || trained.types.get(id) == Some(&CONTROL);
        Some((role.to_owned(), trained.pieces.get(id).filter(|_| is_special)?.as_str().into()))
    });
    named.collect()
}

/// The token that begins every document, as transformers' classes have it.
fn bos<'a>(config: &'a Map<String, Value>, roles: &'a Map<String, Value>) -> Option<&'a str> {
    let class = config.get("tokenizer_class").and_then(Value::as_str);
    let usual = class.is_none_or(|class| BEGINS_DOCUMENTS.iter().any(|family| class.starts_with(family)));
    let adds = config.get("add_bos_token").and_then(Value::as_bool).unwrap_or(usual);
    let named = config.get("bos_token").and_then(super::specials::token_text);
    named.or_else(|| roles.get("bos_token")?.as_str()).filter(|_| adds)
}

/// `legacy` and `add_prefix_space`, as transformers reads them.
fn prefix(config: &Map<String, Value>, trained: bool) -> Prefix {
    let flag = |key: &str| config.get(key).and_then(Value::as_bool);
    match (flag("add_prefix_space").unwrap_or(trained), flag("legacy").unwrap_or(true)) {
        (false, _) => Prefix::Never,
        (true, true) => Prefix::Always,
        (true, false) => Prefix::First,
    }
}
