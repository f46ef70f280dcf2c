//! Sentiment by a lexicon and rules: VADER.

mod rules;
mod tables;

use aligner_core::{Result, Reward, Sample, Score};
use serde::{Deserialize, Serialize};

pub use rules::{Polarity, polarity};

/// Which of VADER's numbers is the score.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Measure {
    /// The sum of the words' valences, squeezed into −1..1.
    #[default]
    Compound,
    /// The share of positive words, 0..1.
    Positive,
    /// The share of words that are neither, 0..1.
    Neutral,
    /// The share of negative words, 0..1.
    Negative,
}

/// Settings of [`Lexicon`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LexiconConfig {
    /// Which number is the score.
    pub measure: Measure,
}

/// The sentiment of the response by VADER (Hutto and Gilbert 2014), as `vaderSentiment` 3.3.2 has it.
///
/// A text without a word scores 0. VADER is made for sentences: the compound of a long text is near −1 or 1.
#[derive(Debug, Clone, Copy, Default)]
pub struct Lexicon {
    config: LexiconConfig,
}

impl Lexicon {
    /// The reward with these settings.
    pub fn new(config: LexiconConfig) -> Self {
        Self { config }
    }

    /// The score of a text.
    pub fn rate(&self, text: &str) -> f64 {
        let polarity = polarity(text);
        match self.config.measure {
            Measure::Compound => polarity.compound,
            Measure::Positive => polarity.positive,
            Measure::Neutral => polarity.neutral,
            Measure::Negative => polarity.negative,
        }
    }
}

impl Reward for Lexicon {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        Ok(samples.iter().map(|sample| Score::Sample(self.rate(&sample.text) as f32)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::float_cmp, reason = "both are rounded to the same digits")]
    fn each_measure_is_its_number() {
        let text = "The book was good.";
        let rate = |measure| Lexicon::new(LexiconConfig { measure }).rate(text);
        let measures = [Measure::Compound, Measure::Positive, Measure::Neutral, Measure::Negative];
        assert_eq!(measures.map(rate), [0.4404, 0.492, 0.508, 0.0]);
    }

    #[test]
    fn a_text_without_a_word_is_neutral() {
        let samples = [Sample::default()];
        assert_eq!(Lexicon::default().score(&samples).expect("a rule"), [Score::Sample(0.0)]);
    }
}
