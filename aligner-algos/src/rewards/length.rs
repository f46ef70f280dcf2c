//! Scores by the response's length.

use aligner_core::{Error, Result, Reward, Sample, Score};
use serde::{Deserialize, Serialize};

/// What is counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LengthUnit {
    /// The response's tokens: those that the mask marks.
    #[default]
    Tokens,
    /// Runs of text between white space.
    Words,
    /// Unicode code points.
    Characters,
}

/// Which lengths are penalised.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LengthSide {
    /// All but the target.
    #[default]
    Both,
    /// Those above the target.
    Over,
    /// Those below the target.
    Under,
}

/// Settings of [`Length`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LengthConfig {
    /// What is counted.
    pub unit: LengthUnit,
    /// The length without a penalty, in units.
    pub target: usize,
    /// Which lengths are penalised.
    pub side: LengthSide,
    /// Penalty for each unit off the target; 1 over the target where it is not set, so that a length of
    /// 0, or of twice the target, costs 1.
    pub penalty: Option<f64>,
    /// The largest penalty.
    pub cap: f64,
}

impl Default for LengthConfig {
    fn default() -> Self {
        Self { unit: LengthUnit::Tokens, target: 0, side: LengthSide::Both, penalty: None, cap: 1.0 }
    }
}

/// A linear penalty for each unit off a target length: `−min(cap, penalty · |length − target|)`.
#[derive(Debug, Clone, Copy)]
pub struct Length {
    config: LengthConfig,
    penalty: f64,
}

impl Length {
    /// The reward with these settings.
    ///
    /// # Errors
    /// [`Error::Setting`] for a penalty or a cap that is negative or not finite, and for a target of 0 without
    /// a penalty.
    pub fn new(config: LengthConfig) -> Result<Self> {
        if config.penalty.is_none() && config.target == 0 {
            return Err(Error::setting("target", "must be above 0 where no `penalty` is set"));
        }
        let penalty = config.penalty.unwrap_or(1.0 / config.target as f64);
        for (key, value) in [("penalty", penalty), ("cap", config.cap)] {
            if super::finite(key, value)? < 0.0 {
                return Err(Error::setting(key, format!("must not be negative, got {value}")));
            }
        }
        Ok(Self { config, penalty })
    }

    /// The response's length in the setting's unit.
    fn length(&self, sample: &Sample) -> usize {
        match self.config.unit {
            LengthUnit::Tokens => sample.targets(),
            LengthUnit::Words => sample.text.split_whitespace().count(),
            LengthUnit::Characters => sample.text.chars().count(),
        }
    }

    fn rate(&self, sample: &Sample) -> f64 {
        let length = self.length(sample);
        let (over, under) =
            (length.saturating_sub(self.config.target), self.config.target.saturating_sub(length));
        let off = match self.config.side {
            LengthSide::Both => over + under,
            LengthSide::Over => over,
            LengthSide::Under => under,
        };
        if off == 0 { 0.0 } else { -(self.penalty * off as f64).min(self.config.cap) }
    }
}

impl Reward for Length {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        Ok(samples.iter().map(|sample| Score::Sample(self.rate(sample) as f32)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(config: LengthConfig, tokens: usize, text: &str) -> f64 {
        let mut sample = Sample::response(&[1, 2, 3], &vec![7; tokens]);
        sample.text = text.into();
        Length::new(config).expect("valid settings").rate(&sample)
    }

    #[test]
    #[expect(clippy::float_cmp, reason = "exact in binary")]
    fn the_penalty_is_linear_up_to_its_cap() {
        let config = LengthConfig { target: 4, cap: 0.75, ..LengthConfig::default() };
        let rates = [4, 3, 5, 0, 100].map(|tokens| rate(config, tokens, ""));
        assert_eq!(rates, [0.0, -0.25, -0.25, -0.75, -0.75]);
        let over = LengthConfig { side: LengthSide::Over, ..config };
        let under = LengthConfig { side: LengthSide::Under, ..config };
        assert_eq!([rate(over, 0, ""), rate(over, 5, "")], [0.0, -0.25]);
        assert_eq!([rate(under, 0, ""), rate(under, 5, "")], [-0.75, 0.0]);
    }

    #[test]
    #[expect(clippy::float_cmp, reason = "exact in binary")]
    fn words_and_characters_are_the_texts() {
        let config = LengthConfig { penalty: Some(1.0), cap: 99.0, ..LengthConfig::default() };
        let text = " two\twörds \n";
        assert_eq!(rate(LengthConfig { unit: LengthUnit::Words, ..config }, 7, text), -2.0);
        assert_eq!(rate(LengthConfig { unit: LengthUnit::Characters, ..config }, 7, text), -12.0);
    }

    #[test]
    fn settings_that_cannot_work_are_named() {
        let refused = |config: LengthConfig| Length::new(config).expect_err("no reward").to_string();
        let base = LengthConfig { target: 4, ..LengthConfig::default() };
        assert!(refused(LengthConfig::default()).starts_with("target: "));
        assert!(refused(LengthConfig { penalty: Some(-1.0), ..base }).starts_with("penalty: "));
        assert!(refused(LengthConfig { cap: f64::NAN, ..base }).starts_with("cap: "));
    }
}
