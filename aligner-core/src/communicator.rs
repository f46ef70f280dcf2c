//! Collective operations among ranks. There is always a communicator, also for one rank.

use std::time::Duration;

use burn::tensor::Tensor;

use crate::Result;

/// How a reduction combines elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduce {
    /// The sum over ranks.
    Sum,
    /// The largest over ranks.
    Max,
}

/// Names a call for errors and bounds its time.
#[derive(Debug, Clone, Copy)]
pub struct Phase {
    /// What the program is doing, as an error names it.
    pub name: &'static str,
    /// How long to wait for the other ranks.
    pub deadline: Duration,
}

impl Phase {
    /// A phase with the default deadline of ten minutes.
    pub const fn new(name: &'static str) -> Self {
        Self { name, deadline: Duration::from_mins(10) }
    }
}

/// Collectives of one group of ranks. All ranks of the group call the same ones in the same order.
///
/// Every method fails with the rank, the operation and the phase where a rank is missing at the
/// deadline or comes with another operation, size or type.
#[allow(clippy::missing_errors_doc)]
pub trait Communicator: Send + Sync {
    /// This rank, from 0.
    fn rank(&self) -> usize;
    /// Ranks in the group.
    fn size(&self) -> usize;
    /// Combines `values` `[elements]` over all ranks; every rank gets the result.
    fn all_reduce(&self, values: Tensor<1>, op: Reduce, phase: Phase) -> Result<Tensor<1>>;
    /// Combines host values over all ranks.
    fn all_reduce_host(&self, values: &mut [f64], op: Reduce, phase: Phase) -> Result<()>;
    /// Concatenates every rank's `[elements]` in the order of ranks.
    fn all_gather(&self, values: Tensor<1>, phase: Phase) -> Result<Tensor<1>>;
    /// Sums `[size * elements]` over all ranks; rank r gets the r-th `[elements]`.
    fn reduce_scatter(&self, values: Tensor<1>, phase: Phase) -> Result<Tensor<1>>;
    /// Gives every rank the root's values.
    fn broadcast(&self, values: Tensor<1>, root: usize, phase: Phase) -> Result<Tensor<1>>;
    /// Sends `parts[r]` to rank r; returns what each rank sent here.
    fn all_to_all(&self, parts: Vec<Tensor<1>>, phase: Phase) -> Result<Vec<Tensor<1>>>;
    /// Sends `values` to another rank.
    fn send(&self, values: Tensor<1>, to: usize, phase: Phase) -> Result<()>;
    /// Receives `[elements]` from another rank.
    fn recv(&self, elements: usize, from: usize, phase: Phase) -> Result<Tensor<1>>;
    /// Whether this is the rank that speaks.
    fn is_main(&self) -> bool {
        self.rank() == 0
    }
}
