//! Every layout of ranks computes what one rank does: losses, values, gradients, and ten steps of training.

mod case;

use aligner_parallel::PipelineSchedule;
use case::{Case, Layout};

const ONE: Layout = Layout::new([1, 1, 1, 1, 1]);

#[test]
fn tensor_parallel() {
    for ranks in [2, 4] {
        Case::ALL.iter().for_each(|case| case.check(Layout::new([ranks, 1, 1, 1, 1])));
    }
}

#[test]
fn sequence_parallel() {
    for ranks in [2, 4] {
        Case::ALL.iter().for_each(|case| case.check(Layout::new([ranks, 1, 1, 1, 1]).sequence()));
    }
}

#[test]
fn context_parallel() {
    for ranks in [2, 4] {
        Case::ALL.iter().for_each(|case| case.check(Layout::new([1, ranks, 1, 1, 1])));
    }
}

#[test]
fn pipeline_parallel() {
    use PipelineSchedule::{GPipe, Interleaved, OneForwardOneBackward};
    for case in Case::ALL {
        for (ranks, schedule, chunks) in [
            (2, GPipe, 1),
            (4, GPipe, 1),
            (2, OneForwardOneBackward, 1),
            (4, OneForwardOneBackward, 1),
            (2, Interleaved, 2),
        ] {
            case.check(Layout::new([1, 1, 1, 1, ranks]).schedule(schedule, chunks));
        }
    }
}

#[test]
fn data_parallel() {
    for case in Case::ALL {
        for ranks in [2, 4] {
            case.check(Layout::new([1, 1, 1, ranks, 1]));
            case.check(Layout::new([1, 1, 1, ranks, 1]).shared());
        }
    }
}

#[test]
fn mixed_meshes() {
    let interleaved = |mesh| Layout::new(mesh).schedule(PipelineSchedule::Interleaved, 2);
    for layout in [
        Layout::new([2, 1, 1, 2, 1]).shared(),
        Layout::new([2, 2, 1, 1, 1]).sequence().checkpointing(),
        Layout::new([1, 2, 1, 2, 1]).shared().checkpointing(),
        Layout::new([1, 1, 1, 2, 2]),
        Layout::new([2, 1, 1, 1, 2]).sequence(),
        Layout::new([1, 2, 1, 1, 2]),
        interleaved([2, 1, 1, 2, 2]).shared(),
        Layout::new([2, 2, 1, 1, 2]).sequence().shared(),
    ] {
        Case::ALL.iter().for_each(|case| case.check(layout));
    }
}
