//! Ranks that find each other over TCP, or do not; and ranks as processes, which this program starts of itself.

mod processes;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aligner_core::{Communicator, Device, Error, Phase, Reduce, Result, Tensor};
use aligner_parallel::{Rendezvous, TcpComm};

/// Far beyond any wait that goes well.
const LONG: Duration = Duration::from_mins(1);
/// Long enough to meet in, and short enough to wait for.
const SHORT: Duration = Duration::from_secs(1);

/// A place on this machine to meet at, and who listens there.
fn place(size: usize, deadline: Duration) -> (TcpListener, Rendezvous) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, Rendezvous { rank: 0, size, host: "localhost".into(), port, deadline })
}

fn join(rank: usize, at: &Rendezvous) -> JoinHandle<Result<TcpComm>> {
    let at = Rendezvous { rank, ..at.clone() };
    std::thread::spawn(move || TcpComm::join(&at))
}

fn join_as_main(listener: TcpListener, at: &Rendezvous) -> JoinHandle<Result<TcpComm>> {
    let at = at.clone();
    std::thread::spawn(move || TcpComm::join_as_main(listener, &at))
}

fn error(rank: JoinHandle<Result<TcpComm>>) -> String {
    rank.join().unwrap().err().expect("ranks that do not meet").to_string()
}

#[test]
fn ranks_that_do_not_come_are_named_on_all_others() {
    let (listener, at) = place(5, SHORT);
    let began = Instant::now();
    let ranks = [join_as_main(listener, &at), join(1, &at), join(3, &at)];
    for (rank, joining) in [0, 1, 3].into_iter().zip(ranks) {
        let told = error(joining);
        assert_eq!(told, format!("rank {rank} of 5: ranks 2, 4 did not come within 1.0 s"));
    }
    assert!(began.elapsed() < SHORT + Duration::from_secs(3), "{:?}", began.elapsed());
}

#[test]
fn a_rank_that_comes_late_is_waited_for() {
    let (listener, at) = place(3, LONG);
    drop(listener);
    // Also rank 0 comes late: whoever came before tries again.
    let early = join(2, &at);
    std::thread::sleep(Duration::from_millis(300));
    let main = join(0, &at);
    std::thread::sleep(Duration::from_millis(300));
    let late = join(1, &at);
    let sums = [main, late, early].map(|joining| {
        std::thread::spawn(move || {
            let comm = joining.join().unwrap()?;
            let mut sum = [comm.rank() as f64];
            comm.all_reduce_host(&mut sum, Reduce::Sum, Phase::new("count"))?;
            Ok::<f64, Error>(sum[0])
        })
    });
    for sum in sums {
        assert_eq!(sum.join().unwrap().unwrap() as usize, 3);
    }
}

#[test]
fn nobody_at_the_place_is_said_with_the_place() {
    let (listener, at) = place(2, Duration::from_millis(300));
    drop(listener);
    let told = error(join(1, &at));
    assert!(
        told.starts_with(&format!("rank 1 of 2: no rank 0 at localhost:{} within 0.3 s: ", at.port)),
        "{told}"
    );
}

#[test]
fn two_ranks_of_one_number_end_all() {
    let (listener, at) = place(4, LONG);
    let ranks = [join_as_main(listener, &at), join(1, &at), join(2, &at), join(2, &at)];
    for joining in ranks {
        let told = error(joining);
        assert!(told.contains("two processes say that they are rank 2: those of 127.0.0.1:"), "{told}");
    }
}

#[test]
fn ranks_of_another_size_end_all() {
    let (listener, at) = place(3, LONG);
    let ranks = [join_as_main(listener, &at), join(1, &Rendezvous { size: 2, ..at.clone() })];
    for joining in ranks {
        let told = error(joining);
        assert!(told.contains("is one of 2 ranks, and rank 0 one of 3"), "{told}");
    }
    let (_listener, at) = place(3, SHORT);
    assert!(error(join(3, &at)).contains("rank 3 of 3 does not exist"));
}

#[test]
fn strangers_are_sent_away_and_harm_nobody() {
    let (listener, at) = place(2, LONG);
    let address = listener.local_addr().unwrap();
    let main = join_as_main(listener, &at);
    let _silent = TcpStream::connect(address).unwrap();
    let mut stranger = TcpStream::connect(address).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    // Nothing, or that the connection is over.
    let _ = stranger.read_to_end(&mut answer);
    assert!(answer.is_empty());
    let other = join(1, &at);
    let (main, other) = (main.join().unwrap().unwrap(), other.join().unwrap().unwrap());
    let other = std::thread::spawn(move || other.barrier(Phase::new("meet")));
    main.barrier(Phase::new("meet")).unwrap();
    drop(main);
    other.join().unwrap().unwrap();
}

#[test]
fn another_program_at_the_place_is_no_rank() {
    let (listener, at) = place(2, LONG);
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n").unwrap();
        stream
    });
    let told = error(join(1, &at));
    assert!(told.contains("what answers is no rank of a run"), "{told}");
    drop(server.join().unwrap());
}

/// Two ranks that have met, each on a thread of its own.
fn on_two(work: impl Fn(&TcpComm) -> Result<()> + Send + Sync + 'static) {
    let (listener, at) = place(2, LONG);
    let work = Arc::new(work);
    let ranks = [join_as_main(listener, &at), join(1, &at)].map(|joining| {
        let work = work.clone();
        std::thread::spawn(move || work(&joining.join().unwrap()?))
    });
    for rank in ranks {
        rank.join().unwrap().unwrap();
    }
}

/// Elements of 64 MiB.
const MANY: usize = 1 << 24;

#[test]
fn large_messages_go_both_ways_at_once() {
    on_two(|comm| {
        let (own, other) = (comm.rank() as f32, 1 - comm.rank());
        let values = |value| Tensor::<1>::full([MANY], value, &Device::flex());
        let mean = |values: Tensor<1>| values.mean().into_scalar::<f32>();
        let phase = Phase { name: "large", deadline: LONG };
        let parts = comm.all_to_all(vec![values(own), values(own)], phase)?;
        assert!((mean(parts[other].clone()) - other as f32).abs() < 1e-6);
        comm.send(values(own), other, phase)?;
        let got = comm.recv(MANY, other, phase)?;
        assert!((mean(got) - other as f32).abs() < 1e-6);
        Ok(())
    });
}

#[test]
fn who_takes_nothing_is_named() {
    on_two(|comm| {
        if comm.rank() == 1 {
            std::thread::sleep(3 * SHORT);
            return Ok(());
        }
        let values = Tensor::<1>::ones([MANY], &Device::flex());
        let all = comm.all_reduce(values, Reduce::Sum, Phase { name: "late", deadline: SHORT });
        let Err(Error::Collective(error)) = all else { panic!("{all:?}") };
        assert_eq!(error.culprits, [1], "{error}");
        Ok(())
    });
}
