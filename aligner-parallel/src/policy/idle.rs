//! A pass of a rank that has no batch, while others need its experts.

use aligner_core::{Batch, Forward, LossOutput, Metrics, Segment, Sequence, Tensor};

use crate::{Axis, Mesh};

/// The group's id in such a batch.
const IDLE: &str = "(no batch of this rank)";

/// The shortest batch that all ranks of a mesh can share: a target after each token.
pub(super) fn idle_batch(mesh: Mesh) -> Batch {
    let tokens = 2 * mesh.axis_size(Axis::Context);
    Batch {
        tokens: vec![0; tokens],
        positions: (0..tokens as u32).collect(),
        segments: vec![Segment { start: 0, len: tokens, position: 0, parent: None }],
        rows: vec![0],
        targets: vec![0],
        weights: vec![0.0],
        sequences: vec![Sequence { group: 0, sample: 0, targets: 0..1, last_row: tokens - 1 }],
        groups: vec![IDLE.into()],
        rewards: vec![None],
        ..Batch::default()
    }
}

pub(super) fn is_idle(batch: &Batch) -> bool {
    batch.groups.first().is_some_and(|group| group == IDLE)
}

/// A loss of 0 on everything that a pass gives, so that it goes back the whole way.
pub(super) fn nothing(out: &Forward) -> LossOutput {
    let flat = |scores: &Tensor<2>| scores.clone().sum();
    let sums = [
        out.logps.as_ref().map(|logps| logps.clone().sum()),
        out.scores.as_ref().map(flat),
        out.values.as_ref().map(|values| values.clone().sum()),
    ];
    let sum = sums.into_iter().flatten().reduce(|sum, more| sum + more);
    let sum = sum.unwrap_or_else(|| Tensor::zeros([1], &aligner_core::Device::flex()));
    LossOutput { sum: sum * 0.0, metrics: Metrics::default() }
}
