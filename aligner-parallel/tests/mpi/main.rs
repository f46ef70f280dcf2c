//! Ranks as processes: this program starts itself under `mpirun`, four times for each case.

#[allow(dead_code, reason = "threads use the rest of it")]
#[path = "../parity/case.rs"]
mod case;
#[path = "../random/fault.rs"]
mod fault;
#[path = "../parity/layouts.rs"]
mod layouts;
#[path = "../random/oracle.rs"]
mod oracle;
#[path = "../random/program.rs"]
mod program;

use std::process::{Command, Output};
use std::sync::Arc;
use std::time::{Duration, Instant};

use aligner_core::{Communicator, Error, Phase};
use aligner_parallel::{Mesh, MeshComms, MpiComm};
use case::Case;
use fault::{Fault, Kind};
use program::Program;

const RANKS: usize = 4;
/// Far beyond any wait in a program that goes well.
const LONG: Duration = Duration::from_secs(60);
/// Long beside the work of one program, and short enough to wait for.
const SHORT: Duration = Duration::from_secs(2);
/// Tells a started copy which case it is in.
const CASE: &str = "ALIGNER_MPI_CASE";

fn main() {
    if let Ok(case) = std::env::var(CASE) {
        // The last communicator is dropped when the rank's work returns.
        std::process::exit(rank(&case));
    }
    random_programs_end_with_the_right_values();
    groups_of_a_mesh_form();
    layouts_compute_what_one_rank_does();
    for kind in [Kind::Size, Kind::Order, Kind::Leave, Kind::Missing, Kind::Late, Kind::Panic] {
        fault_is_named_on_every_rank(kind);
    }
    killed_rank_ends_the_run();
    eprintln!("all cases of MPI passed");
}

/// Whether `mpirun` is Open MPI's, whose options are used where they are needed.
fn is_open_mpi() -> bool {
    let version = Command::new("mpirun").arg("--version").output().expect("mpirun");
    String::from_utf8_lossy(&version.stdout).contains("Open MPI")
}

/// Runs a case on all ranks.
fn launch(case: &str, options: &[&str]) -> (Output, Duration) {
    let this = std::env::current_exe().expect("this program");
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["-np", &RANKS.to_string()]).args(options);
    if is_open_mpi() {
        mpirun.args(["--oversubscribe", "--allow-run-as-root"]);
    }
    let start = Instant::now();
    let output = mpirun.arg(this).env(CASE, case).output().expect("mpirun");
    (output, start.elapsed())
}

