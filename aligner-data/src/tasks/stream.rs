//! A task's endless stream, with questions that are held out of training.

use aligner_core::rng::{Rng, key_of, split_mix};
use aligner_core::{Error, Result};
use serde::{Deserialize, Serialize};

use super::{Task, TaskRow};

/// Tries for a question of one split before the settings are said to have none.
const MOST_TRIES: u64 = 10_000;

/// Which questions a stream asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// Those to train on.
    Train,
    /// Those to evaluate on.
    HeldOut,
}

impl Split {
    fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::HeldOut => "held_out",
        }
    }
}

/// An endless stream of a task's questions.
///
/// The splits share no question, whatever their seeds: a hash of the question's words decides to which it
/// belongs. Within a split, a small space of questions is asked again and again.
#[derive(Debug)]
pub struct TaskStream {
    task: Box<dyn Task>,
    seed: u64,
    split: Split,
    held_out: f64,
}

impl TaskStream {
    /// The stream `seed` of a split, in which `held_out` is the share of all questions kept out of training.
    ///
    /// # Errors
    /// [`Error::Setting`] for a share outside of 0..1.
    pub fn new(task: Box<dyn Task>, seed: u64, split: Split, held_out: f64) -> Result<Self> {
        if !(0.0..1.0).contains(&held_out) {
            return Err(Error::setting(
                "held_out",
                format!("must be at least 0 and below 1, got {held_out}"),
            ));
        }
        if split == Split::HeldOut && held_out == 0.0 {
            return Err(Error::setting("held_out", "must be above 0 where held-out questions are asked"));
        }
        Ok(Self { task, seed, split, held_out })
    }

    /// The task.
    pub fn task(&self) -> &dyn Task {
        self.task.as_ref()
    }

    /// The question at a place of the stream: a function of seed, split and index alone.
    ///
    /// # Errors
    /// [`Error::Setting`] where the settings leave no question to this split.
    pub fn row(&self, index: u64) -> Result<TaskRow> {
        let name = self.split.name();
        for attempt in 0..MOST_TRIES {
            let seed = Rng::new(&[self.seed, key_of(name), attempt]).bits(0);
            let row = self.task.sample(seed, index)?;
            if self.split_of(&row.prompt) == self.split {
                return Ok(TaskRow {
                    id: format!("{}/{name}/{}/{index}", self.task.name(), self.seed),
                    ..row
                });
            }
        }
        Err(Error::setting(
            "held_out",
            format!(
                "{MOST_TRIES} questions of `{}` held none for the split {name}; ask harder ones, or change the share",
                self.task.name()
            ),
        ))
    }

    fn split_of(&self, prompt: &str) -> Split {
        let uniform = (split_mix(key_of(prompt), 0) >> 11) as f64 / (1_u64 << 53) as f64;
        if uniform < self.held_out { Split::HeldOut } else { Split::Train }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::tasks::{ChainSumConfig, TaskConfig};

    fn stream(config: ChainSumConfig, seed: u64, split: Split) -> Result<TaskStream> {
        TaskStream::new(TaskConfig::ChainSum(config).build()?, seed, split, 0.1)
    }

    /// Two terms of one digit: 200 questions in all.
    fn small() -> ChainSumConfig {
        ChainSumConfig {
            min_terms: 2,
            max_terms: 2,
            min_digits: 1,
            max_digits: 1,
            ..ChainSumConfig::default()
        }
    }

    #[test]
    fn no_question_is_in_both_splits() {
        let prompts = |seed, split| -> HashSet<String> {
            let stream = stream(small(), seed, split).expect("settings");
            (0..2000).map(|index| stream.row(index).expect("questions").prompt).collect()
        };
        let (train, held_out) = (prompts(1, Split::Train), prompts(2, Split::HeldOut));
        assert!(train.len() > 160 && held_out.len() > 8, "{} and {}", train.len(), held_out.len());
        assert_eq!(train.len() + held_out.len(), 200, "each of the 200 questions is in one of them");
        assert!(train.is_disjoint(&held_out));
    }

    #[test]
    fn a_row_depends_on_its_place_alone() {
        let one = stream(ChainSumConfig::default(), 4, Split::Train).expect("settings");
        let late = one.row(90).expect("questions");
        let other = stream(ChainSumConfig::default(), 4, Split::Train).expect("settings");
        assert_eq!(other.row(90).expect("questions"), late);
        assert_eq!(late.id, "chain_sum/train/4/90");
    }

    #[test]
    fn a_split_without_questions_is_an_error() {
        let config = ChainSumConfig { min_terms: 1, max_terms: 1, ..small() };
        // Ten questions; none of them falls into the held-out tenth of a thousandth.
        let task = TaskConfig::ChainSum(config).build().expect("settings");
        let stream = TaskStream::new(task, 1, Split::HeldOut, 1e-5).expect("settings");
        assert!(stream.row(0).expect_err("no question").to_string().contains("chain_sum"));
    }

    #[test]
    fn shares_that_cannot_work_are_named() {
        for (share, split) in
            [(-0.1, Split::Train), (1.0, Split::Train), (f64::NAN, Split::Train), (0.0, Split::HeldOut)]
        {
            let task = TaskConfig::ChainSum(small()).build().expect("settings");
            let message = TaskStream::new(task, 0, split, share).expect_err("no share").to_string();
            assert!(message.starts_with("held_out: "), "{message}");
        }
    }
}
