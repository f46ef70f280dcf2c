//! Tokenizers from GGUF metadata, in small files that are written here.

use std::path::PathBuf;

use aligner_core::weights::GgufValue;
use aligner_data::{Message, Tokenizer};

use crate::scene::golden;

/// A GGUF file without tensors.
#[derive(Default)]
struct Metadata {
    bytes: Vec<u8>,
    count: u64,
}

impl Metadata {
    fn string(bytes: &mut Vec<u8>, text: &str) {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
    }

    fn key(mut self, key: &str, kind: u32) -> Self {
        Self::string(&mut self.bytes, key);
        self.bytes.extend(kind.to_le_bytes());
        self.count += 1;
        self
    }

    fn text(self, key: &str, value: &str) -> Self {
        let mut this = self.key(key, 8);
        Self::string(&mut this.bytes, value);
        this
    }

    fn id(self, key: &str, value: u32) -> Self {
        let mut this = self.key(key, 4);
        this.bytes.extend(value.to_le_bytes());
        this
    }

    fn flag(self, key: &str, value: bool) -> Self {
        let mut this = self.key(key, 7);
        this.bytes.push(u8::from(value));
        this
    }

    fn list(self, key: &str, kind: u32, len: usize) -> Self {
        let mut this = self.key(key, 9);
        this.bytes.extend(kind.to_le_bytes());
        this.bytes.extend((len as u64).to_le_bytes());
        this
    }

    fn texts(self, key: &str, values: &[&str]) -> Self {
        let mut this = self.list(key, 8, values.len());
        for value in values {
            Self::string(&mut this.bytes, value);
        }
        this
    }

    fn bytes(self, key: &str, values: &[u8]) -> Self {
        let mut this = self.list(key, 0, values.len());
        this.bytes.extend(values);
        this
    }

    fn types(self, values: &[i32]) -> Self {
        let mut this = self.list("tokenizer.ggml.token_type", 5, values.len());
        this.bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        this
    }

    fn scores(self, values: &[f32]) -> Self {
        let mut this = self.list("tokenizer.ggml.scores", 6, values.len());
        this.bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        this
    }

    fn write(self) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.gguf");
        let mut file = b"GGUF".to_vec();
        file.extend(3_u32.to_le_bytes());
        file.extend(0_u64.to_le_bytes());
        file.extend(self.count.to_le_bytes());
        file.extend(self.bytes);
        std::fs::write(&path, file).unwrap();
        (dir, path)
    }

    fn read(self) -> aligner_core::Result<Tokenizer> {
        let (_dir, path) = self.write();
        Tokenizer::from_checkpoint_path(&path)
    }

    fn fault(self) -> String {
        self.read().unwrap_err().to_string()
    }
}

const TOKENS: &str = "tokenizer.ggml.tokens";

fn sentencepiece() -> Metadata {
    let tokens = ["<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>", "▁", "a", "b", "ab", "▁a", "▁ab", "ba"];
    Metadata::default()
        .text("tokenizer.ggml.model", "llama")
        .texts(TOKENS, &tokens)
        .types(&[2, 3, 3, 6, 6, 1, 1, 1, 1, 1, 1, 1])
        .scores(&[0.0, 0.0, 0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0, -0.5])
        .id("tokenizer.ggml.bos_token_id", 1)
        .id("tokenizer.ggml.eos_token_id", 2)
}

fn byte_level(pre: &str) -> Metadata {
    let tokens = ["<|end|>", "<tool>", "1", "2", "12", "a", "Ġ", "Ġa", "Ċ"];
    Metadata::default()
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", pre)
        .texts(TOKENS, &tokens)
        .types(&[3, 4, 1, 1, 1, 1, 1, 1, 1])
        .texts("tokenizer.ggml.merges", &["1 2", "Ġ a"])
        .id("tokenizer.ggml.eos_token_id", 0)
}

#[test]
fn sentencepiece_merges_by_score_and_falls_back_to_bytes() {
    let tokenizer = sentencepiece().read().unwrap();
    assert_eq!(tokenizer.encode("ab").unwrap(), [10]);
    // "ba" scores best, so it is merged before "ab" can be.
    assert_eq!(tokenizer.encode("aba").unwrap(), [9, 11]);
    assert_eq!(tokenizer.encode("é</s>").unwrap(), [5, 3, 4, 2]);
    assert_eq!(tokenizer.decode(&[5, 3, 4, 10, 2]).unwrap(), "é ab");
    assert!(tokenizer.adds_bos());
    let bare = sentencepiece().flag("tokenizer.ggml.add_bos_token", false).read().unwrap();
    assert!(!bare.adds_bos());
}

#[test]
fn digits_are_split_as_the_named_rule_says() {
    for (pre, expected) in [
        ("gpt-2", vec![4, 7]),
        ("smollm", vec![2, 3, 7]),
        ("llama-bpe", vec![4, 7]),
        ("qwen2", vec![2, 3, 7]),
    ] {
        let tokenizer = byte_level(pre).read().unwrap();
        assert_eq!(tokenizer.encode("12 a").unwrap(), expected, "{pre}");
    }
}

