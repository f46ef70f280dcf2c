//! What a `tokenizer.json` may ask of the library: files come from anywhere, and it believes them.
//!
//! Checked before it reads one: that the table of a normalizer is as long as it says, since memory is taken for it
//! first; that no chain of replacements makes much out of a little text; that a text has the same tokens each time.

use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use base64::{Engine as _, alphabet};
use serde::Deserialize;
use serde_json::Value;

/// Most bytes of text that one byte may become on its way to the model, or back. Of known tokenizers, those of
/// ALBERT come closest, with less than a thousand.
const MOST_GROWTH: f64 = 16_384.0;

/// The parts that change texts, and the model's one that changes tokens; the others are skipped.
#[derive(Deserialize)]
struct Steps {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    decoder: Value,
    model: Option<Model>,
}

#[derive(Deserialize)]
struct Model {
    dropout: Option<f64>,
}

/// # Errors
/// What is wrong with the file.
pub(super) fn check(bytes: &[u8]) -> Result<(), String> {
    let steps: Steps = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    if let Some(dropout) = steps.model.and_then(|model| model.dropout).filter(|&dropout| dropout != 0.0) {
        return Err(format!(
            "model.dropout: expected null, since a text has the same tokens each time, got {dropout}"
        ));
    }
    let there = growth(&steps.normalizer)? * growth(&steps.pre_tokenizer)?;
    for (way, growth) in [("encoding", there), ("decoding", growth(&steps.decoder)?)] {
        if growth > MOST_GROWTH {
            return Err(format!(
                "{way} makes up to {growth:.0} bytes out of one, where {MOST_GROWTH} are allowed"
            ));
        }
    }
    Ok(())
}

/// The most bytes that a step makes out of one.
fn growth(step: &Value) -> Result<f64, String> {
    let text = |key: &str| step.get(key).and_then(Value::as_str);
    // By their keys: the library takes these without a type too.
    if let Some(table) = text("precompiled_charsmap") {
        return charsmap_growth(&charsmap_of(table)?);
    }
    if let (Some(pattern), Some(content)) = (step.get("pattern"), text("content")) {
        return Ok(match pattern.as_str().or_else(|| pattern.get("String")?.as_str()) {
            Some(text) if !text.is_empty() => (content.len() as f64 / text.len() as f64).max(1.0),
            // A pattern may match between any two characters.
            _ => 1.0 + content.len() as f64,
        });
    }
    if let Some(prefix) = text("prepend") {
        return Ok(1.0 + prefix.len() as f64);
    }
    Ok(match text("type") {
        Some("Metaspace") => 4.0,
        Some("ByteLevel" | "Lowercase") => 2.0,
        // U+FDFA, three bytes, has the longest normal form.
        Some("NFKC" | "NFKD") => 11.0,
        Some("NFC" | "NFD" | "BertNormalizer") => 3.0,
        _ => {
            let lists = ["normalizers", "pretokenizers", "decoders"].map(|key| step.get(key)?.as_array());
            let steps = lists.into_iter().flatten().flatten();
            steps.map(growth).try_fold(1.0, |product, growth| growth.map(|growth| product * growth))?
        }
    })
}

/// The length of the longest normal form, in bytes. The table is a length in four bytes, a tree of so many bytes,
/// and the forms, each of which ends with a zero.
fn charsmap_growth(table: &[u8]) -> Result<f64, String> {
    let tree = table.first_chunk().map(|len| u32::from_le_bytes(*len) as usize);
    let Some(forms) = tree.filter(|&tree| tree > 0).and_then(|tree| table[4..].get(tree..)) else {
        return Err(format!("precompiled_charsmap: its {} bytes are not as long as they say", table.len()));
    };
    Ok(forms.split(|&byte| byte == 0).map(<[u8]>::len).max().unwrap_or(0).max(1) as f64)
}

/// A table of normal forms that stands alone; an empty one is none.
///
/// # Errors
/// A table that is not as long as it says, or makes much out of a little text.
pub(super) fn charsmap(table: &[u8]) -> Result<Option<Vec<u8>>, String> {
    if table.is_empty() {
        return Ok(None);
    }
    let growth = charsmap_growth(table)?;
    if growth > MOST_GROWTH {
        return Err(format!(
            "precompiled_charsmap: it has a form of {growth:.0} bytes, where {MOST_GROWTH} are allowed"
        ));
    }
    Ok(Some(table.to_vec()))
}

/// A table in base 64, with or without padding.
pub(super) fn charsmap_of(text: &str) -> Result<Vec<u8>, String> {
    let config = GeneralPurposeConfig::new()
        .with_decode_allow_trailing_bits(true)
        .with_decode_padding_mode(DecodePaddingMode::Indifferent);
    let decoded = GeneralPurpose::new(&alphabet::STANDARD, config).decode(text);
    decoded.map_err(|error| format!("precompiled_charsmap: expected a text in base 64: {error}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fault(value: &Value) -> String {
        check(value.to_string().as_bytes()).unwrap_err()
    }

    #[test]
    fn chains_of_replacements_that_double_a_text_are_refused() {
        let double = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
        let chain = |key: &str, count: usize| json!({"type": "Sequence", key: vec![double.clone(); count]});
        assert!(check(json!({"normalizer": chain("normalizers", 14)}).to_string().as_bytes()).is_ok());
        assert!(fault(&json!({"normalizer": chain("normalizers", 15)})).contains("encoding"));
        assert!(fault(&json!({"decoder": chain("decoders", 15)})).contains("decoding"));
        let nested =
            json!({"type": "Sequence", "normalizers": [chain("normalizers", 8), chain("normalizers", 8)]});
        assert!(fault(&json!({"normalizer": nested})).contains("65536"));
        let anywhere = json!({"type": "Replace", "pattern": {"Regex": ""}, "content": "x".repeat(20_000)});
        assert!(fault(&json!({"normalizer": anywhere})).contains("20001"));
    }

    #[test]
    fn tokens_by_chance_are_refused() {
        assert!(fault(&json!({"model": {"type": "BPE", "dropout": 0.1}})).contains("model.dropout"));
        for model in [json!({"dropout": null}), json!({"dropout": 0.0}), json!({"vocab": {}}), Value::Null] {
            assert_eq!(check(json!({"model": model}).to_string().as_bytes()), Ok(()));
        }
    }

    #[test]
    fn a_table_with_a_long_form_is_refused() {
        let table = |form: usize| [&8_u32.to_le_bytes()[..], &[0; 8], &vec![b'a'; form], &[0]].concat();
        assert_eq!(charsmap(&table(9)), Ok(Some(table(9))));
        assert_eq!(charsmap(&[]), Ok(None));
        assert!(charsmap(&table(20_000)).unwrap_err().contains("form of 20000 bytes"));
    }

    #[test]
    fn a_table_of_normal_forms_is_as_long_as_it_says() {
        let table = |text: &str| json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": text}});
        // Eight bytes of a tree, then "abc" and "d".
        assert_eq!(charsmap_growth(&charsmap_of("CAAAAAAAAAAAAAAAYWJjAGQA").unwrap()), Ok(3.0));
        assert!(check(table("CAAAAAAAAAAAAAAAYWJjAGQA").to_string().as_bytes()).is_ok());
        for text in ["/////wAAAAA=", "AAAA", "", "?", "AAAAAAAA"] {
            assert!(fault(&table(text)).contains("precompiled_charsmap"), "{text}");
        }
    }
}
