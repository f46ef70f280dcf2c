//! Each schema's hand-written rows as groups.

use aligner_core::Group;
use aligner_data::{Dataset, DatasetConfig, EqualPairs, Format, Kind, Overlong, Target};

use crate::scene::{UNMARKED, bare_tokenizer, fixture, learnt, open, tokenizer};

fn groups(dataset: &Dataset) -> Vec<Group> {
    (0..dataset.len()).map(|row| dataset.group(row).unwrap().unwrap()).collect()
}

/// What each row's first sample learns, as text.
fn targets(groups: &[Group], sample: usize) -> Vec<String> {
    let tokenizer = bare_tokenizer();
    let samples = groups.iter().map(|group| &group.samples[sample]);
    samples.map(|sample| learnt(&tokenizer, &sample.tokens, &sample.mask)).collect()
}

fn first_prompt(group: &Group) -> String {
    let sample = &group.samples[0];
    bare_tokenizer().decode_with_specials(&sample.tokens[..sample.prompt_len()]).unwrap()
}

#[test]
fn messages_learn_what_the_assistant_says() {
    let dataset = open("messages.jsonl");
    assert_eq!((dataset.kind(), dataset.format(), dataset.len()), (Kind::Sft, Format::Messages, 5));
    let groups = groups(&dataset);
    let expected = [
        "It's 4.<|im_end|>\n",
        "Blue.<|im_end|>\n",
        "Hello.<|im_end|>\nGoodbye.<|im_end|>\n",
        "Oui — 喫茶店 🎉<|im_end|>\n",
        "<|im_end|>\n",
    ];
    assert_eq!(targets(&groups, 0), expected);
    assert_eq!(groups[2].id, "messages.jsonl:4", "the blank line counts");
    assert_eq!(groups[2].metadata["source"], "greetings");
    assert_eq!(groups[0].samples[0].text, "It's 4.");
    assert_eq!(first_prompt(&groups[0]), "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n");
}

#[test]
fn parquet_gives_the_groups_of_the_same_rows_in_json_lines() {
    for name in ["messages", "preference"] {
        let lines = open(&format!("{name}.jsonl"));
        let columns = open(&format!("{name}.parquet"));
        assert_eq!(lines.format(), columns.format());
        for (line, column) in groups(&lines).iter().zip(&groups(&columns)) {
            assert_eq!((&line.samples, &line.metadata), (&column.samples, &column.metadata));
        }
        assert_eq!(columns.id(4), format!("{name}.parquet:5"));
        // Backwards too: a row does not depend on which was read before it.
        assert_eq!(columns.group(0).unwrap().unwrap().samples, lines.group(0).unwrap().unwrap().samples);
    }
}

#[test]
fn sharegpt_and_alpaca_have_their_own_prompts() {
    let sharegpt = open("sharegpt.json");
    assert_eq!(sharegpt.format(), Format::Sharegpt);
    let sharegpt = groups(&sharegpt);
    assert_eq!(sharegpt[4].id, "sharegpt.json:5");
    let expected =
        "{\"name\":\"get_weather\",\"arguments\":{\"city\":\"Paris\"}}<|im_end|>\n21.5 degrees.<|im_end|>\n";
    assert_eq!(targets(&sharegpt, 0)[3], expected, "a template without tools gets the call as text");
    assert!(first_prompt(&sharegpt[1]).starts_with("<|im_start|>system\nYou are terse.<|im_end|>\n"));

    let alpaca = open("alpaca.json");
    assert_eq!(alpaca.format(), Format::Alpaca);
    let alpaca = groups(&alpaca);
    assert!(first_prompt(&alpaca[1]).contains("Translate to French.\ncheese<|im_end|>"));
    assert_eq!(targets(&alpaca, 0)[3], "Hello.<|im_end|>\nGoodbye.<|im_end|>\n");
}

#[test]
fn text_is_learnt_whole_and_ends_with_eos() {
    for (name, count) in [("text.jsonl", 5), ("text.txt", 5)] {
        let dataset = open(name);
        assert_eq!((dataset.format(), dataset.len()), (Format::Text, count));
        let group = &groups(&dataset)[0];
        let sample = &group.samples[0];
        assert_eq!(bare_tokenizer().decode_with_specials(&sample.tokens).unwrap(), "The sky is blue.</s>");
        assert!(sample.mask.iter().all(|&learn| learn));
    }
}

