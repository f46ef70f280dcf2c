//! Core of Aligner: samples, batches, models, fused operations, weights and the traits that
//! algorithms, engines, rewards and communicators implement.
//!
//! | idea | type |
//! |---|---|
//! | a token sequence with a response mask | [`Sample`], in a [`Group`] |
//! | groups packed without padding | [`Batch`] |
//! | credit plus loss | [`Algorithm`] |
//! | a model with parameters | [`Policy`], [`ParamSet`] |
//! | generation | [`Engine`] |
//! | what a response is worth | [`Reward`] |
//! | ranks | [`Communicator`] |
//!
//! ```
//! use aligner_core::{Batch, Group, Sample};
//!
//! let pair = Group::pair(
//!     "row 1",
//!     Sample::response(&[1, 2, 3], &[4, 5]),
//!     Sample::response(&[1, 2, 3], &[6, 7]),
//! );
//! let batch = Batch::collate([&pair])?;
//! assert_eq!(batch.tokens, [1, 2, 3, 4, 5, 6, 7]); // the prompt is there once
//! assert_eq!(batch.rows[0], batch.rows[2]); // and predicts both first tokens
//! # Ok::<(), aligner_core::Error>(())
//! ```

mod algorithm;
mod batch;
mod communicator;
mod engine;
mod error;
pub mod metrics;
pub mod model;
pub mod ops;
pub mod optim;
mod params;
mod policy;
mod reward;
pub mod rng;
mod sample;
mod sampling;
pub mod shard;
mod step;
pub mod weights;

pub use algorithm::{Algorithm, Forward, LossFn, LossOutput, Needs, Per};
pub use batch::{Batch, Segment, Sequence, constant};
pub use communicator::{CollectiveError, Communicator, Phase, Reduce};
pub use engine::{
    Detokenize, Drawn, Engine, EngineStats, Event, FinishReason, PRIORITY_PLACES, Request, RequestId,
};
pub use error::{Error, Result};
pub use metrics::Metrics;
pub use params::{Param, ParamId, ParamSet, is_finite};
pub use policy::{EachForward, Gradients, Policy, accumulate_in_turn, finite_sum};
pub use reward::{Reward, Score};
pub use sample::{Group, Prompt, Sample};
pub use sampling::{Sampling, TokenMask};
pub use step::StepBatch;

pub use burn::tensor::{Device, Tensor};
