//! `samples.jsonl`: answers to held-out prompts before and after training.

use std::fs;
use std::path::Path;

use aligner_core::weights::atomic_write;
use aligner_core::{Error, Result};
use serde::{Deserialize, Serialize};

/// One answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// Optimizer steps of the model that answered.
    pub step: u64,
    /// Id of the prompt's row.
    pub id: String,
    /// The prompt as text.
    pub prompt: String,
    /// The greedy answer.
    pub text: String,
}

/// Appends answers, in place of any of the same step.
pub(crate) fn write(path: &Path, step: u64, answers: &[Answer]) -> Result<()> {
    let mut all: Vec<Answer> = read(path)?.into_iter().filter(|answer| answer.step < step).collect();
    all.extend_from_slice(answers);
    let mut text = Vec::new();
    for answer in &all {
        serde_json::to_writer(&mut text, answer).map_err(|error| Error::format(path, error.to_string()))?;
        text.push(b'\n');
    }
    atomic_write(path, |file| file.write_all(&text))
}

/// All answers of a file; none where there is no file.
pub(crate) fn read(path: &Path) -> Result<Vec<Answer>> {
    if !path.exists() {
        return Ok(Vec::new());
    }
    let text = fs::read_to_string(path).map_err(Error::io(path))?;
    Ok(text.lines().map_while(|line| serde_json::from_str(line).ok()).collect())
}
