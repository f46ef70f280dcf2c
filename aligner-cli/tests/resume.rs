//! A run that is killed and resumed ends with the weights of an undisturbed run, bit for bit.

mod scene;

use std::fs;
use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use scene::Scene;

const SIGKILL: i32 = 9;

const SETTINGS: [&str; 8] = [
    "--set",
    "run.steps=30",
    "--set",
    "run.save_every=4",
    "--set",
    "run.eval_every=10",
    "--set",
    "run.keep_last=1",
];

fn train<'a>(dir: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["train", "run.toml", "--set", dir][..], &SETTINGS, more].concat()
}

/// Waits until `ready`, which comes before the end of the program.
#[track_caller]
fn wait(child: &mut Child, mut ready: impl FnMut() -> bool) {
    let started = Instant::now();
    while !ready() {
        assert!(child.try_wait().expect("a child").is_none(), "the run ended first");
        assert!(started.elapsed() < Duration::from_mins(2), "the run does not get there");
        std::thread::yield_now();
    }
}

/// Kills the program, and says whether it was still running.
fn kill(child: &mut Child) -> bool {
    child.kill().expect("a child");
    child.wait().expect("a child").signal() == Some(SIGKILL)
}

/// The highest step in a log of metrics.
fn steps(log: &Path) -> usize {
    let text = fs::read_to_string(log).unwrap_or_default();
    text.lines().filter(|line| line.contains("\"grad_norm\"")).count()
}

fn partial(checkpoints: &Path) -> bool {
    let Ok(entries) = fs::read_dir(checkpoints) else { return false };
    entries.flatten().any(|entry| entry.file_name().to_string_lossy().ends_with(".partial"))
}

#[track_caller]
fn assert_same_weights(scene: &Scene, run: &str) {
    for file in ["model/model.safetensors", "checkpoints/step-000030/trainer/optimizer.safetensors"] {
        assert!(
            scene.bytes(&format!("whole/{file}")) == scene.bytes(&format!("{run}/{file}")),
            "{run}: {file} differs"
        );
    }
    let losses = |run: &str| {
        let text = scene.read(&format!("{run}/metrics.jsonl"));
        let values: Vec<(u64, Option<f64>, Option<f64>)> = text
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"))
            .map(|line| {
                (line["step"].as_u64().expect("a step"), line["loss"].as_f64(), line["eval/loss"].as_f64())
            })
            .collect();
        values
    };
    assert_eq!(losses("whole"), losses(run), "the log goes on without a gap or a repeat");
}

#[test]
fn kills_at_several_points_change_nothing() {
    let scene = Scene::new();
    scene.dpo();
    scene.aligner(&train("run.dir=whole", &[])).succeeds();
    // Before the first checkpoint, between checkpoints, and shortly before the end.
    let mut child = scene.start(&train("run.dir=killed", &[]));
    for kill_after in [2, 6, 13, 22, 27] {
        let log = scene.path("killed/metrics.jsonl");
        wait(&mut child, || steps(&log) >= kill_after);
        assert!(kill(&mut child), "the run ended before it was killed after step {kill_after}");
        child = scene.start(&train("run.dir=killed", &["--resume"]));
    }
    assert!(child.wait().expect("a child").success());
    assert_same_weights(&scene, "killed");
}

#[test]
fn a_kill_while_a_checkpoint_is_written_changes_nothing() {
    let scene = Scene::new();
    scene.dpo();
    scene.aligner(&train("run.dir=whole", &[])).succeeds();
    let checkpoints = scene.path("torn/checkpoints");
    // The writing is short: an attempt may find that the kill came after it.
    let torn = (0..20).any(|_| {
        let mut child = scene.start(&train("run.dir=torn", &["--overwrite"]));
        wait(&mut child, || partial(&checkpoints));
        assert!(kill(&mut child), "the run ended before it was killed");
        partial(&checkpoints)
    });
    assert!(torn, "no kill came while a checkpoint was written");
    assert!(!scene.path("torn/model").exists(), "the run had not ended");
    scene.aligner(&train("run.dir=torn", &["--resume"])).succeeds();
    assert_same_weights(&scene, "torn");
    assert!(!partial(&checkpoints), "the torn checkpoint is gone");
}

