//! Models: their configuration, and one family a file.

mod causal_lm;
mod config;
mod exec;
mod layerwise;
mod llama;

pub use causal_lm::CausalLm;
pub use config::{Llama3Scaling, MODEL_TYPES, ModelConfig, RopeConfig};
pub use exec::{Exec, Linear};
pub use llama::{Layout, Llama};
