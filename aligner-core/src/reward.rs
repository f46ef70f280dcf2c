//! What a response is worth.

use serde::{Deserialize, Serialize};

use crate::{Result, Sample};

/// A reward for one sample. "No score" is not 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Score {
    /// Nothing could be said: the sample is left out.
    None,
    /// One score for the sample.
    Sample(f32),
    /// One score for each token of the sample.
    Tokens(Vec<f32>),
}

/// Scores responses.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a reward",
    note = "implement `Reward::score`; closures `Fn(&Sample) -> Score` are rewards already"
)]
pub trait Reward {
    /// One score for each sample, in order.
    ///
    /// # Errors
    /// A scorer that failed as a whole; a sample that it cannot judge is [`Score::None`].
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>>;
}

impl<F: Fn(&Sample) -> Score> Reward for F {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        Ok(samples.iter().map(self).collect())
    }
}
