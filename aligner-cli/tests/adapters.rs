//! Runs that train a low-rank adapter, and what is done with it.

mod scene;

use std::fs;
use std::process::Child;
use std::time::{Duration, Instant};

use aligner_core::weights::read_tensors;
use scene::{Scene, copy_dir, golden};
use serde_json::Value;

/// `[model.lora]` for a run file that is there.
fn with_lora(scene: &Scene, settings: &str) {
    let text = scene.read("run.toml");
    scene.write("run.toml", format!("{text}\n[model.lora]\n{settings}\n"));
}

/// Every linear, a rank of 4, and a rate at which so small a model learns in a few steps.
const ALL: &str = "r = 4\ntargets = \"all-linear\"\n";
const FAST: [&str; 2] = ["--set", "learner.learning_rate=2e-2"];

fn train<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&["train", "run.toml"][..], &FAST, more].concat()
}

fn records(scene: &Scene, run: &str) -> Vec<Value> {
    scene
        .read(&format!("{run}/metrics.jsonl"))
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn held_out(scene: &Scene, run: &str, name: &str) -> Vec<f64> {
    records(scene, run).iter().filter_map(|record| record[name].as_f64()).collect()
}

#[test]
fn fine_tuning_an_adapter_learns_and_leaves_the_base_as_it_is() {
    let scene = Scene::new();
    scene.sft();
    with_lora(&scene, ALL);
    let base = scene.bytes("model/model.safetensors");
    let call = scene.aligner(&train(&["--set", "run.save_every=6", "--set", "run.keep_last=9"]));
    let out = call.succeeds();
    assert!(out.contains("adapter run/model"), "{out}");
    for part in ["adapter: rank 4, alpha 8, on 14 linears", "parameters are trained ("] {
        assert!(call.stderr.contains(part), "no `{part}` in:\n{}", call.stderr);
    }
    let loss = held_out(&scene, "run", "eval/loss");
    assert!(loss.last().unwrap() < &(0.9 * loss[0]), "{loss:?}");
    assert!(scene.bytes("model/model.safetensors") == base);
    let moments =
        read_tensors(&scene.path("run/checkpoints/step-000006/trainer/optimizer.safetensors")).unwrap();
    assert_eq!(moments.len(), 14 * 2 * 2);
    assert!(moments.keys().all(|name| name.contains(".lora_")));
    for place in ["run/model", "run/checkpoints/step-000012"] {
        let names: Vec<String> = fs::read_dir(scene.path(place))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        for name in ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"] {
            assert!(names.contains(&name.to_string()), "{place}: {names:?}");
        }
        assert!(!names.iter().any(|name| ["config.json", "model.safetensors"].contains(&name.as_str())));
    }
    let config: Value = serde_json::from_str(&scene.read("run/model/adapter_config.json")).unwrap();
    assert_eq!((config["base_model_name_or_path"].as_str(), config["r"].as_u64()), (Some("model"), Some(4)));
    let resolved: toml::Table = scene.read("run/resolved.toml").parse().unwrap();
    assert_eq!(resolved["model"]["lora"]["alpha"].as_float(), Some(8.0), "defaults are written out");

    let answer = |arguments: &[&str]| {
        let call = scene.aligner(&[&["generate"], arguments, &["Say 3 in words.", "-n", "8"]].concat());
        call.succeeds().to_string()
    };
    let adapted = answer(&["model", "--adapter", "run/model"]);
    assert_eq!(adapted, answer(&["run/model"]), "an adapter's directory leads to its base");
    assert_ne!(adapted, answer(&["model"]));
    let small = scene.aligner(&["generate", "run/model", "Say 3.", "-n", "4", "--weights", "int8"]);
    small.succeeds();
    assert!(small.stderr.contains("log-probabilities differ by"), "{}", small.stderr);

    let loss_of = |arguments: &[&str]| {
        let call = scene.aligner(&[&["eval", "run.toml", "--json"], arguments].concat());
        serde_json::from_str::<Value>(call.succeeds()).unwrap()["loss"].as_f64().unwrap()
    };
    assert!((loss_of(&[]) - loss.last().unwrap()).abs() < 1e-6);
    assert!((loss_of(&["--adapter", "run/model"]) - loss.last().unwrap()).abs() < 1e-6);
    assert!((loss_of(&["--model", "model"]) - loss[0]).abs() < 1e-6);
    let shown = scene.aligner(&["inspect", "run.toml", "--adapter", "run/model"]);
    assert!(shown.succeeds().contains("model.layers.1.mlp.down_proj, 48 x 96"), "{}", shown.stdout);

    with_start(&scene, "run/model");
    scene.aligner(&train(&["--set", "run.dir=on"])).succeeds();
    let on = held_out(&scene, "on", "eval/loss");
    assert!((on[0] - loss.last().unwrap()).abs() < 1e-6, "it goes on from the adapter: {on:?}");
}

