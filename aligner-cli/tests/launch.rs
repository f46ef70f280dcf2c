//! Runs on several ranks of this machine: what they learn is what one rank learns.

mod scene;

use scene::Scene;
use serde_json::Value;

/// Records of a run's log, one a line.
fn records(scene: &Scene, run: &str) -> Vec<Value> {
    let log = scene.read(&format!("{run}/metrics.jsonl"));
    log.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn number(record: &Value, name: &str) -> f64 {
    record[name].as_f64().unwrap_or_else(|| panic!("no {name} in {record}"))
}

/// Trains on a mesh, into a directory of its own.
fn launch(scene: &Scene, ranks: usize, run: &str, mesh: &[&str], flags: &[&str]) {
    let (count, dir) = (ranks.to_string(), format!("run.dir={run}"));
    let mut arguments = vec!["launch", "--ranks", &count, "train", "run.toml", "--set", &dir];
    arguments.extend(flags);
    for setting in mesh {
        arguments.extend(["--set", setting]);
    }
    scene.aligner(&arguments).succeeds();
}

/// The largest difference of two runs' weights.
fn distance(scene: &Scene, one: &str, other: &str) -> f32 {
    let weights = |run: &str| {
        let bytes = scene.bytes(&format!("{run}/model/model.safetensors"));
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let values = bytes[8 + header..].chunks_exact(4);
        values.map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect::<Vec<f32>>()
    };
    let (one, other) = (weights(one), weights(other));
    assert_eq!(one.len(), other.len());
    one.iter().zip(&other).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

const TENSOR_AND_DATA: [&str; 3] = ["mesh.tp=2", "mesh.dp=2", "mesh.shard_optimizer=true"];
const PIPELINE_AND_DATA: [&str; 2] = ["mesh.pp=2", "mesh.dp=2"];

#[test]
fn preferences_are_learned_as_on_one_rank() {
    let scene = Scene::new();
    scene.dpo();
    scene.aligner(&["train", "run.toml", "--set", "run.dir=one"]).succeeds();
    launch(&scene, 4, "tensor", &TENSOR_AND_DATA, &[]);
    launch(&scene, 4, "pipeline", &PIPELINE_AND_DATA, &[]);
    let expected = records(&scene, "one");
    for run in ["tensor", "pipeline"] {
        let own = records(&scene, run);
        assert_eq!(own.len(), expected.len());
        for (own, expected) in own.iter().zip(&expected) {
            assert_eq!(own["step"], expected["step"]);
            for name in ["loss", "grad_norm", "rewards/accuracies", "rewards/margins", "eval/loss"] {
                if expected[name].is_null() {
                    continue;
                }
                let (own, expected) = (number(own, name), number(expected, name));
                assert!(
                    (own - expected).abs() < 1e-3 * expected.abs().max(1.0),
                    "{run}: {name} {own} {expected}"
                );
            }
        }
        let far = distance(&scene, "one", run);
        assert!(far < 1e-3, "{run}: weights are {far} from one rank's");
    }
}

#[test]
fn samples_of_the_first_step_are_those_of_one_rank() {
    let scene = Scene::new();
    scene.ppo();
    scene.aligner(&["train", "run.toml", "--set", "run.dir=one"]).succeeds();
    launch(&scene, 4, "tensor", &TENSOR_AND_DATA, &[]);
    launch(&scene, 4, "pipeline", &PIPELINE_AND_DATA, &[]);
    launch(&scene, 2, "static", &["mesh.dp=2", "mesh.prompts=\"static\""], &[]);
    let samples = |run: &str, step: u64| {
        let rows = scene.read(&format!("{run}/rollouts.jsonl"));
        let rows = rows.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let mut all: Vec<String> = (rows.filter(|row| row["step"] == step))
            .map(|row| format!("{} {} {}", row["prompt"], row["response"], row["reward"]))
            .collect();
        all.sort();
        all
    };
    let expected = samples("one", 1);
    assert_eq!(expected.len(), 12);
    for run in ["tensor", "pipeline", "static"] {
        assert_eq!(samples(run, 1), expected, "{run}");
        let (own, expected) = (records(&scene, run), records(&scene, "one"));
        for name in ["reward", "completions/mean_length", "objective/kl", "loss", "critic/loss", "entropy"] {
            let first = |records: &[Value]| {
                let record = records.iter().find(|record| record["step"] == 1).unwrap();
                number(record, name)
            };
            let (own, expected) = (first(&own), first(&expected));
            assert!(
                (own - expected).abs() < 1e-4 * expected.abs().max(1.0),
                "{run}: {name} {own} {expected}"
            );
        }
    }
}

#[test]
fn a_full_disk_on_one_rank_ends_all_and_loses_nothing() {
    let scene = Scene::new();
    scene.dpo();
    let settings = ["mesh.tp=2", "mesh.dp=2", "run.save_every=4"];
    launch(&scene, 4, "whole", &settings, &[]);
    // The main rank writes: its log has room, a checkpoint has none.
    let mut arguments = vec!["launch", "--ranks", "4", "train", "run.toml"];
    for setting in &settings {
        arguments.extend(["--set", setting]);
    }
    let began = std::time::Instant::now();
    let out = scene.aligner_with_little_disk(64, &arguments);
    out.fails(1, &["rank 0", "run/checkpoints"]);
    assert!(began.elapsed().as_secs() < 60, "the others waited");
    arguments.push("--resume");
    scene.aligner(&arguments).succeeds();
    assert_eq!(scene.bytes("run/model/model.safetensors"), scene.bytes("whole/model/model.safetensors"));
}

#[test]
fn a_run_anew_has_no_scores_of_ranks_that_were() {
    let scene = Scene::new();
    scene.dpo();
    scene.aligner(&["train", "run.toml"]).succeeds();
    scene.write("run/scores.3.jsonl", "of another run\n");
    launch(&scene, 2, "run", &["mesh.dp=2", "run.steps=2"], &["--overwrite"]);
    assert!(!scene.path("run/scores.3.jsonl").exists());
}

#[test]
fn a_checkpoint_goes_on_on_another_mesh() {
    let scene = Scene::new();
    scene.dpo();
    let keep = ["run.save_every=6", "run.keep_last=10"];
    launch(&scene, 4, "whole", &[&TENSOR_AND_DATA[..], &keep].concat(), &[]);
    for (run, ranks, mesh) in
        [("same", 4, &TENSOR_AND_DATA[..]), ("other", 4, &PIPELINE_AND_DATA), ("one", 1, &[])]
    {
        let copied =
            std::process::Command::new("cp").args(["-r", "whole", run]).current_dir(scene.path("")).status();
        assert!(copied.unwrap().success());
        std::fs::remove_dir_all(scene.path(&format!("{run}/checkpoints/step-000012"))).unwrap();
        std::fs::remove_dir_all(scene.path(&format!("{run}/model"))).unwrap();
        let (count, dir) = (ranks.to_string(), format!("run.dir={run}"));
        let mut arguments = vec!["launch", "--ranks", &count, "train", "run.toml", "--resume", "--set", &dir];
        for setting in mesh.iter().chain(&keep) {
            arguments.extend(["--set", setting]);
        }
        scene.aligner(&arguments).succeeds();
    }
    assert_eq!(
        scene.bytes("same/model/model.safetensors"),
        scene.bytes("whole/model/model.safetensors"),
        "the same mesh goes on with the same bits"
    );
    for run in ["other", "one"] {
        let far = distance(&scene, "whole", run);
        assert!(far < 1e-3, "{run}: weights are {far} from the run that was not interrupted");
    }
}

#[test]
fn mistakes_of_a_mesh_are_told_once_and_all() {
    let scene = Scene::new();
    scene.dpo();
    let out = scene.aligner(&["train", "run.toml", "--set", "mesh.tp=2"]);
    out.fails(2, &["tp=2", "2 ranks, but 1 run", "launch --ranks 2"]);
    let out = scene.aligner(&["launch", "--ranks", "3", "train", "run.toml", "--set", "mesh.tp=2"]);
    out.fails(2, &["2 ranks, but 3 run"]);
    let out = scene.aligner(&["launch", "--ranks", "3", "train", "run.toml", "--set", "mesh.tp=3"]);
    out.fails(1, &["num_attention_heads", "num_key_value_heads"]);
    assert_eq!(out.stderr.matches("num_attention_heads").count(), 1, "{}", out.stderr);
    let out = scene.aligner(&[
        "launch",
        "--ranks",
        "2",
        "train",
        "run.toml",
        "--set",
        "mesh.pp=0",
        "--set",
        "mesh.chunks=0",
        "--set",
        "mesh.depth=2",
    ]);
    out.fails(2, &["mesh.pp", "mesh.chunks", "depth"]);
    let out = scene.aligner(&["launch", "--ranks", "3", "train", "run.toml", "--set", "mesh.dp=3"]);
    out.fails(2, &["run.batch_size", "4 groups do not divide over 3"]);
}
