//! Scores by the answer that the data set has.

use std::borrow::Cow;

use aligner_core::{Error, Result, Reward, Sample, Score};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::extract::{Extract, Extractor, after, last_number};
use super::{finite, number, sample_name};

/// How an answer is compared with the expected one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compare {
    /// Letter by letter, without white space around.
    #[default]
    Exact,
    /// By value, within the tolerance.
    Numeric,
}

/// Settings of [`Answer`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AnswerConfig {
    /// Where the expected answer stands in the prompt's metadata: a key, or keys joined by dots.
    pub key: String,
    /// What the expected answer follows there, as GSM8K's stands after `####`; without it, it is all of the text.
    pub key_marker: Option<String>,
    /// How answers are compared.
    pub compare: Compare,
    /// Largest difference of equal numbers.
    pub tolerance: f64,
    /// Largest difference of equal numbers as a share of the expected one; added to `tolerance`.
    pub relative_tolerance: f64,
    /// Whether letters of both cases are equal.
    pub ignore_case: bool,
    /// Where the answer stands in the response.
    pub extract: Extract,
    /// What the answer follows, for `extract = "marker"` and `"auto"`.
    pub marker: String,
    /// The tag's name, for `extract = "tag"` and `"auto"`.
    pub tag: String,
    /// The score of a right answer.
    pub correct: f64,
    /// The score of a wrong one.
    pub wrong: f64,
    /// The score of a response without an answer.
    pub missing: f64,
}

impl Default for AnswerConfig {
    fn default() -> Self {
        Self {
            key: "answer".into(),
            key_marker: None,
            compare: Compare::Exact,
            tolerance: 1e-6,
            relative_tolerance: 0.0,
            ignore_case: false,
            extract: Extract::Whole,
            marker: "####".into(),
            tag: "answer".into(),
            correct: 1.0,
            wrong: 0.0,
            missing: 0.0,
        }
    }
}

/// Compares the response's answer with the one in the prompt's metadata: a text, a number, a truth value, or a
/// list of such, each of which is right.
///
/// A sample whose metadata have no answer, or with `compare = "numeric"` none that is a number, has no score.
#[derive(Debug, Clone)]
pub struct Answer {
    config: AnswerConfig,
    extractor: Extractor,
}

impl Answer {
    /// The reward with these settings.
    ///
    /// # Errors
    /// [`Error::Setting`] for an empty key, marker or tag, a tolerance that is negative, a number that is not
    /// finite.
    pub fn new(config: AnswerConfig) -> Result<Self> {
        if config.key.is_empty() {
            return Err(Error::setting("key", "must not be empty"));
        }
        if config.key_marker.as_deref() == Some("") {
            return Err(Error::setting("key_marker", "must not be empty"));
        }
        let tolerances = [("tolerance", config.tolerance), ("relative_tolerance", config.relative_tolerance)];
        for (key, value) in tolerances {
            if finite(key, value)? < 0.0 {
                return Err(Error::setting(key, format!("must not be negative, got {value}")));
            }
        }
        for (key, value) in
            [("correct", config.correct), ("wrong", config.wrong), ("missing", config.missing)]
        {
            finite(key, value)?;
        }
        let extractor = Extractor::new(config.extract, &config.marker, &config.tag)?;
        Ok(Self { config, extractor })
    }

    fn rate(&self, at: usize, sample: &Sample) -> Result<Score> {
        let config = &self.config;
        let Some(expected) = look_up(&sample.metadata, &config.key) else { return Ok(Score::None) };
        let expected = texts(expected).ok_or_else(|| self.unusable(at, sample))?;
        let comparable = |text: &String| match self.config.compare {
            Compare::Exact => true,
            Compare::Numeric => number::parse(text).is_some(),
        };
        let expected: Vec<String> =
            expected.iter().map(|text| self.of_key(text)).filter(comparable).collect();
        if expected.is_empty() {
            return Ok(Score::None);
        }
        let otherwise = |text| match config.compare {
            Compare::Exact => Some(text),
            Compare::Numeric => last_number(text),
        };
        let score = match self.extractor.find_or(&sample.text, otherwise) {
            None => config.missing,
            Some(answer) if expected.iter().any(|expected| self.is_equal(answer, expected)) => config.correct,
            Some(_) => config.wrong,
        };
        Ok(Score::Sample(score as f32))
    }

    fn is_equal(&self, answer: &str, expected: &str) -> bool {
        match self.config.compare {
            Compare::Exact if self.config.ignore_case => answer.to_lowercase() == expected.to_lowercase(),
            Compare::Exact => answer == expected,
            Compare::Numeric => match (number::parse(answer), number::parse(expected)) {
                (Some(answer), Some(expected)) => {
                    let limit = self.config.tolerance + self.config.relative_tolerance * expected.abs();
                    (answer - expected).abs() <= limit
                }
                _ => false,
            },
        }
    }

    /// The part of the expected text that is the answer.
    fn of_key(&self, text: &str) -> String {
        let marked = self.config.key_marker.as_deref().and_then(|marker| after(text, marker));
        marked.unwrap_or(text).trim().to_owned()
    }

    fn unusable(&self, at: usize, sample: &Sample) -> Error {
        Error::Invalid(format!(
            "{}: `{}` of its metadata must be a text, a number, a truth value or a list of these",
            sample_name(at, sample),
            self.config.key
        ))
    }
}

