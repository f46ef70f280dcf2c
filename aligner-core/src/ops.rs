//! Fused differentiable operations, each with its own backward.
//!
//! On the CPU (`flex`) they run as parallel Rust kernels; on any other device, and as the reference
//! that the kernels are tested against, they are compositions of Burn operations. Every
//! Burn-specific trick of the crate stands under this module.

mod attention;
#[cfg(feature = "cube")]
pub mod cube;
mod dispatch;
mod dora;
mod dropout;
mod embedding;
mod experts;
mod external;
mod gate;
mod gemm;
pub mod host;
mod index;
pub(crate) mod kernel;
mod layer_norm;
mod linear;
mod linear_cross_entropy;
pub mod logits;
mod lora;
mod rms_norm;
mod rotary;
mod routing;
pub mod rows;
pub(crate) mod simd;
#[cfg(test)]
pub(crate) mod testing;
mod tie;

pub use attention::{
    Attended, AttentionPart, AttentionShape, Keys, Plan, Run, attention, planned_attention, trees,
};
pub use dispatch::{combine, dispatch};
pub use dora::AdaptedRows;
pub use dropout::Dropout;
pub use embedding::embedding;
pub use experts::{ExpertWeights, experts};
pub use external::{Pullback, external};
pub use gate::{Activation, activate, gated};
pub use index::index;
pub use layer_norm::layer_norm;
pub use linear::{Residual, WeightOperand, linear};
pub use linear_cross_entropy::{
    LogitCap, TargetScores, Vocabulary, capped_linear_cross_entropy, linear_cross_entropy,
    linear_cross_entropy_part,
};
pub use lora::{LowRank, lora_linear};
pub use rms_norm::{rms_norm, rms_norm_plus_one};
pub use rotary::{RotaryTable, rotary};
pub use routing::{Routes, routing_weights};

/// The compositions of Burn operations that the kernels are measured and tested against.
pub mod reference {
    pub use super::attention::reference as attention;
    pub use super::dispatch::reference as combine;
    pub use super::embedding::reference as embedding;
    pub use super::experts::reference as experts;
    pub use super::gate::reference as gated;
    pub use super::layer_norm::reference as layer_norm;
    pub use super::linear::reference as linear;
    pub use super::linear_cross_entropy::reference as linear_cross_entropy;
    pub use super::lora::reference as lora_linear;
    pub use super::rms_norm::reference as rms_norm;
    pub use super::rotary::reference as rotary;
    pub use super::routing::reference as routing_weights;
}
