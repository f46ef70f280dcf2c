//! Alignment algorithms, and the learner that trains with any of them.
//!
//! | what | where |
//! |---|---|
//! | the only training step | [`Learner`] |
//! | supervised fine-tuning | [`Sft`] |
//! | preference optimization | [`Dpo`] |
//! | reward modelling | [`RewardModel`] |
//! | a frozen reference, live or cached | [`Reference`] |
//! | checks before step 1 | [`preflight()`] |
//! | checks of a new algorithm | [`check::check_algorithm`] |
//!
//! ```
//! use aligner_algos::{Dpo, DpoConfig};
//! use aligner_core::{Algorithm, Per};
//!
//! let dpo = Dpo::new(DpoConfig { beta: 0.2, ..DpoConfig::default() })?;
//! assert_eq!(dpo.per(), Per::Group);
//! # Ok::<(), aligner_core::Error>(())
//! ```

pub mod check;
mod dpo;
#[cfg(test)]
mod fixture;
mod gradients;
mod learner;
mod micro_batch;
pub mod ops;
mod per_target;
mod preflight;
mod reference;
mod reward_model;
mod sft;

pub use dpo::{Dpo, DpoConfig, DpoLoss};
pub use learner::{Learner, LearnerConfig};
pub use micro_batch::micro_batches;
pub use preflight::{PreflightConfig, PreflightInput, PreflightReport, preflight};
pub use reference::Reference;
pub use reward_model::{RewardModel, RewardModelConfig};
pub use sft::{Average, Sft, SftConfig};
