//! Messages over channels between threads, in the place of processes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use aligner_core::{Communicator, Device, Error, Phase, Reduce, Result, Tensor};
use aligner_parallel::{MessageComm, Network};

use crate::fault::Fault;
use crate::program::{End, Program};
use crate::{LONG, SHORT, assert_right, check_faults, for_all};

/// Words from which a message is on its way until its receiver takes it, as in MPI.
const LARGE: usize = 64;

/// A message, its sender, and whether it has been taken.
type Sent = (usize, Arc<Vec<u64>>, Arc<AtomicBool>);

pub(crate) struct Channels {
    rank: usize,
    to: Vec<Sender<Sent>>,
    from: Receiver<Sent>,
    underway: Vec<(u64, usize, Arc<AtomicBool>)>,
    begun: u64,
    /// Set when it is closed, to whether everyone had left.
    closed: Arc<Mutex<Vec<(usize, bool)>>>,
}

impl Network for Channels {
    fn send(&mut self, to: usize, message: Arc<Vec<u64>>) {
        let taken = Arc::new(AtomicBool::new(message.len() < LARGE));
        self.underway.push((self.begun, to, taken.clone()));
        self.begun += 1;
        // A receiver that is gone takes nothing.
        let _ = self.to[to].send((self.rank, message, taken));
    }

    fn receive(&mut self) -> Option<(usize, Vec<u64>)> {
        let (from, message, taken) = self.from.try_recv().ok()?;
        taken.store(true, Ordering::SeqCst);
        Some((from, message.to_vec()))
    }

    fn begun(&self) -> u64 {
        self.begun
    }

    fn unsent(&mut self, since: u64) -> Vec<usize> {
        self.underway.retain(|(_, _, taken)| !taken.load(Ordering::SeqCst));
        let late = self.underway.iter().filter(|(number, ..)| *number >= since);
        let mut ranks: Vec<usize> = late.map(|&(_, to, _)| to).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    fn close(&mut self, everyone_has_left: bool) {
        self.closed.lock().unwrap().push((self.rank, everyone_has_left));
    }
}

/// Runs ranks as threads; returns what they gave, and how their networks were closed.
pub(crate) fn run<R: Send>(
    size: usize,
    work: impl Fn(MessageComm<Channels>) -> R + Sync,
) -> (Vec<Result<R>>, Vec<(usize, bool)>) {
    let (to, from): (Vec<_>, Vec<_>) = (0..size).map(|_| channel()).unzip();
    let closed = Arc::new(Mutex::new(Vec::new()));
    let results = std::thread::scope(|scope| {
        let start = |(rank, from)| {
            let (to, closed) = (to.clone(), closed.clone());
            let network = Channels { rank, to, from, underway: Vec::new(), begun: 0, closed };
            let comm = MessageComm::over(network, rank, size).expect("below the size");
            scope.spawn(|| work(comm))
        };
        let threads: Vec<_> = from.into_iter().enumerate().map(start).collect();
        let end = |thread: std::thread::ScopedJoinHandle<'_, R>| {
            thread.join().map_err(|_| Error::Invalid("panicked: a fault".into()))
        };
        threads.into_iter().map(end).collect()
    });
    let closed = closed.lock().unwrap().clone();
    (results, closed)
}

fn play(program: &Program, deadline: Duration, fault: Option<&Fault>) -> Vec<Result<End>> {
    run(program.ranks, |comm| program.play(Arc::new(comm), deadline, fault)).0
}

#[test]
fn random_programs_end_with_the_right_values() {
    for_all(0..300, 1, |program, seed| assert_right(program, &play(program, LONG, None), seed));
}

#[test]
fn random_faults_are_named_on_every_rank() {
    check_faults(play);
}

#[test]
fn network_is_closed_in_order_only_where_everyone_has_left() {
    let phase = Phase { name: "a test's phase", deadline: LONG };
    let (results, closed) = run(3, |comm| comm.barrier(phase));
    assert!(results.into_iter().all(|result| result.is_ok_and(|result| result.is_ok())));
    assert!(closed.len() == 3 && closed.iter().all(|&(_, everyone)| everyone), "{closed:?}");
    let start = Instant::now();
    let (results, closed) = run(3, |comm| if comm.rank() == 1 { Ok(()) } else { comm.barrier(phase) });
    let failed = results.into_iter().map(|result| result.expect("no panic"));
    for (rank, result) in failed.enumerate().filter(|&(rank, _)| rank != 1) {
        let Err(Error::Collective(error)) = result else { panic!("rank {rank}: {result:?}") };
        assert_eq!(error.culprits, [1]);
        assert!(error.cause.starts_with("rank 1 has left, and rank "), "{error}");
    }
    assert!(closed.len() == 3 && closed.iter().all(|&(_, everyone)| !everyone), "{closed:?}");
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[test]
fn rank_that_takes_nothing_is_named() {
    let values = Tensor::<1>::ones([10_000], &Device::flex());
    let (results, _) = run(2, |comm| {
        if comm.rank() == 1 {
            std::thread::sleep(3 * SHORT);
            return Ok(());
        }
        comm.all_reduce(values.clone(), Reduce::Sum, Phase { name: "late", deadline: SHORT }).map(|_| ())
    });
    let Some(Ok(Err(Error::Collective(error)))) = results.into_iter().next() else {
        panic!("rank 0 did not fail")
    };
    assert_eq!(error.culprits, [1]);
    assert!(error.cause.contains("for rank 1 in all_reduce (sum) of 10000 f32 in \"late\""), "{error}");
}
