//! Models: their configuration, and one family a file.

mod config;

pub use config::{Llama3Scaling, MODEL_TYPES, ModelConfig, RopeConfig};
