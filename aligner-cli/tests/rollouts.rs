//! Runs that learn from their own samples: rewards from a run file and a program, kills, mistakes.

mod scene;

use std::fs;
use std::time::{Duration, Instant};

use scene::Scene;

/// Writes `run.toml`: six steps of an algorithm on prompts, rewarded by a pattern.
fn run_file(scene: &Scene, algorithm: &str, more: &str) {
    let reward = "[reward.vowels]\nkind = \"regex\"\npattern = \"[aeiou]\"\nmode = \"count\"\n";
    run_file_with(scene, algorithm, more, reward);
}

fn run_file_with(scene: &Scene, algorithm: &str, more: &str, reward: &str) {
    let defaults = [("num_generations", "3"), ("max_completion_length", "12")];
    let defaults: Vec<String> = (defaults.iter().filter(|(key, _)| !more.contains(key)))
        .map(|(key, value)| format!("{key} = {value}\n"))
        .collect();
    let defaults = defaults.concat();
    let rows: Vec<String> = (0..32).map(|row| format!("{{\"prompt\": \"Say {row} in words.\"}}\n")).collect();
    scene.write("prompts.jsonl", rows.concat());
    scene.write(
        "run.toml",
        format!(
            "[model]\npath = \"model\"\n\n[data.train]\npath = \"prompts.jsonl\"\nholdout = 4\n\n{algorithm}\n\n{reward}\n\
             [learner]\nlearning_rate = 1e-3\n\n[run]\ndir = \"run\"\nsteps = 6\nbatch_size = 3\nsave_every = 2\n\
             sample_prompts = 1\nsample_tokens = 8\nrollouts_every = 2\n\n\
             [rollout]\n{defaults}{more}\n"
        ),
    );
}

fn weights(scene: &Scene, run: &str) -> Vec<u8> {
    scene.bytes(&format!("{run}/model/model.safetensors"))
}

#[test]
fn every_algorithm_runs_from_a_file_and_leaves_what_a_reader_wants() {
    let scene = Scene::new();
    for algorithm in ["ppo", "rloo", "grpo", "reinforce", "rejection", "best_of_n_dpo"] {
        run_file(&scene, &format!("[algorithm.{algorithm}]"), "");
        scene.aligner(&["check-algorithm", "run.toml"]).succeeds();
        let plan = scene.aligner(&["plan", "run.toml"]);
        assert!(plan.succeeds().contains("3 prompts x 3 responses"), "{}", plan.stdout);
        let out = scene.aligner(&["train", "run.toml", "--overwrite"]);
        assert!(out.succeeds().contains("reward"), "{algorithm}: {}", out.stdout);
        let log = scene.read("run/metrics.jsonl");
        for name in [
            "\"reward\"",
            "rewards/vowels/mean",
            "completions/mean_length",
            "timing_s/generate",
            "eval/reward",
        ] {
            assert!(log.contains(name), "{algorithm}: no {name}");
        }
        let rollouts = scene.read("run/rollouts.jsonl");
        assert!(rollouts.contains("\"prompt\":\"Say ") && rollouts.contains("\"vowels\":"), "{rollouts}");
        assert!(scene.read("run/report.html").contains("Samples that were learned from"), "{algorithm}");
        assert_eq!(scene.read("run/scores.jsonl"), "", "the last checkpoint has all scores");
        let eval = scene.aligner(&["eval", "run.toml", "--json"]);
        let eval: serde_json::Value = serde_json::from_str(eval.succeeds()).unwrap();
        let last = log.lines().rfind(|line| line.contains("eval/reward")).unwrap();
        let last: serde_json::Value = serde_json::from_str(last).unwrap();
        assert_eq!(eval["reward"], last["eval/reward"], "{algorithm}: the same draws each time");
    }
}

