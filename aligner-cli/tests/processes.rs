//! Ranks as processes: what they learn is what threads learn, to the bit, and nobody waits for one that is gone.

mod scene;

use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use scene::{Call, Scene};

const MESH: [&str; 6] = ["--set", "mesh.tp=2", "--set", "mesh.dp=2", "--set", "mesh.shard_optimizer=true"];

/// Arguments of `launch` for four ranks.
fn launch<'a>(how: &[&'a str], flags: &[&'a str]) -> Vec<&'a str> {
    [&["launch", "--ranks", "4"], how, &["train", "run.toml"], &MESH, flags].concat()
}

/// The figures of a run's log that do not tell of time.
fn figures(scene: &Scene, run: &str) -> Vec<String> {
    let log = scene.read(&format!("{run}/metrics.jsonl"));
    let record = |line: &str| {
        let record: serde_json::Value = serde_json::from_str(line).unwrap();
        let names = ["step", "loss", "grad_norm", "rewards/margins", "eval/loss"];
        names.map(|name| record[name].to_string()).join(" ")
    };
    log.lines().map(record).collect()
}

#[track_caller]
fn assert_same(scene: &Scene, one: &str, other: &str) {
    assert_eq!(figures(scene, one), figures(scene, other));
    let weights = |run: &str| scene.bytes(&format!("{run}/model/model.safetensors"));
    assert!(weights(one) == weights(other), "weights of {one} and {other} differ");
}

#[test]
fn processes_learn_what_threads_learn() {
    let scene = Scene::new();
    scene.dpo();
    scene.aligner(&launch(&[], &["--set", "run.dir=threads"])).succeeds();
    let out = scene.aligner(&launch(&["--processes"], &["--set", "run.dir=processes"]));
    assert!(out.succeeds().contains("processes/report.html"), "{}", out.stdout);
    assert_eq!(out.stdout.matches("report.html").count(), 1, "one rank speaks: {}", out.stdout);
    assert_same(&scene, "threads", "processes");
}

/// Files may be of any size.
const UNLIMITED: &str = "unlimited";

/// Starts one of two ranks as a launcher of processes does, where files may grow to so many blocks.
fn rank(scene: &Scene, rank: usize, port: &str, blocks: &str, arguments: &[&str]) -> Child {
    let number = rank.to_string();
    let variables = [
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", port),
        ("RANK", &number),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", &number),
    ];
    scene.start_with_disk(blocks, &variables, &[&["train", "run.toml"], arguments].concat())
}

/// A port that was free just now.
fn port() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port().to_string()
}

#[test]
fn ranks_that_another_launcher_starts_meet() {
    let scene = Scene::new();
    scene.dpo();
    scene
        .aligner(&[
            "launch",
            "--ranks",
            "2",
            "train",
            "run.toml",
            "--set",
            "mesh.tp=2",
            "--set",
            "run.dir=threads",
        ])
        .succeeds();
    let port = port();
    let arguments = ["--set", "mesh.tp=2", "--set", "run.dir=ranks"];
    let ranks: Vec<Child> = (0..2).map(|number| rank(&scene, number, &port, UNLIMITED, &arguments)).collect();
    let ended: Vec<Call> = ranks.into_iter().map(Call::end_of).collect();
    ended[0].succeeds();
    assert_eq!(ended[1].succeeds(), "", "rank 0 speaks");
    assert_same(&scene, "threads", "ranks");
    let variables = [("MASTER_ADDR", "localhost"), ("WORLD_SIZE", "2"), ("RANK", "2")];
    scene
        .aligner_with(&variables, &["train", "run.toml"])
        .fails(2, &["RANK: expected a number below 2, got 2"]);
}

