//! A unigram tokenizer as GGUF's `t5`.

use aligner_core::Result;
use aligner_core::weights::GgufValue;
use serde_json::Value;

use super::{Metadata, Probes, Vocabulary, read_again, refused, roles, text};
use crate::Tokenizer;
use crate::tokenizer::hostile::charsmap_of;
use crate::tokenizer::vocabulary::UNUSED;

/// The score of rows without a token, as llama.cpp's converter has it.
const NEVER: f64 = -1000.0;

pub(super) fn metadata(tokenizer: &Tokenizer, json: &Value, vocabulary: &Vocabulary) -> Result<Metadata> {
    if json["model"]["byte_fallback"] == true {
        return Err(refused("it falls back to bytes, and unigram models do not there"));
    }
    let scores = scores(json, vocabulary)?;
    let mut charsmaps = Vec::new();
    find_charsmaps(&json["normalizer"], &mut charsmaps)?;
    if charsmaps.len() > 1 {
        return Err(refused("it has several tables of normal forms"));
    }
    let charsmap = charsmaps.pop();
    let probes = Probes::of(json);
    let mut farthest = 0;
    for (prefix, drops_spaces) in [(true, true), (true, false), (false, true), (false, false)] {
        let mut metadata = vec![
            text("tokenizer.ggml.model", "t5"),
            text("tokenizer.ggml.pre", "default"),
            ("tokenizer.ggml.tokens".into(), GgufValue::Texts(vocabulary.tokens.clone())),
            ("tokenizer.ggml.scores".into(), GgufValue::Floats(scores.clone())),
            ("tokenizer.ggml.token_type".into(), GgufValue::Integers(vocabulary.types.clone())),
            ("tokenizer.ggml.add_space_prefix".into(), GgufValue::Flag(prefix)),
            ("tokenizer.ggml.remove_extra_whitespaces".into(), GgufValue::Flag(drops_spaces)),
        ];
        let table = charsmap.clone().map(GgufValue::Bytes);
        metadata.extend(table.map(|table| ("tokenizer.ggml.precompiled_charsmap".into(), table)));
        metadata.extend(roles(tokenizer));
        let read = read_again(&metadata)?;
        let Some(place) = probes.difference(tokenizer, &read) else {
            probes.warn_of_spaces(tokenizer, &read);
            return Ok(metadata);
        };
        farthest = farthest.max(place);
    }
    Err(probes.refused(farthest))
}

/// Those of the pieces; 0 for tokens beside them, which are cut out of the text before.
fn scores(json: &Value, vocabulary: &Vocabulary) -> Result<Vec<f64>> {
    let rest = |&kind: &i64| if kind == UNUSED { NEVER } else { 0.0 };
    let mut scores: Vec<f64> = vocabulary.types.iter().map(rest).collect();
    let pieces = json["model"]["vocab"].as_array().map(Vec::as_slice).unwrap_or_default();
    for (id, piece) in pieces.iter().enumerate() {
        // A file has room for singles.
        let score = piece[1].as_f64().map(|score| f64::from(score as f32)).filter(|score| score.is_finite());
        let score = score.ok_or_else(|| refused(format!("piece {id}: expected a finite score")))?;
        if let Some(own) = scores.get_mut(id) {
            *own = score;
        }
    }
    Ok(scores)
}

/// The tables of normal forms in a normalizer and those that it is made of.
fn find_charsmaps(normalizer: &Value, found: &mut Vec<Vec<u8>>) -> Result<()> {
    if let Some(table) = normalizer["precompiled_charsmap"].as_str() {
        found.push(charsmap_of(table).map_err(refused)?);
    }
    let inner = normalizer["normalizers"].as_array().into_iter().flatten();
    inner.into_iter().try_for_each(|inner| find_charsmaps(inner, found))
}