#[test]
fn a_killed_run_ends_with_the_same_bits_and_asks_no_program_twice() {
    let scene = Scene::new();
    // Answers 0.5 a vowel, and notes each question.
    scene.write(
        "reward.py",
        "import json, sys, time\nfor line in sys.stdin:\n    row = json.loads(line)\n    \
         open('asked.txt', 'a').write(json.dumps([row['prompt'], row['response']]) + '\\n')\n    time.sleep(0.01)\n    \
         print(json.dumps({'id': row['id'], 'score': 0.5 * sum(row['response'].count(v) for v in 'aeiou')}), flush=True)\n",
    );
    let reward = "[reward.program]\nkind = \"process\"\ncommand = [\"python3\", \"reward.py\"]\n";
    for (name, algorithm, more) in [
        ("grpo", "[algorithm.grpo]\nbeta = 0.01", "oversampling = 2"),
        ("ppo", "[algorithm.ppo]\n[critic.learner]\nlearning_rate = 1e-3", "max_staleness = 1"),
    ] {
        run_file_with(&scene, algorithm, more, reward);
        let whole = format!("run.dir={name}_whole");
        scene.aligner(&["train", "run.toml", "--set", &whole]).succeeds();
        let questions = |scene: &Scene| {
            let mut lines: Vec<String> = scene.read("asked.txt").lines().map(str::to_owned).collect();
            lines.sort();
            lines
        };
        let asked = questions(&scene);
        fs::remove_file(scene.path("asked.txt")).unwrap();
        let killed = format!("run.dir={name}_killed");
        let started = Instant::now();
        let log = scene.path(&format!("{name}_killed/scores.jsonl"));
        for kills in 0..6 {
            let more: &[&str] = if kills == 0 { &[] } else { &["--resume"] };
            let mut child = scene.start(&[&["train", "run.toml", "--set", &killed][..], more].concat());
            // In the middle of generation: some groups are scored, and no checkpoint has them.
            let before = fs::metadata(&log).map_or(0, |file| file.len());
            while child.try_wait().unwrap().is_none() {
                if fs::metadata(&log).is_ok_and(|file| file.len() > before + 200) {
                    break;
                }
                assert!(started.elapsed() < Duration::from_mins(3), "the run does not get there");
                std::thread::sleep(Duration::from_millis(1));
            }
            let _ = child.kill();
            child.wait().unwrap();
        }
        scene.aligner(&["train", "run.toml", "--set", &killed, "--resume"]).succeeds();
        assert!(
            weights(&scene, &format!("{name}_whole")) == weights(&scene, &format!("{name}_killed")),
            "{name}"
        );
        // A question that was on its way when the program died has no answer on record, and is asked again.
        let mut again = questions(&scene);
        again.dedup();
        let mut once = asked;
        once.dedup();
        assert_eq!(again, once, "{name}");
        fs::remove_file(scene.path("asked.txt")).unwrap();
    }
}

#[test]
fn one_core_is_enough_for_drawing_beside_learning() {
    let scene = Scene::new();
    run_file(&scene, "[algorithm.grpo]", "max_staleness = 1");
    let one = [("RAYON_NUM_THREADS", "1")];
    scene.aligner_with(&one, &["train", "run.toml"]).succeeds();
}

#[test]
fn tasks_are_asked_and_graded() {
    let scene = Scene::new();
    run_file(&scene, "[algorithm.grpo]", "");
    let text = scene.read("run.toml").replace(
        "path = \"prompts.jsonl\"\nholdout = 4",
        "task = { kind = \"chain_sum\" }\nlimit = 40\nholdout = 5\nraw_text = true",
    );
    scene.write(
        "run.toml",
        text.replace(
            "[reward.vowels]\nkind = \"regex\"\npattern = \"[aeiou]\"\nmode = \"count\"",
            "[reward.task]",
        ),
    );
    scene.aligner(&["train", "run.toml"]).succeeds();
    let log = scene.read("run/metrics.jsonl");
    assert!(log.contains("rewards/task/mean"), "{log}");
    assert!(scene.read("run/rollouts.jsonl").contains("State the final answer"), "the question is shown");
}