/// Puts an adapter to start from in the place of the settings.
fn with_start(scene: &Scene, path: &str) {
    let text = scene.read("run.toml");
    let base = text.split("\n[model.lora]").next().unwrap();
    scene.write("run.toml", format!("{base}\n[model.lora]\npath = \"{path}\"\n"));
}

#[test]
fn a_killed_run_of_an_adapter_ends_with_the_same_bytes() {
    let scene = Scene::new();
    scene.dpo();
    with_lora(&scene, "r = 4\ntargets = \"all-linear\"\ndropout = 0.2\n");
    let settings = ["--set", "run.steps=24", "--set", "run.save_every=4", "--set", "run.keep_last=1"];
    scene.aligner(&train(&[&settings[..], &["--set", "run.dir=whole"]].concat())).succeeds();
    let killed = train(&[&settings[..], &["--set", "run.dir=killed"]].concat());
    let mut child = scene.start(&killed);
    wait_for(&scene, &mut child, "killed/checkpoints/step-000008");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!scene.path("killed/model").exists(), "the run had ended before it was killed");
    let resumed = scene.aligner(&[&killed[..], &["--resume"]].concat());
    resumed.succeeds();
    assert!(resumed.stderr.contains("resuming from"), "{}", resumed.stderr);
    for file in ["model/adapter_model.safetensors", "checkpoints/step-000024/trainer/optimizer.safetensors"] {
        assert!(scene.bytes(&format!("whole/{file}")) == scene.bytes(&format!("killed/{file}")), "{file}");
    }
    let other = [&killed[..], &["--resume", "--set", "model.lora.r=8"]].concat();
    scene.aligner(&other).fails(2, &["other settings", "model.lora.r was 4, is now 8"]);
}

#[test]
fn preference_runs_start_at_the_base_without_a_second_model() {
    let scene = Scene::new();
    scene.dpo();
    with_lora(&scene, "targets = [\"q_proj\", \"v_proj\", \"o_proj\"]");
    let plan = scene.aligner(&["plan", "run.toml", "--measure"]);
    for part in
        ["adapter     ", "rank 8, alpha 8, on 6 linears: o_proj, q_proj, v_proj", "adapter 0 MB", "a step"]
    {
        assert!(plan.succeeds().contains(part), "no `{part}` in:\n{}", plan.stdout);
    }
    assert!(!plan.stdout.contains(", reference "), "{}", plan.stdout);
    // The preflight check that the loss is ln 2 is on.
    let call = scene.aligner(&train(&["--set", "run.steps=30"]));
    call.succeeds();
    assert!(call.stderr.contains("preflight in"), "{}", call.stderr);
    let loss = held_out(&scene, "run", "eval/loss");
    assert!((loss[0] - std::f64::consts::LN_2).abs() < 1e-6, "{loss:?}");
    assert!(loss.last().unwrap() < &0.6, "{loss:?}");
    // The same file of log-probabilities serves a run that trains the whole model.
    let full = ["--set", "reference.cache_file=run/reference.cache", "--set", "run.dir=full"];
    let text = scene.read("run.toml");
    scene.write("run.toml", text.split("\n[model.lora]").next().unwrap());
    let before = scene.bytes("run/reference.cache");
    scene.aligner(&[&["train", "run.toml", "--set", "run.steps=1"][..], &full].concat()).succeeds();
    assert!(scene.bytes("run/reference.cache") == before, "the base's values were there");
}

