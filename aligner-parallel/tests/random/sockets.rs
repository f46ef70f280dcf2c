//! Messages over TCP, between threads in the place of processes.

use std::net::TcpListener;
use std::time::Duration;

use aligner_core::{Error, Result};
use aligner_parallel::{Rendezvous, TcpComm};

use crate::fault::Fault;
use crate::program::{End, Program};
use crate::{LONG, assert_right, check_faults, for_all};

/// Runs ranks as threads that meet on this machine.
pub(crate) fn run<R: Send>(size: usize, work: impl Fn(TcpComm) -> R + Sync) -> Vec<Result<R>> {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let place = |rank| Rendezvous { rank, size, host: "127.0.0.1".into(), port, deadline: LONG };
    let (work, place) = (&work, &place);
    std::thread::scope(|scope| {
        let main = scope.spawn(move || work(TcpComm::join_as_main(listener, &place(0)).expect("rank 0")));
        let others = (1..size).map(|rank| {
            scope.spawn(move || work(TcpComm::join(&place(rank)).unwrap_or_else(|error| panic!("{error}"))))
        });
        let threads: Vec<_> = std::iter::once(main).chain(others).collect();
        let end = |thread: std::thread::ScopedJoinHandle<'_, R>| {
            thread.join().map_err(|_| Error::Invalid("panicked: a fault".into()))
        };
        threads.into_iter().map(end).collect()
    })
}

fn play(program: &Program, deadline: Duration, fault: Option<&Fault>) -> Vec<Result<End>> {
    run(program.ranks, |comm| program.play(std::sync::Arc::new(comm), deadline, fault))
}

#[test]
fn random_programs_over_sockets_end_with_the_right_values() {
    for_all(0..300, 1, |program, seed| assert_right(program, &play(program, LONG, None), seed));
}

#[test]
fn random_faults_over_sockets_are_named_on_every_rank() {
    check_faults(play);
}
