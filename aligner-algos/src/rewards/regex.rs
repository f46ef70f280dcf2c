//! Scores by a regular expression.

use ::regex::{Regex, RegexBuilder};
use aligner_core::{Error, Result, Reward, Sample, Score};
use serde::{Deserialize, Serialize};

/// What a match is worth.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RegexMode {
    /// `score` where the pattern matches somewhere.
    #[default]
    Match,
    /// `score` where the pattern matches the whole response.
    Whole,
    /// `score` for each match that does not overlap the one before.
    Count,
}

/// Settings of [`RegexReward`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RegexConfig {
    /// The pattern, in the syntax of the `regex` crate: Unicode, `(?i)`, `(?s)` and `(?m)` as usual; no
    /// look-around and no back-references, so that every text is searched in linear time.
    pub pattern: String,
    /// What a match is worth.
    pub mode: RegexMode,
    /// The score of a match.
    pub score: f64,
    /// The score where nothing matches.
    pub otherwise: f64,
    /// Most matches that count, in mode `count`.
    pub max_count: Option<usize>,
    /// Whether letters match in both cases.
    pub ignore_case: bool,
    /// Whether `.` matches the end of a line too.
    pub dot_matches_newline: bool,
}

impl Default for RegexConfig {
    fn default() -> Self {
        Self {
            pattern: String::new(),
            mode: RegexMode::Match,
            score: 1.0,
            otherwise: 0.0,
            max_count: None,
            ignore_case: false,
            dot_matches_newline: false,
        }
    }
}

/// A score for responses that a pattern matches.
#[derive(Debug, Clone)]
pub struct RegexReward {
    config: RegexConfig,
    pattern: Regex,
}

impl RegexReward {
    /// The reward with these settings.
    ///
    /// # Errors
    /// [`Error::Setting`] for a pattern that is empty or does not parse, a score that is not finite, and a
    /// `max_count` that the mode does not read.
    pub fn new(config: RegexConfig) -> Result<Self> {
        if config.pattern.is_empty() {
            return Err(Error::setting("pattern", "must not be empty"));
        }
        super::finite("score", config.score)?;
        super::finite("otherwise", config.otherwise)?;
        if config.max_count.is_some() && config.mode != RegexMode::Count {
            return Err(Error::setting("max_count", "is only read in mode \"count\""));
        }
        let source = match config.mode {
            RegexMode::Whole => format!(r"\A(?:{})\z", config.pattern),
            RegexMode::Match | RegexMode::Count => config.pattern.clone(),
        };
        let pattern = RegexBuilder::new(&source)
            .case_insensitive(config.ignore_case)
            .dot_matches_new_line(config.dot_matches_newline)
            .build()
            .map_err(|error| Error::setting("pattern", error.to_string()))?;
        Ok(Self { config, pattern })
    }

    /// The score of a text.
    pub fn rate(&self, text: &str) -> f64 {
        let Self { config, pattern } = self;
        let most = if config.mode == RegexMode::Count { config.max_count.unwrap_or(usize::MAX) } else { 1 };
        match pattern.find_iter(text).take(most).count() {
            0 => config.otherwise,
            count => config.score * count as f64,
        }
    }
}

impl Reward for RegexReward {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        Ok(samples.iter().map(|sample| Score::Sample(self.rate(&sample.text) as f32)).collect())
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "the scores are the settings' own")]
mod tests {
    use super::*;

    fn reward(pattern: &str, mode: RegexMode) -> RegexReward {
        let config = RegexConfig {
            pattern: pattern.into(),
            mode,
            score: 2.0,
            otherwise: -1.0,
            ..RegexConfig::default()
        };
        RegexReward::new(config).expect("a pattern")
    }

    #[test]
    fn each_mode_counts_its_matches() {
        let text = "I see a cat, a cat and a cat";
        assert_eq!(reward("cat", RegexMode::Match).rate(text), 2.0);
        assert_eq!(reward("cat", RegexMode::Count).rate(text), 6.0);
        assert_eq!(reward("cat", RegexMode::Whole).rate(text), -1.0);
        assert_eq!(reward("I.*cat", RegexMode::Whole).rate(text), 2.0);
        assert_eq!(reward("dog", RegexMode::Count).rate(text), -1.0);
    }

    #[test]
    fn whole_takes_alternatives_as_one() {
        assert_eq!(reward("a|b", RegexMode::Whole).rate("ab"), -1.0);
        assert_eq!(reward("a|ab", RegexMode::Whole).rate("ab"), 2.0);
        assert_eq!(reward("a", RegexMode::Whole).rate("a\n"), -1.0);
    }

    #[test]
    fn a_count_can_be_capped() {
        let config = RegexConfig {
            pattern: "A".into(),
            mode: RegexMode::Count,
            max_count: Some(2),
            ignore_case: true,
            ..RegexConfig::default()
        };
        assert_eq!(RegexReward::new(config).expect("a pattern").rate("aaaa"), 2.0);
    }

    #[test]
    fn settings_that_cannot_work_are_named() {
        let refused = |config: RegexConfig| RegexReward::new(config).expect_err("no reward").to_string();
        let base = || RegexConfig { pattern: "a".into(), ..RegexConfig::default() };
        assert!(refused(RegexConfig::default()).starts_with("pattern: "));
        assert!(refused(RegexConfig { pattern: "(".into(), ..base() }).starts_with("pattern: "));
        assert!(refused(RegexConfig { score: f64::NAN, ..base() }).starts_with("score: "));
        assert!(refused(RegexConfig { otherwise: f64::INFINITY, ..base() }).starts_with("otherwise: "));
        assert!(refused(RegexConfig { max_count: Some(1), ..base() }).starts_with("max_count: "));
    }
}
