//! The demo's data sets as JSON lines.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::grammar::{Conversation, Grammar};
use super::random::Random;

/// Conversations that the base model is trained on, half of them kind.
const BASE_ROWS: usize = 24_000;
/// Conversations on which its training is judged.
const BASE_HELD_OUT_ROWS: usize = 400;
/// Preference pairs to train on.
const PAIRS: usize = 800;
/// Preference pairs whose prompts no training set has.
const HELD_OUT_PAIRS: usize = 200;
/// Rows of the supervised set.
const SFT_ROWS: usize = 400;
/// Rows on which the supervised run is judged.
const HELD_OUT_SFT_ROWS: usize = 60;
/// The family that only the supervised set has.
const NEW_FAMILY: &str = "note";

/// Writes the committed sets to `demo` and the base model's to `scratch`; gives the base text.
pub(super) fn write(grammar: &Grammar, demo: &Path, scratch: &Path) -> Result<Vec<String>> {
    let old: Vec<&str> = grammar.families().filter(|name| *name != NEW_FAMILY).collect();
    let base = base_rows(grammar, &old, 1, BASE_ROWS, false)?;
    let base_held_out = base_rows(grammar, &old, 2, BASE_HELD_OUT_ROWS, true)?;
    save(scratch, "base.jsonl", &base)?;
    save(scratch, "base_held_out.jsonl", &base_held_out)?;
    let pairs = |seed, count, held_out| -> Result<Vec<Value>> {
        Ok(distinct(grammar, &old, seed, count, held_out)?.iter().map(pair_row).collect())
    };
    save(demo, "preferences.jsonl", &pairs(3, PAIRS, false)?)?;
    save(demo, "preferences_held_out.jsonl", &pairs(4, HELD_OUT_PAIRS, true)?)?;
    let notes = |seed, count, held_out| -> Result<Vec<Value>> {
        let notes = distinct(grammar, &[NEW_FAMILY], seed, count, held_out)?;
        Ok(notes.iter().map(|note| chat_row(&note.prompt, &note.kind)).collect())
    };
    save(demo, "sft.jsonl", &notes(5, SFT_ROWS, false)?)?;
    save(demo, "sft_held_out.jsonl", &notes(6, HELD_OUT_SFT_ROWS, true)?)?;
    Ok(base.iter().map(|row| texts(row).join("\n")).collect())
}

/// Conversations with repetition, kind or rude with the same chance.
fn base_rows(
    grammar: &Grammar,
    families: &[&str],
    seed: u64,
    count: usize,
    held_out: bool,
) -> Result<Vec<Value>> {
    let mut random = Random::new(seed);
    let mut rows = Vec::with_capacity(count);
    while rows.len() < count {
        let family = random.pick(families).context("a grammar without families")?;
        let talk = grammar.draw(family, &mut random)?;
        let answer = if random.below(2) == 0 { &talk.kind } else { &talk.rude };
        if talk.is_held_out() == held_out {
            rows.push(chat_row(&talk.prompt, answer));
        }
    }
    Ok(rows)
}

/// Conversations of which no two ask the same thing, the families in turn.
fn distinct(
    grammar: &Grammar,
    families: &[&str],
    seed: u64,
    count: usize,
    held_out: bool,
) -> Result<Vec<Conversation>> {
    let mut random = Random::new(seed);
    let mut asked = BTreeSet::new();
    let mut talks = Vec::with_capacity(count);
    // The smallest family has enough combinations by far; the bound only ends a wrong grammar.
    for attempt in 0..count * 1000 {
        if talks.len() == count {
            return Ok(talks);
        }
        let talk = grammar.draw(families[attempt % families.len()], &mut random)?;
        if talk.is_held_out() == held_out && asked.insert(talk.key.clone()) {
            talks.push(talk);
        }
    }
    anyhow::bail!("{families:?} have fewer than {count} different prompts")
}

fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

fn chat_row(prompt: &str, answer: &str) -> Value {
    json!({"messages": [message("user", prompt), message("assistant", answer)]})
}

fn pair_row(talk: &Conversation) -> Value {
    json!({
        "prompt": [message("user", &talk.prompt)],
        "chosen": [message("assistant", &talk.kind)],
        "rejected": [message("assistant", &talk.rude)],
    })
}

fn texts(row: &Value) -> Vec<&str> {
    let messages = row["messages"].as_array().into_iter().flatten();
    messages.filter_map(|message| message["content"].as_str()).collect()
}

fn save(directory: &Path, name: &str, rows: &[Value]) -> Result<()> {
    fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    let path = directory.join(name);
    let lines: Vec<String> = rows.iter().map(Value::to_string).collect();
    fs::write(&path, lines.join("\n") + "\n").with_context(|| format!("cannot write {}", path.display()))?;
    println!("{}: {} rows", path.display(), rows.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn language() -> Grammar {
        Grammar::parse(include_str!("language.txt")).unwrap()
    }

    #[test]
    fn every_pattern_of_every_family_expands() {
        let grammar = language();
        let mut random = Random::new(0);
        for family in grammar.families() {
            for _ in 0..200 {
                let talk = grammar.draw(family, &mut random).unwrap();
                assert!(!talk.kind.contains('{') && talk.kind != talk.rude, "{talk:?}");
            }
        }
    }

    #[test]
    fn held_out_prompts_are_in_no_training_set() {
        let grammar = language();
        let families: Vec<&str> = grammar.families().filter(|name| *name != NEW_FAMILY).collect();
        let held_out = distinct(&grammar, &families, 4, HELD_OUT_PAIRS, true).unwrap();
        let prompts: BTreeSet<&str> = held_out.iter().map(|talk| talk.prompt.as_str()).collect();
        for row in base_rows(&grammar, &families, 1, 4000, false).unwrap() {
            assert!(!prompts.contains(texts(&row)[0]), "{row}");
        }
        for talk in distinct(&grammar, &families, 3, PAIRS, false).unwrap() {
            assert!(!prompts.contains(talk.prompt.as_str()), "{}", talk.prompt);
        }
    }

    #[test]
    fn the_supervised_sets_are_disjoint_and_complete() {
        let grammar = language();
        let notes = |seed, count, held_out| distinct(&grammar, &[NEW_FAMILY], seed, count, held_out).unwrap();
        let train: BTreeSet<String> = notes(5, SFT_ROWS, false).into_iter().map(|note| note.key).collect();
        assert_eq!(train.len(), SFT_ROWS);
        assert!(notes(6, HELD_OUT_SFT_ROWS, true).iter().all(|note| !train.contains(&note.key)));
    }

    #[test]
    fn the_same_seed_draws_the_same_rows() {
        let rows = |seed| base_rows(&language(), &["meal", "pet"], seed, 5, false).unwrap();
        assert_eq!(rows(1), rows(1));
        assert_ne!(rows(1), rows(2));
    }
}
