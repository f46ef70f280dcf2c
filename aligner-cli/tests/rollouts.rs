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
        let report = scene.read("run/report.html");
        for heading in ["Signs of reward hacking", "Time of a step", "Samples that were learned from"] {
            assert!(report.contains(heading), "{algorithm}: no {heading}");
        }
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
    let resolved = scene.read("run/resolved.toml");
    let critic = resolved.split_once("[critic.lora]").expect("a section").1;
    assert!(critic.contains("alpha = 8.0") && critic.contains("q_proj"), "every default: {resolved}");
    let first = scene.read("run/metrics.jsonl");
    let first = first.lines().find(|line| line.contains("\"step\":1,")).expect("a first step");
    let kl = serde_json::from_str::<serde_json::Value>(first).unwrap()["objective/kl"].as_f64().unwrap();
    assert!(kl.abs() < 1e-5, "{kl}");
}

#[test]
fn warnings_are_told_once_logged_at_each_step_and_end_a_run_where_that_is_asked() {
    let scene = Scene::new();
    // Responses are always longer than a tenth of the first ones.
    run_file(&scene, "[algorithm.grpo]\n[warnings]\nwindow = 2\nlength = 0.1\nstop = [\"length\"]", "");
    scene.aligner(&["train", "run.toml"]).fails(1, &["step 4: responses are", "warnings.stop"]);
    let marked = |scene: &Scene| scene.read("run/metrics.jsonl").matches("\"warnings/length\":1.0").count();
    assert_eq!(marked(&scene), 1);
    assert!(scene.path("run/checkpoints/step-000004").exists(), "nothing is lost");
    let report = scene.read("run/report.html");
    assert!(report.contains("<b>step 4</b> responses are") && report.contains("4 of 6 steps"), "{report}");
    let resumed = scene.aligner(&["train", "run.toml", "--resume", "--set", "warnings.stop=[]"]);
    resumed.succeeds();
    assert_eq!(marked(&scene), 3, "steps 4, 5 and 6");
    assert!(!resumed.stderr.contains("responses are"), "told before: {}", resumed.stderr);
    assert_eq!(scene.read("run/report.html").matches("<b>step 4</b>").count(), 1);
}

#[test]
fn a_judge_is_logged_and_changes_nothing() {
    let scene = Scene::new();
    run_file(&scene, "[algorithm.grpo]", "");
    scene.aligner(&["train", "run.toml", "--set", "run.dir=alone"]).succeeds();
    let judged = scene
        .read("run.toml")
        .replace("[learner]", "[reward.strict]\nkind = \"regex\"\npattern = \"e\"\nweight = 0\n\n[learner]");
    scene.write("run.toml", judged);
    scene.aligner(&["train", "run.toml"]).succeeds();
    assert!(weights(&scene, "run") == weights(&scene, "alone"));
    let log = scene.read("run/metrics.jsonl");
    assert!(log.contains("\"rewards/strict/mean\"") && log.contains("\"eval/rewards/strict/mean\""), "{log}");
    assert!(scene.read("run/report.html").contains("<b>rewards/strict/mean</b>"));
    scene
        .aligner(&["train", "run.toml", "--set", "reward.vowels.weight=0", "--overwrite"])
        .fails(2, &["every weight is 0"]);
}

/// A program that scores with a secret and a file beside it.
const SECRETIVE: &str = "import json, os, sys\nassert os.environ['TOKEN']\nfor line in sys.stdin:\n    \
    print(json.dumps({'id': json.loads(line)['id'], 'score': 1}), flush=True)\n";

#[test]
fn secrets_of_rewards_are_not_written_and_may_change() {
    let scene = Scene::new();
    scene.write("reward.py", SECRETIVE);
    let with = |more: &str| {
        let reward = "[reward.program]\nkind = \"process\"\ncommand = [\"python3\", \"reward.py\"]\n";
        run_file_with(&scene, "[algorithm.grpo]", "", &format!("{reward}{more}\n"));
    };
    with("env = { TOKEN = \"sesame\" }");
    scene.aligner(&["train", "run.toml", "--set", "run.steps=2"]).succeeds();
    for file in ["resolved.toml", "report.html", "run.json"] {
        let text = scene.read(&format!("run/{file}"));
        assert!(!text.contains("sesame"), "{file}");
    }
    assert!(scene.read("run/resolved.toml").contains("env = [\"TOKEN\"]"));
    with("env = { TOKEN = \"another\" }");
    let resume = ["train", "run.toml", "--set", "run.steps=2", "--resume"];
    scene.aligner(&resume).succeeds();
    with("");
    scene.aligner(&resume).fails(2, &["reward.program.env was [\"TOKEN\"], is now unset"]);
}

#[test]
fn a_run_does_not_go_on_with_other_files_of_its_rewards() {
    let scene = Scene::new();
    scene.write("reward.py", SECRETIVE);
    scene.write("words.txt", "one");
    scene.write("schema.json", "{\"type\": \"object\"}");
    let reward = "[reward.program]\nkind = \"process\"\ncommand = [\"python3\", \"-u\", \"reward.py\"]\n\
        env = { TOKEN = \"sesame\" }\nfiles = [\"words.txt\"]\n\n[reward.json_schema]\nschema_file = \"schema.json\"\n";
    run_file_with(&scene, "[algorithm.grpo]", "", reward);
    scene.aligner(&["train", "run.toml", "--set", "run.steps=2"]).succeeds();
    for file in ["reward.py", "words.txt", "schema.json"] {
        let before = scene.read(file);
        scene.write(file, format!("{before} "));
        let resumed = scene.aligner(&["train", "run.toml", "--set", "run.steps=2", "--resume"]);
        resumed.fails(2, &[file, "no longer those that it was begun with"]);
        scene.write(file, before);
    }
    scene.aligner(&["train", "run.toml", "--set", "run.steps=2", "--resume"]).succeeds();
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
    with("[algorithm.grpo]", "\n[warnings]\nstop = [\"judge\"]", regex)
        .fails(2, &["warnings.stop", "no judge"]);
    with("[algorithm.grpo]", "\n[warnings]\nstop = [\"lenght\"]", regex).fails(2, &["lenght", "length"]);
    with("[algorithm.grpo]", "\n[warnings]\nwindow = 1", regex).fails(2, &["warnings.window"]);
    let missing = "[reward.regex]\npattern = \"a\"\nfiles = [\"absent.txt\"]\n";
    with("[algorithm.grpo]", "", missing).fails(2, &["absent.txt: no such file"]);
    let unset = "[reward.remote]\nurl = \"http://localhost:1\"\nheaders_from_env = { Authorization = \"NOT_SET_HERE\" }\n";
    with("[algorithm.grpo]", "", unset).fails(2, &["headers_from_env.Authorization", "NOT_SET_HERE"]);
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
