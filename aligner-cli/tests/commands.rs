//! The commands beside `train` and `fetch`.

mod scene;

use std::time::{Duration, Instant};

use scene::Scene;

#[test]
fn version_and_help_come_at_once() {
    let scene = Scene::new();
    for flag in ["--version", "--help"] {
        let fastest = (0..10).map(|_| {
            let started = Instant::now();
            scene.aligner(&[flag]).succeeds();
            started.elapsed()
        });
        // The best of ten: others may be using the machine.
        let fastest = fastest.min().unwrap();
        assert!(fastest < Duration::from_millis(100), "{flag} took {fastest:?}");
    }
    assert!(scene.aligner(&["--version"]).succeeds().starts_with("aligner "));
}

#[test]
fn mistaken_arguments_have_their_own_exit_code() {
    let scene = Scene::new();
    scene.aligner(&["tran", "run.toml"]).fails(2, &["tran", "train"]);
    scene.aligner(&["generate", "absent", "hi"]).fails(2, &["absent: no such file or directory"]);
    scene
        .aligner(&["generate", "model", "hi", "--temperature", "-1"])
        .code
        .filter(|code| *code == 2)
        .unwrap();
}

#[test]
fn greedy_answers_are_the_same_from_arguments_and_from_lines() {
    let scene = Scene::new();
    let arguments = scene.aligner(&["generate", "model", "one", "two", "--max-tokens", "6"]);
    let lines = scene.aligner_fed("one\ntwo\n", &["generate", "model", "--max-tokens", "6"]);
    assert_eq!(arguments.succeeds(), lines.succeeds());
    assert!(!arguments.stdout.trim().is_empty());
}

#[test]
fn prompts_that_cannot_be_answered_are_named() {
    let scene = Scene::new();
    let call = scene.aligner_fed(b"one\n\xff\n", &["generate", "model", "--max-tokens", "2"]);
    call.fails(2, &["standard input:2: not UTF-8"]);
    scene.aligner(&["generate", "model", "", "--raw"]).fails(2, &["the prompt is empty"]);
}

#[test]
fn sampled_answers_follow_the_seed() {
    let scene = Scene::new();
    let sample = |seed: &str| {
        let call = scene.aligner(&["generate", "model", "hello", "-t", "1.0", "-n", "16", "--seed", seed]);
        call.succeeds().to_string()
    };
    assert_eq!(sample("1"), sample("1"));
    assert_ne!(sample("1"), sample("2"));
}

#[test]
fn a_model_that_scores_is_not_asked_to_write() {
    let scene = Scene::new();
    scene.run_file("pairs.jsonl", "reward_model", "");
    scene.aligner(&["train", "run.toml", "--set", "run.steps=1"]).succeeds();
    scene.aligner(&["generate", "run/model", "hi"]).fails(2, &["run/model: the model scores"]);
}

#[test]
fn eval_measures_the_start_and_then_what_was_trained() {
    let scene = Scene::new();
    scene.dpo();
    let start = scene.aligner(&["eval", "run.toml", "--json"]);
    let start: serde_json::Value = serde_json::from_str(start.succeeds()).unwrap();
    assert_eq!(start["rewards/accuracies"], 0.5);
    assert!(start["perplexity"].as_f64().unwrap() > 1.0 && start["loss_stderr"].is_number());
    scene.aligner(&["train", "run.toml"]).succeeds();
    let end = scene.aligner(&["eval", "run.toml", "--json"]);
    let end: serde_json::Value = serde_json::from_str(end.succeeds()).unwrap();
    assert!(end["loss"].as_f64() < start["loss"].as_f64());
    let text = scene.read("run/metrics.jsonl");
    let last: serde_json::Value = serde_json::from_str(text.lines().next_back().unwrap()).unwrap();
    assert!(
        (last["eval/loss"].as_f64().unwrap() - end["loss"].as_f64().unwrap()).abs() < 1e-6,
        "the run's own figure"
    );
    let table = scene.aligner(&["eval", "run.toml", "--model", "model"]);
    assert!(table.succeeds().contains("rewards/accuracies") && table.stdout.contains(" ± "));
}

#[test]
fn eval_without_held_out_rows_says_how_to_have_some() {
    let scene = Scene::new();
    scene.dpo();
    scene
        .aligner(&["eval", "run.toml", "--set", "data.train.holdout=0"])
        .fails(2, &["no row is held out", "data.train.holdout"]);
}

#[test]
fn inspect_marks_targets_and_shows_the_packing() {
    let scene = Scene::new();
    scene.dpo();
    let call = scene.aligner(&["inspect", "run.toml", "--row", "1", "--tokens"]);
    assert!(call.stdout.contains("family      llama\nparameters  0.07 M: "), "{}", call.stdout);
    let out = call.succeeds();
    for part in
        ["2 samples", "(chosen)", "(rejected)", "⟦", "continues", "predicts", "common prompt stored once"]
    {
        assert!(out.contains(part), "no `{part}` in:\n{out}");
    }
    let mixture = scene::golden().join("models/mixtral");
    let path = format!("model.path={}", mixture.display());
    let call = scene.aligner(&["inspect", "run.toml", "--set", &path, "--set", "model.tokenizer=model"]);
    let out = call.succeeds();
    assert!(out.contains("family      mixtral\nparameters  0.10 M, 0.07 M of them for a token"), "{out}");
    assert!(out.contains("which has 2 of 4 experts"), "{out}");
    scene
        .aligner(&["inspect", "run.toml", "--row", "999"])
        .fails(2, &["--row: the training data has 24 rows"]);
}

#[test]
fn plan_shows_batches_parameters_and_memory() {
    let scene = Scene::new();
    scene.dpo();
    let call = scene.aligner(&["plan", "run.toml", "--measure"]);
    let out = call.succeeds();
    for part in [
        "24 rows to train on, 8 held out",
        "4 groups",
        "12 steps = 2.00 epochs",
        "attention",
        "moments",
        "reference",
        "activations",
        "of keys and values while 2 sample prompts are answered",
        "a step",
    ] {
        assert!(out.contains(part), "no `{part}` in:\n{out}");
    }
    assert!(!scene.path("run").exists(), "a plan writes nothing");
}

#[test]
fn completions_are_scripts() {
    let scene = Scene::new();
    for shell in ["bash", "zsh", "fish"] {
        assert!(scene.aligner(&["completions", shell]).succeeds().contains("aligner"));
    }
}
