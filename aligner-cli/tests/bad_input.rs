//! Input that cannot be used: an error that names it, an exit code, and nothing overwritten.

mod scene;

use std::fs;

use scene::Scene;

/// Trains and expects a failure with `code`; the run's directory holds no model.
#[track_caller]
fn refuses(scene: &Scene, code: i32, parts: &[&str]) {
    scene.aligner(&["train", "run.toml"]).fails(code, parts);
    assert!(!scene.path("run/model").exists());
}

#[test]
fn a_missing_model_or_data_file() {
    let scene = Scene::new();
    scene.dpo();
    fs::remove_file(scene.path("pairs.jsonl")).unwrap();
    fs::remove_file(scene.path("model/model.safetensors")).unwrap();
    refuses(
        &scene,
        2,
        &[
            "2 problems",
            "run.toml:2:8: `model.path`",
            "model.safetensors",
            "`data.train.path`",
            "no such file",
        ],
    );
}

#[test]
fn a_model_without_a_tokenizer() {
    let scene = Scene::new();
    scene.dpo();
    fs::remove_file(scene.path("model/tokenizer.json")).unwrap();
    refuses(&scene, 2, &["run.toml:2:8", "neither tokenizer.json nor tokenizer.model"]);
}

#[test]
fn a_tokenizer_of_another_vocabulary() {
    let scene = Scene::new();
    scene.dpo();
    let config = scene.read("model/config.json").replace("\"vocab_size\": 320", "\"vocab_size\": 100");
    scene.write("model/config.json", config);
    refuses(&scene, 1, &["the tokenizer has token ids up to 319", "100"]);
}

#[test]
fn truncated_and_hostile_safetensors() {
    let scene = Scene::new();
    let good = scene.bytes("model/model.safetensors");
    let header = |json: &str| [&(json.len() as u64).to_le_bytes()[..], json.as_bytes(), &[0; 64]].concat();
    let hostile: [(&str, Vec<u8>); 7] = [
        ("truncated", good[..good.len() / 2].to_vec()),
        ("empty", Vec::new()),
        ("header length", [&u64::MAX.to_le_bytes()[..], b"{}"].concat()),
        ("offsets past the end", header(r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,99999]}}"#)),
        ("offsets backwards", header(r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[32,16]}}"#)),
        (
            "overlapping",
            header(
                r#"{"a":{"dtype":"F32","shape":[8],"data_offsets":[0,32]},"b":{"dtype":"F32","shape":[8],"data_offsets":[16,48]}}"#,
            ),
        ),
        (
            "absurd shape",
            header(r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,64]}}"#),
        ),
    ];
    for (name, bytes) in hostile {
        scene.write("model/model.safetensors", bytes);
        let call = scene.aligner(&["generate", "model", "hello"]);
        assert_eq!(call.code, Some(1), "{name}: {}", call.stderr);
        assert!(call.stderr.contains("model.safetensors"), "{name}: {}", call.stderr);
    }
}

#[test]
fn truncated_and_hostile_gguf() {
    let scene = Scene::new();
    let start = |tensors: u64, entries: u64| {
        [&b"GGUF"[..], &3u32.to_le_bytes(), &tensors.to_le_bytes(), &entries.to_le_bytes()].concat()
    };
    let huge_key = [start(0, 1), u64::MAX.to_le_bytes().to_vec()].concat();
    let hostile = [
        ("magic", b"GGML".to_vec()),
        ("empty", Vec::new()),
        ("counts", start(u64::MAX, u64::MAX)),
        ("key length", huge_key),
    ];
    for (name, bytes) in hostile {
        scene.write("bad.gguf", bytes);
        let call = scene.aligner(&["generate", "bad.gguf", "hello"]);
        assert_eq!(call.code, Some(1), "{name}: {}", call.stderr);
        assert!(call.stderr.contains("bad.gguf"), "{name}: {}", call.stderr);
    }
}

#[test]
fn rows_that_are_not_json_or_not_text_have_their_line() {
    let scene = Scene::new();
    scene.dpo();
    let good = scene.read("pairs.jsonl");
    scene.write("pairs.jsonl", format!("{good}{{\"prompt\": \n"));
    refuses(&scene, 1, &["pairs.jsonl:33"]);
    scene.write("pairs.jsonl", [good.as_bytes(), b"{\"prompt\": \"\xff\"}\n"].concat());
    refuses(&scene, 1, &["pairs.jsonl:33", "UTF-8"]);
}

#[test]
fn an_empty_data_set() {
    let scene = Scene::new();
    scene.dpo();
    scene.write("pairs.jsonl", "");
    refuses(&scene, 1, &["pairs.jsonl"]);
}