#[test]
fn prompt_and_completion_are_turns_or_joined_as_they_are() {
    let chat = open("prompt_completion.jsonl");
    assert_eq!(
        first_prompt(&groups(&chat)[0]),
        "<|im_start|>user\nThe sky is<|im_end|>\n<|im_start|>assistant\n"
    );
    let config = DatasetConfig { raw_text: true, ..DatasetConfig::new(fixture("prompt_completion.jsonl")) };
    let raw = groups(&Dataset::open(&config, &tokenizer()).unwrap());
    assert_eq!(first_prompt(&raw[0]), "The sky is");
    assert_eq!(targets(&raw, 0)[0], " blue.</s>");
    let bare =
        Dataset::open(&DatasetConfig::new(fixture("prompt_completion.jsonl")), &bare_tokenizer()).unwrap();
    assert_eq!(groups(&bare)[0].samples, raw[0].samples, "without a template the same");
}

#[test]
fn preference_pairs_are_ordered_share_their_prompt_and_carry_margins() {
    let expected = ["It's 4.", "Blue.", "Hi!", "1, 2, 3.", "c-a-t"].map(|text| format!("{text}<|im_end|>\n"));
    let rejected =
        ["It's 5.", "Seven.", "No.", "1, 2, 4.", "k-a-t"].map(|text| format!("{text}<|im_end|>\n"));
    let rewards = [None, Some((1.5, 0.0)), None, Some((0.5, 0.0)), None];
    for name in ["preference.jsonl", "preference_messages.jsonl"] {
        let dataset = open(name);
        assert_eq!(dataset.kind(), Kind::Preference);
        let groups = groups(&dataset);
        assert_eq!(targets(&groups, 0), expected, "{name}");
        assert_eq!(targets(&groups, 1), rejected, "{name}");
        for (group, reward) in groups.iter().zip(rewards) {
            let [chosen, rejected] = &group.samples[..] else { panic!("{name}: not a pair") };
            let got = chosen.reward.zip(rejected.reward);
            assert!(name != "preference.jsonl" || got == reward, "{got:?}");
            assert_eq!(group.shared_prefix(), chosen.prompt_len(), "the whole prompt is shared");
        }
    }
}

#[test]
fn texts_without_a_prompt_are_split_where_they_part() {
    let groups = groups(&open("preference_implicit.jsonl"));
    assert_eq!(targets(&groups, 0)[1], " Blue.</s>");
    assert_eq!(targets(&groups, 1)[1], " Seven.</s>");
    assert_eq!(first_prompt(&groups[1]), "\n\nHuman: Name a colour.\n\nAssistant:");
}

#[test]
fn kto_labels_become_rewards() {
    let dataset = open("kto.jsonl");
    assert_eq!((dataset.kind(), dataset.format()), (Kind::Kto, Format::Kto));
    let groups = groups(&dataset);
    let rewards: Vec<_> = groups.iter().map(|group| group.samples[0].reward).collect();
    assert_eq!(rewards, [1.0, 0.0, 1.0, 0.0, 1.0].map(Some));
    assert_eq!(targets(&groups, 0)[3], "No.<|im_end|>\n");
}

#[test]
fn loss_weights_choose_turns_with_marks_and_without() {
    let dataset = open("loss_weight.jsonl");
    let config = DatasetConfig::new(fixture("loss_weight.jsonl"));
    let unmarked = Dataset::open(&config, &bare_tokenizer().with_template(UNMARKED).unwrap()).unwrap();
    let expected = [
        "It's 4.<|im_end|>\n",
        "Goodbye.<|im_end|>\n",
        "Hello.<|im_end|>\n",
        "Blue.<|im_end|>\n",
        "<|im_start|>user\nCount to three.<|im_end|>\n1, 2, 3.<|im_end|>\n",
    ];
    assert_eq!(targets(&groups(&dataset), 0), expected);
    assert_eq!(targets(&groups(&unmarked), 0), expected);
}

#[test]
fn train_on_and_system_change_targets_and_prompts() {
    let base = DatasetConfig { limit: Some(3), ..DatasetConfig::new(fixture("messages.jsonl")) };
    let open = |config: DatasetConfig| groups(&Dataset::open(&config, &tokenizer()).unwrap());
    let last = open(DatasetConfig { train_on: Target::Last, ..base.clone() });
    assert_eq!(targets(&last, 0)[2], "Goodbye.<|im_end|>\n");
    let all = open(DatasetConfig { train_on: Target::All, ..base.clone() });
    assert!(all[0].samples[0].mask.iter().all(|&learn| learn));
    let system = open(DatasetConfig { system: Some("Be kind.".into()), ..base });
    assert!(first_prompt(&system[0]).starts_with("<|im_start|>system\nBe kind."));
    assert!(
        first_prompt(&system[1]).starts_with("<|im_start|>system\nYou are terse."),
        "the row's own stays"
    );
}

