//! Tokenizers from `tokenizer.model`: ids and texts are those of `sentencepiece`, which
//! `xtask/sentencepiece_golden.py` has recorded.

use std::fs;
use std::path::Path;

use aligner_data::Tokenizer;
use serde_json::{Value, json};

use crate::scene::golden;

const MODELS: [&str; 4] = ["bpe", "bpe_bare", "unigram", "unigram_bytes"];

fn directory(name: &str) -> std::path::PathBuf {
    golden().join("sentencepiece").join(name)
}

#[test]
fn ids_and_texts_are_those_of_sentencepiece() {
    for name in MODELS {
        let tokenizer = Tokenizer::from_dir(&directory(name)).unwrap();
        let cases: Value =
            serde_json::from_slice(&fs::read(directory(name).join("expected.json")).unwrap()).unwrap();
        let cases = cases.as_array().unwrap();
        assert!(cases.len() > 25);
        for case in cases {
            let text = case["text"].as_str().unwrap();
            let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
            assert_eq!(tokenizer.encode(text).unwrap(), ids, "{name}: {text:?}");
            if let Some(decoded) = case["decoded"].as_str() {
                assert_eq!(tokenizer.decode(&ids).unwrap(), decoded, "{name}: {text:?}");
            }
        }
    }
}

#[test]
fn a_saved_tokenizer_of_sentencepiece_reads_back_the_same() {
    for name in MODELS {
        let tokenizer = Tokenizer::from_dir(&directory(name)).unwrap();
        let dir = tempfile::tempdir().unwrap();
        tokenizer.save(dir.path()).unwrap();
        let read = Tokenizer::from_dir(dir.path()).unwrap();
        let text = " ½ naïve  日本語 🎉 <turn>\n\n</s> x";
        assert_eq!(read.encode(text).unwrap(), tokenizer.encode(text).unwrap(), "{name}");
        assert_eq!((read.bos(), read.eos(), read.pad()), (tokenizer.bos(), tokenizer.eos(), tokenizer.pad()));
        assert_eq!((read.adds_bos(), read.stops()), (tokenizer.adds_bos(), tokenizer.stops()));
    }
}

/// A directory with a golden model and with settings beside it.
fn beside(name: &str, files: &[(&str, Value)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(directory(name).join("tokenizer.model"), dir.path().join("tokenizer.model")).unwrap();
    for (name, value) in files {
        fs::write(dir.path().join(name), value.to_string()).unwrap();
    }
    dir
}

fn with_config(name: &str, config: &Value) -> Tokenizer {
    let dir = beside(name, &[("tokenizer_config.json", config.clone())]);
    Tokenizer::from_dir(dir.path()).unwrap()
}

#[test]
fn roles_are_those_of_the_training_where_no_file_names_them() {
    let tokenizer = Tokenizer::from_dir(&directory("unigram_bytes")).unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.pad()), (Some(1), Some(2), Some(3)));
    assert_eq!(tokenizer.stops(), [2]);
    let bare = Tokenizer::from_dir(&directory("bpe")).unwrap();
    assert_eq!((bare.bos(), bare.eos(), bare.pad()), (Some(1), Some(2), None));
    let named = with_config("bpe", &json!({"eos_token": "<s>", "pad_token": {"content": "<s>"}}));
    assert_eq!((named.eos(), named.pad(), named.stops()), (Some(1), Some(1), &[1][..]));
}

#[test]
fn documents_begin_as_the_settings_or_the_family_say() {
    for (config, expected) in [
        (json!({}), true),
        (json!({"tokenizer_class": "LlamaTokenizer"}), true),
        (json!({"tokenizer_class": "T5Tokenizer"}), false),
        (json!({"tokenizer_class": "T5Tokenizer", "add_bos_token": true}), true),
        (json!({"add_bos_token": false, "add_eos_token": true}), false),
    ] {
        assert_eq!(with_config("bpe", &config).adds_bos(), expected, "{config}");
    }
}

