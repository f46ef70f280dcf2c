//! Scores by the instructions of format that a response follows.

mod check;
mod rules;
mod sentences;
mod words;

use aligner_core::{Error, Result, Reward, Sample, Score};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{each, prompt_text};
pub use check::{Check, Relation};

/// What following some of several instructions is worth.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FormatScore {
    /// 1 where all are followed, else 0.
    #[default]
    All,
    /// The share that is followed, 0..1.
    Share,
}

/// Settings of [`Format`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FormatConfig {
    /// Instructions to every prompt.
    pub checks: Vec<Check>,
    /// Whether a prompt's own instructions are read from its metadata, as `IFEval`'s rows write them:
    /// `instruction_id_list` and, for each, a table of `kwargs`.
    pub from_metadata: bool,
    /// What following some of them is worth.
    pub score: FormatScore,
    /// Whether an instruction also counts as followed where the response follows it without its first line, its
    /// last line, both, or its asterisks.
    pub loose: bool,
    /// Whether what stands before `</think>` is left out.
    pub strip_thinking: bool,
}

impl Default for FormatConfig {
    fn default() -> Self {
        Self {
            checks: Vec::new(),
            from_metadata: false,
            score: FormatScore::All,
            loose: false,
            strip_thinking: true,
        }
    }
}

/// Checks instructions of format, as `IFEval` does (Zhou et al. 2023, arXiv:2311.07911).
///
/// An empty response follows none. With `from_metadata`, a sample has no score where its metadata have no instruction,
/// or one that has no [`Check`].
#[derive(Debug, Clone)]
pub struct Format {
    config: FormatConfig,
}

impl Format {
    /// The reward with these settings.
    ///
    /// # Errors
    /// [`Error::Setting`] for no instruction, or one that cannot be followed.
    pub fn new(config: FormatConfig) -> Result<Self> {
        if config.checks.is_empty() && !config.from_metadata {
            return Err(Error::setting("checks", "must hold a check, or `from_metadata` be true"));
        }
        for (at, check) in config.checks.iter().enumerate() {
            check.validate().map_err(|message| Error::setting(format!("checks.{at}"), message))?;
        }
        Ok(Self { config })
    }

    fn rate(&self, sample: &Sample) -> Result<Score, String> {
        let own = if self.config.from_metadata { of_metadata(&sample.metadata)? } else { Some(Vec::new()) };
        let Some(own) = own else { return Ok(Score::None) };
        let text = if self.config.strip_thinking { without_thinking(&sample.text) } else { &sample.text };
        let readings = if self.config.loose { readings(text) } else { vec![text.to_owned()] };
        let prompt = prompt_text(sample);
        let follows = |check: &Check| {
            readings.iter().any(|reading| !reading.trim().is_empty() && check.is_followed(reading, prompt))
        };
        let checks = || self.config.checks.iter().chain(&own);
        let (all, followed) = (checks().count(), checks().filter(|check| follows(check)).count());
        Ok(Score::Sample(match self.config.score {
            FormatScore::All => f32::from(u8::from(followed == all)),
            FormatScore::Share => followed as f32 / all as f32,
        }))
    }
}

/// The instructions that a row's metadata hold; none where there is none, or one that is not known here.
fn of_metadata(metadata: &Value) -> Result<Option<Vec<Check>>, String> {
    let Some(ids) = metadata.get("instruction_id_list").and_then(Value::as_array) else { return Ok(None) };
    let settings = metadata.get("kwargs").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    if ids.len() != settings.len() || ids.is_empty() {
        return if ids.is_empty() {
            Ok(None)
        } else {
            Err(format!("its metadata have {} instructions, but {} `kwargs`", ids.len(), settings.len()))
        };
    }
    let mut checks = Vec::with_capacity(ids.len());
    for (id, settings) in ids.iter().zip(settings) {
        let id = id.as_str().ok_or_else(|| format!("its instruction {id} is no text"))?;
        match Check::of_ifeval(id, settings)
            .map_err(|message| format!("its instruction `{id}`: {message}"))?
        {
            Some(check) => checks.push(check),
            None => return Ok(None),
        }
    }
    Ok(Some(checks))
}

/// What stands behind the first `</think>`; nothing of a thought that does not end.
fn without_thinking(text: &str) -> &str {
    let text = text.trim();
    match text.split_once("</think>") {
        Some((_, rest)) => rest.trim(),
        None if text.starts_with("<think>") => "",
        None => text,
    }
}

