//! Log-probabilities in the two shapes that clients read.

use aligner_core::Drawn;
use aligner_data::Tokenizer;
use serde_json::{Map, Value, json};

use super::draft::Form;

/// What stands for minus infinity, which JSON has no number for; `OpenAI`'s own value.
const LEAST: f32 = -9999.0;

/// Writes the log-probabilities of one choice.
#[derive(Debug, Default)]
pub(super) struct Logprobs {
    /// Characters of the tokens so far.
    offset: usize,
}

impl Logprobs {
    /// Those of `drawn`, the next tokens of the choice. They are the model's own: temperature, penalties
    /// and truncation do not count.
    pub(super) fn of(&mut self, form: Form, drawn: &[Drawn], tokenizer: &Tokenizer) -> Value {
        match form {
            Form::Chat => {
                let content: Vec<Value> = drawn.iter().map(|drawn| chat(drawn, tokenizer)).collect();
                json!({ "content": content, "refusal": null })
            }
            Form::Text => self.text(drawn, tokenizer),
        }
    }

    fn text(&mut self, drawn: &[Drawn], tokenizer: &Tokenizer) -> Value {
        let (mut tokens, mut logprobs) = (Vec::new(), Vec::new());
        let (mut tops, mut offsets) = (Vec::new(), Vec::new());
        for one in drawn {
            let token = token_text(tokenizer, one.token);
            let mut top: Map<String, Value> = Map::new();
            for &(other, logp) in &one.top {
                // Two tokens may read the same; the likelier one stands first.
                top.entry(token_text(tokenizer, other)).or_insert(finite(logp));
            }
            top.entry(token.clone()).or_insert(finite(one.raw_logp));
            offsets.push(self.offset);
            self.offset += token.chars().count();
            tops.push(top);
            tokens.push(token);
            logprobs.push(finite(one.raw_logp));
        }
        json!({ "tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets })
    }
}

fn chat(drawn: &Drawn, tokenizer: &Tokenizer) -> Value {
    let mut entry = token(tokenizer, drawn.token, drawn.raw_logp);
    entry["top_logprobs"] = drawn.top.iter().map(|&(id, logp)| token(tokenizer, id, logp)).collect();
    entry
}

fn token(tokenizer: &Tokenizer, id: u32, logp: f32) -> Value {
    let text = token_text(tokenizer, id);
    let bytes = token_bytes(tokenizer, id, &text);
    json!({ "token": text, "logprob": finite(logp), "bytes": bytes })
}

fn finite(logp: f32) -> Value {
    // A NaN is written as the least too.
    Value::from(f64::from(logp.max(LEAST)))
}

/// A token as it reads within a text: decoders cut the space before a first word, so the token is read
/// after itself.
fn token_text(tokenizer: &Tokenizer, id: u32) -> String {
    let read = |tokens: &[u32]| tokenizer.decode_with_specials(tokens).unwrap_or_default();
    let once = read(&[id]);
    match read(&[id, id]).strip_prefix(once.as_str()) {
        Some(second) if !second.is_empty() => second.to_string(),
        _ => once,
    }
}

/// The token's bytes, where they can be told: tokens that hold a part of a character have no text.
fn token_bytes(tokenizer: &Tokenizer, id: u32, text: &str) -> Option<Vec<u8>> {
    if !text.contains('\u{fffd}') {
        return Some(text.as_bytes().to_vec());
    }
    let name = tokenizer.id_token(id)?;
    let fallback = name.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    if let Some(byte) = fallback.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
        return Some(vec![byte]);
    }
    name.chars().map(byte_of).collect()
}

/// The byte that a character of a byte-level vocabulary stands for (`bytes_to_unicode` of GPT-2): printable
/// bytes stand for themselves, the others are counted up from 256.
fn byte_of(character: char) -> Option<u8> {
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let code = u32::from(character);
    match u8::try_from(code) {
        Ok(byte) => Some(byte).filter(printable),
        Err(_) => (0..=u8::MAX).filter(|byte| !printable(byte)).nth(code as usize - 256),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_of_byte_level_vocabularies_are_bytes() {
        // `Ġ` is the space, `Ċ` the line feed, `â` and `Ģ` parts of a quotation mark.
        let bytes: Vec<Option<u8>> = "ĠĊâĢa☃".chars().map(byte_of).collect();
        assert_eq!(bytes, [Some(b' '), Some(b'\n'), Some(0xe2), Some(0x80), Some(b'a'), None]);
    }

    #[test]
    fn every_byte_has_one_character() {
        let mut seen: Vec<u8> = (0..400).filter_map(char::from_u32).filter_map(byte_of).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..=u8::MAX).collect::<Vec<_>>());
    }

    #[test]
    fn impossible_tokens_have_a_number() {
        assert_eq!(finite(f32::NEG_INFINITY), -9999.0);
        assert_eq!(finite(f32::NAN), -9999.0);
    }
}