#[test]
fn the_space_before_a_text_is_put_where_the_settings_say() {
    let pieces = |config: Value| {
        let tokenizer = with_config("bpe", &config);
        let ids = tokenizer.encode("a</s>a").unwrap();
        ids.into_iter().map(|id| tokenizer.id_token(id).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(pieces(json!({})), ["▁a", "</s>", "▁a"]);
    assert_eq!(pieces(json!({"legacy": false})), ["▁a", "</s>", "a"]);
    assert_eq!(pieces(json!({"add_prefix_space": false})), ["a", "</s>", "a"]);
}

#[test]
fn added_tokens_rename_follow_and_are_cut_out_of_the_text() {
    let config = json!({"added_tokens_decoder": {
        "1": {"content": "<begin>", "special": true},
        "700": {"content": "<|user|>", "special": true, "rstrip": true, "normalized": false},
    }, "bos_token": "<begin>"});
    let dir =
        beside("bpe", &[("tokenizer_config.json", config), ("added_tokens.json", json!({"<pad>": 701}))]);
    fs::write(dir.path().join("chat_template.jinja"), "{{ bos_token }}<|user|> {{ messages[0].content }}")
        .unwrap();
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.token_id("<s>")), (Some(1), None));
    let ids = tokenizer.encode("<begin><|user|>  a<pad>").unwrap();
    assert_eq!((&ids[..2], ids.last()), (&[1, 700][..], Some(&701)));
    assert_eq!(tokenizer.encode("<|user|>  a").unwrap(), tokenizer.encode("<|user|>a").unwrap());
    let rendered = tokenizer.template().unwrap().render(&[aligner_data::Message::new("user", "Hi")], false);
    assert_eq!(rendered.unwrap(), "<begin><|user|> Hi");
    assert_eq!(tokenizer.vocab_size(), 702);
}

#[test]
fn tokenizer_json_is_preferred() {
    let dir = beside("bpe", &[]);
    fs::copy(golden().join("chat/tokenizer/tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    assert_eq!(tokenizer.token_id("<|im_end|>"), Some(5));
}

/// A message's field with bytes, as a protocol buffer has it.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut out = vec![number << 3 | 2];
    let mut len = bytes.len();
    while len >= 0x80 {
        out.push(len as u8 | 0x80);
        len >>= 7;
    }
    out.push(len as u8);
    [out, bytes.to_vec()].concat()
}

fn piece(text: &str, score: f32, kind: u8) -> Vec<u8> {
    let score = [&[0x15][..], &score.to_le_bytes()].concat();
    field(1, &[field(1, text.as_bytes()), score, vec![0x18, kind]].concat())
}

fn fault(bytes: &[u8]) -> String {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("tokenizer.model"), bytes).unwrap();
    let message = Tokenizer::from_dir(dir.path()).unwrap_err().to_string();
    assert!(message.contains("tokenizer.model"), "{message}");
    message
}

#[test]
fn files_that_are_no_usable_model_say_why() {
    let pieces = [piece("<unk>", 0.0, 2), piece("a", -1.0, 1)].concat();
    let with = |more: Vec<u8>| fault(&[pieces.clone(), more].concat());
    assert!(fault(b"").contains("no pieces"));
    assert!(fault(&field(1, b"")).contains("piece 0 is empty"));
    assert!(fault(&field(1, &field(1, &[0xFF]))).contains("piece 0 is not valid UTF-8"));
    assert!(fault(&piece("a", -1.0, 1)).contains("unknown"));
    assert!(with(piece("a", -2.0, 1)).contains("\"a\" is there twice, as 1 and as 2"));
    assert!(with(piece("b", f32::NAN, 1)).contains("expected a finite score, got NaN"));
    assert!(with(field(2, &[0x18, 4])).contains("expected UNIGRAM or BPE, got CHAR"));
    assert!(with(field(2, &[0xC0, 0x01, 1])).contains("treat_whitespace_as_suffix"));
    assert!(with(field(3, &[0x28, 0])).contains("escape_whitespaces"));
    assert!(with(field(3, &field(2, &[0xFF; 8]))).contains("precompiled_charsmap"));
    assert!(with(field(5, &field(2, &[0; 8]))).contains("denormalizer_spec"));
    assert!(with(vec![0x0A, 200, 1]).contains("bytes should follow"));
    assert!(fault(b"{\"model\": 1}").contains("SentencePiece model"));
}

#[test]
fn a_model_that_is_cut_or_changed_anywhere_is_an_error_or_a_tokenizer() {
    let whole = fs::read(directory("bpe").join("tokenizer.model")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let read = |bytes: &[u8]| {
        fs::write(dir.path().join("tokenizer.model"), bytes).unwrap();
        if let Ok(tokenizer) = Tokenizer::from_dir(Path::new(dir.path())) {
            let _ = tokenizer.encode("Hello <s> ▁x 日").map(|ids| tokenizer.decode(&ids));
        }
    };
    (0..whole.len()).step_by(83).for_each(|len| read(&whole[..len]));
    for at in (0..whole.len()).step_by(61) {
        let mut changed = whole.clone();
        changed[at] ^= 0x55;
        read(&changed);
    }
}
