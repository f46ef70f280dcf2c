//! Every layout of ranks computes what one rank does: losses, values, gradients, and ten steps of training.

mod case;
mod layouts;

use case::{Case, Layout};

fn check(layouts: &[Layout]) {
    for case in Case::ALL {
        let expected = case.on_one();
        for &layout in layouts {
            case.check_on_threads(layout, &expected);
        }
    }
}

#[test]
fn tensor_and_sequence_parallel() {
    check(&layouts::TENSOR);
}

#[test]
fn context_parallel() {
    check(&layouts::CONTEXT);
}

#[test]
fn pipeline_parallel() {
    check(&layouts::PIPELINE);
}

#[test]
fn data_parallel() {
    check(&layouts::DATA);
}

#[test]
fn expert_parallel() {
    let expected = Case::Mixture.on_one();
    for layout in layouts::EXPERT {
        Case::Mixture.check_on_threads(layout, &expected);
    }
}

#[test]
fn mixed_meshes() {
    check(&layouts::MIXED);
}
