//! The demo's byte-level BPE vocabulary and chat template.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use serde_json::{Value, json};
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, TokenizerBuilder, TokenizerImpl};

/// Tokens of the vocabulary, the special ones among them.
const VOCABULARY_TOKENS: usize = 1536;
/// The special tokens, with the ids 0, 1 and 2.
const SPECIALS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
/// Id of `<|endoftext|>`, which also pads.
pub(super) const PAD_ID: u32 = 0;
/// Id of `<|im_end|>`, which ends a turn.
pub(super) const END_ID: u32 = 2;

/// Turns between marks, as `ChatML` has them.
const TEMPLATE: &str = "\
{%- for message in messages -%}\
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}\
{%- endfor -%}\
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}";

/// A byte-level BPE tokenizer.
pub(super) type Vocabulary = TokenizerImpl<BPE, NFC, ByteLevel, ByteLevel, ByteLevel>;

/// Trains the vocabulary on `texts`.
pub(super) fn train(texts: &[String]) -> Result<Vocabulary> {
    let mut trainer = BpeTrainerBuilder::new()
        .show_progress(false)
        .vocab_size(VOCABULARY_TOKENS)
        .min_frequency(2)
        .special_tokens(SPECIALS.iter().map(|&token| AddedToken::from(token, true)).collect())
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build();
    let bytes = ByteLevel::new(false, true, true);
    let mut vocabulary: Vocabulary = TokenizerBuilder::new()
        .with_model(BPE::default())
        .with_normalizer(None)
        .with_pre_tokenizer(Some(bytes))
        .with_post_processor(None)
        .with_decoder(Some(bytes))
        .build()
        .map_err(|error| anyhow!("cannot build the tokenizer: {error}"))?;
    vocabulary
        .train(&mut trainer, texts.iter())
        .map_err(|error| anyhow!("cannot train the tokenizer: {error}"))?;
    Ok(vocabulary)
}

/// Writes `tokenizer.json` and `tokenizer_config.json`, the chat template inside.
pub(super) fn save(vocabulary: &Vocabulary, directory: &Path) -> Result<()> {
    vocabulary
        .save(directory.join("tokenizer.json"), false)
        .map_err(|error| anyhow!("cannot write tokenizer.json: {error}"))?;
    let path = directory.join("tokenizer_config.json");
    let text = serde_json::to_string_pretty(&tokenizer_config())?;
    std::fs::write(&path, text + "\n").with_context(|| format!("cannot write {}", path.display()))
}

fn tokenizer_config() -> Value {
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": null,
        "eos_token": SPECIALS[END_ID as usize],
        "pad_token": SPECIALS[PAD_ID as usize],
        "add_bos_token": false,
        "clean_up_tokenization_spaces": false,
        "model_max_length": super::base_model::MAX_POSITIONS,
        "chat_template": TEMPLATE,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_survives_and_specials_have_their_ids() {
        let texts: Vec<String> = (0..50).map(|n| format!("a small cat number {n} sat")).collect();
        let vocabulary = train(&texts).unwrap();
        let text = "<|im_start|>a small café<|im_end|>";
        let encoding = vocabulary.encode(text, false).unwrap();
        let ids = encoding.get_ids();
        assert_eq!((ids.first(), ids.last()), (Some(&1), Some(&END_ID)));
        assert_eq!(vocabulary.decode(ids, false).unwrap(), text);
        assert_eq!(vocabulary.token_to_id(SPECIALS[0]), Some(PAD_ID));
    }
}
