//! Pure functions on tensors and on samples, each named after the equation that it computes.

pub mod advantage;
pub mod filter;
pub mod importance;
pub mod kl;
pub(crate) mod penalty;
pub mod preference;
pub mod ratio;
pub mod reduce;
pub mod targets;
