//! Equal work for data-parallel ranks: which prompts a rank draws responses to, and which samples it learns from.
//!
//! Responses are of very different lengths, so ranks with equally many prompts end at very different times. With
//! [`Split::Stealing`] a rank that has room asks the prompt server for the next prompt, those that are expected to be
//! longest first: what is left at the end is short. For learning, whose work follows the tokens, [`rebalance`] then
//! moves groups between ranks so that each has about as many tokens.
//!
//! Neither changes a sample. A token's random number is keyed by seed, step, prompt, sample and position, whichever rank
//! draws it, and the weights that draw it follow from counts of steps; only the time follows from who is faster.

mod assign;
mod exchange;
mod history;
mod server;

pub use assign::{contiguous, longest_first, most_tokens};
pub use exchange::{Held, Move, Rebalanced, rebalance};
pub use history::LengthHistory;
pub use server::{PromptServer, Split};