#[test]
fn a_killed_run_of_two_adapters_on_one_base_ends_with_the_same_bytes() {
    let scene = Scene::new();
    let rows: Vec<String> = (0..24).map(|row| format!("{{\"prompt\": \"Say {row} in words.\"}}\n")).collect();
    scene.write("prompts.jsonl", rows.concat());
    scene.run_file("prompts.jsonl", "ppo", "");
    let text = scene
        .read("run.toml")
        .replace("path = \"prompts.jsonl\"", "path = \"prompts.jsonl\"\nformat = \"prompt\"");
    let critic = "[critic.lora]\nr = 2\ndropout = 0.3\n\n[critic.learner]\nlearning_rate = 1e-2\n";
    let reward = "[reward.vowels]\nkind = \"regex\"\npattern = \"[aeiou]\"\nmode = \"count\"\n";
    let rollout = "[rollout]\nnum_generations = 2\nmax_completion_length = 12\n";
    scene.write("run.toml", format!("{text}\n{critic}\n{reward}\n{rollout}"));
    with_lora(&scene, "r = 4");
    let plan = scene.aligner(&["plan", "run.toml"]);
    assert!(plan.succeeds().contains("with an adapter on the policy's base"), "{}", plan.stdout);
    let settings = ["--set", "run.steps=10", "--set", "run.save_every=2", "--set", "run.keep_last=1"];
    scene.aligner(&train(&[&settings[..], &["--set", "run.dir=whole"]].concat())).succeeds();
    let killed = train(&[&settings[..], &["--set", "run.dir=killed"]].concat());
    let mut child = scene.start(&killed);
    wait_for(&scene, &mut child, "killed/checkpoints/step-000004");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!scene.path("killed/model").exists(), "the run had ended before it was killed");
    scene.aligner(&[&killed[..], &["--resume"]].concat()).succeeds();
    let trainer = "checkpoints/step-000010/trainer";
    for file in [
        "model/adapter_model.safetensors".to_string(),
        format!("{trainer}/optimizer.safetensors"),
        format!("{trainer}/critic/adapter_model.safetensors"),
        format!("{trainer}/critic/optimizer.safetensors"),
    ] {
        assert!(scene.bytes(&format!("whole/{file}")) == scene.bytes(&format!("killed/{file}")), "{file}");
    }
    let first = &records(&scene, "whole")[1];
    assert!(first["objective/kl"].as_f64().unwrap().abs() < 1e-5, "{first}");
}

/// Waits until the program, which goes on, has made a file.
fn wait_for(scene: &Scene, child: &mut Child, name: &str) {
    let started = Instant::now();
    while !scene.path(name).exists() {
        assert!(child.try_wait().unwrap().is_none(), "the run ended first");
        assert!(started.elapsed() < Duration::from_mins(2), "the run does not get there");
        std::thread::yield_now();
    }
}

