//! Alignment algorithms, and the learner that trains with any of them.
//!
//! | what | where |
//! |---|---|
//! | the only training step | [`Learner`] |
//! | the only rollout loop | [`Online`] |
//! | supervised fine-tuning | [`Sft`] |
//! | preference optimization | [`Dpo`] |
//! | reward modelling | [`RewardModel`] |
//! | reinforcement learning with a critic | [`Ppo`], [`ValueLoss`] |
//! | reinforcement learning with a baseline | [`Grpo`], [`Rloo`], [`Reinforce`] |
//! | learning from the best of several answers | [`Rejection`], [`BestOfN`] |
//! | what responses are worth | [`rewards`] |
//! | signs that a policy pleases its reward and nothing else | [`Warnings`] |
//! | a frozen reference, live or cached | [`Reference`] |
//! | checks before step 1 | [`preflight()`] |
//! | checks of a new algorithm | [`check::check_algorithm`] |
//! | names for an algorithm's panics and hangs | [`Guarded`], [`Watchdog`] |
//!
//! ```
//! use aligner_algos::{Dpo, DpoConfig};
//! use aligner_core::{Algorithm, Per};
//!
//! let dpo = Dpo::new(DpoConfig { beta: 0.2, ..DpoConfig::default() })?;
//! assert_eq!(dpo.per(), Per::Group);
//! # Ok::<(), aligner_core::Error>(())
//! ```

mod best_of_n;
pub mod check;
mod dpo;
#[cfg(test)]
mod fixture;
mod gradients;
mod grpo;
mod guarded;
mod learner;
mod micro_batch;
mod online;
pub mod ops;
mod per_target;
mod ppo;
mod preflight;
mod reference;
mod reinforce;
mod rejection;
mod reward_model;
pub mod rewards;
mod rloo;
mod sft;
mod value;
mod watchdog;

pub use best_of_n::{BestOfN, BestOfNConfig};
pub use dpo::{Dpo, DpoConfig, DpoLoss};
pub use grpo::{Grpo, GrpoConfig, GrpoLoss};
pub use guarded::Guarded;
pub use learner::{Learner, LearnerConfig, TrainingRanks};
pub use micro_batch::micro_batches;
pub use online::{
    AdaptiveKlConfig, Crew, Critic, EngineWeights, Iteration, OldLogps, Online, OnlineParts, OnlineState,
    Prompts, RolloutConfig, ScoreFiles, Warning, WarningKind, Warnings, WarningsConfig, Watch, divergence,
};
pub use ppo::{KlConfig, KlPlace, Ppo, PpoConfig};
pub use preflight::{PreflightConfig, PreflightInput, PreflightReport, preflight};
pub use reference::Reference;
pub use reinforce::{Baseline, Mean, Reinforce, ReinforceConfig, Whiten};
pub use rejection::{Rejection, RejectionConfig};
pub use reward_model::{RewardModel, RewardModelConfig};
pub use rloo::{Rloo, RlooConfig};
pub use sft::{Average, Sft, SftConfig};
pub use value::{ValueLoss, ValueLossConfig};
pub use watchdog::Watchdog;
