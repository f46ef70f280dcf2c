//! What a step would take on ranks that are not there: a model of costs, no measurement.
//!
//! A [`Scenario`] is a cluster, a mesh of ranks, a model's shape and a job; [`Scenario::simulate`] predicts the seconds of
//! each phase and the memory of the rank that has most. A pipeline's bubble comes from running its schedule's events
//! ([`replay`]), the time of drawing from running engines pass by pass on long-tailed lengths. Collectives cost latency
//! and bytes over rings. `docs/simulator.md` has the formulas, their sources, and the errors against published runs.
//!
//! ```
//! use aligner_parallel::Mesh;
//! use aligner_parallel::simulate::{Cluster, Job, Scenario, shape};
//!
//! let cluster = Cluster { nodes: 8, ..Cluster::default() };
//! let mesh = Mesh::new([4, 1, 1, 4, 4])?;
//! let scenario = Scenario { cluster, mesh, model: shape("llama3-70b")?, job: Job::default() };
//! assert!(scenario.simulate()?.phase("generate") > 0.0);
//! # Ok::<(), aligner_core::Error>(())
//! ```

mod cluster;
mod fit;
mod job;
mod lengths;
mod memory;
mod model;
mod order;
mod passes;
mod phase;
mod published;
mod replay;
mod rollout;
mod step;
#[cfg(test)]
mod step_tests;
mod table;

pub use cluster::{Cluster, Link, Rates, Spread};
pub use fit::{Measured, least_squares, rate};
pub use job::{Job, Workload};
pub use lengths::Lengths;
pub use memory::{Kind, Memory};
pub use model::{SHAPES, shape};
pub use order::Order;
pub use phase::Phase;
pub use published::{Row, published, table};
pub use replay::{Costs, Piece, Timeline, Work, replay};
pub use rollout::Rollout;
pub use step::{Report, Scenario};
