//! Numbers of a count that ranks share, over threads and over messages.

use std::sync::Arc;
use std::time::Duration;

use aligner_core::{Communicator, Error, Phase, Result};
use aligner_parallel::ThreadComm;

use crate::{LONG, SHORT, channels, sockets};

const PHASE: Phase = Phase { name: "asking", deadline: LONG };

/// Runs the same on all transports, and returns each rank's result.
fn on_all<R: Send>(
    ranks: usize,
    work: impl Fn(Arc<dyn Communicator>) -> Result<R> + Sync,
) -> [Vec<Result<R>>; 3] {
    let threads = ThreadComm::run(ranks, |comm| work(Arc::new(comm)));
    let (messages, _) = channels::run(ranks, |comm| work(Arc::new(comm)));
    let over_sockets = sockets::run(ranks, |comm| work(Arc::new(comm)));
    let ended = |results: Vec<Result<Result<R>>>| results.into_iter().map(|result| result.expect("no panic"));
    [threads, ended(messages).collect(), ended(over_sockets).collect()]
}

/// Numbers below `count` that this rank takes, working on each for a while, which depends on the rank.
fn take_all(comm: &dyn Communicator, round: u64, count: u64) -> Result<Vec<u64>> {
    let mut own = Vec::new();
    loop {
        let number = comm.take(round, own.len() as u64, PHASE)?;
        if number >= count {
            return Ok(own);
        }
        own.push(number);
        for _ in 0..=(number + comm.rank() as u64) % 3 {
            std::thread::sleep(Duration::from_micros(50));
            comm.attend(PHASE)?;
        }
    }
}

#[test]
fn each_number_goes_to_one_rank_in_every_round_and_group() {
    let results = on_all(4, |comm| {
        let half = comm.split(comm.rank() % 2, 3 - comm.rank(), PHASE)?;
        let mut taken = Vec::new();
        for round in 0..3 {
            taken.push((take_all(comm.as_ref(), round, 40)?, take_all(half.as_ref(), round, 20)?));
            comm.barrier(PHASE)?;
        }
        Ok(taken)
    });
    for ranks in results {
        let ranks: Vec<_> = ranks.into_iter().map(Result::unwrap).collect();
        for round in 0..3 {
            let sorted = |numbers: Vec<&Vec<u64>>| {
                let mut numbers: Vec<u64> = numbers.into_iter().flatten().copied().collect();
                numbers.sort_unstable();
                numbers
            };
            let all = sorted(ranks.iter().map(|rank| &rank[round].0).collect());
            assert_eq!(all, (0..40).collect::<Vec<_>>());
            for half in 0..2 {
                let own = sorted(ranks.iter().skip(half).step_by(2).map(|rank| &rank[round].1).collect());
                assert_eq!(own, (0..20).collect::<Vec<_>>());
            }
        }
    }
}

#[test]
fn letters_and_numbers_do_not_mix() {
    let results = on_all(2, |comm| {
        let values = || aligner_core::Tensor::<1>::ones([2], &aligner_core::Device::flex());
        if comm.rank() == 0 {
            comm.send(values(), 1, PHASE)?;
        }
        let number = comm.take(0, 0, PHASE)?;
        if comm.rank() == 1 {
            comm.recv(2, 0, PHASE)?;
        }
        comm.barrier(PHASE)?;
        Ok(number)
    });
    for ranks in results {
        let mut numbers: Vec<u64> = ranks.into_iter().map(Result::unwrap).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, [0, 1]);
    }
}

#[test]
fn a_rank_that_asks_in_an_earlier_round_is_named() {
    let results = on_all(3, |comm| {
        if comm.rank() == 1 {
            comm.take(5, 0, PHASE)?;
        }
        comm.barrier(PHASE)?;
        if comm.rank() == 2 {
            comm.take(4, 0, PHASE)?;
        }
        comm.barrier(PHASE)
    });
    for (rank, result) in results.into_iter().flat_map(|ranks| ranks.into_iter().enumerate()) {
        let Err(Error::Collective(error)) = result else { panic!("rank {rank}: {result:?}") };
        assert_eq!(error.culprits, [2], "{error}");
        assert!(error.cause.contains("take in \"asking\" in round 4, but round 5 has begun"), "{error}");
    }
}

#[test]
fn a_first_rank_that_does_not_attend_is_named() {
    let (results, _) = channels::run(2, |comm| {
        if comm.rank() == 0 {
            std::thread::sleep(3 * SHORT);
            return comm.attend(PHASE);
        }
        comm.take(0, 0, Phase { name: "asking", deadline: SHORT }).map(|_| ())
    });
    for result in results {
        let Err(Error::Collective(error)) = result.expect("no panic") else { panic!("no failure") };
        assert_eq!(error.culprits, [0]);
        assert!(
            error.cause.contains("rank 1 waited") && error.cause.contains("for rank 0 in take"),
            "{error}"
        );
    }
}