/// The process of this rank among those that `launcher` has started.
fn process_of(launcher: &Child, rank: usize) -> u32 {
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(30) {
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let Some(process) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            if is_rank(&entry.path(), launcher.id(), rank) {
                return process;
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("no process of rank {rank}");
}

fn is_rank(process: &Path, launcher: u32, rank: usize) -> bool {
    let status = std::fs::read_to_string(process.join("status")).unwrap_or_default();
    let variables = std::fs::read(process.join("environ")).unwrap_or_default();
    status.contains(&format!("PPid:\t{launcher}\n"))
        && variables.split(|byte| *byte == 0).any(|variable| variable == format!("RANK={rank}").as_bytes())
}

fn signal(process: u32, name: &str) {
    assert!(Command::new("kill").args([name, &process.to_string()]).status().unwrap().success());
}

/// Waits until the run has made a step.
fn wait_for_a_step(scene: &Scene) {
    let began = Instant::now();
    while std::fs::read_to_string(scene.path("run/metrics.jsonl")).unwrap_or_default().is_empty() {
        assert!(began.elapsed() < Duration::from_mins(1), "no step");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A run that ends by a signal alone.
const ENDLESS: [&str; 2] = ["--set", "run.steps=1000000"];

#[test]
fn a_killed_rank_ends_all_and_is_named() {
    let scene = Scene::new();
    scene.dpo();
    let launcher = scene.start_with(&[], &launch(&["--processes"], &ENDLESS));
    wait_for_a_step(&scene);
    let ranks: Vec<u32> = (0..4).map(|rank| process_of(&launcher, rank)).collect();
    let began = Instant::now();
    signal(ranks[2], "-KILL");
    let out = Call::end_of(launcher);
    out.fails(1, &["error: rank 2: the process was ended by signal 9", "rank 2 is gone"]);
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    assert_eq!(out.stderr.matches("last operations:").count(), 1, "it is said once: {}", out.stderr);
    assert!(ranks.iter().all(|rank| !Path::new(&format!("/proc/{rank}")).exists()), "ranks are left");
}

#[test]
fn a_signal_to_the_launcher_saves_the_run() {
    let scene = Scene::new();
    scene.dpo();
    let launcher = scene.start_with(&[], &launch(&["--processes"], &ENDLESS));
    wait_for_a_step(&scene);
    signal(launcher.id(), "-INT");
    let out = Call::end_of(launcher);
    out.fails(130, &["is saved"]);
    let saved = std::fs::read_dir(scene.path("run/checkpoints")).unwrap().count();
    assert_eq!(saved, 1, "{}", out.stderr);
}

#[test]
fn a_full_disk_is_told_by_the_rank_that_writes() {
    let scene = Scene::new();
    scene.dpo();
    let out = scene.aligner_with_little_disk(64, &launch(&["--processes"], &["--set", "run.save_every=4"]));
    out.fails(1, &["rank 0", "run/checkpoints"]);
}

/// Two ranks of a run that draws samples, the second of which may write files of so many blocks.
fn two_that_draw(scene: &Scene, blocks: &str, run: &str, flags: &[&str]) -> Vec<Call> {
    let (port, run) = (port(), format!("run.dir={run}"));
    let arguments = [&["--set", "mesh.dp=2", "--set", &run], flags].concat();
    let start = |number| rank(scene, number, &port, [UNLIMITED, blocks][number], &arguments);
    let ranks: Vec<Child> = (0..2).map(start).collect();
    ranks.into_iter().map(Call::end_of).collect()
}

#[test]
fn a_full_disk_of_a_rank_that_logs_scores_is_named_and_nothing_is_lost() {
    let scene = Scene::new();
    scene.ppo();
    for ended in two_that_draw(&scene, UNLIMITED, "whole", &[]) {
        ended.succeeds();
    }
    let began = Instant::now();
    let ended = two_that_draw(&scene, "0", "run", &[]);
    ended[1].fails(1, &["rank 1 of 2", "scores.1.jsonl"]);
    ended[0].fails(1, &["rank 1"]);
    assert!(began.elapsed() < Duration::from_mins(1), "the other waited");
    for ended in two_that_draw(&scene, UNLIMITED, "run", &["--resume"]) {
        ended.succeeds();
    }
    let weights = |run: &str| scene.bytes(&format!("{run}/model/model.safetensors"));
    assert!(weights("run") == weights("whole"), "the run that was stopped ends elsewhere");
}
