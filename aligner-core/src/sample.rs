//! Token sequences with a response mask, in groups: the one data type of every algorithm.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// A prompt to generate from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Prompt {
    /// Stable id of the data set's row.
    pub id: String,
    /// Token ids, the chat template's generation prompt included.
    pub tokens: Vec<u32>,
    /// What the data set says of the row beside its text.
    #[serde(default)]
    pub metadata: serde_json::Value,
}

/// A whole token sequence (prompt first) with a mask of the tokens that are scored.
///
/// Per-token fields are as long as `tokens`, or empty where nobody has computed them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Token ids: prompt, then response; in a dialogue, all turns.
    pub tokens: Vec<u32>,
    /// True where the token is a target: it was, or should be, the model's own.
    pub mask: Vec<bool>,
    /// The response as text.
    #[serde(default)]
    pub text: String,
    /// Log-probability of each token under the policy that sampled it, in nats.
    #[serde(default)]
    pub logps: Vec<f32>,
    /// Log-probability of each token under the model that sampled it, before temperature, penalties and
    /// truncation, in nats. Empty where that is `logps`, or where nobody has computed it.
    #[serde(default)]
    pub raw_logps: Vec<f32>,
    /// Log-probability of each token under the trainer's weights when the sample was taken, in nats:
    /// the denominator of a policy ratio. Empty where that is `logps`.
    #[serde(default)]
    pub old_logps: Vec<f32>,
    /// Log-probability of each token under the reference, in nats.
    #[serde(default)]
    pub ref_logps: Vec<f32>,
    /// A critic's value of the state before each token: read at the row that predicts it.
    #[serde(default)]
    pub values: Vec<f32>,
    /// What the critic should have said at each token.
    #[serde(default)]
    pub returns: Vec<f32>,
    /// Reward at each token, beside the whole sample's `reward`.
    #[serde(default)]
    pub token_rewards: Vec<f32>,
    /// Credit of each token: advantage, or loss weight. Empty means 1 everywhere.
    #[serde(default)]
    pub weights: Vec<f32>,
    /// Version of the weights that made each token.
    #[serde(default)]
    pub versions: Vec<u64>,
    /// The whole sample's score. In a preference pair with a margin, the scores differ by it.
    #[serde(default)]
    pub reward: Option<f32>,
    /// What each part of the reward said, by its name, before its weight.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub parts: BTreeMap<String, f32>,
    /// Whether the response ended by a stop token, and not by a limit on its length. None if unknown.
    #[serde(default)]
    pub ended: Option<bool>,
    /// What the data set says of its prompt beside the text.
    #[serde(default)]
    pub metadata: serde_json::Value,
}

impl Sample {
    /// A sample of `tokens` in which `mask` marks the targets.
    pub fn new(tokens: Vec<u32>, mask: Vec<bool>) -> Self {
        Self { tokens, mask, ..Self::default() }
    }

    /// A response to a prompt: the targets are all of the response's tokens.
    pub fn response(prompt: &[u32], response: &[u32]) -> Self {
        let mask = std::iter::repeat_n(false, prompt.len())
            .chain(std::iter::repeat_n(true, response.len()))
            .collect();
        Self::new([prompt, response].concat(), mask)
    }

    /// How many tokens are scored. The first token never is: nothing predicts it.
    pub fn targets(&self) -> usize {
        self.mask.iter().skip(1).filter(|&&scored| scored).count()
    }

    /// Tokens before the first target (all of them where there is no target).
    pub fn prompt_len(&self) -> usize {
        let first = self.mask.iter().skip(1).position(|&scored| scored);
        first.map_or(self.tokens.len(), |at| at + 1)
    }
}

/// Samples that belong together: one for SFT, an ordered pair (chosen, rejected) for preferences,
/// n siblings of one prompt for GRPO and RLOO.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Group {
    /// Stable id of the data set's row; errors, caches and cursors name it.
    pub id: String,
    /// The samples.
    pub samples: Vec<Sample>,
    /// What the data set says of the row beside its text.
    #[serde(default)]
    pub metadata: serde_json::Value,
}

impl Group {
    /// A group of one.
    pub fn single(id: impl Into<String>, sample: Sample) -> Self {
        Self { id: id.into(), samples: vec![sample], metadata: serde_json::Value::Null }
    }

    /// An ordered preference pair.
    pub fn pair(id: impl Into<String>, chosen: Sample, rejected: Sample) -> Self {
        Self { id: id.into(), samples: vec![chosen, rejected], metadata: serde_json::Value::Null }
    }

    /// Tokens that all samples begin with and none of them scores: computed once in a batch.
    ///
    /// At least one token of every sample stays outside, so that each has a row of its own.
    pub fn shared_prefix(&self) -> usize {
        let [first, rest @ ..] = self.samples.as_slice() else { return 0 };
        if rest.is_empty() {
            return 0;
        }
        let unscored =
            self.samples.iter().map(|s| s.prompt_len().min(s.tokens.len().saturating_sub(1))).min();
        let common = rest
            .iter()
            .map(|sample| sample.tokens.iter().zip(&first.tokens).take_while(|(a, b)| a == b).count());
        common.chain(unscored).min().unwrap_or(0)
    }

    /// Tokens that the group takes in a batch: its prefix once, then each sample's rest.
    pub fn packed_tokens(&self) -> usize {
        let prefix = self.shared_prefix();
        prefix + self.samples.iter().map(|s| s.tokens.len() - prefix).sum::<usize>()
    }

    /// Checks the lengths of every per-token field.
    ///
    /// # Errors
    /// [`Error::Invalid`] names the group, the sample and the field.
    pub fn check(&self) -> Result<()> {
        for (at, sample) in self.samples.iter().enumerate() {
            let len = sample.tokens.len();
            let fields = [
                ("mask", sample.mask.len(), false),
                ("logps", sample.logps.len(), true),
                ("raw_logps", sample.raw_logps.len(), true),
                ("old_logps", sample.old_logps.len(), true),
                ("ref_logps", sample.ref_logps.len(), true),
                ("values", sample.values.len(), true),
                ("returns", sample.returns.len(), true),
                ("token_rewards", sample.token_rewards.len(), true),
                ("weights", sample.weights.len(), true),
                ("versions", sample.versions.len(), true),
            ];
            for (field, got, may_be_empty) in fields {
                if got != len && !(may_be_empty && got == 0) {
                    let id = &self.id;
                    return Err(Error::Invalid(format!(
                        "group {id}, sample {at}: `{field}` has {got} entries for {len} tokens"
                    )));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_prefix_stops_before_the_first_target() {
        let group =
            Group::pair("p", Sample::response(&[1, 2, 3], &[4, 5]), Sample::response(&[1, 2, 3], &[4, 6]));
        assert_eq!(group.shared_prefix(), 3);
        assert_eq!(group.packed_tokens(), 7);
    }

    #[test]
    fn shared_prefix_stops_where_tokens_differ() {
        let group = Group::pair("p", Sample::response(&[1, 2, 3], &[4]), Sample::response(&[1, 9], &[4]));
        assert_eq!(group.shared_prefix(), 1);
    }

    #[test]
    fn first_token_is_never_a_target() {
        let sample = Sample::new(vec![1, 2], vec![true, true]);
        assert_eq!((sample.targets(), sample.prompt_len()), (1, 1));
    }

    #[test]
    fn lengths_are_checked_by_name() {
        let mut sample = Sample::response(&[1], &[2]);
        sample.ref_logps = vec![0.0];
        let message = Group::single("row 7", sample).check().unwrap_err().to_string();
        assert!(message.contains("row 7") && message.contains("ref_logps"), "{message}");
    }
}
