//! Data of Aligner: tokenizers, chat templates, data files in the field's schemas, and the loader
//! that hands out groups of samples.
//!
//! | idea | type |
//! |---|---|
//! | text to token ids and back | [`Tokenizer`] |
//! | a conversation as tokens, with a mask of what the model says | [`ChatTemplate`], [`Message`] |
//! | a data file, row by row | [`Dataset`], [`DatasetConfig`], [`Format`] |
//! | a seeded order that can be resumed | [`Loader`], [`LoaderState`] |
//! | sequences that share a token budget | [`packing`] |
//! | endless questions with answers that can be checked | [`tasks`] |
//!
//! The mask of a sample is taken from the template's rendering and laid over the tokens by their
//! place in the text. Token ids are never searched: a pad or end token in the text means nothing.

mod dataset;
mod loader;
mod message;
pub mod packing;
mod read;
mod schema;
mod shuffle;
pub mod tasks;
mod template;
mod tokenizer;

pub use dataset::{Dataset, DatasetConfig, EqualPairs, Overlong, Stats};
pub use loader::{Loader, LoaderState};
pub use message::Message;
pub use read::Rows;
pub use schema::{Format, Kind};
pub use template::{ChatTemplate, Encoded, RenderOptions, Target, now_secs};
pub use tokenizer::Tokenizer;
