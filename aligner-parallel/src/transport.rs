//! What carries parts among ranks: memory that threads share, or messages of processes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::call::Call;
use crate::failure::Failure;
use crate::part::{Part, Parts};
use crate::recorder::Recorder;

/// Ranks that meet, as one of them sees them.
#[derive(Debug, Clone)]
pub struct Group {
    /// Tells groups apart that have a rank in common.
    pub(crate) id: u64,
    /// Ranks of the run, in the order of the group.
    pub(crate) ranks: Arc<[usize]>,
    /// This rank's place in the group.
    pub(crate) place: usize,
    /// All ranks of the run.
    pub(crate) run: usize,
}

impl Group {
    /// All ranks of a run.
    pub(crate) fn all(rank: usize, run: usize) -> Self {
        Self { id: 0, ranks: (0..run).collect(), place: rank, run }
    }

    /// This rank, counted over the run.
    pub(crate) fn rank(&self) -> usize {
        self.ranks[self.place]
    }
}

/// When a call has to be over.
#[derive(Debug, Clone, Copy)]
pub struct Deadline {
    began: Instant,
    limit: Duration,
}

impl Deadline {
    /// The deadline of a call that begins now.
    pub(crate) fn after(limit: Duration) -> Self {
        Self { began: Instant::now(), limit }
    }

    /// The time that is left; 0 once it is over.
    pub(crate) fn left(self) -> Duration {
        self.limit.saturating_sub(self.began.elapsed())
    }

    /// Milliseconds since the call began.
    pub(crate) fn waited(self) -> u128 {
        self.began.elapsed().as_millis()
    }
}

/// The result of what needs other ranks.
pub(crate) type Met<T> = Result<T, Arc<Failure>>;

/// Meetings of ranks. After a failure every call returns it.
pub trait Transport: Send + Sync + 'static {
    /// Brings `parts`, and returns what each rank of the group brought for this one, in the group's order.
    fn exchange(&self, group: &Group, call: &Call, deadline: Deadline, parts: Parts) -> Met<Vec<Part>>;

    /// Sends a part to the rank at place `to`, and does not wait for it.
    fn send(&self, group: &Group, call: &Call, to: usize, part: Part) -> Met<()>;

    /// The next number of the group's count in this round, which the group's first rank keeps.
    fn take(&self, group: &Group, call: &Call, deadline: Deadline, round: u64) -> Met<u64>;

    /// Answers what others have asked, without waiting.
    fn attend(&self) -> Met<()>;

    /// As [`Transport::attend`]; fails also where a rank of the group has panicked in this call.
    #[cfg(any(feature = "nccl", feature = "nccl-host"))]
    fn attend_to(&self, group: &Group, call: &Call) -> Met<()>;

    /// Whether this rank of the run has left, and will receive nothing more.
    #[cfg(any(feature = "nccl", feature = "nccl-host"))]
    fn has_left(&self, rank: usize) -> bool;

    /// Makes this failure everyone's, unless there has been one; returns the first.
    #[cfg(any(feature = "nccl", feature = "nccl-host"))]
    fn fail(&self, failure: Arc<Failure>) -> Arc<Failure>;

    /// The next part of the rank at place `from`.
    fn recv(&self, group: &Group, call: &Call, deadline: Deadline, from: usize) -> Met<Part>;

    /// This rank's operations.
    fn recorder(&self) -> &Recorder;

    /// The last operations of all ranks that this one knows of, as an error tells them.
    fn history(&self) -> String;
}