#[test]
fn a_kill_at_a_random_moment_changes_nothing() {
    let scene = Scene::new();
    scene.dpo();
    let started = Instant::now();
    scene.aligner(&train("run.dir=whole", &[])).succeeds();
    let whole = started.elapsed();
    let nanos = || SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock after 1970").subsec_nanos();
    // A moment past the end of a run that was faster than the first is drawn again.
    let killed = (0..20).any(|_| {
        let moment = whole.mul_f64(f64::from(nanos()) / 1e9);
        let _ = writeln!(std::io::stderr(), "killed after {moment:?} of {whole:?}");
        let mut child = scene.start(&train("run.dir=random", &["--overwrite"]));
        std::thread::sleep(moment);
        kill(&mut child)
    });
    assert!(killed, "no run was killed before its end");
    scene.aligner(&train("run.dir=random", &["--resume"])).succeeds();
    assert_same_weights(&scene, "random");
}

#[test]
fn a_partial_checkpoint_and_a_torn_log_are_ignored() {
    let scene = Scene::new();
    scene.dpo();
    scene.aligner(&train("run.dir=whole", &[])).succeeds();
    let mut child = scene.start(&train("run.dir=planted", &[]));
    let first = scene.path("planted/checkpoints/step-000004");
    wait(&mut child, || first.exists());
    assert!(kill(&mut child), "the run ended before it was killed");
    let newest = scene.path("planted/checkpoints/.step-000029.partial");
    fs::create_dir(&newest).unwrap();
    fs::write(newest.join("model.safetensors"), b"half of it").unwrap();
    let log = scene.path("planted/metrics.jsonl");
    let mut text = fs::read_to_string(&log).unwrap();
    text.push_str("{\"step\":29,\"lo");
    fs::write(&log, text).unwrap();
    scene.aligner(&train("run.dir=planted", &["--resume"])).succeeds();
    assert_same_weights(&scene, "planted");
}

/// Whether this process was started with SIGHUP ignored, as under `nohup`: its children are, too.
fn hangups_are_ignored() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.is_none_or(|mask| u64::from_str_radix(mask.trim(), 16).is_ok_and(|mask| mask & 1 == 1))
}

#[test]
fn an_interrupt_saves_and_says_how_to_go_on() {
    let scene = Scene::new();
    scene.dpo();
    // A planned checkpoint is measured, so the undisturbed run must have as many.
    scene.aligner(&train("run.dir=whole", &["--set", "run.save_every=0"])).succeeds();
    for signal in ["-INT", "-TERM", "-HUP"] {
        if signal == "-HUP" && hangups_are_ignored() {
            let _ = writeln!(std::io::stderr(), "skipped: SIGHUP is ignored here");
            continue;
        }
        let stopped = format!("stopped{signal}");
        let dir = format!("run.dir={stopped}");
        let mut child = scene.start(&train(&dir, &["--set", "run.save_every=0"]));
        let log = scene.path(&format!("{stopped}/metrics.jsonl"));
        wait(&mut child, || steps(&log) >= 5);
        let killed = std::process::Command::new("kill").args([signal, &child.id().to_string()]).status();
        assert!(killed.expect("kill").success());
        assert_eq!(child.wait().expect("a child").code(), Some(130), "{signal}");
        let saved = fs::read_dir(scene.path(&format!("{stopped}/checkpoints"))).unwrap();
        assert_eq!(saved.flatten().count(), 1, "{signal}");
        scene.aligner(&train(&dir, &["--set", "run.save_every=0", "--resume"])).succeeds();
        assert_same_weights(&scene, &stopped);
    }
}

/// Puts a finished run back to where it was after step 4.
fn rewind(scene: &Scene, run: &str) {
    fs::remove_dir_all(scene.path(&format!("{run}/model"))).unwrap();
    for entry in fs::read_dir(scene.path(&format!("{run}/checkpoints"))).unwrap().flatten() {
        if entry.file_name() != "step-000004" {
            fs::remove_dir_all(entry.path()).unwrap();
        }
    }
}