/// The text, and what is left of it without its first line, its last line, both; each with and without asterisks.
fn readings(text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.split('\n').collect();
    let part = |from: usize, to: usize| {
        let lines = lines.get(from..to.max(from)).unwrap_or_default();
        lines.join("\n").trim().to_owned()
    };
    let count = lines.len();
    let parts = [text.to_owned(), part(1, count), part(0, count - 1), part(1, count - 1)];
    let plain: Vec<String> = parts.iter().map(|part| part.replace('*', "")).collect();
    parts.into_iter().chain(plain).collect()
}

impl Reward for Format {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        each(samples, |sample| self.rate(sample))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn sample(metadata: Value, text: &str) -> Sample {
        Sample { metadata, text: text.into(), ..Sample::default() }
    }

    fn scores(config: FormatConfig, texts: &[&str]) -> Vec<Score> {
        let samples: Vec<Sample> = texts.iter().map(|text| sample(json!({}), text)).collect();
        Format::new(config).expect("settings").score(&samples).expect("checks")
    }

    fn two() -> FormatConfig {
        let checks =
            vec![Check::NoComma {}, Check::NumberWords { num_words: 2, relation: Relation::AtLeast }];
        FormatConfig { checks, ..FormatConfig::default() }
    }

    #[test]
    fn all_or_a_share_of_the_checks_count() {
        let texts = ["two words", "one", "one, two", "", " \n"];
        let score = |value| Score::Sample(value);
        assert_eq!(scores(two(), &texts), [1.0, 0.0, 0.0, 0.0, 0.0].map(score));
        let config = FormatConfig { score: FormatScore::Share, ..two() };
        assert_eq!(scores(config, &texts), [1.0, 0.5, 0.5, 0.0, 0.0].map(score));
    }

    #[test]
    fn loose_reading_passes_over_lines_and_asterisks() {
        let loose = FormatConfig { loose: true, ..two() };
        let texts = ["Sure, here:\ntwo words", "two words\nDone, I hope"];
        assert_eq!(scores(loose, &texts), vec![Score::Sample(1.0); 2]);
        assert_eq!(scores(two(), &texts), vec![Score::Sample(0.0); 2]);
    }

    #[test]
    fn thoughts_are_left_out() {
        let texts = ["<think>well, yes</think> two words", "<think> two words"];
        assert_eq!(scores(two(), &texts), [Score::Sample(1.0), Score::Sample(0.0)]);
        let config = FormatConfig { strip_thinking: false, ..two() };
        assert_eq!(scores(config, &texts), [Score::Sample(0.0), Score::Sample(1.0)]);
    }

    #[test]
    fn rows_of_ifeval_bring_their_own_instructions() {
        let reward =
            Format::new(FormatConfig { from_metadata: true, ..FormatConfig::default() }).expect("settings");
        let score = |metadata: Value, text: &str| reward.score(&[sample(metadata, text)]);
        let row = json!({
            "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
            "kwargs": [{}, {"num_words": 2.0, "relation": "at least", "letter": null}],
        });
        assert_eq!(score(row.clone(), "two words").expect("known"), [Score::Sample(1.0)]);
        assert_eq!(score(row, "one").expect("known"), [Score::Sample(0.0)]);
        let language =
            json!({"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "de"}]});
        assert_eq!(score(language, "ja").expect("no score"), [Score::None]);
        assert_eq!(score(Value::Null, "ja").expect("no score"), [Score::None]);
        let short = json!({"id": "row 4", "instruction_id_list": ["punctuation:no_comma"], "kwargs": []});
        let message = score(short, "a").expect_err("no kwargs").to_string();
        assert!(message.starts_with("sample 0 (row 4): "), "{message}");
        let wrong = json!({"instruction_id_list": ["keywords:existence"], "kwargs": [{"keyword": "a"}]});
        let message = score(wrong, "a").expect_err("no keywords").to_string();
        assert!(message.contains("keywords:existence") && message.contains("`keyword`"), "{message}");
    }

    #[test]
    fn settings_that_cannot_work_are_named() {
        let refused = |config| Format::new(config).expect_err("no reward").to_string();
        assert!(refused(FormatConfig::default()).starts_with("checks: "));
        let config = FormatConfig {
            checks: vec![Check::NoComma {}, Check::Existence { keywords: vec![] }],
            ..FormatConfig::default()
        };
        assert!(refused(config).starts_with("checks.1: "));
    }
}
