//! The crate through its public face, against recorded values and against itself.
#![expect(clippy::print_stdout, reason = "the errors that were seen are read from the tests' output")]

mod credit;
mod crew;
mod fixture;
mod learner;
mod learning;
mod lora;
mod losses;
mod model;
mod online;
mod padded;
mod policy_gradient;
mod ranks;
mod reference;
mod train;
