//! Bad files end in an error that names the file and the line, never in a panic.

use std::fs;
use std::path::PathBuf;

use aligner_data::{Dataset, DatasetConfig, Format};

use crate::scene::{bare_tokenizer, fixture, tokenizer};

struct File {
    _dir: tempfile::TempDir,
    path: PathBuf,
}

fn file(name: &str, content: impl AsRef<[u8]>) -> File {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    fs::write(&path, content).unwrap();
    File { _dir: dir, path }
}

fn fault(name: &str, content: impl AsRef<[u8]>) -> String {
    let file = file(name, content);
    Dataset::open(&DatasetConfig::new(&file.path), &tokenizer()).unwrap_err().to_string()
}

#[track_caller]
fn assert_says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "expected {part:?} in {message:?}");
    }
}

#[test]
fn a_missing_file_is_named() {
    let config = DatasetConfig::new("no/such/file.jsonl");
    let message = Dataset::open(&config, &tokenizer()).unwrap_err().to_string();
    assert_says(&message, &["no/such/file.jsonl"]);
}

#[test]
fn broken_json_lines_are_named_by_line() {
    assert_says(
        &fault("a.jsonl", "{\"text\": \"x\"}\n\n{\"text\": \"x\"\n"),
        &["a.jsonl:3: broken JSON", "column"],
    );
    assert_says(
        &fault("a.jsonl", "{\"text\": \"x\"}\n[1]\n"),
        &["a.jsonl:2: expected an object, got a list"],
    );
    assert_says(&fault("a.jsonl", "\"text\"\n"), &["a.jsonl:1: expected an object, got a text"]);
}

#[test]
fn bytes_that_are_not_utf8_are_named_by_line() {
    assert_says(
        &fault("a.jsonl", b"{\"text\": \"x\"}\n{\"text\": \"\xff\"}\n"),
        &["a.jsonl:2: not UTF-8", "byte 11"],
    );
    assert_says(&fault("a.txt", b"fine\n\xc3\x28\n"), &["a.txt:2: not UTF-8"]);
    assert_says(&fault("a.json", b"[\n{\"text\": \"\xff\"}]"), &["not UTF-8"]);
}

#[test]
fn broken_arrays_are_named_by_line() {
    assert_says(&fault("a.json", "[\n{\"text\": \"x\"},\n{\"text\" \"y\"}\n]"), &["a.json:3: broken JSON"]);
    assert_says(&fault("a.json", "[\n{\"text\": \"x\"}\n{\"text\": \"y\"}]"), &["a.json:3: broken JSON"]);
    assert_says(&fault("a.json", "[\n{\"text\": \"x\"},\n{\"text\": \"y"), &["a.json:3: broken JSON"]);
    assert_says(&fault("a.json", "[{\"text\": \"x\"}, 7]"), &["a.json:2: expected an object, got a number"]);
}

#[test]
fn brackets_nested_without_end_are_an_error() {
    let deep = format!("{{\"text\": {}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
    assert_says(&fault("a.jsonl", &deep), &["a.jsonl:1: broken JSON", "recursion"]);
    assert_says(&fault("a.json", format!("[{deep}]")), &["broken JSON", "recursion"]);
    assert_says(&fault("a.json", "[".repeat(100_000)), &["broken JSON"]);
}

#[test]
fn empty_data_sets_are_refused() {
    for (name, content) in [("a.jsonl", ""), ("a.jsonl", "\n \n"), ("a.json", "[ ]"), ("a.txt", "\n\n")] {
        assert_says(&fault(name, content), &[name, "the data set is empty"]);
    }
}

#[test]
fn rows_of_another_schema_are_named_by_line_and_key() {
    assert_says(
        &fault("a.jsonl", r#"{"question": "x", "answer": "y"}"#),
        &["a.jsonl:1", "`question`", "expected"],
    );
    let rows = "{\"prompt\": \"p\", \"completion\": \"c\"}\n{\"prompt\": \"p\"}\n";
    assert_says(&fault("a.jsonl", rows), &["a.jsonl:2: `completion` is missing"]);
    let rows = "{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\"}]}\n{\"messages\": \"hello\"}\n";
    assert_says(&fault("a.jsonl", rows), &["a.jsonl:2: `messages`: expected a list of turns, got a text"]);
    let config = DatasetConfig { format: Format::Preference, ..DatasetConfig::new(fixture("text.jsonl")) };
    let message = Dataset::open(&config, &tokenizer()).unwrap_err().to_string();
    assert_says(&message, &["text.jsonl:1: `chosen` is missing"]);
}

#[test]
fn a_sample_without_a_target_is_named() {
    let rows = r#"{"messages": [{"role": "user", "content": "a"}]}"#;
    assert_says(&fault("a.jsonl", rows), &["a.jsonl:1: ", "no turn to learn from"]);
    let rows = r#"{"messages": [{"role": "assistant", "content": "a", "loss_weight": 0}]}"#;
    assert_says(&fault("a.jsonl", rows), &["a.jsonl:1: ", "no turn to learn from"]);
    // A template that never says what the assistant says.
    let file = file("a.jsonl", r#"{"prompt": "p", "completion": "c"}"#);
    let silent = bare_tokenizer().with_template("{{ messages[0].content }}").unwrap();
    let dataset = Dataset::open(&DatasetConfig::new(&file.path), &silent).unwrap();
    assert_says(&dataset.group(0).unwrap_err().to_string(), &["a.jsonl:1: no target"]);
}

#[test]
fn a_conversation_without_a_template_says_so() {
    let dataset = Dataset::open(&DatasetConfig::new(fixture("messages.jsonl")), &bare_tokenizer()).unwrap();
    assert_says(&dataset.group(0).unwrap_err().to_string(), &["messages.jsonl:1", "chat template"]);
}

#[test]
fn a_template_that_refuses_a_row_is_reported_with_the_row() {
    let template = "{{ raise_exception('roles must alternate') }}";
    let tokenizer = bare_tokenizer().with_template(template).unwrap();
    let dataset = Dataset::open(&DatasetConfig::new(fixture("messages.jsonl")), &tokenizer).unwrap();
    assert_says(&dataset.group(1).unwrap_err().to_string(), &["messages.jsonl:2", "roles must alternate"]);
}

#[test]
fn truncated_and_altered_parquet_is_an_error() {
    let whole = fs::read(fixture("preference.parquet")).unwrap();
    for len in (0..whole.len()).step_by(97).chain([whole.len() - 1]) {
        let message = fault("a.parquet", &whole[..len]);
        assert_says(&message, &["a.parquet", "parquet"]);
    }
    // Whatever a changed byte does, it does not end the process.
    for at in (0..whole.len()).step_by(13) {
        let mut altered = whole.clone();
        altered[at] ^= 0x55;
        let file = file("a.parquet", &altered);
        if let Ok(dataset) = Dataset::open(&DatasetConfig::new(&file.path), &tokenizer()) {
            let _ = dataset.group(0);
        }
    }
}

#[test]
fn a_byte_order_mark_is_not_text() {
    let text = "\u{feff}{\"text\": \"x\"}\n";
    let lines = file("a.jsonl", text);
    assert_eq!(Dataset::open(&DatasetConfig::new(&lines.path), &tokenizer()).unwrap().len(), 1);
    let array = file("a.json", "\u{feff}[{\"text\": \"x\"}]");
    assert_eq!(Dataset::open(&DatasetConfig::new(&array.path), &tokenizer()).unwrap().len(), 1);
}