#[test]
fn a_reward_model_s_head_is_trained_and_kept_beside_the_adapter() {
    let scene = Scene::new();
    scene.run_file("pairs.jsonl", "reward_model", "");
    with_lora(&scene, ALL);
    scene.aligner(&train(&["--set", "run.save_every=6", "--set", "run.keep_last=9"])).succeeds();
    let loss = held_out(&scene, "run", "eval/loss");
    assert!(loss.last().unwrap() < &(0.9 * loss[0]), "{loss:?}");
    let tensors = read_tensors(&scene.path("run/model/adapter_model.safetensors")).unwrap();
    assert_eq!(tensors["base_model.model.score.weight"].0, [1, 48]);
    let config: Value = serde_json::from_str(&scene.read("run/model/adapter_config.json")).unwrap();
    assert_eq!((&config["modules_to_save"][0], &config["task_type"]), (&"score".into(), &"SEQ_CLS".into()));
    let eval = scene.aligner(&["eval", "run.toml", "--json"]);
    let measured: Value = serde_json::from_str(eval.succeeds()).unwrap();
    assert!((measured["loss"].as_f64().unwrap() - loss.last().unwrap()).abs() < 1e-6);
    scene.aligner(&["generate", "run/model", "hi"]).fails(2, &["run/model: the model scores"]);
    // Back to step 6, and on from there.
    let weights = scene.bytes("run/model/adapter_model.safetensors");
    fs::remove_dir_all(scene.path("run/model")).unwrap();
    fs::remove_dir_all(scene.path("run/checkpoints/step-000012")).unwrap();
    scene.aligner(&train(&["--set", "run.save_every=6", "--set", "run.keep_last=9", "--resume"])).succeeds();
    assert!(scene.bytes("run/model/adapter_model.safetensors") == weights);
    scene.aligner(&["merge", "model", "run/model", "-o", "scorer"]).succeeds();
    let eval = scene.aligner(&["eval", "run.toml", "--json", "--model", "scorer"]);
    let merged: Value = serde_json::from_str(eval.succeeds()).unwrap();
    assert!((merged["loss"].as_f64().unwrap() - loss.last().unwrap()).abs() < 1e-4);
}

#[test]
fn a_merged_model_answers_as_base_and_adapter_do() {
    let scene = Scene::new();
    for name in ["lora_all_r3_rslora", "dora_qv_r4"] {
        copy_dir(&golden().join("lora").join(name), &scene.path(name));
        let out = format!("{name}.merged");
        let call = scene.aligner(&["merge", "model", name, "-o", &out]);
        let difference =
            call.succeeds().lines().find(|line| line.starts_with("difference")).unwrap().to_string();
        let largest: f64 = difference.split_whitespace().nth(1).unwrap().parse().unwrap();
        assert!(largest > 0.0 && largest < 1e-4, "{difference}");
        let answer = |arguments: &[&str]| {
            scene
                .aligner(&[&["generate"], arguments, &["Say it.", "-n", "16"]].concat())
                .succeeds()
                .to_string()
        };
        assert_eq!(answer(&[&out]), answer(&["model", "--adapter", name]));
        scene.aligner(&["merge", "model", name, "-o", &out]).fails(2, &["--output", "is there already"]);
        let half = format!("{name}.half");
        scene.aligner(&["merge", "model", name, "-o", &half, "--dtype", "bf16"]).succeeds();
        let sizes = [&out, &half].map(|dir| scene.bytes(&format!("{dir}/model.safetensors")).len());
        assert!(sizes[1] < sizes[0] * 6 / 10, "{sizes:?}");
        let strict = ["merge", "model", name, "-o", "strict", "--dtype", "bf16", "--limit", "1e-6"];
        scene.aligner(&strict).fails(1, &["nothing is written", "of the largest, more than 1e-6"]);
        assert!(!scene.path("strict").exists());
    }
}

#[test]
fn settings_of_an_adapter_that_cannot_work_are_named_with_their_place() {
    let scene = Scene::new();
    scene.sft();
    with_lora(&scene, "r = 4");
    for (setting, expected) in [
        ("model.lora.r=0", "`model.lora.r`: must be at least 1"),
        ("model.lora.alpha=-1", "`model.lora.alpha`: must be finite and above 0"),
        ("model.lora.dropout=1", "`model.lora.dropout`: must be at least 0 and below 1"),
        ("model.lora.targets=[]", "`model.lora.targets`: names no linear"),
        (
            "model.lora.targets=[\"q_proj\", \"v_prj\"]",
            "`v_prj` is the name of no linear of the model; did you mean `v_proj`?",
        ),
        ("model.lora.targets=[\"lm_head\"]", "the layers' linears alone take an adapter"),
        ("model.lora.targets=3", "expected a list of names, or \"all-linear\""),
        ("model.lora.rank=3", "unknown key `rank` in [model.lora]"),
        ("model.lora.path=absent", "`model.lora.path`: absent: no adapter_config.json there"),
    ] {
        for command in ["train", "plan"] {
            scene
                .aligner(&[command, "run.toml", "--set", setting])
                .fails(2, &[&format!("--set {setting}: "), expected]);
        }
        assert!(!scene.path("run").exists());
    }
    copy_dir(&golden().join("lora/lora_qv_r4"), &scene.path("adapter"));
    let both = ["train", "run.toml", "--set", "model.lora.path=adapter"];
    scene.aligner(&both).fails(2, &["`model.lora.r`: comes from the adapter that `path` names"]);
    let as_model = ["plan", "run.toml", "--set", "model.path=adapter"];
    scene.aligner(&as_model).fails(2, &["`model.path`: adapter: an adapter, where a model is expected"]);
}

