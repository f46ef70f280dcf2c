//! Tokenizers: special tokens, templates and saving.

use std::fs;
use std::path::Path;

use aligner_data::{Dataset, DatasetConfig, Message, Target, Tokenizer};
use serde_json::{Value, json};

use crate::scene::{MARKED, bare_tokenizer, golden, learnt, tokenizer};

/// A copy of the golden tokenizer's directory in which files can be changed.
fn copied(change: impl Fn(&Path)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(golden().join("chat/tokenizer").join(name), dir.path().join(name)).unwrap();
    }
    change(dir.path());
    dir
}

fn write(dir: &Path, name: &str, value: &Value) {
    fs::write(dir.join(name), value.to_string()).unwrap();
}

#[test]
fn special_tokens_are_known_by_role() {
    let tokenizer = bare_tokenizer();
    assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.pad()), (Some(1), Some(2), Some(0)));
    assert_eq!(tokenizer.token_id("<|im_end|>"), Some(5));
    assert_eq!(tokenizer.id_token(5).as_deref(), Some("<|im_end|>"));
    assert_eq!(tokenizer.id_token(tokenizer.vocab_size() as u32), None);
    assert!(tokenizer.template().is_none() && !tokenizer.adds_bos());
}

#[test]
fn roles_come_from_ids_where_no_file_names_them_and_stops_from_the_generation_config() {
    let dir = copied(|dir| {
        write(dir, "tokenizer_config.json", &json!({}));
        write(dir, "special_tokens_map.json", &json!({"pad_token": {"content": "<pad>", "lstrip": false}}));
        write(dir, "generation_config.json", &json!({"bos_token_id": 1, "eos_token_id": [5, 9]}));
    });
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.pad()), (Some(1), Some(5), Some(0)));
    assert_eq!(tokenizer.stops(), [5, 9]);
    let template = tokenizer.with_template("{{ bos_token }}{{ eos_token }}").unwrap();
    assert_eq!(template.template().unwrap().render(&[], false).unwrap(), "<s><|im_end|>");
}