/// The value at a key, or at keys joined by dots; none where it is absent or null.
fn look_up<'m>(metadata: &'m Value, key: &str) -> Option<&'m Value> {
    let direct = metadata.get(key);
    let found = direct.or_else(|| key.split('.').try_fold(metadata, |value, key| value.get(key)));
    found.filter(|value| !value.is_null())
}

fn texts(value: &Value) -> Option<Vec<Cow<'_, str>>> {
    Some(match value {
        Value::String(text) => vec![Cow::Borrowed(text.as_str())],
        Value::Number(number) => vec![Cow::Owned(number.to_string())],
        Value::Bool(flag) => vec![Cow::Owned(flag.to_string())],
        Value::Array(items) if !items.iter().any(Value::is_array) => {
            items.iter().map(texts).collect::<Option<Vec<_>>>()?.into_iter().flatten().collect()
        }
        Value::Array(_) | Value::Object(_) | Value::Null => return None,
    })
}

impl Reward for Answer {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        samples.iter().enumerate().map(|(at, sample)| self.rate(at, sample)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn sample(metadata: Value, text: &str) -> Sample {
        Sample { metadata, text: text.into(), ..Sample::default() }
    }

    fn rate(config: AnswerConfig, metadata: Value, text: &str) -> Score {
        let reward = Answer::new(config).expect("settings");
        reward.score(&[sample(metadata, text)]).expect("usable").remove(0)
    }

    const RIGHT: Score = Score::Sample(1.0);
    const WRONG: Score = Score::Sample(0.0);

    #[test]
    fn exact_answers_differ_in_white_space_around_them_at_most() {
        let exact = || AnswerConfig::default();
        assert_eq!(rate(exact(), json!({"answer": "Paris"}), " Paris\n"), RIGHT);
        assert_eq!(rate(exact(), json!({"answer": "Paris"}), "paris"), WRONG);
        let config = AnswerConfig { ignore_case: true, ..exact() };
        assert_eq!(rate(config, json!({"answer": "Paris"}), "PARIS"), RIGHT);
        assert_eq!(rate(exact(), json!({"answer": ["a", "b"]}), "b"), RIGHT);
        assert_eq!(rate(exact(), json!({"answer": true}), "true"), RIGHT);
    }

    #[test]
    fn numbers_are_compared_by_value() {
        let numeric = || AnswerConfig {
            compare: Compare::Numeric,
            extract: Extract::LastNumber,
            ..AnswerConfig::default()
        };
        assert_eq!(rate(numeric(), json!({"answer": "1000"}), "That makes $1,000.00."), RIGHT);
        assert_eq!(rate(numeric(), json!({"answer": 1000}), "1001"), WRONG);
        assert_eq!(rate(numeric(), json!({"answer": -0.75}), "-3/4"), RIGHT);
        let missing = AnswerConfig { missing: -1.0, ..numeric() };
        assert_eq!(rate(missing, json!({"answer": 7}), "seven"), Score::Sample(-1.0));
        let near = AnswerConfig { tolerance: 0.0, relative_tolerance: 0.01, ..numeric() };
        assert_eq!(rate(near.clone(), json!({"answer": 200}), "202"), RIGHT);
        assert_eq!(rate(near, json!({"answer": 200}), "203"), WRONG);
    }

    #[test]
    fn the_expected_answer_is_found_in_the_metadata() {
        let config = AnswerConfig {
            key: "reward_model.ground_truth".into(),
            key_marker: Some("####".into()),
            extract: Extract::Auto,
            compare: Compare::Numeric,
            ..AnswerConfig::default()
        };
        let nested = json!({"reward_model": {"ground_truth": "so 6*12 is\n#### 72"}});
        assert_eq!(rate(config.clone(), nested.clone(), "I think <answer>72.0</answer>, not 71"), RIGHT);
        assert_eq!(rate(config.clone(), nested, "I think it is 72"), RIGHT);
        assert_eq!(rate(config, json!({"reward_model.ground_truth": "72"}), "#### 72"), RIGHT);
    }

    #[test]
    fn without_an_expected_answer_there_is_no_score() {
        for metadata in [json!(null), json!({}), json!({"answer": null}), json!({"answer": []})] {
            assert_eq!(rate(AnswerConfig::default(), metadata, "7"), Score::None);
        }
        let config = AnswerConfig { compare: Compare::Numeric, ..AnswerConfig::default() };
        assert_eq!(rate(config, json!({"answer": "seven"}), "7"), Score::None);
    }

    #[test]
    fn an_expected_answer_that_is_a_table_names_its_sample() {
        let reward = Answer::new(AnswerConfig::default()).expect("settings");
        let samples =
            [sample(json!({"answer": "a"}), "a"), sample(json!({"answer": {}, "id": "row 9"}), "a")];
        let message = reward.score(&samples).expect_err("a table").to_string();
        assert!(message.contains("sample 1 (row 9)") && message.contains("`answer`"), "{message}");
    }

    #[test]
    fn settings_that_cannot_work_are_named() {
        let refused = |config| Answer::new(config).expect_err("no reward").to_string();
        let base = AnswerConfig::default;
        assert!(refused(AnswerConfig { key: String::new(), ..base() }).starts_with("key: "));
        assert!(refused(AnswerConfig { tolerance: -1.0, ..base() }).starts_with("tolerance: "));
        assert!(refused(AnswerConfig { wrong: f64::NAN, ..base() }).starts_with("wrong: "));
        let config = AnswerConfig { extract: Extract::Marker, marker: String::new(), ..base() };
        assert!(refused(config).starts_with("marker: "));
    }
}