#[test]
fn a_resumed_run_has_the_date_of_its_beginning() {
    let scene = Scene::new();
    scene.dpo();
    let dated = "{{ strftime_now('%A %d %B %Y') }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}\
                 {% if add_generation_prompt %}[assistant]{% endif %}";
    scene.write("model/chat_template.jinja", dated);
    let keep = ["--set", "run.keep_last=9"];
    let on = |day: &str, run: &str, more: &[&str]| {
        scene
            .aligner_with(&[("SOURCE_DATE_EPOCH", day)], &train(run, &[&keep[..], more].concat()))
            .succeeds();
    };
    on("0", "run.dir=whole", &[]);
    on("0", "run.dir=dated", &[]);
    rewind(&scene, "dated");
    on("1700000000", "run.dir=dated", &["--resume"]);
    assert_same_weights(&scene, "dated");
    on("1700000000", "run.dir=later", &[]);
    let weights = |run: &str| scene.bytes(&format!("{run}/model/model.safetensors"));
    assert!(weights("later") != weights("whole"), "the date is part of the prompts");
}

#[test]
fn a_run_whose_files_have_changed_is_not_resumed() {
    let scene = Scene::new();
    scene.dpo();
    scene.aligner(&["train", "run.toml", "--set", "run.save_every=4", "--set", "run.keep_last=9"]).succeeds();
    rewind(&scene, "run");
    let resume = ["train", "run.toml", "--resume", "--set", "run.save_every=4"];
    // The number of rows and the next one are the same.
    let rows = scene.read("pairs.jsonl");
    scene.write("pairs.jsonl", rows.replacen("never", "often", 1));
    scene.aligner(&resume).fails(2, &["pairs.jsonl has other content of the same length", "`--overwrite`"]);
    scene.write("pairs.jsonl", &rows);
    for (name, change) in [
        ("model/model.safetensors", "model/model.safetensors has other content of the same length"),
        ("model/tokenizer.json", "model/tokenizer.json had"),
    ] {
        let good = scene.bytes(name);
        let mut bad = good.clone();
        match name {
            "model/tokenizer.json" => bad.push(b'\n'),
            _ => *bad.last_mut().unwrap() ^= 1,
        }
        scene.write(name, &bad);
        scene.aligner(&resume).fails(2, &["no longer those that it was begun with", change]);
        scene.write(name, &good);
    }
    scene.write("model/chat_template.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}");
    scene.aligner(&resume).fails(2, &["model/chat_template.jinja was not there then"]);
    fs::remove_file(scene.path("model/chat_template.jinja")).unwrap();
    scene.aligner(&resume).succeeds();
}

#[test]
fn a_damaged_newest_checkpoint_comes_with_the_way_out() {
    let scene = Scene::new();
    scene.dpo();
    let settings = ["--set", "run.save_every=4", "--set", "run.keep_last=9"];
    scene.aligner(&[&["train", "run.toml"][..], &settings].concat()).succeeds();
    let resume = [&["train", "run.toml", "--resume"][..], &settings].concat();
    let weights = scene.bytes("run/model/model.safetensors");
    let newest = "run/checkpoints/step-000012";
    for file in ["model.safetensors", "trainer/optimizer.safetensors", "trainer/state.json"] {
        let path = format!("{newest}/{file}");
        let good = scene.bytes(&path);
        scene.write(&path, &good[..good.len() / 2]);
        let advice = format!("that of step 8 is whole: move {newest} away");
        scene.aligner(&resume).fails(1, &[file, &advice]);
        scene.write(&path, &good);
    }
    scene.write(&format!("{newest}/model.safetensors"), "");
    fs::rename(scene.path(newest), scene.path("run/damaged")).unwrap();
    scene.aligner(&resume).succeeds();
    assert!(weights == scene.bytes("run/model/model.safetensors"));
}

#[test]
fn the_number_type_of_the_final_model_may_change() {
    let scene = Scene::new();
    scene.dpo();
    scene.aligner(&["train", "run.toml"]).succeeds();
    let long = scene.bytes("run/model/model.safetensors").len();
    scene.aligner(&["train", "run.toml", "--resume", "--set", "run.save_dtype=bf16"]).succeeds();
    assert!(scene.bytes("run/model/model.safetensors").len() < long * 6 / 10);
}