#[test]
fn an_adapter_learns_and_the_base_is_its_reference() {
    let scene = Scene::new();
    run_file(&scene, "[algorithm.ppo]\n\n[critic.lora]\nr = 2", "");
    let text = scene.read("run.toml").replace("path = \"model\"", "path = \"model\"\n[model.lora]\nr = 2");
    scene.write("run.toml", text);
    scene.aligner(&["train", "run.toml"]).succeeds();
    assert!(scene.path("run/model/adapter_model.safetensors").exists());
    assert!(scene.path("run/checkpoints/step-000006/trainer/critic/adapter_model.safetensors").exists());
    let first = scene.read("run/metrics.jsonl");
    let first = first.lines().find(|line| line.contains("\"step\":1,")).expect("a first step");
    let kl = serde_json::from_str::<serde_json::Value>(first).unwrap()["objective/kl"].as_f64().unwrap();
    assert!(kl.abs() < 1e-5, "{kl}");
}

#[test]
fn mistakes_are_told_with_their_places() {
    let scene = Scene::new();
    let with = |algorithm: &str, more: &str, reward: &str| {
        run_file_with(&scene, algorithm, more, reward);
        scene.aligner(&["train", "run.toml", "--overwrite"])
    };
    let regex = "[reward.regex]\npattern = \"a\"\n";
    with("[algorithm.grpo]", "", "").fails(2, &["`grpo` learns from the rewards", "[reward.regex]"]);
    with("[algorithm.grpo]", "", "[reward.mine]\nkind = \"regexp\"\n").fails(2, &["regexp", "`regex`"]);
    with("[algorithm.grpo]", "", "[reward.regex]\npatern = \"a\"\n").fails(2, &["patern", "`pattern`"]);
    with("[algorithm.grpo]", "", "[reward.regex]\npattern = \"(\"\n").fails(2, &["reward.regex.pattern"]);
    with("[algorithm.grpo]", "temperature = 0.0", regex).fails(2, &["rollout.temperature"]);
    with("[algorithm.grpo]", "top_p = 0.9", regex).fails(2, &["rollout.top_p", "importance"]);
    with("[algorithm.grpo]", "adaptive_kl = {}", regex).fails(2, &["rollout.adaptive_kl", "`grpo`"]);
    with("[algorithm.grpo]", "max_completion_length = 100000", regex)
        .fails(2, &["rollout.max_completion_length"]);
    with("[algorithm.dpo]", "", regex).fails(2, &["`dpo` draws no samples"]);
    with("[algorithm.rloo]", "num_generations = 1", regex).fails(1, &["prompts.jsonl:"]);
    for (kind, settings) in [
        ("lexicon", ""),
        ("regex", "pattern = \"a\""),
        ("answer", ""),
        ("json_schema", "schema = { type = \"object\" }"),
        ("format", "checks = [{ kind = \"no_comma\" }]"),
        ("length", "target = 7"),
        ("task", ""),
        ("process", "command = [\"true\"]"),
        ("remote", "url = \"http://localhost:1\""),
        ("model", "path = \"model\""),
    ] {
        let section = format!("[reward.mine]\nkind = \"{kind}\"\n{settings}\npatern = 1\n");
        with("[algorithm.grpo]", "", &section).fails(2, &["run.toml: 1 problem", "unknown key `patern`"]);
    }
    let model = "[reward.judge]\nkind = \"model\"\npath = \"model\"\n";
    with("[algorithm.grpo]", "", model).fails(1, &["scalar head"]);
    run_file(&scene, "[algorithm.grpo]", "");
    let pairs = scene.read("run.toml").replace("prompts.jsonl", "pairs.jsonl");
    scene.write("run.toml", pairs);
    scene
        .aligner(&["train", "run.toml", "--overwrite"])
        .fails(2, &["trains on prompts", "format = \"prompt\""]);
    let text = scene.read("run.toml").replace("holdout = 4", "holdout = 4\nformat = \"prompt\"");
    scene.write("run.toml", text);
    scene.aligner(&["train", "run.toml", "--overwrite"]).succeeds();
    scene.write("prompts.jsonl", "");
    run_file(&scene, "[algorithm.grpo]", "");
    scene.write("prompts.jsonl", "");
    scene.aligner(&["train", "run.toml", "--overwrite"]).fails(1, &["prompts.jsonl", "empty"]);
}
