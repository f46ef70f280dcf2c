//! The families that can be loaded, one a file.

mod gemma2;
mod gemma3;
mod gpt2;
mod llama;
mod mistral;
mod mixtral;
mod olmo2;
mod phi3;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_moe;

use super::family::Family;

/// Every family.
pub(super) static FAMILIES: [&Family; 12] = [
    &llama::FAMILY,
    &qwen2::FAMILY,
    &qwen3::FAMILY,
    &qwen2_moe::FAMILY,
    &qwen3_moe::FAMILY,
    &mistral::FAMILY,
    &mixtral::FAMILY,
    &gemma2::FAMILY,
    &gemma3::FAMILY,
    &gpt2::FAMILY,
    &phi3::FAMILY,
    &olmo2::FAMILY,
];

/// The model types that can be loaded.
pub const MODEL_TYPES: [&str; FAMILIES.len()] = {
    let mut types = [""; FAMILIES.len()];
    let mut at = 0;
    while at < types.len() {
        types[at] = FAMILIES[at].model_type;
        at += 1;
    }
    types
};
