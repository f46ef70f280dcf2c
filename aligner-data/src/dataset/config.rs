//! The settings of a data set.

use std::path::PathBuf;

use aligner_core::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::tasks::TaskConfig;
use crate::{Format, Target};

/// What becomes of a sample with more than `max_length` tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Overlong {
    /// Its end is cut off. A row that loses every target is dropped, and so is a prompt.
    #[default]
    Truncate,
    /// Its row is dropped.
    Drop,
    /// The run stops.
    Error,
}

/// What becomes of a preference pair whose sides are equal.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EqualPairs {
    /// The run stops.
    #[default]
    Error,
    /// The row is dropped.
    Drop,
}

/// A data file and how its rows become samples.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DatasetConfig {
    /// JSON lines, a JSON array, Parquet, or lines of text (`.txt`); this or `task`.
    #[serde(default)]
    pub path: PathBuf,
    /// A task whose questions are made, with answers that can be checked; this or `path`. Held-out rows are
    /// questions that the others never ask.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<TaskConfig>,
    /// Seed of the task's questions.
    #[serde(default)]
    pub task_seed: u64,
    /// The schema of its rows; told from the first row by default.
    #[serde(default)]
    pub format: Format,
    /// Use the first rows only, this many; of a task's endless rows, 10000 by default.
    #[serde(default)]
    pub limit: Option<usize>,
    /// The longest sample, prompt and response together, in tokens. The default is TRL's.
    #[serde(default = "default_max_length")]
    pub max_length: usize,
    /// What becomes of longer samples.
    #[serde(default)]
    pub overlong: Overlong,
    /// What becomes of preference pairs whose sides are equal.
    #[serde(default)]
    pub equal_pairs: EqualPairs,
    /// Which turns of a conversation are targets. Pairs and labelled responses learn their responses.
    #[serde(default)]
    pub train_on: Target,
    /// System prompt for conversations that begin without one.
    #[serde(default)]
    pub system: Option<String>,
    /// Join prompt and completion as they are, also where the tokenizer has a chat template.
    #[serde(default)]
    pub raw_text: bool,
    /// Rows to keep aside for evaluation.
    #[serde(default)]
    pub holdout: usize,
    /// Seed of the draw of held-out rows: the same rows are held out whatever seed a run trains with.
    #[serde(default)]
    pub holdout_seed: u64,
}

fn default_max_length() -> usize {
    1024
}

impl DatasetConfig {
    /// The defaults for a data file.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            task: None,
            task_seed: 0,
            format: Format::Auto,
            limit: None,
            max_length: default_max_length(),
            overlong: Overlong::default(),
            equal_pairs: EqualPairs::default(),
            train_on: Target::default(),
            system: None,
            raw_text: false,
            holdout: 0,
            holdout_seed: 0,
        }
    }

    /// What messages call the rows: the file, or the task.
    pub fn name(&self) -> String {
        match &self.task {
            Some(task) => format!("task {}", task.name()),
            None => self.path.display().to_string(),
        }
    }

    /// Checks what no type can say.
    ///
    /// # Errors
    /// [`Error::Setting`] names the setting.
    pub fn check(&self) -> Result<()> {
        if self.max_length < 2 {
            let message =
                format!("expected 2 tokens or more (one predicts another), got {}", self.max_length);
            return Err(Error::setting("max_length", message));
        }
        match (&self.task, self.path.as_os_str().is_empty()) {
            (None, true) => return Err(Error::setting("path", "expected a data file, or `task`")),
            (Some(_), false) => return Err(Error::setting("task", "give either `path` or `task`")),
            _ => {}
        }
        if self.limit == Some(0) {
            return Err(Error::setting("limit", "expected 1 row or more, got 0"));
        }
        if self.train_on == Target::Nothing {
            return Err(Error::setting("train_on", "expected assistant, last or all, got nothing"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_key_is_refused_and_the_rest_has_defaults() {
        let config: DatasetConfig =
            serde_json::from_str(r#"{"path": "a.jsonl", "overlong": "drop"}"#).unwrap();
        assert_eq!(config, DatasetConfig { overlong: Overlong::Drop, ..DatasetConfig::new("a.jsonl") });
        let error =
            serde_json::from_str::<DatasetConfig>(r#"{"path": "a.jsonl", "max_len": 2}"#).unwrap_err();
        assert!(error.to_string().contains("max_len"), "{error}");
    }

    #[test]
    fn settings_that_cannot_work_are_named() {
        let base = DatasetConfig::new("a.jsonl");
        for (config, key) in [
            (DatasetConfig { max_length: 1, ..base.clone() }, "max_length"),
            (DatasetConfig { limit: Some(0), ..base.clone() }, "limit"),
            (DatasetConfig { train_on: Target::Nothing, ..base.clone() }, "train_on"),
        ] {
            assert!(config.check().unwrap_err().to_string().starts_with(key));
        }
    }
}
