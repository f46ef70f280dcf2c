//! Models: their configuration, the decoder that runs them, and one family a file.

mod adapted;
mod balance;
mod causal_lm;
pub(crate) mod config;
mod decoder;
pub(crate) mod exec;
mod families;
pub(crate) mod family;
mod heads;
mod layerwise;
mod lora;
mod parameters;
mod stage;

pub use causal_lm::{CausalLm, Work};
pub use config::{ExpertsConfig, Llama3Scaling, ModelConfig, RopeConfig};
pub use decoder::{Decoder, Layout};
pub use exec::{Exec, Linear, Mixture, Norm, NormKind};
pub use families::MODEL_TYPES;
pub use family::Family;
pub use layerwise::{Part, PartSource, accumulate_by_parts, forward_each_by_parts};
pub(crate) use lora::{A as LORA_A, B as LORA_B, MAGNITUDE as LORA_MAGNITUDE};
pub use lora::{Adapter, AdapterModule, Lora, LoraConfig, SavedParameter, Targets};
pub use parameters::{ParamSpec, Role, Splits};
pub use stage::{Stage, layer_of};
