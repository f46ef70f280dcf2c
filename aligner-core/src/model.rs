//! Models: their configuration, and one family a file.

mod adapted;
mod causal_lm;
mod config;
mod exec;
mod heads;
mod layerwise;
mod llama;
mod lora;
mod stage;

pub use causal_lm::{CausalLm, Work};
pub use config::{Llama3Scaling, MODEL_TYPES, ModelConfig, RopeConfig};
pub use exec::{Exec, Linear};
pub use layerwise::{Part, PartSource, accumulate_by_parts, forward_each_by_parts};
pub use llama::{Layout, Llama};
pub(crate) use lora::{A as LORA_A, B as LORA_B, MAGNITUDE as LORA_MAGNITUDE};
pub use lora::{Adapter, AdapterModule, Lora, LoraConfig, Targets};
pub use stage::{Stage, layer_of};
