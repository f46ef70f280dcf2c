//! Why ranks cannot go on, and which of them is at fault.

use std::sync::{Arc, OnceLock};

use crate::call::name_ranks;

/// The first failure of a run; it is every rank's.
#[derive(Debug)]
pub struct Failure {
    /// The ranks at fault.
    pub(crate) culprits: Vec<usize>,
    /// What went wrong.
    pub(crate) cause: String,
    /// Each rank's last operations, as they were when the failure was first told.
    pub(crate) history: OnceLock<String>,
}

impl Failure {
    pub(crate) fn new(culprits: Vec<usize>, cause: String) -> Arc<Self> {
        Arc::new(Self { culprits, cause, history: OnceLock::new() })
    }
}

/// What a rank waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wait {
    /// Its call, as an error names it.
    pub(crate) call: String,
    /// The ranks that have not come.
    pub(crate) missing: Vec<usize>,
}

/// What is wrong where `rank` has waited `millis` in vain.
///
/// A rank that did not come may wait itself, for one that waits for another: at fault is who waits for
/// nobody, or a circle of ranks that wait for each other. `waits` tells, by rank, what each waits for.
pub(crate) fn blame(rank: usize, wait: Wait, millis: u128, waits: &[Vec<Wait>]) -> Arc<Failure> {
    let mut told =
        vec![format!("rank {rank} waited {millis} ms for {} in {}", name_ranks(&wait.missing), wait.call)];
    let (mut idle, mut seen) = (Vec::new(), Vec::new());
    let mut next = wait.missing;
    while let Some(at) = next.pop() {
        if seen.contains(&at) {
            continue;
        }
        seen.push(at);
        let waits: Vec<&Wait> = waits[at].iter().filter(|wait| !wait.missing.is_empty()).collect();
        if waits.is_empty() {
            idle.push(at);
        }
        for wait in waits {
            if at != rank {
                told.push(format!("rank {at} waits for {} in {}", name_ranks(&wait.missing), wait.call));
            }
            next.extend(&wait.missing);
        }
    }
    let circle = idle.is_empty();
    let mut culprits = if circle { seen } else { idle };
    culprits.sort_unstable();
    let verdict = if circle { "wait for each other" } else { "did not come in time" };
    let cause = format!("{} {verdict}: {}", name_ranks(&culprits), told.join("; "));
    Failure::new(culprits, cause)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(missing: &[usize]) -> Wait {
        Wait { call: "a barrier".into(), missing: missing.to_vec() }
    }

    #[test]
    fn blame_follows_waits_to_the_rank_that_waits_for_nobody() {
        let waits = [vec![wait(&[1])], vec![wait(&[2])], vec![wait(&[0, 3])], Vec::new()];
        let failure = blame(0, wait(&[1]), 200, &waits);
        assert_eq!(failure.culprits, [3]);
        assert_eq!(
            failure.cause,
            "rank 3 did not come in time: rank 0 waited 200 ms for rank 1 in a barrier; \
             rank 1 waits for rank 2 in a barrier; rank 2 waits for ranks 0, 3 in a barrier"
        );
    }

    #[test]
    fn ranks_in_a_circle_are_all_named() {
        let waits = [vec![wait(&[1])], vec![wait(&[2])], vec![wait(&[1])]];
        let failure = blame(0, wait(&[1]), 200, &waits);
        assert_eq!(failure.culprits, [1, 2]);
        assert!(failure.cause.starts_with("ranks 1, 2 wait for each other"), "{}", failure.cause);
    }

    #[test]
    fn a_rank_whose_wait_is_over_has_to_come() {
        assert_eq!(blame(0, wait(&[1]), 200, &[vec![wait(&[1])], vec![wait(&[])]]).culprits, [1]);
    }
}
