//! Generation with the policy's own weights: the model code of the trainer, on the same parameter
//! handles, with continuous batching over a paged key-value cache.
//!
//! | module | holds |
//! |---|---|
//! | `engine` | [`PagedEngine`]: submits, passes, refits |
//! | `schedule` | which requests take part in the next pass |
//! | `job` | one request: its tokens, pages, draws |
//! | `pages` | who holds which page; the prefix index |
//! | `host` | the forward pass on host slices |
//! | `accelerator` | the forward pass on an accelerator's kernels |
//! | `logits` | what a pass leaves, wherever it ran |
//! | `draft` | a smaller model that proposes tokens |
//! | `adapters` | the low-rank adapters that requests name |
//! | `gap` | how far smaller weights are from the trainer's |
//! | `weights` | handles of the weights, and smaller copies |
//! | `sampler`, `stop` | logits to tokens, stop strings |

#[cfg(feature = "cube")]
mod accelerator;
#[cfg(not(feature = "cube"))]
#[path = "accelerator/absent.rs"]
mod accelerator;
mod adapters;
mod config;
mod draft;
mod engine;
mod gap;
mod host;
mod job;
mod logits;
mod pages;
mod sampler;
mod schedule;
mod stop;
mod weights;

pub use aligner_core::ops::rows::PackedKind;
pub use config::{CacheSize, EngineConfig, EngineDevice, InFlight, Speculation};
pub use engine::PagedEngine;
pub use gap::LogpGap;
pub use sampler::{Distribution, NgramProposer, Row, Sampler, Seen};
pub use stop::{StopText, TextStream};
