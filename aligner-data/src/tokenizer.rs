//! Text to token ids and back, with what a model directory says of special tokens.

mod added;
mod files;
mod gguf;
mod hostile;
mod model_file;
mod parts;
mod save;
mod sentencepiece;
mod specials;
mod vocabulary;

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use aligner_core::weights::GgufValue;
use aligner_core::{Detokenize, Error, Result};
use serde_json::{Map, Value};

use self::specials::Specials;
use crate::ChatTemplate;
use crate::template::mask::fill_gaps;

/// Most rows that a model's embedding may have. The library lists every id up to the last where it writes a file.
const MOST_TOKENS: usize = 1 << 26;

/// A tokenizer with its special tokens and chat template. Clones share the vocabulary.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: Arc<tokenizers::Tokenizer>,
    specials: Specials,
    adds_bos: bool,
    vocab_size: usize,
    /// `tokenizer_config.json` as it was read, for writing back.
    config: Map<String, Value>,
    template: Option<ChatTemplate>,
}

impl Tokenizer {
    /// Reads `tokenizer.json` or, where there is none, `tokenizer.model` of `SentencePiece`, and the files
    /// beside it that say more.
    ///
    /// Those are `tokenizer_config.json`, `special_tokens_map.json`, `added_tokens.json`,
    /// `generation_config.json`, `config.json` and `chat_template.jinja`, each optional.
    ///
    /// # Errors
    /// Neither of the two, a file that does not parse, files that contradict each other, or a chat template
    /// that does not compile.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        files::read(dir)
    }

    /// Reads the tokenizer of a checkpoint: a model directory, or a GGUF file's metadata.
    ///
    /// # Errors
    /// As [`Self::from_dir`]; for a GGUF file, metadata without a tokenizer or of a kind unknown here.
    pub fn from_checkpoint_path(path: &Path) -> Result<Self> {
        if path.is_dir() { Self::from_dir(path) } else { gguf::read(path) }
    }

    /// Whether a directory holds a file that a tokenizer is read from.
    pub fn is_in(dir: &Path) -> bool {
        files::VOCABULARIES.iter().any(|name| dir.join(name).is_file())
    }

    fn new(
        inner: tokenizers::Tokenizer,
        specials: Specials,
        config: Map<String, Value>,
        template: Option<String>,
    ) -> Result<Self> {
        let vocab_size = inner.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1);
        if vocab_size > MOST_TOKENS {
            let message =
                format!("tokenizer: ids go up to {}, where {MOST_TOKENS} are allowed", vocab_size - 1);
            return Err(Error::Invalid(message));
        }
        let first = call(|| inner.encode("", true))?.get_ids().first().copied();
        let stated = config.get("add_bos_token").and_then(Value::as_bool);
        let adds_bos = specials.bos.is_some() && stated.unwrap_or(first == specials.bos);
        let template = template.map(|source| templated(&source, &specials)).transpose()?;
        Ok(Self { inner: Arc::new(inner), specials, adds_bos, vocab_size, config, template })
    }

    /// The same tokenizer with another chat template.
    ///
    /// # Errors
    /// A template that does not compile.
    pub fn with_template(mut self, source: &str) -> Result<Self> {
        self.template = Some(templated(source, &self.specials)?);
        Ok(self)
    }

    /// The same tokenizer, for whose chat template it is always `now_secs` (seconds since 1970, UTC).
    ///
    /// # Errors
    /// As [`ChatTemplate::at`].
    pub fn at(mut self, now_secs: i64) -> Result<Self> {
        self.template = self.template.map(|template| template.at(now_secs)).transpose()?;
        Ok(self)
    }

    /// Token ids of `text`, `[tokens]`. Names of special tokens in it become those tokens; no other
    /// special token is added.
    ///
    /// # Errors
    /// Text that the tokenizer's model cannot represent.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = call(|| self.inner.encode_fast(text, false))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Token ids of `text` and the bytes that each covers, without holes.
    pub(crate) fn encode_offsets(&self, text: &str) -> Result<(Vec<u32>, Vec<Range<usize>>)> {
        let encoding = call(|| self.inner.encode(text, false))?;
        Ok((encoding.get_ids().to_vec(), fill_gaps(encoding.get_offsets())))
    }

    /// The text of `tokens`, special tokens left out.
    ///
    /// # Errors
    /// A decoder that fails; ids outside of the vocabulary are left out.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        call(|| self.inner.decode(tokens, true))
    }

    /// The text of `tokens`, special tokens included.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub fn decode_with_specials(&self, tokens: &[u32]) -> Result<String> {
        call(|| self.inner.decode(tokens, false))
    }

    /// One more than the largest id: the least that a model's `vocab_size` must be.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The id of a token by its name in the vocabulary.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// A token's name in the vocabulary.
    pub fn id_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The token that begins a document.
    pub fn bos(&self) -> Option<u32> {
        self.specials.bos
    }

    /// The token that ends a document or a turn.
    pub fn eos(&self) -> Option<u32> {
        self.specials.eos
    }

    /// The token that fills up rows. Nothing here pads: it is kept for the saved files' readers.
    pub fn pad(&self) -> Option<u32> {
        self.specials.pad
    }

    /// Every token that ends a response: [`Self::eos`] and what `generation_config.json` adds.
    pub fn stops(&self) -> &[u32] {
        &self.specials.stops
    }

    /// Whether the tokenizer by its own rule begins every document with [`Self::bos`].
    pub fn adds_bos(&self) -> bool {
        self.adds_bos
    }

    /// The chat template.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// The keys of GGUF that say the same as this tokenizer, for a model whose embedding has so many rows.
    ///
    /// # Errors
    /// A tokenizer that GGUF's readers would take for another one: its kind, its way of splitting text, or
    /// merges that do not follow from scores; token ids that the model has no row for.
    pub fn gguf_metadata(&self, rows: usize) -> Result<Vec<(String, GgufValue)>> {
        gguf::metadata(self, rows)
    }

    /// Writes `tokenizer.json` and `tokenizer_config.json` (with the chat template) to `dir`, as
    /// transformers loads them.
    ///
    /// # Errors
    /// A file that cannot be written; one that stands there already is then left as it was.
    pub fn save(&self, dir: &Path) -> Result<()> {
        save::write(self, dir)
    }
}

impl Detokenize for Tokenizer {
    /// Special tokens are left out, and so is what a decoder fails on.
    fn text(&self, tokens: &[u32]) -> String {
        self.decode(tokens).unwrap_or_default()
    }
}

fn templated(source: &str, specials: &Specials) -> Result<ChatTemplate> {
    Ok(ChatTemplate::new(source)?.with_variables(specials.names.clone()))
}

/// Calls the library, which panics on some files that contradict themselves.
fn guarded<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err("its parts contradict each other".into()),
    }
}

fn call<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
    guarded(call).map_err(|error| Error::Invalid(format!("tokenizer: {error}")))
}
