//! Memory at the peak of a step, by kind.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use aligner_core::Needs;
use aligner_core::model::{Adapter, CausalLm, ModelConfig, ParamSpec, Role};
use aligner_infer::{EngineConfig, PackedKind};

use super::shape::Shape;
use crate::Run;

const F32_BYTES: f64 = 4.0;

/// Bytes of each kind.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Memory(Vec<(&'static str, f64)>);

impl Memory {
    /// What a step of this shape holds at its peak, where so many parameters are trained beside frozen ones or, for
    /// none, the model.
    pub(super) fn estimate(config: &ModelConfig, adapter: Option<usize>, run: &Run, shape: &Shape) -> Self {
        let whole = config.num_params() as f64 * F32_BYTES;
        let kind = run.config.model.lora.as_ref().and_then(|lora| lora.base().packed());
        let base = kind.map_or(whole, |kind| packed(config, kind));
        let trained = adapter.map_or(base, |count| count as f64 * F32_BYTES);
        // A further micro-batch's gradients are there beside the sum of those before.
        let sets = if shape.micro_batches > 1.0 { 2.0 } else { 1.0 };
        let mut kinds = vec![("weights", base)];
        kinds.extend(adapter.is_some().then_some(("adapter", trained)));
        kinds.extend([("gradients", sets * trained), ("moments", 2.0 * trained)]);
        // Without its adapter, the model is its own reference.
        let shared = adapter.is_some() && run.config.reference.path.is_none();
        if run.algorithm.needs().contains(Needs::REF_LOGPS) && !shared {
            kinds.push(("reference", whole));
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

/// Bytes of a base whose linears are packed.
fn packed(config: &ModelConfig, kind: PackedKind) -> f64 {
    let bytes = |spec: ParamSpec| match spec.packable() {
        Some(shape) => {
            let kind = if kind.fits(shape) { kind } else { PackedKind::Bf16 };
            kind.bytes(shape[0] * shape[1]) as f64
        }
        None => spec.shape.iter().product::<usize>() as f64 * F32_BYTES,
    };
    CausalLm::parameters(config).into_iter().map(bytes).sum()
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
    let hidden = config.hidden_size as f64;
    let queries = (config.num_heads * config.head_dim) as f64;
    let keys = (config.num_kv_heads * config.head_dim) as f64;
    // Of a layer: both norms' inputs and outputs, q, k and v before and after the rotation, the
    // attention's output, and the MLP's gate, up and product.
    let layer = |mlp: f64| 4.0 * hidden + 3.0 * queries + 3.0 * keys + mlp;
    let dense = layer(3.0 * config.intermediate_size as f64);
    let mixed = config.experts.as_ref().map(|experts| {
        // Rows in slots and what experts make of them; gate and up are kept, their product is not.
        let slots = experts.per_token as f64 * (2.0 * hidden + 2.0 * experts.intermediate_size as f64);
        layer(slots + 4.0 * experts.shared_intermediate_size.unwrap_or(0) as f64)
    });
    let is_dense = |layer: &usize| config.experts.as_ref().is_none_or(|experts| experts.is_dense(*layer));
    let dense_layers = (0..config.num_layers).filter(is_dense).count();
    let mixed_layers = config.num_layers - dense_layers;
    let of_mixed = mixed.unwrap_or(0.0);
    let kept = if checkpointing {
        config.num_layers as f64 * hidden + dense.max(of_mixed)
    } else {
        dense_layers as f64 * dense + mixed_layers as f64 * of_mixed
    };
    tokens as f64 * F32_BYTES * (kept + 2.0 * hidden)
}

/// A model's parameters by kind; of a mixture, how many a token meets.
pub(crate) fn parameters(config: &ModelConfig) -> String {
    let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
    for spec in CausalLm::parameters(config) {
        *kinds.entry(kind(spec.role)).or_default() += spec.shape.iter().product::<usize>();
    }
    let mut out = format!("parameters  {}", count(config.num_params()));
    if let Some(experts) = &config.experts {
        let (active, each, all) = (count(config.num_active_params()), experts.per_token, experts.count);
        let _ = write!(out, ", {active} of them for a token, which has {each} of {all} experts");
    }
    let parts: Vec<String> =
        kinds.iter().map(|(kind, elements)| format!("{kind} {}", count(*elements))).collect();
    let _ = writeln!(out, ": {}", parts.join(", "));
    out
}

/// The parameters of an adapter.
pub(super) fn adapter(adapter: &Adapter, config: &ModelConfig) -> String {
    let (own, base) = (adapter.num_params() + adapter.num_saved(), config.num_params());
    let share = 100.0 * own as f64 / (own + base).max(1) as f64;
    format!("adapter     {} ({share:.2} %): {}\n", count(own), adapter.describe())
}

fn kind(role: Role) -> &'static str {
    match role {
        Role::Embedding => "embedding",
        Role::Attention => "attention",
        Role::Mlp => "mlp",
        Role::Router => "router",
        Role::Expert(_) => "experts",
        Role::Norm => "norms",
        Role::Head => "head",
    }
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

    fn mixture() -> ModelConfig {
        let json = serde_json::json!({
            "model_type": "mixtral", "vocab_size": 100, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 8,
            "num_experts_per_tok": 2,
        });
        ModelConfig::from_json("tiny".as_ref(), &json).unwrap()
    }

    #[test]
    fn a_mixture_says_what_a_token_meets() {
        // An expert has 3 * 16 * 24; a layer 8 of them, the router 8 * 16, the attention 2 * 256 + 2 * 128.
        let described = parameters(&mixture());
        assert_eq!(
            described,
            "parameters  0.02 M, 9680 of them for a token, which has 2 of 8 experts: attention 1536, \
             embedding 1600, experts 0.02 M, head 1600, norms 80, router 256\n"
        );
    }

    #[test]
    fn activations_of_a_mixture_are_those_of_its_own_experts() {
        // 4 * 16 + 3 * 16 + 3 * 8 + 2 * (2 * 16 + 2 * 24) a layer, and 2 * 16 for all.
        let all = activations(&mixture(), 10, false);
        assert!((all - 10.0 * 4.0 * (2.0 * 296.0 + 32.0)).abs() < 1e-9, "{all}");
    }

    #[test]
    fn a_packed_base_has_whole_embeddings_and_norms() {
        let kind = PackedKind::Int8;
        // Rows of 16 and 24 fit no group of 32: bf16. Embedding, head, norms and routers are whole.
        let of_layers = 2 * (768 + 8 * 3 * 16 * 24);
        assert!((packed(&mixture(), kind) - f64::from(2 * of_layers + 4 * (3200 + 80 + 256))).abs() < 1e-9);
    }

    #[test]
    fn counts_are_short() {
        assert_eq!([count(960), count(134_515_008), count(1_235_814_400)], ["960", "134.5 M", "1.24 B"]);
        assert_eq!([bytes(538e6), bytes(2.15e9)], ["538 MB", "2.15 GB"]);
    }
}