#[test]
fn adapters_without_their_base_and_of_another_one_are_named() {
    let scene = Scene::new();
    copy_dir(&golden().join("lora/lora_qv_r4"), &scene.path("adapter"));
    copy_dir(&golden().join("models/llama_bias_mha"), &scene.path("other"));
    let parts = ["adapter: an adapter of `../models/llama_gqa_untied`", "--adapter"];
    scene.aligner(&["generate", "adapter", "hi"]).fails(2, &parts);
    let call = scene.aligner(&["generate", "other", "--adapter", "adapter", "hi"]);
    call.fails(1, &["adapter", "base_model.model.model.layers.0.self_attn.", "expected shape"]);
    scene
        .aligner(&["generate", "model", "--adapter", "model", "hi"])
        .fails(2, &["--adapter: model: no adapter_config.json"]);
    let config = scene.read("adapter/adapter_config.json").replace("\"bias\": \"none\"", "\"bias\": \"all\"");
    scene.write("adapter/adapter_config.json", config);
    let call = scene.aligner(&["merge", "model", "adapter", "-o", "out"]);
    call.fails(1, &["adapter_config.json", "bias: expected \"none\""]);
    let good = scene.bytes("adapter/adapter_model.safetensors");
    scene.write("adapter/adapter_model.safetensors", &good[..good.len() / 2]);
    scene.write(
        "adapter/adapter_config.json",
        scene.read("adapter/adapter_config.json").replace("\"all\"", "\"none\""),
    );
    scene
        .aligner(&["generate", "model", "--adapter", "adapter", "hi"])
        .fails(1, &["adapter_model.safetensors"]);
}

#[test]
fn a_base_in_few_bits_learns_resumes_and_merges_into_its_own_weights() {
    let scene = Scene::new();
    scene.sft();
    // The golden model's rows are 48 wide: whole blocks of nf4, and no whole groups of int8.
    with_lora(&scene, &format!("{ALL}base = \"nf4\"\n"));
    let call = scene.aligner(&train(&["--set", "run.save_every=6", "--set", "run.keep_last=9"]));
    call.succeeds();
    assert!(call.stderr.contains("base: 14 frozen weights of "), "{}", call.stderr);
    let loss = held_out(&scene, "run", "eval/loss");
    assert!(loss.last().unwrap() < &(0.9 * loss[0]), "{loss:?}");
    let weights = scene.bytes("run/model/adapter_model.safetensors");
    fs::remove_dir_all(scene.path("run/checkpoints/step-000012")).unwrap();
    fs::remove_dir_all(scene.path("run/model")).unwrap();
    scene.aligner(&train(&["--set", "run.save_every=6", "--set", "run.keep_last=9", "--resume"])).succeeds();
    assert!(scene.bytes("run/model/adapter_model.safetensors") == weights, "bit for bit");
    let other = train(&["--set", "model.lora.base=\"int8\"", "--resume"]);
    scene.aligner(&other).fails(2, &["model.lora.base was"]);
    let merged = scene.aligner(&["merge", "model", "run/model", "-o", "merged"]);
    merged.succeeds();
    assert!(merged.stderr.contains("trained on the base in nf4"), "{}", merged.stderr);
    // The same bits as in training; the base's own are near.
    let measured = |arguments: &[&str]| {
        let call = scene.aligner(&[&["eval", "run.toml", "--json"], arguments].concat());
        serde_json::from_str::<Value>(call.succeeds()).unwrap()["loss"].as_f64().unwrap()
    };
    assert!((measured(&[]) - loss.last().unwrap()).abs() < 1e-6);
    let of_merged = measured(&["--model", "merged"]);
    assert!((of_merged - loss.last().unwrap()).abs() < 0.3, "{of_merged} {loss:?}");
    let text = scene.read("run.toml").replace("base = \"nf4\"", "base = \"nf5\"");
    scene.write("run.toml", text);
    scene.aligner(&["plan", "run.toml"]).fails(2, &["nf5", "nf4"]);
}

