//! How often a letter occurs in a text.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use aligner_core::Result;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::draws::Draws;
use super::{Task, TaskRow, check_range};

const NAME: &str = "letter_counting";

/// The words of "In the Year 2889" (Jules and Michel Verne, 1889; in the public domain), in order.
static WORDS: LazyLock<Vec<&'static str>> =
    LazyLock::new(|| include_str!("in_the_year_2889.txt").split_whitespace().collect());

/// Settings of [`LetterCounting`]; names and defaults as in `reasoning-gym`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LetterCountingConfig {
    /// Fewest words of the text.
    pub min_words: usize,
    /// Most words of the text, up to 5000.
    pub max_words: usize,
}

impl Default for LetterCountingConfig {
    fn default() -> Self {
        Self { min_words: 5, max_words: 15 }
    }
}

/// How many times does the letter "t" appear in the text?
#[derive(Debug, Clone, Copy)]
pub struct LetterCounting {
    config: LetterCountingConfig,
}

impl LetterCounting {
    /// The task with these settings.
    ///
    /// # Errors
    /// [`aligner_core::Error::Setting`] for ranges that are empty or too wide.
    pub fn new(config: LetterCountingConfig) -> Result<Self> {
        check_range(("min_words", config.min_words), ("max_words", config.max_words), 1..=5000)?;
        Ok(Self { config })
    }
}

impl Task for LetterCounting {
    fn name(&self) -> &'static str {
        NAME
    }

    fn sample(&self, seed: u64, index: u64) -> Result<TaskRow> {
        let mut draws = Draws::new(NAME, seed, index);
        let count = draws.count(self.config.min_words, self.config.max_words);
        let start = draws.count(0, WORDS.len() - count);
        let text = WORDS[start..start + count].join(" ");
        let lower = text.to_lowercase();
        let letters: BTreeSet<char> = lower.chars().filter(|symbol| symbol.is_alphabetic()).collect();
        // A text of numbers alone is asked for a letter that it does not have.
        let letters: Vec<char> = if letters.is_empty() { vec!['a'] } else { letters.into_iter().collect() };
        let letter = *draws.pick(&letters);
        let prompt = format!("How many times does the letter \"{letter}\" appear in the text: \"{text}\"?");
        let metadata = json!({
            "task": NAME,
            "prompt": prompt,
            "answer": lower.matches(letter).count().to_string(),
            "target_letter": letter.to_string(),
            "span_length": count,
        });
        Ok(TaskRow { id: format!("{NAME}/{seed}/{index}"), prompt, metadata })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_counts_the_letter_in_both_cases() {
        let task = LetterCounting::new(LetterCountingConfig::default()).expect("settings");
        for index in 0..200 {
            let row = task.sample(9, index).expect("questions");
            let parts: Vec<&str> = row.prompt.split('"').collect();
            let count =
                parts[3].chars().filter(|symbol| symbol.to_lowercase().to_string() == parts[1]).count();
            let answer: usize = row.metadata["answer"].as_str().expect("text").parse().expect("a count");
            assert!(count > 0 && answer == count, "{row:?}");
            assert!((5..=15).contains(&parts[3].split(' ').count()));
        }
    }

    #[test]
    fn the_whole_text_can_be_asked_for() {
        let config = LetterCountingConfig { min_words: 5000, max_words: 5000 };
        assert!(LetterCounting::new(config).expect("settings").sample(0, 0).is_ok());
        let config = LetterCountingConfig { min_words: 0, ..config };
        assert!(LetterCounting::new(config).expect_err("no words").to_string().starts_with("min_words: "));
    }
}
