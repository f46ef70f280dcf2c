//! Pure functions on tensors, each named after the equation that it computes.

pub mod preference;