#[test]
fn preference_and_reward_runs_on_a_base_in_few_bits_measure_against_the_same_bits() {
    let scene = Scene::new();
    scene.dpo();
    with_lora(&scene, &format!("{ALL}base = \"nf4\"\n"));
    let call = scene.aligner(&train(&[]));
    call.succeeds();
    // The first loss is checked to be ln 2: policy and reference read the same bits.
    assert!(call.stderr.contains("preflight in"), "{}", call.stderr);
    let loss = held_out(&scene, "run", "eval/loss");
    assert!(
        (loss[0] - std::f64::consts::LN_2).abs() < 1e-6 && loss.last().unwrap() < &(0.9 * loss[0]),
        "{loss:?}"
    );
    scene.run_file("pairs.jsonl", "reward_model", "");
    with_lora(&scene, &format!("{ALL}base = \"nf4\"\n"));
    scene.aligner(&train(&["--set", "run.dir=scores"])).succeeds();
    let loss = held_out(&scene, "scores", "eval/loss");
    assert!(loss.last().unwrap() < &(0.9 * loss[0]), "{loss:?}");
}

#[test]
fn modules_in_full_learn_beside_the_adapter_and_their_reference_is_the_base() {
    let scene = Scene::new();
    scene.dpo();
    with_lora(&scene, "r = 4\nmodules_to_save = [\"embed_tokens\", \"lm_head\"]\n");
    let settings = ["--set", "run.save_every=6", "--set", "run.keep_last=9"];
    let call = scene.aligner(&train(&settings));
    call.succeeds();
    assert!(call.stderr.contains("in full: embed_tokens, lm_head"), "{}", call.stderr);
    let loss = held_out(&scene, "run", "eval/loss");
    assert!(
        (loss[0] - std::f64::consts::LN_2).abs() < 1e-6 && loss.last().unwrap() < &(0.9 * loss[0]),
        "{loss:?}"
    );
    let tensors = read_tensors(&scene.path("run/model/adapter_model.safetensors")).unwrap();
    for name in ["lm_head.weight", "model.embed_tokens.weight"] {
        let base = &read_tensors(&scene.path("model/model.safetensors")).unwrap()[name];
        assert_ne!(&tensors[&format!("base_model.model.{name}")], base, "{name} has learned");
    }
    // A run that goes on has the base as it was for its reference, not what was saved of it.
    let weights = scene.bytes("run/model/adapter_model.safetensors");
    fs::remove_dir_all(scene.path("run/checkpoints/step-000012")).unwrap();
    fs::remove_dir_all(scene.path("run/model")).unwrap();
    fs::remove_file(scene.path("run/reference.cache")).unwrap();
    scene.aligner(&train(&[&settings[..], &["--resume"]].concat())).succeeds();
    assert!(scene.bytes("run/model/adapter_model.safetensors") == weights, "bit for bit");
    scene.aligner(&["merge", "model", "run/model", "-o", "merged"]).succeeds();
    let answer = |arguments: &[&str]| {
        let call = scene.aligner(&[&["generate"], arguments, &["Say 3 in words.", "-n", "8"]].concat());
        call.succeeds().to_string()
    };
    assert_eq!(answer(&["merged"]), answer(&["run/model"]));
    assert_ne!(answer(&["merged"]), answer(&["model"]));
    let text = scene.read("run.toml").replace("\"embed_tokens\", \"lm_head\"", "\"q_proj\"");
    scene.write("run.toml", text);
    scene.aligner(&["plan", "run.toml"]).fails(2, &["model.lora.modules_to_save", "not both"]);
}

