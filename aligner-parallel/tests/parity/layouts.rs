//! The layouts that are compared with one rank, by axis.

use aligner_parallel::PipelineSchedule::{self, GPipe, Interleaved, OneForwardOneBackward};

use crate::case::Layout;

const fn pipeline(ranks: usize, schedule: PipelineSchedule, chunks: usize) -> Layout {
    Layout::new([1, 1, 1, 1, ranks]).schedule(schedule, chunks)
}

const fn interleaved(mesh: [usize; 5]) -> Layout {
    Layout::new(mesh).schedule(Interleaved, 2)
}

pub(crate) const TENSOR: [Layout; 4] = [
    Layout::new([2, 1, 1, 1, 1]),
    Layout::new([4, 1, 1, 1, 1]),
    Layout::new([2, 1, 1, 1, 1]).sequence(),
    Layout::new([4, 1, 1, 1, 1]).sequence(),
];

pub(crate) const CONTEXT: [Layout; 2] = [Layout::new([1, 2, 1, 1, 1]), Layout::new([1, 4, 1, 1, 1])];

pub(crate) const PIPELINE: [Layout; 5] = [
    pipeline(2, GPipe, 1),
    pipeline(4, GPipe, 1),
    pipeline(2, OneForwardOneBackward, 1),
    pipeline(4, OneForwardOneBackward, 1),
    pipeline(2, Interleaved, 2),
];

/// Of a model with a layer for each of its parts.
pub(crate) const DEEP: [Layout; 1] = [pipeline(4, Interleaved, 2)];

pub(crate) const DATA: [Layout; 6] = [
    Layout::new([1, 1, 1, 2, 1]),
    Layout::new([1, 1, 1, 4, 1]),
    Layout::new([1, 1, 1, 2, 1]).shared(),
    Layout::new([1, 1, 1, 4, 1]).shared(),
    Layout::new([1, 1, 1, 2, 1]).share_parameters(),
    Layout::new([1, 1, 1, 4, 1]).share_parameters(),
];

/// Of mixtures of experts.
pub(crate) const EXPERT: [Layout; 7] = [
    Layout::new([1, 1, 2, 1, 1]),
    Layout::new([1, 1, 4, 1, 1]),
    Layout::new([1, 1, 2, 2, 1]),
    Layout::new([2, 1, 2, 1, 1]).sequence(),
    Layout::new([1, 2, 2, 1, 1]).checkpointing(),
    Layout::new([1, 1, 2, 1, 2]),
    Layout::new([2, 1, 2, 1, 2]),
];

pub(crate) const MIXED: [Layout; 9] = [
    Layout::new([2, 1, 1, 2, 1]).shared(),
    Layout::new([2, 2, 1, 1, 1]).sequence().checkpointing(),
    Layout::new([1, 2, 1, 2, 1]).shared().checkpointing(),
    Layout::new([1, 1, 1, 2, 2]),
    Layout::new([2, 2, 1, 2, 1]).sequence().share_parameters(),
    Layout::new([2, 1, 1, 1, 2]).sequence(),
    Layout::new([1, 2, 1, 1, 2]),
    interleaved([2, 1, 1, 2, 2]).shared(),
    Layout::new([2, 2, 1, 1, 2]).sequence().shared(),
];
