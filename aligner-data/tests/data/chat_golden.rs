//! Chat templates against transformers: rendered text byte for byte, ids, masks and errors.
//!
//! Templates that may not be committed are taken from the golden set that `ALIGNER_GOLDEN` names, or
//! from `assets/trl`; what is committed of their cases is a hash of each expected value.

use std::fs;
use std::path::PathBuf;

use aligner_data::{Encoded, Message, RenderOptions, Target, Tokenizer};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::scene::{bare_tokenizer, golden, skip, workspace};

fn read_json(name: &str) -> Option<Value> {
    let path = golden().join("chat").join(name);
    let text = fs::read_to_string(path).ok()?;
    Some(serde_json::from_str(&text).unwrap())
}

fn template_source(name: &str) -> Option<String> {
    let folders: [PathBuf; 2] =
        [golden().join("chat/templates"), workspace().join("assets/trl/chat_templates")];
    folders.iter().find_map(|folder| fs::read_to_string(folder.join(format!("{name}.jinja"))).ok())
}

fn message(value: &Value) -> Message {
    let mut fields = value.as_object().unwrap().clone();
    let mut take = |key: &str| fields.shift_remove(key).unwrap().as_str().unwrap().to_owned();
    let mut message = Message::new(take("role"), take("content"));
    message.fields = fields;
    message
}

fn options(value: &Value) -> RenderOptions {
    let mut variables: Map<String, Value> = value.as_object().unwrap().clone();
    let add_generation_prompt = variables.shift_remove("add_generation_prompt") == Some(Value::Bool(true));
    let tools = variables.shift_remove("tools");
    RenderOptions { add_generation_prompt, tools, variables }
}

fn encode(tokenizer: &Tokenizer, conversations: &Value, case: &Value) -> aligner_core::Result<Encoded> {
    let turns = conversations[case["conversation"].as_str().unwrap()].as_array().unwrap();
    let messages: Vec<Message> = turns.iter().map(message).collect();
    let template = tokenizer.template().unwrap();
    // Without marks transformers gives no mask: there is none to compare.
    let target = if template.has_generation_marks() { Target::Assistant } else { Target::Nothing };
    template.encode_with(tokenizer, &messages, target, &options(&case["options"]))
}

fn hash(text: &str) -> Value {
    format!("{:x}", Sha256::digest(text.as_bytes())).into()
}

/// Whether the case's `key`, or the hash of it, is `got`; absent keys are not compared.
fn agrees(case: &Value, key: &str, got: &Value) -> bool {
    let as_hashed = got.as_str().map_or_else(|| got.to_string(), str::to_owned);
    let plain = case.get(key).is_none_or(|expected| expected == got);
    plain && case.get(format!("{key}_sha256")).is_none_or(|expected| *expected == hash(&as_hashed))
}

/// Runs every case whose template is at hand and returns how many ran.
fn run(conversations: &Value, cases: &[Value]) -> usize {
    let base = bare_tokenizer();
    let mut ran = 0;
    let mut skipped = 0;
    for case in cases {
        let name = case["template"].as_str().unwrap();
        let Some(source) = template_source(name) else {
            skipped += 1;
            continue;
        };
        let tokenizer = base.clone().with_template(&source).unwrap();
        let label = format!("{name}, {}, {}", case["conversation"], case["options"]);
        let result = encode(&tokenizer, conversations, case);
        ran += 1;
        if case.get("error").is_some() {
            assert!(result.is_err(), "{label}: expected an error, got {result:?}");
            continue;
        }
        let encoded = result.unwrap_or_else(|error| panic!("{label}: {error}"));
        assert!(
            agrees(case, "text", &encoded.text.clone().into()),
            "{label}: text\n{}\n{}",
            encoded.text,
            case["text"]
        );
        assert!(agrees(case, "input_ids", &encoded.tokens.into()), "{label}: ids");
        let mask: Value = encoded.mask.iter().map(|&learn| u8::from(learn)).collect();
        assert!(agrees(case, "assistant_mask", &mask), "{label}: mask\n{mask}\n{}", case["assistant_mask"]);
    }
    if skipped > 0 {
        skip(
            "chat cases",
            &format!("{skipped} cases have no template here; `cargo xtask assets` fetches them"),
        );
    }
    ran
}

#[test]
fn rendered_text_ids_and_masks_equal_those_of_transformers() {
    let file = read_json("cases.json").unwrap();
    let ran = run(&file["conversations"], file["cases"].as_array().unwrap());
    assert!(ran >= 74, "the four committed templates have 74 cases, {ran} ran");
}

#[test]
fn templates_of_the_trl_package_agree_by_hash() {
    let conversations = read_json("cases.json").unwrap()["conversations"].take();
    let Some(file) = read_json("hashed_cases.json") else {
        return skip("hashed chat cases", "the golden set has its cases in full");
    };
    let cases = file["cases"].as_array().unwrap();
    let ran = run(&conversations, cases);
    assert!(ran == 0 || ran == cases.len(), "{ran} of {} cases ran: some template is missing", cases.len());
}

/// The same text without marks must give the same mask by incremental rendering.
#[test]
fn incremental_rendering_finds_the_mask_that_marks_give() {
    let file = read_json("cases.json").unwrap();
    let source = template_source("chatml").unwrap();
    let bare = source.replace("{%- generation %}", "").replace("{%- endgeneration %}", "");
    assert_ne!(source, bare);
    let [marked, unmarked] = [&source, &bare].map(|source| bare_tokenizer().with_template(source).unwrap());
    let mut compared = 0;
    for turns in file["conversations"].as_object().unwrap().values() {
        let messages: Vec<Message> = turns.as_array().unwrap().iter().map(message).collect();
        let encode = |tokenizer: &Tokenizer| {
            tokenizer.template().unwrap().encode(tokenizer, &messages, Target::Assistant).unwrap()
        };
        let (by_marks, by_increments) = (encode(&marked), encode(&unmarked));
        assert_eq!(by_marks, by_increments);
        compared += by_marks.mask.iter().filter(|learn| **learn).count();
    }
    assert!(compared > 50, "only {compared} targets were compared");
}

#[test]
fn tokenizer_agrees_with_transformers_on_awkward_text() {
    let tokenizer = bare_tokenizer();
    let cases = read_json("bpe.json").unwrap();
    for case in cases.as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let ids = tokenizer.encode(text).unwrap();
        assert_eq!(Value::from(ids.clone()), case["ids"], "{text:?}");
        assert_eq!(tokenizer.decode_with_specials(&ids).unwrap(), case["decoded"], "{text:?}");
        assert_eq!(tokenizer.decode(&ids).unwrap(), case["decoded_skip_special"], "{text:?}");
    }
    assert!(cases.as_array().unwrap().len() >= 10);
}