#[test]
fn long_rows_are_cut_dropped_or_refused_and_counted() {
    let config = |overlong, max_length| DatasetConfig {
        overlong,
        max_length,
        ..DatasetConfig::new(fixture("messages.jsonl"))
    };
    let whole = groups(&open("messages.jsonl"));
    let lengths: Vec<usize> = whole.iter().map(|group| group.samples[0].tokens.len()).collect();
    let limit = whole[0].samples[0].prompt_len() + 1;
    let longer = lengths.iter().filter(|&&len| len > limit).count();
    let learning = whole.iter().filter(|group| group.samples[0].prompt_len() < limit).count();
    assert!(longer > 0 && longer < 5 && learning > 0 && learning < 5, "{lengths:?} {limit}");

    let mut cut = Dataset::open(&config(Overlong::Truncate, limit), &tokenizer()).unwrap();
    let mut watched = Vec::new();
    let kept = cut.retain_usable_watched(&mut |done| watched.push(done)).unwrap();
    assert_eq!(cut.len(), learning);
    assert_eq!(watched, [0, 1, 2, 3, 4], "dropped rows are told of too");
    assert!(kept.iter().all(|&len| len <= limit));
    assert!(groups(&cut).iter().all(|group| group.samples[0].targets() > 0));
    let stats = cut.stats();
    assert_eq!((stats.used, stats.overlong, stats.rows), (learning, 5 - learning, 5));

    let mut dropped = Dataset::open(&config(Overlong::Drop, limit), &tokenizer()).unwrap();
    dropped.retain_usable().unwrap();
    assert_eq!((dropped.len(), dropped.stats().overlong), (5 - longer, longer));

    let refused = Dataset::open(&config(Overlong::Error, limit), &tokenizer()).unwrap();
    let message = refused.group(0).unwrap_err().to_string();
    assert!(message.contains("messages.jsonl:1: ") && message.contains("max_length"), "{message}");
}

#[test]
fn a_pair_that_loses_one_side_is_dropped_whole() {
    let whole = open("preference.jsonl").group(1).unwrap().unwrap();
    let limit = whole.samples[0].prompt_len();
    let config = DatasetConfig { max_length: limit, ..DatasetConfig::new(fixture("preference.jsonl")) };
    let dataset = Dataset::open(&config, &tokenizer()).unwrap();
    assert_eq!(dataset.group(1).unwrap(), None);
    assert_eq!(dataset.stats().overlong, 1);
}

#[test]
fn a_pair_that_is_cut_to_equal_sides_counts_as_equal() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pairs.jsonl");
    let long =
        r#"{"prompt": "a", "chosen": "one two three four five", "rejected": "one two three four six"}"#;
    std::fs::write(&path, format!("{long}\n{}\n", r#"{"prompt": "a", "chosen": "b", "rejected": "c"}"#))
        .unwrap();
    let whole = Dataset::open(&DatasetConfig::new(&path), &tokenizer()).unwrap().group(0).unwrap().unwrap();
    let max_length = whole.samples[0].prompt_len() + 2;
    let config = DatasetConfig { max_length, ..DatasetConfig::new(&path) };
    let message = Dataset::open(&config, &tokenizer()).unwrap().group(0).unwrap_err().to_string();
    assert!(message.contains("pairs.jsonl:1: chosen and rejected have equal tokens"), "{message}");
    let config = DatasetConfig { equal_pairs: EqualPairs::Drop, ..config };
    let mut dataset = Dataset::open(&config, &tokenizer()).unwrap();
    dataset.retain_usable().unwrap();
    assert_eq!((dataset.len(), dataset.stats().equal_pairs, dataset.stats().used), (1, 1, 1));
}

#[test]
fn equal_pairs_are_refused_or_dropped_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pairs.jsonl");
    let rows = r#"{"prompt": "a", "chosen": "b", "rejected": "c"}
{"prompt": "a", "chosen": "b", "rejected": "b"}
{"chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
"#;
    std::fs::write(&path, rows).unwrap();
    let config = DatasetConfig::new(&path);
    let message = Dataset::open(&config, &tokenizer()).unwrap_err().to_string();
    assert!(message.contains("pairs.jsonl:2: chosen and rejected are equal"), "{message}");
    let config = DatasetConfig { equal_pairs: EqualPairs::Drop, ..config };
    let dataset = Dataset::open(&config, &tokenizer()).unwrap();
    assert_eq!((dataset.len(), dataset.stats().equal_pairs), (1, 2));
}