#[test]
fn rows_of_another_kind_than_the_algorithm_trains_on() {
    let scene = Scene::new();
    scene.run_file("texts.jsonl", "dpo", "");
    refuses(&scene, 2, &["run.toml:5:8", "`dpo` trains on preference pairs", "texts.jsonl"]);
}

#[test]
fn a_sample_without_a_target() {
    let scene = Scene::new();
    scene.sft();
    scene.write("texts.jsonl", "{\"text\": \"\"}\n{\"text\": \"why not\"}\n");
    let flags = ["--set", "data.train.holdout=0", "--set", "data.shuffle=false"];
    scene.aligner(&[&["train", "run.toml"][..], &flags].concat()).fails(1, &["texts.jsonl:1", "target"]);
}

#[test]
fn a_pair_of_equals() {
    let scene = Scene::new();
    scene.dpo();
    let good = scene.read("pairs.jsonl");
    scene.write(
        "pairs.jsonl",
        format!("{good}{{\"prompt\": \"why\", \"chosen\": \"so\", \"rejected\": \"so\"}}\n"),
    );
    refuses(&scene, 1, &["pairs.jsonl:33", "equal"]);
    scene.aligner(&["train", "run.toml", "--set", "data.train.equal_pairs=drop"]).succeeds();
}

#[test]
fn rows_longer_than_the_limit() {
    let scene = Scene::new();
    scene.sft();
    let long = "word ".repeat(400);
    let good = scene.read("texts.jsonl");
    scene.write("texts.jsonl", format!("{{\"prompt\": \"why\", \"completion\": \"{long}\"}}\n{good}"));
    let with = |overlong: &str| {
        let overlong = format!("data.train.overlong={overlong}");
        let settings = [
            "data.train.max_length=64",
            "data.train.holdout=0",
            "data.shuffle=false",
            "run.dir=run",
            &overlong,
        ];
        let flags = settings.iter().flat_map(|setting| ["--set", *setting]);
        let arguments: Vec<&str> = ["train", "run.toml", "--overwrite"].into_iter().chain(flags).collect();
        scene.aligner(&arguments)
    };
    with("error").fails(1, &["texts.jsonl:1", "64"]);
    let dropped = with("drop");
    dropped.succeeds();
    assert!(dropped.stderr.contains("dropped"), "{}", dropped.stderr);
    let cut = with("truncate");
    cut.succeeds();
    assert!(cut.stderr.contains("are cut"), "{}", cut.stderr);
}

#[test]
fn a_held_out_part_that_leaves_nothing() {
    let scene = Scene::new();
    scene.dpo();
    scene
        .aligner(&["train", "run.toml", "--set", "data.train.holdout=32"])
        .fails(2, &["--set data.train.holdout=32", "32 of 32"]);
}

/// Makes the first number of the model's weights NaN.
fn plant_a_nan(scene: &Scene) {
    let mut bytes = scene.bytes("model/model.safetensors");
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[8 + header..12 + header].copy_from_slice(&f32::NAN.to_le_bytes());
    scene.write("model/model.safetensors", bytes);
}

#[test]
fn weights_with_a_nan_are_named_before_the_first_step() {
    let scene = Scene::new();
    scene.dpo();
    plant_a_nan(&scene);
    refuses(&scene, 1, &["NaN"]);
    assert!(!scene.path("run/checkpoints").exists());
}

#[test]
fn weights_that_are_refused_do_not_cost_the_run_that_was_there() {
    let scene = Scene::new();
    scene.dpo();
    scene.aligner(&["train", "run.toml"]).succeeds();
    let names = ["run/model/model.safetensors", "run/metrics.jsonl", "run/resolved.toml"];
    let before = names.map(|name| scene.bytes(name));
    plant_a_nan(&scene);
    scene.aligner(&["train", "run.toml", "--overwrite"]).fails(1, &["NaN"]);
    assert!(before == names.map(|name| scene.bytes(name)));
    assert!(scene.path("run/checkpoints/step-000012").exists());
}

