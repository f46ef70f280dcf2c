//! Collective operations among ranks. There is always a communicator, also for one rank.

use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{Device, Tensor};

use crate::ops::host::to_vec;
use crate::{Error, Result};

/// How a reduction combines elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduce {
    /// The sum over ranks.
    Sum,
    /// The largest over ranks; not a number where any of them is not.
    Max,
    /// The sum over ranks, divided by their number.
    Mean,
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
    /// The deadline where nothing else is said.
    pub const DEADLINE: Duration = Duration::from_mins(10);

    /// A phase with the default deadline of ten minutes, or the one that its communicator has been told
    /// ([`Communicator::set_deadline`]).
    pub const fn new(name: &'static str) -> Self {
        Self { name, deadline: Self::DEADLINE }
    }
}

/// Why a collective failed, as one rank tells it. Every rank names the same culprits and cause.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank} of {size}, {operation}: {cause}{history}")]
pub struct CollectiveError {
    /// The rank that tells it, counted over all ranks of the run.
    pub rank: usize,
    /// All ranks of the run.
    pub size: usize,
    /// What this rank called: operation, elements, type, phase, group.
    pub operation: String,
    /// The ranks at fault, counted over all ranks of the run; more than one where it cannot be told which.
    pub culprits: Vec<usize>,
    /// What went wrong, with the ranks, operations and phases.
    pub cause: String,
    /// Each rank's last operations, one a line; empty where nothing is known.
    pub history: String,
}

impl From<CollectiveError> for Error {
    fn from(error: CollectiveError) -> Self {
        Self::Collective(Box::new(error))
    }
}

/// Collectives of one group of ranks. All ranks of the group call the same ones, in the same order,
/// with the same phase; sender and receiver name the same phase too.
///
/// Every method fails with the rank, the operation and the phase where a rank is missing at the
/// deadline or comes with another operation, size or type. After a failure every later call fails
/// with the same cause, in all groups of the run: ranks that are out of step cannot go on.
///
/// Reductions add in the order of ranks, so all ranks get the same bits in every run.
#[allow(clippy::missing_errors_doc)]
pub trait Communicator: Send + Sync {
    /// This rank in the group, from 0.
    fn rank(&self) -> usize;
    /// Ranks in the group.
    fn size(&self) -> usize;
    /// Combines `values` `[elements]` over all ranks; every rank gets the result.
    fn all_reduce(&self, values: Tensor<1>, op: Reduce, phase: Phase) -> Result<Tensor<1>>;
    /// Combines host values over all ranks.
    fn all_reduce_host(&self, values: &mut [f64], op: Reduce, phase: Phase) -> Result<()>;
    /// Concatenates every rank's `[elements]`, equally many on each, in the order of ranks.
    fn all_gather(&self, values: Tensor<1>, phase: Phase) -> Result<Tensor<1>>;
    /// Sums `[size * elements]` over all ranks; rank r gets the r-th `[elements]`.
    fn reduce_scatter(&self, values: Tensor<1>, phase: Phase) -> Result<Tensor<1>>;
    /// Gives every rank the root's values; the others' say how many there are, and are dropped.
    fn broadcast(&self, values: Tensor<1>, root: usize, phase: Phase) -> Result<Tensor<1>>;
    /// Sends `parts[r]`, of any size, to rank r; returns what each rank sent here.
    fn all_to_all(&self, parts: Vec<Tensor<1>>, phase: Phase) -> Result<Vec<Tensor<1>>>;
    /// Sends `values` to another rank, without waiting for it to receive them.
    fn send(&self, values: Tensor<1>, to: usize, phase: Phase) -> Result<()>;
    /// Receives `[elements]` from another rank, in the order of its sends.
    fn recv(&self, elements: usize, from: usize, phase: Phase) -> Result<Tensor<1>>;
    /// Parts the group: ranks of equal `color` form a group, ordered by `key`, then by rank.
    fn split(&self, color: usize, key: usize, phase: Phase) -> Result<Arc<dyn Communicator>>;
    /// Every rank's values, as many as each has, in the order of ranks.
    fn all_gather_uneven(&self, values: Tensor<1>, phase: Phase) -> Result<Vec<Tensor<1>>> {
        self.all_to_all(vec![values; self.size()], phase)
    }
    /// Every rank's bytes, as many as each has, in the order of ranks.
    fn all_gather_bytes(&self, bytes: &[u8], phase: Phase) -> Result<Vec<Vec<u8>>> {
        // A byte is a number that every type of element holds exactly.
        let numbers: Vec<f32> = bytes.iter().copied().map(f32::from).collect();
        let all = self.all_gather_uneven(Tensor::from_floats(numbers.as_slice(), &Device::flex()), phase)?;
        Ok(all.iter().map(|part| to_vec(part).into_iter().map(|number| number as u8).collect()).collect())
    }
    /// The next number of a count that the group shares, from 0: each number goes to one rank, in the order in which
    /// they ask, and nobody meets. Each `round` has a count of its own, and rounds ascend: after one rank has asked in a
    /// later round, none may ask in an earlier one. `taken` says how many numbers of the round this rank has had.
    ///
    /// Between processes the group's first rank answers, when it calls the communicator: where it computes for long, it
    /// should [`attend`](Communicator::attend) meanwhile.
    fn take(&self, round: u64, taken: u64, phase: Phase) -> Result<u64> {
        if self.size() == 1 {
            return Ok(taken);
        }
        Err(Error::Invalid(format!("{}, round {round}: this communicator has no shared count", phase.name)))
    }
    /// Answers what others have asked meanwhile; waits for nobody, and fails after a failure.
    fn attend(&self, _phase: Phase) -> Result<()> {
        Ok(())
    }
    /// Sets the deadline of calls whose phase has the default one, in all groups of this rank.
    fn set_deadline(&self, _deadline: Duration) {}
    /// Waits until every rank has come.
    fn barrier(&self, phase: Phase) -> Result<()> {
        self.all_reduce_host(&mut [], Reduce::Max, phase)
    }
    /// Whether this is the rank that speaks.
    fn is_main(&self) -> bool {
        self.rank() == 0
    }
}