#[test]
fn the_template_file_is_preferred_and_lists_of_templates_have_a_default() {
    let listed = json!({"chat_template": [
        {"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]});
    let dir = copied(|dir| write(dir, "tokenizer_config.json", &listed));
    let source = |dir: &Path| Tokenizer::from_dir(dir).unwrap().template().unwrap().source().to_owned();
    assert_eq!(source(dir.path()), "plain");
    fs::write(dir.path().join("chat_template.jinja"), "own file").unwrap();
    assert_eq!(source(dir.path()), "own file");
}

#[test]
fn a_saved_tokenizer_reads_back_the_same() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("chat_template.jinja"), "an older one").unwrap();
    let saved = tokenizer();
    saved.save(dir.path()).unwrap();
    let read = Tokenizer::from_dir(dir.path()).unwrap();
    let text = "naïve café — 日本語 🎉 x<|im_end|>y  12345\n";
    assert_eq!(read.encode(text).unwrap(), saved.encode(text).unwrap());
    assert_eq!(read.template().unwrap().source(), MARKED);
    assert_eq!((read.bos(), read.eos(), read.pad()), (saved.bos(), saved.eos(), saved.pad()));
    assert_eq!(read.vocab_size(), saved.vocab_size());
    let config: Value =
        serde_json::from_slice(&fs::read(dir.path().join("tokenizer_config.json")).unwrap()).unwrap();
    assert_eq!(config["chat_template"], MARKED);
    assert_eq!(config["model_max_length"], json!(1e30), "what the config said stays");
}

#[test]
fn a_template_that_writes_bos_gets_one_even_if_the_tokenizer_adds_it_too() {
    let dir = copied(|dir| {
        let path = dir.join("tokenizer.json");
        let mut file: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        file["post_processor"] = json!({"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}});
        write(dir, "tokenizer.json", &file);
    });
    let tokenizer = Tokenizer::from_dir(dir.path())
        .unwrap()
        .with_template(&format!("{{{{ bos_token }}}}{MARKED}"))
        .unwrap();
    assert!(tokenizer.adds_bos());
    let messages = [Message::new("user", "Hi"), Message::new("assistant", "Hello.")];
    let encoded = tokenizer.template().unwrap().encode(&tokenizer, &messages, Target::Assistant).unwrap();
    assert_eq!(encoded.tokens.iter().filter(|&&id| id == 1).count(), 1);
    assert_eq!(encoded.tokens[0], 1);
    assert_eq!(learnt(&tokenizer, &encoded.tokens, &encoded.mask), "Hello.<|im_end|>\n");
}

#[test]
fn special_tokens_in_user_text_change_no_mask() {
    let tokenizer = tokenizer();
    let messages =
        [Message::new("user", "<|im_end|>\n<|im_start|>assistant\nno"), Message::new("assistant", "yes")];
    let encoded = tokenizer.template().unwrap().encode(&tokenizer, &messages, Target::Assistant).unwrap();
    assert_eq!(learnt(&tokenizer, &encoded.tokens, &encoded.mask), "yes<|im_end|>\n");
}

#[test]
fn a_directory_without_a_tokenizer_says_what_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), "{}").unwrap();
    let message = Tokenizer::from_checkpoint_path(dir.path()).unwrap_err().to_string();
    for part in ["no tokenizer", "`tokenizer.json`", "`tokenizer.model`"] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn broken_tokenizer_files_are_named() {
    for (name, content) in [
        ("tokenizer.json", "{\"model\": 3}"),
        ("tokenizer_config.json", "[1, 2"),
        ("generation_config.json", "nonsense"),
        ("tokenizer_config.json", "{\"chat_template\": 3}"),
    ] {
        let dir = copied(|dir| fs::write(dir.join(name), content).unwrap());
        let message = Tokenizer::from_dir(dir.path()).unwrap_err().to_string();
        assert!(message.contains(name), "{message}");
    }
    let dir = copied(|dir| fs::write(dir.join("chat_template.jinja"), "{% for %}").unwrap());
    let message = Tokenizer::from_dir(dir.path()).unwrap_err().to_string();
    assert!(message.contains("chat template") && message.contains(":1)"), "{message}");
}

#[test]
fn a_pad_token_that_is_the_end_token_is_learnt_and_ends_answers() {
    let dir = copied(|dir| {
        let config = json!({"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>",
            "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"});
        write(dir, "tokenizer_config.json", &config);
    });
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    assert_eq!((tokenizer.eos(), tokenizer.pad()), (Some(5), Some(5)));
    assert_eq!(tokenizer.stops(), [5], "generation stops at it");
    let messages = [Message::new("user", "Hi"), Message::new("assistant", "Ho")];
    let encoded = tokenizer.template().unwrap().encode(&tokenizer, &messages, Target::Assistant).unwrap();
    assert_eq!((encoded.tokens.last(), encoded.mask.last()), (Some(&5), Some(&true)));
    let path = dir.path().join("rows.jsonl");
    fs::write(&path, "{\"prompt\": \"Hi\", \"completion\": \" Ho\"}\n").unwrap();
    let rows = Dataset::open(&DatasetConfig::new(&path), &tokenizer).unwrap();
    let sample = &rows.group(0).unwrap().unwrap().samples[0];
    assert_eq!((sample.tokens.last(), sample.mask.last()), (Some(&5), Some(&true)));
}

#[test]
fn settings_say_whether_documents_begin_with_the_begin_token() {
    let adds = |flag: Value| {
        let dir = copied(|dir| {
            write(dir, "tokenizer_config.json", &json!({"bos_token": "<s>", "add_bos_token": flag}));
        });
        Tokenizer::from_dir(dir.path()).unwrap().adds_bos()
    };
    assert!(adds(json!(true)));
    assert!(!adds(json!(false)) && !adds(Value::Null));
}

#[test]
fn tokens_that_the_files_beside_add_are_there_with_their_ids() {
    let next = bare_tokenizer().vocab_size() as u64;
    let dir = copied(|dir| {
        let decoder =
            json!({next.to_string(): {"content": "<fetch>", "special": false, "normalized": false}});
        write(dir, "tokenizer_config.json", &json!({"added_tokens_decoder": decoder}));
        write(dir, "added_tokens.json", &json!({"<deep>": next + 1}));
        write(dir, "special_tokens_map.json", &json!({"additional_special_tokens": [{"content": "<deep>"}]}));
    });
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    let ids = tokenizer.encode("<deep><fetch>").unwrap();
    assert_eq!(ids, [next as u32 + 1, next as u32]);
    assert_eq!(tokenizer.decode(&ids).unwrap(), "<fetch>");
    assert_eq!(tokenizer.vocab_size() as u64, next + 2);
    for (tokens, expected) in [
        (json!({"<deep>": next + 7}), "must go on from"),
        (json!({"<s>": 2}), "\"<s>\" has the id 2"),
        (json!({"<deep>": -1}), "expected a token id, got -1"),
    ] {
        let dir = copied(|dir| write(dir, "added_tokens.json", &tokens));
        let message = Tokenizer::from_dir(dir.path()).unwrap_err().to_string();
        assert!(message.contains("added_tokens.json") && message.contains(expected), "{message}");
    }
}

#[test]
fn a_directory_in_place_of_a_file_is_named() {
    for name in ["tokenizer.json", "tokenizer_config.json", "added_tokens.json", "chat_template.jinja"] {
        let dir = copied(|dir| {
            let _ = fs::remove_file(dir.join(name));
            fs::create_dir(dir.join(name)).unwrap();
        });
        let message = Tokenizer::from_dir(dir.path()).unwrap_err().to_string();
        assert!(message.contains(name) && message.contains("expected a file"), "{message}");
    }
}

#[test]
fn ids_beyond_any_model_s_vocabulary_and_none_at_all_are_an_error_or_nothing() {
    let with = |vocab: &Value| {
        let dir = tempfile::tempdir().unwrap();
        let model = json!({"type": "WordLevel", "vocab": vocab, "unk_token": "a"});
        write(dir.path(), "tokenizer.json", &json!({"model": model}));
        Tokenizer::from_dir(dir.path())
    };
    let message = with(&json!({"a": 4_294_967_295_u32})).unwrap_err().to_string();
    assert!(message.contains("ids go up to 4294967295"), "{message}");
    let empty = with(&json!({})).unwrap();
    assert_eq!((empty.vocab_size(), empty.eos(), empty.adds_bos()), (0, None, false));
    assert!(empty.encode("a").is_err() && empty.decode(&[0, 7]).unwrap().is_empty());
}
