//! Ranks of a learner under test.

use std::sync::Arc;

use aligner_parallel::{Solo, ThreadComm};

/// A rank alone.
pub(crate) fn alone() -> Arc<Solo> {
    Arc::new(Solo)
}

/// Runs two ranks, a thread each, and returns what `run` gives, by rank.
pub(crate) fn two<R: Send>(run: impl Fn(Arc<ThreadComm>) -> R + Sync) -> Vec<R> {
    let results = ThreadComm::run(2, |comm| Ok(run(Arc::new(comm))));
    results.into_iter().map(|result| result.unwrap()).collect()
}
