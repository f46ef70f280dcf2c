//! Every layout of ranks computes what one rank does: losses, values, gradients, and ten steps of training.

mod case;
mod layouts;

use std::sync::Arc;

use aligner_core::Policy;
use aligner_core::model::Stage;
use aligner_parallel::{Cut, Mesh, MeshComms, ParallelLm, ThreadComm};
use case::{Case, Layout};

fn check(cases: &[Case], layouts: &[Layout]) {
    for case in cases {
        let expected = case.on_one();
        for &layout in layouts {
            case.check_on_threads(layout, &expected);
        }
    }
}

#[test]
fn tensor_and_sequence_parallel() {
    check(&Case::ALL, &layouts::TENSOR);
}

#[test]
fn context_parallel() {
    check(&Case::ALL, &layouts::CONTEXT);
}

#[test]
fn pipeline_parallel() {
    check(&Case::ALL, &layouts::PIPELINE);
    check(&[Case::Deep], &layouts::DEEP);
}

#[test]
fn data_parallel() {
    check(&Case::ALL, &layouts::DATA);
}

#[test]
fn expert_parallel() {
    check(&[Case::Mixture], &layouts::EXPERT);
}

#[test]
fn mixed_meshes() {
    check(&Case::ALL, &layouts::MIXED);
}

#[test]
fn a_loss_on_the_use_of_experts_is_not_cut() {
    for (mesh, axis) in [([2, 1, 1, 1, 1], "tp"), ([1, 2, 1, 1, 1], "cp"), ([1, 1, 1, 1, 2], "pp")] {
        let results = ThreadComm::run(2, |comm| {
            let model = Case::Mixture.model();
            let mut config = model.config().clone();
            config.experts.as_mut().expect("a mixture").balance_loss = Some(0.01);
            let stage = Stage::whole(&config);
            let model = model.reshaped(config, model.params().clone(), stage)?;
            let comms = MeshComms::new(Mesh::new(mesh)?, Arc::new(comm))?;
            ParallelLm::new(&model, &comms, Cut::default()).map(|_| ())
        });
        for result in results {
            let message = result.unwrap_err().to_string();
            assert!(message.contains("output_router_logits") && message.contains(axis), "{message}");
        }
    }
}
