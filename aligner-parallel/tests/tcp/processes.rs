//! Ranks as processes: each case starts this test program several times.

use std::io::Write as _;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use aligner_core::{Communicator, Error, Phase, Reduce};
use aligner_parallel::{Mesh, MeshComms, Rendezvous, TcpComm};

use super::{LONG, SHORT, place};

const RANKS: usize = 4;
/// Tells a started copy which case it is in.
const CASE: &str = "ALIGNER_TCP_CASE";

/// Starts all ranks of a case, with what a launcher would tell them.
fn start(case: &str) -> Vec<Child> {
    // The port is free again once it is known.
    let (_, at) = place(RANKS, LONG);
    let start = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["processes::one_rank", "--exact", "--nocapture", "--test-threads=1"]);
        command.env(CASE, case).env("RANK", rank.to_string()).env("WORLD_SIZE", RANKS.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", at.port.to_string());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    (0..RANKS).map(start).collect()
}

/// Each rank's success and what it said.
fn end(ranks: Vec<Child>) -> Vec<(bool, String)> {
    let end = |rank: Child| {
        let output = rank.wait_with_output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    ranks.into_iter().map(end).collect()
}

/// What a started copy does; nothing where this is the test program itself.
#[test]
fn one_rank() {
    let Ok(case) = std::env::var(CASE) else { return };
    let at = Rendezvous::of_environment().unwrap().expect("several ranks");
    let comm: Arc<dyn Communicator> = Arc::new(TcpComm::join(&at).unwrap());
    let rank = comm.rank();
    if case == "mesh" {
        let mesh = Mesh::new([2, 1, 1, 2, 1]).unwrap();
        let comms = MeshComms::new(mesh, comm).unwrap();
        let mut sum = [rank as f64];
        comms.gradients().all_reduce_host(&mut sum, Reduce::Sum, Phase::new("sum")).unwrap();
        assert_eq!(sum[0] as usize, [2, 4][rank % 2], "rank {rank} and its replica");
        return;
    }
    // One process ends without a word; rank 3 sleeps through it.
    for round in 0.. {
        if rank == 2 && round == 3 {
            let _ = Command::new("kill").args(["-9", &std::process::id().to_string()]).status();
            std::thread::sleep(LONG);
        }
        if rank == 3 && round == 3 {
            std::thread::sleep(SHORT);
        }
        let met = comm.barrier(Phase { name: "waiting for a killed rank", deadline: LONG });
        if let Err(Error::Collective(error)) = met {
            writeln!(std::io::stderr(), "rank {rank} names {:?}: {}", error.culprits, error.cause).unwrap();
            std::process::exit(1);
        }
        met.unwrap();
    }
}

#[test]
fn groups_of_a_mesh_form_between_processes() {
    for (rank, (success, told)) in end(start("mesh")).into_iter().enumerate() {
        assert!(success, "rank {rank}: {told}");
    }
}

#[test]
fn a_killed_process_is_named_at_once_by_all_others() {
    let began = Instant::now();
    let ended = end(start("killed"));
    assert!(began.elapsed() < LONG / 2, "{:?}", began.elapsed());
    for (rank, (success, told)) in ended.into_iter().enumerate() {
        assert!(!success);
        if rank != 2 {
            let expected = format!("rank {rank} names [2]: rank 2 is gone: its process has ended");
            assert!(told.contains(&expected), "rank {rank}: {told}");
        }
    }
}
