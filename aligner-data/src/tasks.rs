//! Tasks whose answers can be checked: seeded, endless sources of questions.
//!
//! Wording and difficulty settings are those of `reasoning-gym` (Stojanovski et al. 2025, arXiv:2505.24760); the
//! random numbers are not, so a seed gives other questions than there.

mod chain_sum;
mod countdown;
mod draws;
mod leg_counting;
mod letter_counting;
mod stream;

use aligner_core::{Error, Result};
use serde::{Deserialize, Serialize};

pub use chain_sum::{ChainSum, ChainSumConfig};
pub use countdown::{Countdown, CountdownConfig, Operator};
pub use leg_counting::{LegCounting, LegCountingConfig};
pub use letter_counting::{LetterCounting, LetterCountingConfig};
pub use stream::{Split, TaskStream};

/// One question.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TaskRow {
    /// The task, its seed and its index: the same words for the same question.
    pub id: String,
    /// The question's text, before any chat template.
    pub prompt: String,
    /// `task`, `prompt`, `answer`, and what else the task's grader or a reader of the data may ask for.
    pub metadata: serde_json::Value,
}

/// A source of questions, each a pure function of a seed and an index.
pub trait Task: std::fmt::Debug + Send + Sync {
    /// The task's name in settings and in the rows' metadata.
    fn name(&self) -> &'static str;

    /// The question number `index` of the stream `seed`.
    ///
    /// # Errors
    /// [`Error::Setting`] where the settings leave nothing to ask.
    fn sample(&self, seed: u64, index: u64) -> Result<TaskRow>;
}

/// A task and its settings, as a run file writes them: `kind` is the task's name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum TaskConfig {
    /// Sums and differences of several numbers.
    ChainSum(ChainSumConfig),
    /// An expression of given numbers that equals a target.
    Countdown(CountdownConfig),
    /// The legs of several kinds of animals.
    LegCounting(LegCountingConfig),
    /// How often a letter occurs in a text.
    LetterCounting(LetterCountingConfig),
}

impl TaskConfig {
    /// The task's name: its `kind`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::ChainSum(_) => "chain_sum",
            Self::Countdown(_) => "countdown",
            Self::LegCounting(_) => "leg_counting",
            Self::LetterCounting(_) => "letter_counting",
        }
    }

    /// The task with these settings.
    ///
    /// # Errors
    /// [`Error::Setting`] for settings that cannot work.
    pub fn build(self) -> Result<Box<dyn Task>> {
        Ok(match self {
            Self::ChainSum(config) => Box::new(ChainSum::new(config)?),
            Self::Countdown(config) => Box::new(Countdown::new(config)?),
            Self::LegCounting(config) => Box::new(LegCounting::new(config)?),
            Self::LetterCounting(config) => Box::new(LetterCounting::new(config)?),
        })
    }
}

/// Checks that `least` is a range's lower end, and that both ends lie within `allowed`.
fn check_range<T: PartialOrd + std::fmt::Display>(
    (least_key, least): (&str, T),
    (most_key, most): (&str, T),
    allowed: std::ops::RangeInclusive<T>,
) -> Result<()> {
    if least < *allowed.start() {
        return Err(Error::setting(least_key, format!("must be at least {}, got {least}", allowed.start())));
    }
    if most > *allowed.end() {
        return Err(Error::setting(most_key, format!("must be at most {}, got {most}", allowed.end())));
    }
    if most < least {
        return Err(Error::setting(most_key, format!("must be at least {least_key} ({least}), got {most}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Box<dyn Task>> {
        let configs = [
            TaskConfig::ChainSum(ChainSumConfig::default()),
            TaskConfig::Countdown(CountdownConfig::default()),
            TaskConfig::LegCounting(LegCountingConfig::default()),
            TaskConfig::LetterCounting(LetterCountingConfig::default()),
        ];
        configs.into_iter().map(|config| config.build().expect("defaults")).collect()
    }

    #[test]
    fn a_question_is_a_function_of_seed_and_index() {
        for task in all() {
            let rows = |seed| -> Vec<TaskRow> {
                (0..50).map(|index| task.sample(seed, index).expect("defaults")).collect()
            };
            let first = rows(7);
            assert_eq!(first, rows(7));
            let differ = first.iter().zip(rows(8)).filter(|(one, other)| one.prompt != other.prompt).count();
            assert!(differ >= 45, "{}: {differ} of 50 differ under another seed", task.name());
            let mut prompts: Vec<&str> = first.iter().map(|row| row.prompt.as_str()).collect();
            prompts.sort_unstable();
            prompts.dedup();
            assert!(prompts.len() >= 45, "{}: {} different of 50", task.name(), prompts.len());
        }
    }

    #[test]
    fn every_row_says_what_a_grader_asks() {
        for task in all() {
            let row = task.sample(1, 2).expect("defaults");
            assert_eq!(row.metadata["task"], task.name());
            assert_eq!(row.metadata["prompt"], row.prompt.as_str());
            assert!(row.metadata["answer"].is_string(), "{row:?}");
            assert!(row.id.contains(task.name()) && row.id.contains('2'), "{}", row.id);
        }
    }

    #[test]
    fn a_run_files_table_names_its_task_and_misspelt_keys_are_refused_by_name() {
        let read = |text: &str| serde_json::from_str::<TaskConfig>(text);
        let config = read(r#"{"kind": "chain_sum", "max_terms": 3}"#).expect("a task");
        assert_eq!(
            config,
            TaskConfig::ChainSum(ChainSumConfig { max_terms: 3, ..ChainSumConfig::default() })
        );
        for kind in ["chain_sum", "countdown", "leg_counting", "letter_counting"] {
            let text = format!(r#"{{"kind": "{kind}", "max_trems": 3}}"#);
            let message = read(&text).expect_err("a misspelt key").to_string();
            assert!(message.contains("max_trems"), "{message}");
        }
        assert!(read(r#"{"kind": "chain_sums"}"#).expect_err("no task").to_string().contains("chain_sums"));
    }

    #[test]
    fn questions_never_change_between_versions() {
        // A resumed run must see the questions that the interrupted one would have seen.
        let recorded = [
            "18 + 22 - 59 + 15 + 31 =",
            "Calculate 107 using all of these numbers: 32, 66, 17, 8.",
            "4 sea slugs, 3 humans, 3 leechs, 6 tigers, 1 grasshopper, 9 praying mantiss, 3 flatworms, 9 insects, 3 crabs?",
            "the letter \"t\" appear in the text: \"Only passably good Yes the stomach There s the rub You are\"?",
        ];
        for (task, recorded) in all().iter().zip(recorded) {
            let prompt = task.sample(3, 5).expect("defaults").prompt;
            assert!(prompt.contains(recorded), "{prompt}");
        }
    }
}
