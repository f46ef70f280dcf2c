//! Memory of a rank, by kind.

use super::model::{HALF, activation_bytes, cache_bytes};
use super::passes::Layout;
use super::{Rollout, Timeline};
use crate::mesh::Axis;

/// Bytes of one kind.
pub type Kind = (&'static str, f64);

/// Bytes of the rank that has most, by kind, while the step learns and while it draws.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Memory {
    /// While gradients are computed.
    pub learning: Vec<Kind>,
    /// While engines draw; empty where nothing is drawn.
    pub drawing: Vec<Kind>,
}

impl Memory {
    /// The larger of both sums.
    pub fn peak(&self) -> f64 {
        let sum = |kinds: &[Kind]| kinds.iter().map(|kind| kind.1).sum::<f64>();
        sum(&self.learning).max(sum(&self.drawing))
    }
}

/// How many models a rank holds besides the policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Others {
    /// That are only looked at: a reference, a reward model.
    pub(super) frozen: usize,
    /// That learn too: a critic.
    pub(super) trained: usize,
}

/// What a rank of `layout` holds, whose longest sequence has `longest` tokens.
pub(super) fn estimate(
    layout: &Layout<'_>,
    others: Others,
    longest: f64,
    timeline: &Timeline,
    rollout: Option<&Rollout>,
) -> Memory {
    let params = layout.params();
    let split = |stage: usize| if layout.job.zero_stage >= stage { layout.shards() } else { 1.0 };
    let models = 1.0 + others.trained as f64;
    // Weights in bf16; of what learns, a gradient and three numbers of the optimizer in f32 (master weight, moments).
    let mut kept = vec![
        ("weights", models * HALF * params / split(3)),
        ("optimizer", models * 12.0 * params / split(1)),
    ];
    if others.frozen > 0 {
        kept.push(("frozen models", others.frozen as f64 * HALF * params / split(3)));
    }
    let mut learning = kept.clone();
    learning.push(("gradients", models * 4.0 * params / split(2)));
    learning.push(("activations", activations(layout, longest, timeline)));
    let drawing = rollout.map_or_else(Vec::new, |rollout| {
        let (tp, pp) = (layout.job.generation_tp(&layout.mesh) as f64, layout.job.generation_pp as f64);
        if !layout.job.generates_in_place(&layout.mesh) {
            kept.push(("engine's weights", HALF * layout.model.num_params() as f64 / (tp * pp)));
        }
        kept.push(("keys and values", rollout.cached_tokens as f64 * cache_bytes(layout.model) / (tp * pp)));
        kept
    });
    Memory { learning, drawing }
}

/// Activations of the rank that holds most: what it keeps of each chunk's passes in flight and, where layers are
/// computed again, of the one layer that is.
fn activations(layout: &Layout<'_>, longest: f64, timeline: &Timeline) -> f64 {
    let tp = layout.axis(Axis::Tensor);
    let tokens = longest * layout.job.micro_batch_sequences as f64 / layout.axis(Axis::Context);
    let layer = activation_bytes(layout.model, tp);
    let inputs = HALF * layout.model.hidden_size as f64 / tp;
    let (kept, again) = if layout.job.recompute { (inputs, layer) } else { (layer, 0.0) };
    let most = timeline.in_flight.iter().copied().max().unwrap_or(0) as f64;
    tokens * (most * layout.layers(layout.job.chunks) * kept + again)
}
