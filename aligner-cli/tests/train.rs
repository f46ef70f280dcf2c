//! Whole runs: what they write, what they print, and what they refuse.

mod scene;

use std::fs;

use scene::Scene;

/// Names of all metrics that a run has logged.
fn logged(scene: &Scene, run: &str) -> std::collections::BTreeSet<String> {
    let text = scene.read(&format!("{run}/metrics.jsonl"));
    let records = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let names = records.flat_map(|record| record.as_object().unwrap().keys().cloned().collect::<Vec<_>>());
    names.filter(|name| name != "step").collect()
}

#[test]
fn a_dpo_run_leaves_everything_that_it_promises() {
    let scene = Scene::new();
    scene.dpo();
    let call =
        scene.aligner(&["train", "run.toml", "--set", "run.eval_every=4", "--set", "run.save_every=4"]);
    let out = call.succeeds();
    for part in ["prompt  ", "before  ", "after   ", "rewards/accuracies", "±", "run/report.html"] {
        assert!(out.contains(part), "no `{part}` in:\n{out}");
    }
    for line in ["preflight in", "step 0  held out (8 groups)", "step 12/12", "tokens/s"] {
        assert!(call.stderr.contains(line), "no `{line}` in:\n{}", call.stderr);
    }
    let records: Vec<serde_json::Value> =
        scene.read("run/metrics.jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let evaluations: Vec<u64> = records
        .iter()
        .filter(|r| r.get("eval/loss").is_some())
        .map(|r| r["step"].as_u64().unwrap())
        .collect();
    assert_eq!(evaluations, [0, 4, 8, 12]);
    assert_eq!(records[0]["eval/rewards/accuracies"], 0.5, "policy and reference are equal at the start");
    assert!((records[0]["eval/loss"].as_f64().unwrap() - std::f64::consts::LN_2).abs() < 1e-5);
    assert!(records.last().unwrap()["eval/loss"].as_f64().unwrap() < 0.6, "it learns");
    for name in ["loss", "grad_norm", "learning_rate", "num_tokens", "epoch", "step_time", "rewards/margins"]
    {
        assert!(records[1].get(name).is_some(), "{name}");
    }
    for step in ["step-000008", "step-000012"] {
        for file in [
            "config.json",
            "model.safetensors",
            "tokenizer.json",
            "trainer/state.json",
            "trainer/optimizer.safetensors",
        ] {
            assert!(scene.path("run/checkpoints").join(step).join(file).is_file(), "{step}/{file}");
        }
    }
    for name in logged(&scene, "run") {
        let described = name.trim_end_matches("_stderr");
        assert!(aligner_core::metrics::describe(described).is_some(), "{described} is not in the dictionary");
    }
    assert_eq!(scene.read("run/samples.jsonl").lines().count(), 4, "two prompts, before and after");
    let resolved: toml::Table = scene.read("run/resolved.toml").parse().unwrap();
    assert_eq!(resolved["algorithm"]["dpo"]["beta"].as_float(), Some(0.5));
    assert_eq!(resolved["run"]["seed"].as_integer(), Some(1234), "defaults are written out");
    let report = scene.read("run/report.html");
    assert!(report.contains("<svg") && report.contains("rewards/accuracies") && !report.contains("http"));
    assert!(
        fs::read_dir(scene.path("run"))
            .unwrap()
            .flatten()
            .any(|e| e.file_name().to_string_lossy().contains("tfevents"))
    );
}

#[test]
fn what_became_of_the_rows_is_said_before_and_after() {
    let scene = Scene::new();
    scene.dpo();
    let row = |chosen: &str, rejected: &str| {
        serde_json::json!({ "prompt": "Say it.", "chosen": chosen, "rejected": rejected }).to_string() + "\n"
    };
    let rows = scene.read("pairs.jsonl") + &row("same", "same") + &row(&"yes ".repeat(200), "no");
    scene.write("pairs.jsonl", rows);
    let settings = ["--set", "data.train.equal_pairs=drop", "--set", "data.train.max_length=128"];
    let run = |more: &[&str]| {
        let call = scene.aligner(&[&["train", "run.toml"][..], &settings, more].concat());
        call.succeeds();
        call.stderr
            .lines()
            .filter(|line| line.starts_with("pairs.jsonl: "))
            .map(String::from)
            .collect::<Vec<_>>()
    };
    let cut = run(&["--set", "run.dir=cut"]);
    let expected = "pairs.jsonl: 34 rows, 33 used (1 truncated), 0 dropped as overlong, 1 as equal pairs";
    assert_eq!(cut, [expected, expected]);
    let dropped = run(&["--set", "run.dir=dropped", "--set", "data.train.overlong=drop"]);
    let expected = "pairs.jsonl: 34 rows, 32 used (0 truncated), 1 dropped as overlong, 1 as equal pairs";
    assert_eq!(dropped, [expected, expected]);
}

#[test]
fn every_planned_checkpoint_is_measured_and_the_best_is_kept() {
    let scene = Scene::new();
    scene.dpo();
    // So fast that it gets worse.
    let settings = ["run.save_every=3", "run.eval_every=5", "run.keep_last=1", "learner.learning_rate=0.3"];
    let settings: Vec<&str> = settings.iter().flat_map(|setting| ["--set", *setting]).collect();
    scene.aligner(&[&["train", "run.toml"][..], &settings].concat()).succeeds();
    let text = scene.read("run/metrics.jsonl");
    let records = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let losses: Vec<(u64, f64)> = records
        .filter_map(|record| Some((record["step"].as_u64().unwrap(), record["eval/loss"].as_f64()?)))
        .collect();
    let steps: Vec<u64> = losses.iter().map(|(step, _)| *step).collect();
    assert_eq!(steps, [0, 3, 5, 6, 9, 10, 12]);
    let saved = losses.iter().filter(|(step, _)| *step > 0 && step.is_multiple_of(3));
    let (best, _) = saved.min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
    let kept = |step: u64| scene.path(&format!("run/checkpoints/step-{step:06}")).exists();
    for step in [3, 6, 9, 12] {
        assert_eq!(kept(step), step == *best || step == 12, "{step}: {losses:?}");
    }
}

#[test]
fn sft_and_the_reward_model_learn() {
    let scene = Scene::new();
    scene.sft();
    scene.aligner(&["train", "run.toml"]).succeeds();
    scene.run_file("pairs.jsonl", "reward_model", "");
    scene.aligner(&["train", "run.toml", "--set", "run.dir=scores"]).succeeds();
    for (run, name) in [("run", "eval/nll"), ("scores", "eval/loss")] {
        let text = scene.read(&format!("{run}/metrics.jsonl"));
        let values: Vec<f64> = text
            .lines()
            .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()[name].as_f64())
            .collect();
        assert!(values.len() == 2 && values[1] < 0.9 * values[0], "{run}: {values:?}");
    }
    for name in ["run", "scores"].iter().flat_map(|run| logged(&scene, run)) {
        let described = name.trim_end_matches("_stderr");
        assert!(aligner_core::metrics::describe(described).is_some(), "{described} is not in the dictionary");
    }
    let config: serde_json::Value = serde_json::from_str(&scene.read("scores/model/config.json")).unwrap();
    assert_eq!(config["architectures"][0], "LlamaForSequenceClassification");
}