#[test]
fn adapters_by_name_answer_the_lines_that_name_them() {
    let scene = Scene::new();
    for name in ["lora_all_r3_rslora", "dora_qv_r4"] {
        copy_dir(&golden().join("lora").join(name), &scene.path(name));
    }
    let named = ["--adapter", "a=lora_all_r3_rslora", "--adapter", "b=dora_qv_r4"];
    let lines = ["a", "b", "base"].map(|name| {
        format!("{{\"prompt\": \"Say it.\", \"adapter\": \"{name}\"}}\n{{\"prompt\": \"Say 3.\", \"adapter\": \"{name}\"}}\n")
    });
    scene.write("asked.jsonl", lines.concat());
    let out = ["--input", "asked.jsonl", "--output", "out.jsonl", "-n", "16"];
    scene.aligner(&[&["generate", "model"], &named[..], &out].concat()).succeeds();
    let answers: Vec<Value> =
        scene.read("out.jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let alone = |arguments: &[&str]| {
        scene
            .aligner(&[&["generate", "model"], arguments, &["Say it.", "-n", "16"]].concat())
            .succeeds()
            .to_string()
    };
    let (a, b) = (alone(&["--adapter", "lora_all_r3_rslora"]), alone(&["--adapter", "dora_qv_r4"]));
    for (at, own) in [(0, &a), (2, &b), (4, &alone(&[]))] {
        assert_eq!(&format!("{}\n", answers[at]["text"].as_str().unwrap()), own);
    }
    assert_eq!((answers[0]["adapter"].as_str(), answers[4]["adapter"].as_str()), (Some("a"), Some("base")));
    assert_eq!(alone(&named), a, "prompts without a name have the first");
    scene.write("asked.jsonl", "{\"prompt\": \"x\", \"adapter\": \"c\"}\n");
    scene
        .aligner(&[&["generate", "model"], &named[..], &out].concat())
        .fails(2, &["adapter `c`", "--adapter"]);
    scene.aligner(&["generate", "model", "--adapter", "a=x", "--adapter", "y"]).fails(2, &["not both"]);
    scene.aligner(&["chat", "model", "--adapter", "a=dora_qv_r4"]).fails(2, &["without a name"]);
}

#[test]
fn an_online_run_on_a_base_in_few_bits_draws_from_what_it_trains() {
    let scene = Scene::new();
    let rows: Vec<String> = (0..16).map(|row| format!("{{\"prompt\": \"Say {row} in words.\"}}\n")).collect();
    scene.write("prompts.jsonl", rows.concat());
    scene.run_file("prompts.jsonl", "ppo", "");
    let text = scene
        .read("run.toml")
        .replace("path = \"prompts.jsonl\"", "path = \"prompts.jsonl\"\nformat = \"prompt\"");
    let critic = "[critic.lora]\nr = 2\nbase = \"nf4\"\n\n[critic.learner]\nlearning_rate = 1e-2\n";
    let reward = "[reward.vowels]\nkind = \"regex\"\npattern = \"[aeiou]\"\nmode = \"count\"\n";
    let rollout = "[rollout]\nnum_generations = 2\nmax_completion_length = 12\n";
    scene.write("run.toml", format!("{text}\n{critic}\n{reward}\n{rollout}"));
    with_lora(&scene, &format!("{ALL}base = \"nf4\"\n"));
    let plan = scene.aligner(&["plan", "run.toml"]);
    assert!(plan.succeeds().contains("with an adapter on the policy's base"), "{}", plan.stdout);
    let apart = scene.aligner(&["plan", "run.toml", "--set", "critic.lora.base=\"f32\""]);
    assert!(!apart.succeeds().contains("on the policy's base"), "{}", apart.stdout);
    // The first step fails where a ratio of trainer to engine is farther from 1.
    let strict = ["--set", "run.steps=3", "--set", "rollout.max_ratio_error=1e-4"];
    scene.aligner(&train(&strict)).succeeds();
    let first = &records(&scene, "run")[1];
    assert!(first["objective/kl"].as_f64().unwrap().abs() < 1e-5, "{first}");
}
