//! Ranks with NCCL on host memory, by a library in its place: `cargo xtask nccl` builds it and runs these.

#[path = "../random/fault.rs"]
mod fault;
#[path = "../random/oracle.rs"]
mod oracle;
#[path = "../random/program.rs"]
mod program;

use std::ops::Range;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aligner_core::{Communicator, Device, Error, Phase, Reduce, Result, Tensor};
use aligner_parallel::{NcclComm, ThreadComm};
use fault::{Fault, Kind};
use program::{End, Program};

/// Far beyond any wait in a program that goes well.
const LONG: Duration = Duration::from_mins(1);
/// Long beside the work of one program, and short enough to wait for.
const SHORT: Duration = Duration::from_secs(1);
const PHASE: Phase = Phase { name: "a test's phase", deadline: LONG };

/// Runs ranks as threads.
fn run<R: Send>(size: usize, work: impl Fn(Arc<dyn Communicator>) -> Result<R> + Sync) -> Vec<Result<R>> {
    ThreadComm::run(size, |comm| work(Arc::new(NcclComm::on_host(comm)?)))
}

fn all_right<R>(results: Vec<Result<R>>) -> Vec<R> {
    results.into_iter().map(Result::unwrap).collect()
}

fn play(program: &Program, deadline: Duration, fault: Option<&Fault>) -> Vec<Result<End>> {
    run(program.ranks, |comm| Ok(program.play(comm, deadline, fault)))
}

/// Calls `check` with the program of each seed, on so many threads.
fn for_all(seeds: Range<u64>, threads: usize, check: impl Fn(&Program, u64) + Sync) {
    let next = AtomicU64::new(seeds.start);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if !seeds.contains(&seed) {
                        return;
                    }
                    check(&Program::random(seed), seed);
                }
            });
        }
    });
}

#[test]
fn a_thousand_random_programs_end_with_the_right_values() {
    for_all(0..1000, 3, |program, seed| {
        for (rank, end) in play(program, LONG, None).into_iter().enumerate() {
            program.assert_rank_right(&end.expect("no panic"), rank, seed);
        }
    });
}

fn check_fault(program: &Program, kinds: &[Kind], deadline: Duration, seed: u64) {
    let Some(fault) = Fault::draw(program, seed, kinds) else { return };
    let start = Instant::now();
    for (rank, end) in play(program, deadline, Some(&fault)).into_iter().enumerate() {
        match end {
            Ok(end) => drop(fault.assert_rank(program, &end, rank, seed)),
            Err(error) => {
                assert!(
                    fault.kind == Kind::Panic && fault.rank == rank,
                    "program {seed}, rank {rank}: {error}"
                );
            }
        }
    }
    let took = start.elapsed();
    assert!(took < SHORT + Duration::from_secs(5), "program {seed}, {fault:?} took {took:?}");
}

#[test]
fn random_faults_are_named_on_every_rank() {
    for_all(0..300, 3, |program, seed| {
        check_fault(program, &[Kind::Size, Kind::Panic, Kind::Leave], LONG, seed);
    });
    for_all(300..350, 25, |program, seed| {
        check_fault(program, &[Kind::Order, Kind::Missing, Kind::Late], SHORT, seed);
    });
}

fn tensor(values: &[f32]) -> Tensor<1> {
    Tensor::from_floats(values, &Device::flex())
}

fn values(tensor: &Tensor<1>) -> Vec<f32> {
    tensor.to_data().iter::<f32>().collect()
}

#[test]
fn a_send_does_not_wait_for_the_receiver() {
    all_right(run(3, |comm| {
        let (next, before) = ((comm.rank() + 1) % 3, (comm.rank() + 2) % 3);
        let group = comm.split(0, 2 - comm.rank(), PHASE)?;
        // All send first, in two groups, and receive in another order.
        for count in 0..4 {
            comm.send(tensor(&[comm.rank() as f32, count as f32]), next, PHASE)?;
            group.send(tensor(&[10.0 + group.rank() as f32]), (group.rank() + 1) % 3, PHASE)?;
        }
        for _ in 0..4 {
            let got = group.recv(1, (group.rank() + 2) % 3, PHASE)?;
            assert_eq!(values(&got), [10.0 + ((group.rank() + 2) % 3) as f32]);
        }
        for count in 0..4 {
            assert_eq!(values(&comm.recv(2, before, PHASE)?), [before as f32, count as f32]);
        }
        Ok(())
    }));
}

