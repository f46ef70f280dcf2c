//! Fused differentiable operations, each with its own backward.
//!
//! On the CPU (`flex`) they run as parallel Rust kernels; on any other device, and as the reference
//! that the kernels are tested against, they are compositions of Burn operations. Every
//! Burn-specific trick of the crate stands under this module.

mod attention;
#[cfg(feature = "cube")]
pub mod cube;
mod dora;
mod dropout;
mod embedding;
mod external;
mod gemm;
pub mod host;
pub(crate) mod kernel;
mod linear;
mod linear_cross_entropy;
pub mod logits;
mod lora;
mod rms_norm;
mod rotary;
pub mod rows;
pub(crate) mod simd;
mod swiglu;
#[cfg(test)]
pub(crate) mod testing;

pub use attention::{Attended, AttentionPart, AttentionShape, Plan, Run, attention, trees};
pub use dora::AdaptedRows;
pub use dropout::Dropout;
pub use embedding::embedding;
pub use external::{Backward, Pullback, elements, external, without_graph};
pub use linear::{Residual, linear};
pub use linear_cross_entropy::{TargetScores, Vocabulary, linear_cross_entropy, linear_cross_entropy_part};
pub use lora::{LowRank, lora_linear};
pub use rms_norm::rms_norm;
pub use rotary::{RotaryTable, rotary};
pub use swiglu::swiglu;

/// The compositions of Burn operations that the kernels are measured and tested against.
pub mod reference {
    pub use super::attention::reference as attention;
    pub use super::embedding::reference as embedding;
    pub use super::linear::reference as linear;
    pub use super::linear_cross_entropy::reference as linear_cross_entropy;
    pub use super::lora::reference as lora_linear;
    pub use super::rms_norm::reference as rms_norm;
    pub use super::rotary::reference as rotary;
    pub use super::swiglu::reference as swiglu;
}
