//! A rank that fails in any phase of a step: all others end in time, and name it.

#[allow(dead_code, reason = "the parity suite uses the rest of it")]
#[path = "../parity/case.rs"]
mod case;
mod watched;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use aligner_core::{Communicator, Error, Result};
use aligner_parallel::{PipelineSchedule, ThreadComm};
use case::{Case, Layout};
use watched::{Fault, Planned, Watched};

/// Long beside any wait in a run of this size that goes well.
const PATIENT: Duration = Duration::from_secs(30);
/// Short enough to wait for, in every phase.
const SHORT: Duration = Duration::from_millis(800);
const CULPRIT: usize = 1;

/// Layouts in which together every phase of a step occurs.
fn layouts() -> [(Case, Layout); 4] {
    [
        (Case::TiedWithBiases, Layout::new([2, 1, 1, 2, 1]).sequence().shared()),
        (Case::Plain, Layout::new([1, 2, 1, 2, 1]).share_parameters()),
        (
            Case::TiedWithBiases,
            Layout::new([2, 1, 1, 1, 2]).schedule(PipelineSchedule::OneForwardOneBackward, 1),
        ),
        (Case::Scores, Layout::new([2, 2, 1, 1, 1])),
    ]
}

/// Trains on four ranks, of which one does what is planned; the results by rank, and the phases of that one.
fn run(case: Case, layout: Layout, planned: Option<Planned>) -> (Vec<Result<()>>, Vec<&'static str>) {
    let phases = Mutex::new(Vec::new());
    let deadline = if planned.is_some() { SHORT } else { PATIENT };
    let results = ThreadComm::run(layout.ranks(), |comm| {
        let is_culprit = comm.rank() == CULPRIT;
        let watched = Arc::new(Watched::new(Arc::new(comm), deadline, planned.filter(|_| is_culprit)));
        let outcome = case.outcome(layout, watched.clone());
        if is_culprit {
            *phases.lock().unwrap() = watched.phases();
        }
        outcome.map(|_| ())
    });
    let phases = phases.lock().unwrap().clone();
    (results, phases)
}

fn check(fault: Fault) {
    let mut seen = Vec::new();
    for (case, layout) in layouts() {
        let (results, phases) = run(case, layout, None);
        for result in results {
            result.unwrap();
        }
        // Those of the test itself stand for none of a step.
        for phase in phases.into_iter().filter(|phase| *phase != "test") {
            if seen.contains(&phase) {
                continue;
            }
            seen.push(phase);
            let start = Instant::now();
            let (results, _) = run(case, layout, Some(Planned { fault, phase }));
            let took = start.elapsed();
            assert!(took < SHORT + Duration::from_secs(5), "{fault:?} in {phase:?}: {took:?}");
            for (rank, result) in results.into_iter().enumerate().filter(|(rank, _)| *rank != CULPRIT) {
                let what = format!("{fault:?} in {phase:?}, rank {rank} of {layout:?}");
                let error = match result {
                    Err(Error::Collective(error)) => error,
                    other => panic!("{what}: {other:?}"),
                };
                assert!(error.culprits.contains(&CULPRIT), "{what}: {error}");
                // Of a group of two that call different things it cannot be told which one is wrong.
                assert!(error.culprits.len() <= 2, "{what}: {error}");
                if fault != Fault::Other {
                    assert_eq!(error.culprits, [CULPRIT], "{what}: {error}");
                }
            }
        }
    }
    assert!(seen.len() >= 15, "only {seen:?}");
}

#[test]
fn a_rank_that_panics_is_named_in_every_phase() {
    check(Fault::Panic);
}

#[test]
fn a_rank_that_is_late_is_named_in_every_phase() {
    check(Fault::Late);
}

#[test]
fn a_rank_that_calls_something_else_is_named_in_every_phase() {
    check(Fault::Other);
}
