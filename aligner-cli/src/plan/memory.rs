//! Memory at the peak of a step, by kind.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use aligner_core::Needs;
use aligner_core::model::{Adapter, ModelConfig};
use aligner_core::weights::Checkpoint;
use aligner_infer::EngineConfig;

use super::shape::Shape;
use crate::Run;

const F32_BYTES: f64 = 4.0;

/// Bytes of each kind.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Memory(Vec<(&'static str, f64)>);

impl Memory {
    /// What a step of this shape holds at its peak, where an adapter of so many parameters is trained or, for
    /// none, the model.
    pub(super) fn estimate(config: &ModelConfig, adapter: Option<usize>, run: &Run, shape: &Shape) -> Self {
        let base = config.num_params() as f64 * F32_BYTES;
        let trained = adapter.map_or(base, |count| count as f64 * F32_BYTES);
        // A further micro-batch's gradients are there beside the sum of those before.
        let sets = if shape.micro_batches > 1.0 { 2.0 } else { 1.0 };
        let mut kinds = vec![("weights", base)];
        kinds.extend(adapter.is_some().then_some(("adapter", trained)));
        kinds.extend([("gradients", sets * trained), ("moments", 2.0 * trained)]);
        // Without its adapter, the model is its own reference.
        let shared = adapter.is_some() && run.config.reference.path.is_none();
        if run.algorithm.needs().contains(Needs::REF_LOGPS) && !shared {
            kinds.push(("reference", base));
        }
        let checkpointing = run.config.learner.gradient_checkpointing;
        kinds.push(("activations", activations(config, shape.largest_micro_batch, checkpointing)));
        Self(kinds)
    }

    fn total(&self) -> f64 {
        self.0.iter().map(|kind| kind.1).sum()
    }

    pub(super) fn describe(&self) -> String {
        let kinds: Vec<String> =
            self.0.iter().map(|(name, size)| format!("{name} {}", bytes(*size))).collect();
        format!("memory      {} at the peak: {}\n", bytes(self.total()), kinds.join(", "))
    }
}

/// What the engine's keys and values take while the sample prompts are answered.
pub(super) fn cache(engine: &EngineConfig, config: &ModelConfig, prompts: usize) -> String {
    if prompts == 0 {
        return String::new();
    }
    let size = bytes((engine.pages(config) * EngineConfig::page_bytes(config)) as f64);
    format!(
        "cache       {size} of keys and values while {prompts} sample prompts are answered, between steps\n"
    )
}

/// Bytes that the forward pass keeps for the backward pass, estimated from the layers' shapes.
fn activations(config: &ModelConfig, tokens: usize, checkpointing: bool) -> f64 {
    let (hidden, mlp) = (config.hidden_size as f64, config.intermediate_size as f64);
    let queries = (config.num_heads * config.head_dim) as f64;
    let keys = (config.num_kv_heads * config.head_dim) as f64;
    // Of a layer: both norms' inputs and outputs, q, k and v before and after the rotation, the
    // attention's output, and the MLP's gate, up and product.
    let layer = 4.0 * hidden + 3.0 * queries + 3.0 * keys + 3.0 * mlp;
    let layers = config.num_layers as f64;
    let kept = if checkpointing { layers * hidden + layer } else { layers * layer };
    tokens as f64 * F32_BYTES * (kept + 2.0 * hidden)
}

/// The parameters of a checkpoint by kind.
pub(super) fn parameters(checkpoint: &Checkpoint) -> String {
    let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
    for name in checkpoint.names() {
        let elements: usize = checkpoint.shape(name).unwrap_or_default().iter().product();
        *kinds.entry(kind(name)).or_default() += elements;
    }
    let total: usize = kinds.values().sum();
    let mut out = format!("parameters  {}: ", count(total));
    let parts: Vec<String> =
        kinds.iter().map(|(kind, elements)| format!("{kind} {}", count(*elements))).collect();
    let _ = writeln!(out, "{}", parts.join(", "));
    out
}

/// The parameters of an adapter.
pub(super) fn adapter(adapter: &Adapter, config: &ModelConfig) -> String {
    let (own, base) = (adapter.num_params(), config.num_params());
    let share = 100.0 * own as f64 / (own + base).max(1) as f64;
    format!("adapter     {} ({share:.2} %): {}\n", count(own), adapter.describe())
}

fn kind(name: &str) -> &'static str {
    let kinds = [
        ("embed", "embedding"),
        ("lm_head", "head"),
        ("score", "head"),
        ("norm", "norms"),
        ("attn", "attention"),
        ("mlp", "mlp"),
    ];
    kinds.iter().find(|(part, _)| name.contains(part)).map_or("other", |(_, kind)| kind)
}

fn count(elements: usize) -> String {
    match elements {
        0..10_000 => elements.to_string(),
        10_000..10_000_000 => format!("{:.2} M", elements as f64 / 1e6),
        10_000_000..1_000_000_000 => format!("{:.1} M", elements as f64 / 1e6),
        _ => format!("{:.2} B", elements as f64 / 1e9),
    }
}

pub(super) fn bytes(size: f64) -> String {
    if size < 1e9 { format!("{:.0} MB", size / 1e6) } else { format!("{:.2} GB", size / 1e9) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_kinds_and_counts_are_short() {
        assert_eq!(kind("model.layers.0.self_attn.q_proj.weight"), "attention");
        assert_eq!(kind("model.layers.0.input_layernorm.weight"), "norms");
        assert_eq!(kind("model.embed_tokens.weight"), "embedding");
        assert_eq!([count(960), count(134_515_008), count(1_235_814_400)], ["960", "134.5 M", "1.24 B"]);
        assert_eq!([bytes(538e6), bytes(2.15e9)], ["538 MB", "2.15 GB"]);
    }
}