#[test]
fn what_was_sent_arrives_though_the_sender_has_nothing_more_to_do() {
    all_right(run(2, |comm| {
        if comm.rank() == 0 {
            return comm.send(tensor(&[1.0, 2.0]), 1, PHASE);
        }
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(values(&comm.recv(2, 0, PHASE)?), [1.0, 2.0]);
        Ok(())
    }));
}

#[test]
fn a_sender_does_not_wait_for_who_has_left() {
    let start = Instant::now();
    all_right(run(2, |comm| {
        if comm.rank() == 0 {
            return comm.send(tensor(&[1.0, 2.0]), 1, PHASE);
        }
        // Not before the other has sent: who sends to a rank that has left is told so.
        std::thread::sleep(Duration::from_millis(300));
        Ok(())
    }));
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[test]
fn a_letter_of_another_size_is_named_and_not_received() {
    let results = run(2, |comm| {
        if comm.rank() == 0 {
            comm.send(tensor(&[1.0]), 1, PHASE)
        } else {
            comm.recv(2, 0, PHASE).map(|_| ())
        }
    });
    let Err(Error::Collective(error)) = &results[1] else { panic!("{results:?}") };
    assert!(error.cause.contains("rank 0 called send of 1 f32 on a device in \"a test's phase\""), "{error}");
}

#[test]
fn the_largest_of_what_is_no_number_is_no_number() {
    all_right(run(3, |comm| {
        let own = [comm.rank() as f32, if comm.rank() == 1 { f32::NAN } else { 1.0 }, f32::NEG_INFINITY];
        let largest = values(&comm.all_reduce(tensor(&own), Reduce::Max, PHASE)?);
        assert!(largest[1].is_nan() && largest[0].to_bits() == 2f32.to_bits(), "{largest:?}");
        assert!(largest[2].is_infinite());
        Ok(())
    }));
}

#[test]
fn numbers_of_both_widths_go_and_nothing_goes_nowhere() {
    all_right(run(3, |comm| {
        let wide = tensor(&[1.0, 0.5]).cast(burn::tensor::DType::F64);
        let sum = comm.all_reduce(wide, Reduce::Mean, PHASE)?;
        assert_eq!((values(&sum), sum.dtype()), (vec![1.0, 0.5], burn::tensor::DType::F64));
        assert_eq!(comm.all_reduce(tensor(&[]), Reduce::Sum, PHASE)?.dims(), [0]);
        let parts = comm.all_to_all(vec![tensor(&[]); 3], PHASE)?;
        assert!(parts.iter().all(|part| part.dims() == [0]));
        Ok(())
    }));
}

/// So many elements are never summed by the library in NCCL's place.
const HANGS: usize = 12_345;

#[test]
fn what_nccl_does_not_end_fails_on_all_ranks_at_the_deadline() {
    let start = Instant::now();
    let results = run(3, |comm| {
        let deadline = if comm.rank() == 2 { SHORT } else { LONG };
        let values = Tensor::<1>::ones([HANGS], &Device::flex());
        comm.all_reduce(values, Reduce::Sum, Phase { name: "hanging", deadline }).map(|_| ())
    });
    for result in results {
        let Err(Error::Collective(error)) = result else { panic!("{result:?}") };
        assert_eq!(error.culprits, [0, 1, 2]);
        let expected =
            "ranks 0, 1, 2 all came to all_reduce (sum) of 12345 f32 on a device in \"hanging\", but NCCL";
        assert!(error.cause.starts_with(expected), "{error}");
    }
    assert!(start.elapsed() < SHORT + Duration::from_secs(5), "{:?}", start.elapsed());
}

/// Tells a started copy that it is one.
const WITHOUT: &str = "ALIGNER_NCCL_WITHOUT";

#[test]
fn a_missing_library_is_named() {
    if std::env::var_os(WITHOUT).is_some() {
        let comm = ThreadComm::group(1).unwrap().remove(0);
        let error = NcclComm::on_host(comm).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains("libnccl.so is not found"), "{error}");
        return;
    }
    let mut copy = Command::new(std::env::current_exe().unwrap());
    copy.args(["a_missing_library_is_named", "--exact"]).env(WITHOUT, "1").env_remove("LD_LIBRARY_PATH");
    assert!(copy.status().unwrap().success());
}
