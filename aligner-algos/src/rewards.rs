//! What a response is worth: rules, graders, models and programs, and their weighted sum.
//!
//! | what | where |
//! |---|---|
//! | several rewards, each with a name and a weight | [`RewardParts`] |
//! | sentiment | [`Lexicon`] |
//! | a pattern, a length, a format, a JSON schema | [`RegexReward`], [`Length`], [`Format`], [`JsonSchema`] |
//! | the data set's answer, a generated task's answer | [`Answer`], [`TaskReward`] |
//! | a trained reward model | [`ModelReward`] |
//! | a program in any language, a service | [`ProcessReward`], [`RemoteReward`] |
//!
//! A reward reads the response's text from [`Sample::text`], and what the data set says of the prompt from
//! [`Sample::metadata`]; the prompt's own text stands there under `prompt`.

mod answer;
mod expression;
mod extract;
mod format;
mod json_schema;
mod length;
mod letters;
mod lexicon;
mod model;
mod number;
mod parts;
mod process;
mod protocol;
mod regex;
mod remote;
mod task;

use aligner_core::{Error, Result, Sample, Score};
use serde_json::Value;

pub use answer::{Answer, AnswerConfig, Compare};
pub use extract::Extract;
pub use format::{Check, Format, FormatConfig, FormatScore, Relation};
pub use json_schema::{JsonSchema, JsonSchemaConfig, Schema};
pub use length::{Length, LengthConfig, LengthSide, LengthUnit};
pub use lexicon::{Lexicon, LexiconConfig, Measure, Polarity, polarity};
pub use model::{ModelReward, ModelRewardConfig};
pub use parts::{PartScores, RewardParts, Scored};
pub use process::{ProcessConfig, ProcessReward};
pub use regex::{RegexConfig, RegexMode, RegexReward};
pub use remote::{RemoteConfig, RemoteReward};
pub use task::{TaskReward, TaskRewardConfig};

/// The prompt's text, as the metadata hold it under `prompt`; empty where they do not, or hold a list of turns.
pub fn prompt_text(sample: &Sample) -> &str {
    sample.metadata.get("prompt").and_then(Value::as_str).unwrap_or_default()
}

/// How errors name the sample at a place of a batch: by that place, and by the `id` that its metadata hold.
fn sample_name(at: usize, sample: &Sample) -> String {
    match sample.metadata.get("id") {
        Some(Value::String(id)) => format!("sample {at} ({id})"),
        Some(Value::Number(id)) => format!("sample {at} ({id})"),
        _ => format!("sample {at}"),
    }
}

/// Each sample's score by a rule that judges one; what it cannot judge is an error with the sample's name.
fn each(
    samples: &[Sample],
    rate: impl Fn(&Sample) -> std::result::Result<Score, String>,
) -> Result<Vec<Score>> {
    let named = |(at, sample): (usize, &Sample)| {
        rate(sample).map_err(|message| Error::Invalid(format!("{}: {message}", sample_name(at, sample))))
    };
    samples.iter().enumerate().map(named).collect()
}

/// Names of the samples at some places of a batch, the first few of many.
fn sample_names(places: &[usize], samples: &[Sample]) -> String {
    const MOST: usize = 8;
    let mut names: Vec<String> = places.iter().take(MOST).map(|&at| sample_name(at, &samples[at])).collect();
    if places.len() > MOST {
        names.push(format!("and {} more", places.len() - MOST));
    }
    names.join(", ")
}

/// Writes a table's keys alone: its values may be secrets.
fn names_only<S: serde::Serializer>(
    table: &std::collections::BTreeMap<String, String>,
    out: S,
) -> std::result::Result<S::Ok, S::Error> {
    out.collect_seq(table.keys())
}

/// A setting's number, refused where 32 bits do not hold it.
fn finite(key: &str, value: f64) -> Result<f64> {
    if (value as f32).is_finite() {
        return Ok(value);
    }
    Err(Error::setting(key, format!("must be finite, got {value}")))
}

/// A setting's number of seconds, up to some thirty years.
fn seconds(key: &str, value: f64) -> Result<std::time::Duration> {
    if value > 0.0 && value <= 1e9 {
        return Ok(std::time::Duration::from_secs_f64(value));
    }
    Err(Error::setting(key, format!("must be above 0 and at most 1e9 seconds, got {value}")))
}