#[test]
fn control_tokens_are_special_and_user_defined_ones_are_text() {
    let tokenizer = byte_level("gpt-2").read().unwrap();
    let ids = tokenizer.encode("a<tool>a<|end|>").unwrap();
    assert_eq!(ids, [5, 1, 5, 0]);
    assert_eq!(tokenizer.decode(&ids).unwrap(), "a<tool>a");
    assert_eq!(tokenizer.decode_with_specials(&ids).unwrap(), "a<tool>a<|end|>");
}

#[test]
fn the_template_sees_the_special_tokens_of_the_metadata() {
    let metadata =
        byte_level("gpt-2").text("tokenizer.chat_template", "{{ messages[0].content + eos_token }}");
    let tokenizer = metadata.id("tokenizer.ggml.eot_token_id", 1).read().unwrap();
    let rendered = tokenizer.template().unwrap().render(&[Message::new("user", "a")], false).unwrap();
    assert_eq!(rendered, "a<|end|>");
    assert_eq!(tokenizer.stops(), [0, 1]);
}

#[test]
fn metadata_that_makes_no_tokenizer_is_named_by_key() {
    let gpt2 = || Metadata::default().text("tokenizer.ggml.model", "gpt2");
    let t5 = |tokens: &[&str], scores: &[f32]| {
        let types: Vec<i32> = (0..tokens.len()).map(|id| if id == 0 { 2 } else { 1 }).collect();
        Metadata::default()
            .text("tokenizer.ggml.model", "t5")
            .texts(TOKENS, tokens)
            .scores(scores)
            .types(&types)
    };
    for (metadata, expected) in [
        (Metadata::default(), "`tokenizer.ggml.tokens`"),
        (Metadata::default().texts(TOKENS, &["a"]).text("tokenizer.ggml.model", "bert"), "got bert"),
        (gpt2().texts(TOKENS, &["a"]), "`tokenizer.ggml.merges`"),
        (
            Metadata::default().text("tokenizer.ggml.model", "t5").texts(TOKENS, &["a"]).scores(&[0.0]),
            "tokenizer.ggml.token_type: expected 2, the unknown token",
        ),
        (t5(&["<unk>", "a"], &[0.0]), "tokenizer.ggml.scores: expected 2 entries"),
        (t5(&["<unk>", "a", "a"], &[0.0; 3]), "tokenizer.ggml.tokens: piece \"a\" is there twice"),
        (t5(&["<unk>", "a"], &[0.0, f32::NAN]), "expected a finite score"),
        (
            t5(&["<unk>", "a"], &[0.0; 2]).bytes("tokenizer.ggml.precompiled_charsmap", &[9, 0, 0, 0, 1]),
            "tokenizer.ggml.precompiled_charsmap: its 5 bytes",
        ),
        (byte_level("unheard-of"), "got unheard-of"),
        (gpt2().texts(TOKENS, &["a"]).types(&[1, 1]), "expected 1 entries"),
        (byte_level("gpt-2").id("tokenizer.ggml.bos_token_id", 99), "expected an id below 9, got 99"),
        (gpt2().texts(TOKENS, &["a"]).texts("tokenizer.ggml.merges", &["x y"]), "cannot be built"),
        (byte_level("gpt-2").text("tokenizer.chat_template", "{% if %}"), "chat template"),
    ] {
        let message = metadata.fault();
        assert!(
            message.contains("model.gguf") && message.contains(expected),
            "expected {expected}: {message}"
        );
    }
}

/// The tokenizer that the metadata of `tokenizer` makes.
fn again(tokenizer: &Tokenizer, rows: usize) -> Tokenizer {
    let written = tokenizer.gguf_metadata(rows).unwrap();
    let file = written.iter().fold(Metadata::default(), |file, (key, value)| match value {
        GgufValue::Text(text) => file.text(key, text),
        GgufValue::Flag(flag) => file.flag(key, *flag),
        GgufValue::Integer(id) => file.id(key, *id as u32),
        GgufValue::Texts(texts) => file.texts(key, &texts.iter().map(String::as_str).collect::<Vec<_>>()),
        GgufValue::Bytes(bytes) => file.bytes(key, bytes),
        GgufValue::Integers(types) => file.types(&types.iter().map(|&kind| kind as i32).collect::<Vec<_>>()),
        GgufValue::Floats(scores) => {
            file.scores(&scores.iter().map(|&score| score as f32).collect::<Vec<_>>())
        }
        other => panic!("{key}: {other:?}"),
    });
    file.read().unwrap()
}

