//! What `tokenizer.model` says: the pieces, and the settings of their training that encoding depends on.
//!
//! Field numbers and defaults are those of `sentencepiece_model.proto` in `SentencePiece`'s repository.

use super::protobuf::{Held, Message};
use crate::tokenizer::hostile::charsmap;
use crate::tokenizer::sentencepiece::Algorithm;
use crate::tokenizer::vocabulary::{NORMAL, UNKNOWN};

/// A trained model.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a setting of the file")]
pub(super) struct Trained {
    pub(super) pieces: Vec<String>,
    /// For each piece.
    pub(super) scores: Vec<f64>,
    pub(super) types: Vec<i64>,
    pub(super) algorithm: Algorithm,
    pub(super) byte_fallback: bool,
    /// Ids of special tokens, negative where there is none.
    pub(super) unknown: i64,
    pub(super) bos: i64,
    pub(super) eos: i64,
    pub(super) pad: i64,
    /// Whether a space is put before the text.
    pub(super) prefix: bool,
    pub(super) drops_spaces: bool,
    pub(super) charsmap: Option<Vec<u8>>,
    escapes_spaces: bool,
    spaces_at_ends: bool,
}

impl Trained {
    /// # Errors
    /// What is wrong, with the byte or the piece: bytes that are no such message, settings that change the
    /// tokens in a way that is not supported.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let mut trained = Self {
            pieces: Vec::new(),
            scores: Vec::new(),
            types: Vec::new(),
            algorithm: Algorithm::Unigram,
            byte_fallback: false,
            unknown: 0,
            bos: 1,
            eos: 2,
            pad: -1,
            prefix: true,
            drops_spaces: true,
            charsmap: None,
            escapes_spaces: true,
            spaces_at_ends: false,
        };
        for field in (Message { bytes, start: 0 }).fields() {
            match field? {
                (1, Held::Bytes(message)) => trained.piece(message)?,
                (2, Held::Bytes(message)) => trained.trainer(message)?,
                (3, Held::Bytes(message)) => trained.normalizer(message)?,
                (5, Held::Bytes(message)) => refuse_denormalizer(message)?,
                _ => {}
            }
        }
        trained.check()?;
        Ok(trained)
    }

    fn piece(&mut self, message: Message<'_>) -> Result<(), String> {
        let id = self.pieces.len();
        let (mut piece, mut score, mut kind) = (None, 0.0, NORMAL);
        for field in message.fields() {
            match field? {
                (1, Held::Bytes(text)) => piece = Some(text.bytes),
                (2, Held::Fixed32(bytes)) => score = f32::from_le_bytes(bytes),
                (3, Held::Number(number)) => kind = number.cast_signed(),
                _ => {}
            }
        }
        let text = std::str::from_utf8(piece.unwrap_or_default());
        let text = text.map_err(|_| format!("piece {id} is not valid UTF-8"))?;
        if text.is_empty() {
            return Err(format!("piece {id} is empty"));
        }
        self.pieces.push(text.to_owned());
        self.scores.push(score.into());
        self.types.push(kind);
        Ok(())
    }

    fn trainer(&mut self, message: Message<'_>) -> Result<(), String> {
        for field in message.fields() {
            // Negative numbers are written in 64 bits.
            let (field, Held::Number(number)) = field? else { continue };
            let id = number.cast_signed();
            match field {
                3 => self.algorithm = algorithm(number)?,
                24 => self.spaces_at_ends = number != 0,
                35 => self.byte_fallback = number != 0,
                40 => self.unknown = id,
                41 => self.bos = id,
                42 => self.eos = id,
                43 => self.pad = id,
                _ => {}
            }
        }
        Ok(())
    }

    fn normalizer(&mut self, message: Message<'_>) -> Result<(), String> {
        for field in message.fields() {
            match field? {
                (2, Held::Bytes(table)) => self.charsmap = charsmap(table.bytes)?,
                (3, Held::Number(flag)) => self.prefix = flag != 0,
                (4, Held::Number(flag)) => self.drops_spaces = flag != 0,
                (5, Held::Number(flag)) => self.escapes_spaces = flag != 0,
                _ => {}
            }
        }
        Ok(())
    }

    fn check(&self) -> Result<(), String> {
        if self.pieces.is_empty() {
            return Err("no pieces; is this a SentencePiece model?".into());
        }
        if !self.types.contains(&UNKNOWN) {
            return Err("no piece is the unknown one: expected one of type 2".into());
        }
        if self.spaces_at_ends {
            return Err(
                "treat_whitespace_as_suffix: expected false, the only setting that is supported".into()
            );
        }
        if !self.escapes_spaces {
            return Err("escape_whitespaces: expected true, the only setting that is supported".into());
        }
        Ok(())
    }
}

fn algorithm(number: u64) -> Result<Algorithm, String> {
    match number {
        1 => Ok(Algorithm::Unigram),
        2 => Ok(Algorithm::Bpe),
        _ => {
            let name =
                ["0", "1", "2", "WORD", "CHAR"].get(number as usize).copied().unwrap_or("one unknown here");
            Err(format!("model_type: expected UNIGRAM or BPE, got {name}"))
        }
    }
}

/// A table for the way back would change decoded text.
fn refuse_denormalizer(message: Message<'_>) -> Result<(), String> {
    for field in message.fields() {
        if matches!(field?, (2, Held::Bytes(table)) if !table.bytes.is_empty()) {
            return Err("denormalizer_spec: expected none, since it is not supported".into());
        }
    }
    Ok(())
}
