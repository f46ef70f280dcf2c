//! Random programs of collectives, against what one thread works out, and with faults: on threads that
//! share memory, and on threads that send messages, over channels and over TCP.

mod channels;
mod fault;
mod numbers;
mod oracle;
mod program;
mod sockets;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aligner_core::Result;
use aligner_parallel::ThreadComm;
use fault::{Fault, Kind};
use program::{End, Program};

/// Far beyond any wait in a program that goes well.
const LONG: Duration = Duration::from_mins(1);
/// Long beside the work of one program, and short enough to wait for.
const SHORT: Duration = Duration::from_secs(1);

fn run(program: &Program, deadline: Duration, fault: Option<&Fault>) -> Vec<Result<End>> {
    ThreadComm::run(program.ranks, |comm| Ok(program.play(Arc::new(comm), deadline, fault)))
}

/// Calls `check` with the program of each seed, on so many threads.
fn for_all(seeds: Range<u64>, threads: usize, check: impl Fn(&Program, u64) + Sync) {
    let next = AtomicU64::new(seeds.start);
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if !seeds.contains(&seed) {
                return;
            }
            check(&Program::random(seed), seed);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
}

/// Faults of one rank, and then those that are seen at a deadline, in programs that ranks `play` over a transport.
fn check_faults(play: impl Fn(&Program, Duration, Option<&Fault>) -> Vec<Result<End>> + Sync) {
    let check = |program: &Program, seed, kinds: &[Kind], deadline| {
        if let Some(fault) = Fault::draw(program, seed, kinds) {
            assert_named(program, &play(program, deadline, Some(&fault)), &fault, seed);
        }
    };
    for_all(0..100, 2, |program, seed| check(program, seed, &SUDDEN, LONG));
    for_all(100..130, 30, |program, seed| check(program, seed, &SLOW, SHORT));
}

/// Every rank has done everything, with the right values.
fn assert_right(program: &Program, ends: &[Result<End>], seed: u64) {
    for (rank, end) in ends.iter().enumerate() {
        program.assert_rank_right(end.as_ref().expect("no panic"), rank, seed);
    }
}

/// Whoever failed names the faulty rank, and whoever did not has the right values; returns the causes told.
fn assert_named(program: &Program, ends: &[Result<End>], fault: &Fault, seed: u64) -> Vec<String> {
    let mut causes = Vec::new();
    for (rank, end) in ends.iter().enumerate() {
        match end {
            Ok(end) => causes.extend(fault.assert_rank(program, end, rank, seed)),
            Err(error) => {
                assert!(
                    fault.kind == Kind::Panic && fault.rank == rank,
                    "program {seed}, rank {rank}: {error}"
                );
                assert!(
                    error.to_string().contains("panicked: a fault"),
                    "program {seed}, rank {rank}: {error}"
                );
            }
        }
    }
    if fault.kind == Kind::Order && causes.is_empty() {
        assert_right(program, ends, seed);
    }
    causes
}

/// Faults that the others can see without waiting for the deadline.
const SUDDEN: [Kind; 3] = [Kind::Size, Kind::Panic, Kind::Leave];
/// Faults that may need the deadline.
const SLOW: [Kind; 3] = [Kind::Order, Kind::Missing, Kind::Late];

/// Runs a program with a fault, which all ranks have to tell in the same words.
fn check_fault(program: &Program, deadline: Duration, fault: &Fault, seed: u64) {
    let mut causes = assert_named(program, &run(program, deadline, Some(fault)), fault, seed);
    causes.dedup();
    assert!(causes.len() <= 1, "program {seed}, {fault:?}: {causes:#?}");
}

#[test]
fn ten_thousand_random_programs_end_with_the_right_values_or_name_who_is_at_fault() {
    for_all(0..8000, 4, |program, seed| assert_right(program, &run(program, LONG, None), seed));
    for_all(8000..9850, 4, |program, seed| {
        if let Some(fault) = Fault::draw(program, seed, &SUDDEN) {
            check_fault(program, LONG, &fault, seed);
        }
    });
    // Nearly all of the time is waiting.
    for_all(9850..10_000, 50, |program, seed| {
        if let Some(fault) = Fault::draw(program, seed, &SLOW) {
            let start = Instant::now();
            check_fault(program, SHORT, &fault, seed);
            let took = start.elapsed();
            assert!(took < SHORT + Duration::from_secs(5), "program {seed} took {took:?}");
        }
    });
}