#[test]
fn every_kind_of_tokenizer_comes_back_from_its_metadata() {
    let template = "{{ messages[0].content + eos_token }}";
    let kinds = ["gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "stablelm2"].map(byte_level);
    let prefixes =
        [true, false].map(|prefix| sentencepiece().flag("tokenizer.ggml.add_space_prefix", prefix));
    for metadata in kinds.into_iter().chain(prefixes) {
        let tokenizer = metadata.text("tokenizer.chat_template", template).read().unwrap();
        let back = again(&tokenizer, 20);
        for text in ["12 a", "aba ab é</s>", "a<tool>a<|end|>", " a  b\n"] {
            assert_eq!(tokenizer.encode(text).unwrap(), back.encode(text).unwrap(), "{text:?}");
        }
        assert_eq!((tokenizer.bos(), tokenizer.eos()), (back.bos(), back.eos()));
        assert_eq!((tokenizer.stops(), tokenizer.adds_bos()), (back.stops(), back.adds_bos()));
        assert_eq!(back.template().unwrap().source(), template);
        // Rows without a token have a name that no text becomes.
        assert_eq!(back.id_token(19).as_deref(), Some("[PAD19]"));
    }
}

#[test]
fn a_unigram_model_goes_through_metadata_as_it_came() {
    let dir = golden().join("sentencepiece").join("unigram");
    let tokenizer = Tokenizer::from_dir(&dir).unwrap();
    let written = tokenizer.gguf_metadata(tokenizer.vocab_size() + 3).unwrap();
    let of = |key: &str| written.iter().find(|(name, _)| name == key).map(|(_, value)| value);
    assert_eq!(of("tokenizer.ggml.model"), Some(&GgufValue::Text("t5".into())));
    assert!(matches!(of("tokenizer.ggml.precompiled_charsmap"), Some(GgufValue::Bytes(_))));
    let back = again(&tokenizer, tokenizer.vocab_size() + 3);
    let cases: serde_json::Value =
        serde_json::from_slice(&std::fs::read(dir.join("expected.json")).unwrap()).unwrap();
    for case in cases.as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(back.encode(text).unwrap(), ids, "{text:?}");
        assert_eq!(back.decode(&ids).unwrap(), tokenizer.decode(&ids).unwrap(), "{text:?}");
    }
    assert_eq!((back.bos(), back.eos(), back.pad()), (tokenizer.bos(), tokenizer.eos(), tokenizer.pad()));
    // What the metadata has no place for.
    let saved = tempfile::tempdir().unwrap();
    tokenizer.save(saved.path()).unwrap();
    let path = saved.path().join("tokenizer.json");
    let mut json: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let quotes = serde_json::json!({"type": "Replace", "pattern": {"String": "``"}, "content": "\""});
    json["normalizer"] = serde_json::json!({"type": "Sequence", "normalizers": [quotes, json["normalizer"]]});
    std::fs::write(&path, json.to_string()).unwrap();
    let replacing = Tokenizer::from_dir(saved.path()).unwrap();
    let message = replacing.gguf_metadata(replacing.vocab_size()).unwrap_err().to_string();
    assert!(message.contains("read again, it splits") && message.contains("``"), "{message}");
    let bytes = Tokenizer::from_dir(&golden().join("sentencepiece").join("unigram_bytes")).unwrap();
    let message = bytes.gguf_metadata(bytes.vocab_size()).unwrap_err().to_string();
    assert!(message.contains("falls back to bytes"), "{message}");
}

#[test]
fn the_rule_of_splitting_is_written_by_its_name() {
    for name in ["gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "stablelm2"] {
        let written = byte_level(name).read().unwrap().gguf_metadata(9).unwrap();
        let pre = written.iter().find(|(key, _)| key == "tokenizer.ggml.pre").unwrap();
        assert_eq!(pre.1, GgufValue::Text(name.into()));
    }
}

#[test]
fn tokenizers_that_gguf_cannot_say_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let read = |json: &str| {
        std::fs::write(dir.path().join("tokenizer.json"), json).unwrap();
        Tokenizer::from_checkpoint_path(dir.path()).unwrap().gguf_metadata(9).unwrap_err().to_string()
    };
    let of = |pre_tokenizer: &str, model: &str| {
        format!(
            r#"{{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
            "pre_tokenizer":{pre_tokenizer},"post_processor":null,"decoder":null,"model":{model}}}"#
        )
    };
    let bpe = r#"{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]}"#;
    let whitespace = of(r#"{"type":"Whitespace"}"#, bpe);
    assert!(read(&whitespace).contains("known are gpt-2, smollm"), "{}", read(&whitespace));
    let words = of("null", r#"{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}"#);
    assert!(read(&words).contains("its model is WordLevel"), "{}", read(&words));
    // A merge that scores would give is not there.
    let pieces =
        r#"{"type":"BPE","byte_fallback":true,"vocab":{"a":0,"b":1,"ab":2,"ba":3},"merges":["a b"]}"#;
    assert!(read(&of("null", pieces)).contains("do not follow from scores"), "{}", read(&of("null", pieces)));
    let bytes =
        of(r#"{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}"#, bpe);
    std::fs::write(dir.path().join("tokenizer.json"), bytes).unwrap();
    let tokenizer = Tokenizer::from_checkpoint_path(dir.path()).unwrap();
    tokenizer.gguf_metadata(3).unwrap();
    let message = tokenizer.gguf_metadata(2).unwrap_err().to_string();
    assert!(message.contains("ids up to 2, the model 2 rows"), "{message}");
}
