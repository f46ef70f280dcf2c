//! `rollouts.jsonl`: some of the samples that a run has learned from, with what they were worth.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use aligner_algos::ops::targets::places;
use aligner_core::weights::atomic_write;
use aligner_core::{Error, Group, Result, Sample};
use serde::{Deserialize, Serialize};

/// One sample.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Drawn {
    /// The step that learned from it.
    pub step: u64,
    /// Id of the prompt's row.
    pub id: String,
    /// Which of the prompt's responses it is.
    pub sample: usize,
    /// What was asked, as text.
    pub prompt: String,
    /// The response as text.
    pub text: String,
    /// Its reward.
    pub reward: Option<f32>,
    /// What each part of the reward said.
    pub parts: BTreeMap<String, f32>,
    /// Σ (log-probability − reference's) over the response, in nats; none without a reference.
    pub kl: Option<f64>,
    /// Tokens of the response.
    pub tokens: usize,
    /// Whether it ended by itself.
    pub ended: bool,
}

impl Drawn {
    /// All samples of a group.
    pub(crate) fn of(step: u64, group: &Group) -> Vec<Self> {
        let prompt = group.metadata.get("prompt").and_then(|text| text.as_str()).unwrap_or_default();
        let one = |(at, sample): (usize, &Sample)| Self {
            step,
            id: group.id.clone(),
            sample: at,
            prompt: prompt.to_owned(),
            text: sample.text.clone(),
            reward: sample.reward,
            parts: sample.parts.clone(),
            kl: kl(sample),
            tokens: sample.targets(),
            ended: sample.ended == Some(true),
        };
        group.samples.iter().enumerate().map(one).collect()
    }
}

fn kl(sample: &Sample) -> Option<f64> {
    let known = |values: &[f32]| values.len() == sample.tokens.len();
    (known(&sample.logps) && known(&sample.ref_logps))
        .then(|| places(sample).map(|at| f64::from(sample.logps[at] - sample.ref_logps[at])).sum())
}

/// Appends a step's samples, in place of any of that step and of later ones.
pub(crate) fn write(path: &Path, step: u64, drawn: &[Drawn]) -> Result<()> {
    let mut all: Vec<Drawn> = read(path)?.into_iter().filter(|other| other.step < step).collect();
    all.extend_from_slice(drawn);
    let mut text = Vec::new();
    for one in &all {
        serde_json::to_writer(&mut text, one).map_err(|error| Error::format(path, error.to_string()))?;
        text.push(b'\n');
    }
    atomic_write(path, |file| file.write_all(&text))
}

/// All samples of a file; none where there is no file.
pub(crate) fn read(path: &Path) -> Result<Vec<Drawn>> {
    if !path.exists() {
        return Ok(Vec::new());
    }
    let text = fs::read_to_string(path).map_err(Error::io(path))?;
    Ok(text.lines().map_while(|line| serde_json::from_str(line).ok()).collect())
}
