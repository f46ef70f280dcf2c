//! Generation with the policy's own weights: the model code of the trainer, on the same parameter
//! handles, with a key-value cache.
//!
//! [`CachedEngine`] runs one request at a time. It is the plain engine that faster ones are compared
//! with: its tokens and log-probabilities are those of the full forward pass.

mod cache;
mod engine;
mod sampler;
mod stop;

pub use engine::CachedEngine;
pub use sampler::{Distribution, NgramProposer, Row, Sampler, Seen, Verdict, accept};
pub use stop::{StopText, TextStream};