fn told(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

fn random_programs_end_with_the_right_values() {
    let (output, took) = launch("values", &[]);
    assert!(output.status.success(), "{}", told(&output));
    eprintln!("values: right in {took:.1?}");
}

fn groups_of_a_mesh_form() {
    let (output, took) = launch("mesh", &[]);
    assert!(output.status.success(), "{}", told(&output));
    eprintln!("mesh: formed in {took:.1?}");
}

fn layouts_compute_what_one_rank_does() {
    let (output, took) = launch("parity", &[]);
    assert!(output.status.success(), "{}", told(&output));
    eprintln!("parity: equal in {took:.1?}");
}

/// Every case on every layout of as many ranks.
fn parity(comm: &Arc<dyn Communicator>) {
    let layouts =
        [&layouts::TENSOR[..], &layouts::CONTEXT, &layouts::PIPELINE, &layouts::DATA, &layouts::MIXED];
    let layouts = layouts.concat();
    for case in Case::ALL.into_iter().chain([Case::Deep]) {
        let expected = case.on_one();
        let all = match case {
            Case::Deep => layouts::DEEP.to_vec(),
            Case::Mixture => [&layouts[..], &layouts::EXPERT].concat(),
            _ => layouts.clone(),
        };
        for layout in all.into_iter().filter(|layout| layout.ranks() == RANKS) {
            let what = format!("{case:?} on {layout:?}, rank {}", comm.rank());
            match case.outcome(layout, comm.clone()) {
                Ok(outcome) => outcome.compare(&expected, &what),
                Err(error) => panic!("{what}: {error}"),
            }
        }
    }
}

/// The first program on all ranks in which a fault of this kind stops all others.
fn faulty(kind: Kind) -> (Program, Fault, u64) {
    let programs =
        (0..).map(|seed| (Program::random(seed), seed)).filter(|(program, _)| program.ranks == RANKS);
    let mut drawn = programs.filter_map(|(program, seed)| {
        let fault = Fault::draw(&program, seed, &[kind])?;
        (fault.stopped(&program).len() == RANKS - 1).then_some((program, fault, seed))
    });
    drawn.next().expect("some program")
}

fn fault_is_named_on_every_rank(kind: Kind) {
    let (_, fault, seed) = faulty(kind);
    let (output, took) = launch(&format!("{kind:?}"), &[]);
    assert!(!output.status.success(), "{kind:?}, program {seed}: {}", told(&output));
    assert_named(fault.rank, &output, took);
    eprintln!("{kind:?}: rank {} named in {took:.1?}", fault.rank);
}

/// All ranks but this one have named it, in time.
fn assert_named(culprit: usize, output: &Output, took: Duration) {
    let told = told(output);
    for rank in (0..RANKS).filter(|&rank| rank != culprit) {
        let line = format!("rank {rank} names rank {culprit}\n");
        assert!(told.contains(&line), "no `{line}` in\n{told}");
    }
    assert!(took < SHORT + Duration::from_secs(5), "{took:?}: {told}");
}

fn killed_rank_ends_the_run() {
    let (output, took) = launch("killed", &[]);
    let told = told(&output);
    assert!(!output.status.success() && took < SHORT + Duration::from_secs(5), "{took:?}: {told}");
    eprintln!("killed: ended in {took:.1?}");
    if is_open_mpi() {
        assert!(told.contains("process rank 2 ") && told.contains("signal 9"), "{told}");
        // A launcher that does not end the others at once lets them say whom they miss.
        let (output, took) = launch("killed", &["--enable-recovery"]);
        assert_named(2, &output, took);
        eprintln!("killed, the others left alone: rank 2 named in {took:.1?}");
    }
}

/// What a started copy does; returns its exit code.
fn rank(case: &str) -> i32 {
    let comm: Arc<dyn Communicator> = Arc::new(MpiComm::start().expect("MPI"));
    assert_eq!(comm.size(), RANKS);
    let rank = comm.rank();
    let mut failure = None;
    match case {
        "values" => {
            for seed in 0..400 {
                let program = Program::random(seed);
                if program.ranks == RANKS {
                    program.assert_rank_right(&program.play(comm.clone(), LONG, None), rank, seed);
                }
            }
        }
        "mesh" => {
            let mesh = Mesh::new([2, 1, 1, 2, 1]).expect("a mesh");
            let comms = MeshComms::new(mesh, comm).expect("groups");
            let mut sum = [rank as f64];
            comms
                .gradients()
                .all_reduce_host(&mut sum, aligner_core::Reduce::Sum, Phase::new("sum"))
                .expect("a sum");
            assert_eq!(sum[0] as usize, [2, 4][rank % 2], "ranks {rank} and its replica");
        }
        "parity" => parity(&comm),
        "killed" => {
            if rank == 2 {
                let _ = Command::new("kill").args(["-9", &std::process::id().to_string()]).status();
            }
            failure = comm.barrier(Phase { name: "waiting for a killed rank", deadline: SHORT }).err();
        }
        _ => {
            let kinds = [Kind::Size, Kind::Order, Kind::Leave, Kind::Missing, Kind::Late, Kind::Panic];
            let kind = kinds.into_iter().find(|kind| format!("{kind:?}") == case).expect("a case");
            let (program, fault, seed) = faulty(kind);
            let end = program.play(comm.clone(), SHORT, Some(&fault));
            fault.assert_rank(&program, &end, rank, seed);
            failure = end.error;
        }
    }
    let Some(Error::Collective(error)) = failure else { return 0 };
    // It is told before the communicator is dropped.
    let named = error.culprits.iter().map(|culprit| format!("rank {} names rank {culprit}\n", error.rank));
    // In one piece: other ranks write to the same place.
    let told = format!("{}{error}\n", named.collect::<String>());
    eprint!("{told}");
    1
}
