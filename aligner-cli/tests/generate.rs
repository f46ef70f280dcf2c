//! `aligner generate`: batches, files, sampling flags.

mod scene;

use scene::Scene;
use serde_json::Value;

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_file_of_prompts_becomes_a_file_of_answers_in_its_order() {
    let scene = Scene::new();
    let prompts = "{\"prompt\": \"one\"}\n\n{\"id\": \"b\", \"prompt\": \"two\", \"answer\": 3}\n";
    scene.write("prompts.jsonl", prompts);
    let call = scene.aligner(&[
        "generate",
        "model",
        "--input",
        "prompts.jsonl",
        "--output",
        "out.jsonl",
        "--n",
        "2",
        "--max-tokens",
        "5",
        "--logps",
        "-t",
        "1",
    ]);
    assert_eq!(call.succeeds(), "");
    assert!(call.stderr.contains("4/4 answers, 20 tokens"), "{}", call.stderr);
    let answers = lines(&scene.read("out.jsonl"));
    let keys: Vec<(&Value, &Value)> = answers.iter().map(|line| (&line["id"], &line["sample"])).collect();
    assert_eq!(format!("{keys:?}").matches("Number(1), Number").count(), 2);
    assert_eq!(keys[2].0, "b");
    for line in &answers {
        assert_eq!(line["tokens"].as_array().unwrap().len(), 5);
        assert_eq!(line["finish_reason"], "length");
        for logps in ["logps", "raw_logps"] {
            let logps = line[logps].as_array().unwrap();
            assert!(logps.len() == 5 && logps.iter().all(|logp| logp.as_f64().unwrap() < 0.0));
        }
    }
    assert_eq!(answers[0]["prompt"], "one");
    assert_ne!(answers[0]["tokens"], answers[1]["tokens"], "samples differ");
}

#[test]
fn a_batch_answers_as_the_terminal_does() {
    let scene = Scene::new();
    let aloud = scene.aligner(&["generate", "model", "one", "two", "--max-tokens", "6"]);
    scene
        .aligner_fed("one\ntwo\n", &["generate", "model", "--max-tokens", "6", "--output", "out.jsonl"])
        .succeeds();
    let answers = lines(&scene.read("out.jsonl"));
    let texts: Vec<&str> = answers.iter().map(|line| line["text"].as_str().unwrap()).collect();
    assert_eq!(aloud.succeeds(), texts.join("\n") + "\n");
}

#[test]
fn bad_lines_are_named_before_anything_runs() {
    let scene = Scene::new();
    for (line, parts) in [
        ("{\"prompt\": 3}", ["prompts.jsonl:2", "expected a string"]),
        ("{\"text\": \"a\"}", ["prompts.jsonl:2", "got neither"]),
        ("nonsense", ["prompts.jsonl:2", "expected ident"]),
        ("{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}", ["prompt 2", "no chat template"]),
    ] {
        scene.write("prompts.jsonl", format!("{{\"prompt\": \"one\"}}\n{line}\n"));
        let call = scene.aligner(&["generate", "model", "--input", "prompts.jsonl", "--output", "out.jsonl"]);
        assert!(call.code == Some(2) || call.code == Some(1), "{line}");
        call.fails(call.code.unwrap(), &parts);
        assert!(!scene.path("out.jsonl").exists());
    }
    scene.write("prompts.jsonl", b"{\"prompt\": \"\xff\"}");
    scene.aligner(&["generate", "model", "--input", "prompts.jsonl"]).fails(2, &["prompts.jsonl:1", "UTF-8"]);
    scene
        .aligner(&["generate", "model", "--input", "absent.jsonl"])
        .fails(2, &["absent.jsonl", "No such file"]);
}

#[test]
fn flags_out_of_range_are_named() {
    let scene = Scene::new();
    for (flag, value) in [
        ("--top-p", "1.5"),
        ("--min-p", "2"),
        ("--repetition-penalty", "0"),
        ("--temperature", "NaN"),
        ("--stop", ""),
        ("--logit-bias", "9999=1"),
        ("--logit-bias", "a"),
        ("--min-tokens", "1000"),
    ] {
        scene.aligner(&["generate", "model", "hi", flag, value]).fails(2, &[flag]);
    }
}

#[test]
fn a_stop_text_ends_an_answer_before_itself() {
    let scene = Scene::new();
    let call = scene.aligner(&["generate", "model", "one", "--max-tokens", "12"]);
    let whole = call.succeeds().trim_end_matches('\n');
    let middle = whole.char_indices().nth(whole.chars().count() / 2).unwrap().0;
    let stop = &whole[middle..];
    let first = whole.find(stop).unwrap();
    let call = scene.aligner(&["generate", "model", "one", "--max-tokens", "12", &format!("--stop={stop}")]);
    assert_eq!(call.succeeds(), format!("{}\n", &whole[..first]));
}

#[test]
fn guesses_and_a_small_cache_change_no_answer() {
    let scene = Scene::new();
    let with = |flags: &[&str]| {
        let base = ["generate", "model", "one two one two", "--max-tokens", "12"];
        scene.aligner(&[&base[..], flags].concat()).succeeds().to_string()
    };
    let plain = with(&[]);
    assert_eq!(with(&["--speculate", "3"]), plain);
    assert_eq!(with(&["--speculate", "3", "--draft-model", "model"]), plain);
    assert_eq!(with(&["--cache", "1MiB"]), plain);
}

#[test]
fn smaller_weights_tell_what_they_change() {
    let scene = Scene::new();
    for kind in ["bf16", "int8", "int4"] {
        let call = scene.aligner(&["generate", "model", "one", "--max-tokens", "2", "--weights", kind]);
        call.succeeds();
        let told = ["beside the model's own, made in", "log-probabilities differ by"];
        assert!(told.iter().all(|part| call.stderr.contains(part)), "{kind}: {}", call.stderr);
    }
}

#[test]
fn engine_flags_that_cannot_work_are_named() {
    let scene = Scene::new();
    for (flags, part) in [
        (&["--cache", "lots"][..], "expected a size as in `512MiB`"),
        (&["--cache", "1KiB"], "cache: too small for two pages"),
        (&["--weights", "int2"], "possible values: f32, bf16, int8, int4"),
        (&["--speculate", "2", "--draft-model", "nowhere"], "--draft-model"),
        (&["--draft-model", "model"], "--speculate"),
    ] {
        let call = scene.aligner(&[&["generate", "model", "one"], flags].concat());
        call.fails(2, &[part]);
    }
}