#[test]
fn a_full_disk_stops_the_run_and_keeps_the_earlier_checkpoint() {
    let scene = Scene::new();
    scene.dpo();
    scene.aligner(&["train", "run.toml", "--set", "run.save_every=4"]).succeeds();
    let names =
        ["run/checkpoints/step-000008/model.safetensors", "run/checkpoints/step-000012/model.safetensors"];
    let before = names.map(|name| scene.bytes(name));
    // A second run of the same settings, whose files may not grow beyond what its optimizer needs.
    let longer = ["train", "run.toml", "--set", "run.dir=second", "--set", "run.save_every=4"];
    let call = scene.aligner_with_little_disk(600, &longer);
    assert_eq!(call.code, Some(1), "{}", call.stderr);
    assert!(
        call.stderr.contains("second/checkpoints") && call.stderr.contains("optimizer.safetensors"),
        "{}",
        call.stderr
    );
    assert!(
        fs::read_dir(scene.path("second/checkpoints")).unwrap().next().is_none(),
        "no half checkpoint is left"
    );
    assert_eq!(before, names.map(|name| scene.bytes(name)));
    // With room again, the run goes on to the same weights.
    scene.aligner(&[&longer[..], &["--resume"]].concat()).succeeds();
    assert_eq!(scene.bytes("run/model/model.safetensors"), scene.bytes("second/model/model.safetensors"));
}

#[test]
fn a_late_row_without_a_target_is_found_before_the_first_step() {
    let scene = Scene::new();
    scene.sft();
    let rows = "{\"text\": \"why not\"}\n".repeat(40);
    scene.write("texts.jsonl", format!("{rows}{{\"text\": \"\"}}\n"));
    let flags = ["--set", "data.train.holdout=0", "--set", "data.shuffle=false"];
    let call = scene.aligner(&[&["train", "run.toml"][..], &flags].concat());
    call.fails(1, &["texts.jsonl:41", "target"]);
    assert!(!call.stderr.contains("step 1/"), "{}", call.stderr);
}

#[test]
fn a_reference_that_cannot_judge_the_model() {
    let scene = Scene::new();
    scene.dpo();
    scene::copy_dir(&scene.path("model"), &scene.path("small"));
    let config = scene.read("small/config.json").replace("\"vocab_size\": 320", "\"vocab_size\": 100");
    scene.write("small/config.json", config);
    let call = scene.aligner(&["train", "run.toml", "--set", "reference.path=small"]);
    call.fails(1, &["small", "not usable as the reference", "100 rows"]);
}

#[test]
fn a_model_in_the_run_s_own_directory_is_not_written_over() {
    let scene = Scene::new();
    scene.dpo();
    scene.aligner(&["train", "run.toml", "--set", "run.steps=1"]).succeeds();
    let before = scene.bytes("run/model/model.safetensors");
    let arguments = ["train", "run.toml", "--overwrite", "--set", "model.path=run/model"];
    scene.aligner(&arguments).fails(2, &["model.path", "copy it elsewhere"]);
    assert!(before == scene.bytes("run/model/model.safetensors"));
}

#[test]
fn a_directory_of_something_else_is_not_taken_for_a_run() {
    let scene = Scene::new();
    scene.dpo();
    scene::copy_dir(&scene.path("model"), &scene.path("run/model"));
    scene.write("run/resolved.toml", "[run]\n");
    scene.write("run/run.json", "{\"name\": \"of another program\"}");
    for flags in [&["--overwrite"][..], &["--resume"], &[]] {
        let call = scene.aligner(&[&["train", "run.toml"][..], flags].concat());
        call.fails(2, &["run: is not empty, and what it holds is no run"]);
    }
    assert_eq!(scene.bytes("run/model/model.safetensors"), scene.bytes("model/model.safetensors"));
}

#[test]
fn a_file_where_a_directory_of_the_run_must_be() {
    let scene = Scene::new();
    scene.dpo();
    fs::create_dir(scene.path("run")).unwrap();
    for name in ["checkpoints", "model"] {
        let path = format!("run/{name}");
        scene.write(&path, "");
        let call = scene.aligner(&["train", "run.toml"]);
        call.fails(2, &["run.toml:15:7: `run.dir`", &format!("{path}: expected a directory")]);
        fs::remove_file(scene.path(&path)).unwrap();
    }
}

#[test]
fn a_step_of_more_rows_than_there_are_and_a_warmup_without_end() {
    let scene = Scene::new();
    scene.dpo();
    let with = |command: &str, setting: &str| scene.aligner(&[command, "run.toml", "--set", setting]);
    for command in ["plan", "train"] {
        let place = "--set run.batch_size=25: `run.batch_size`";
        with(command, "run.batch_size=25").fails(2, &[place, "25 rows a step, but only 24 rows to train on"]);
        let place = "--set learner.warmup_steps=12: `learner.warmup_steps`";
        with(command, "learner.warmup_steps=12").fails(2, &[place, "12 steps of warmup in a run of 12"]);
    }
    assert!(!scene.path("run").exists());
    let rounded = with("plan", "learner.warmup_ratio=1.0");
    rounded.succeeds();
    assert!(rounded.stderr.contains("12 steps of warmup in a run of 12"), "{}", rounded.stderr);
}