#[test]
fn the_same_seed_gives_the_same_bytes_and_another_gives_others() {
    let scene = Scene::new();
    scene.sft();
    for (dir, seed) in [("one", "7"), ("two", "7"), ("three", "8")] {
        let (dir, seed) = (format!("run.dir={dir}"), format!("run.seed={seed}"));
        scene.aligner(&["train", "run.toml", "--set", &dir, "--set", &seed]).succeeds();
    }
    let weights = ["one", "two", "three"].map(|dir| scene.bytes(&format!("{dir}/model/model.safetensors")));
    assert!(weights[0] == weights[1] && weights[0] != weights[2]);
}

#[test]
fn a_directory_with_a_run_is_not_overwritten_unless_told() {
    let scene = Scene::new();
    scene.sft();
    scene.aligner(&["train", "run.toml"]).succeeds();
    let weights = scene.bytes("run/model/model.safetensors");
    scene
        .aligner(&["train", "run.toml"])
        .fails(2, &["already holds a finished run", "--resume", "--overwrite"]);
    let other = ["train", "run.toml", "--resume", "--set", "run.steps=3"];
    scene.aligner(&other).fails(2, &["other settings", "run.steps was 12, is now 3"]);
    assert!(scene.bytes("run/model/model.safetensors") == weights);
    let text = scene.aligner(&["train", "run.toml", "--resume"]);
    assert!(text.succeeds().contains("run/report.html"), "a finished run says its results again");
    scene.aligner(&["train", "run.toml", "--overwrite", "--set", "run.steps=3"]).succeeds();
    assert!(scene.bytes("run/model/model.safetensors") != weights);
}

#[test]
fn a_checkpoint_is_a_model_to_start_from() {
    let scene = Scene::new();
    scene.sft();
    scene.aligner(&["train", "run.toml"]).succeeds();
    let from = ["--set", "model.path=run/checkpoints/step-000012", "--set", "run.dir=more"];
    scene.aligner(&[&["train", "run.toml"][..], &from].concat()).succeeds();
}
