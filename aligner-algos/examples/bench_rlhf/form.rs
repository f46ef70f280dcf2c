//! How a step is done: each form adds one thing to the one before it.

use aligner_core::{Error, Result};

/// A form by its number, from 0, the naive one, to the last, the rollout loop as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Form(usize);

/// What each form adds.
const NAMES: [&str; 8] = [
    "naive",
    "+ key-value cache",
    "+ continuous batching",
    "+ prompts shared in generation",
    "+ packed training",
    "+ prompts shared in training",
    "+ weights by handle",
    "+ log-probs of the engine",
];

impl Form {
    pub(crate) fn numbered(text: &str) -> Result<Self> {
        let number = text.parse().ok().filter(|number| *number < NAMES.len());
        let expected = || Error::Invalid(format!("form {text}: expected 0 to {}", NAMES.len() - 1));
        number.map(Self).ok_or_else(expected)
    }

    pub(crate) fn number(self) -> usize {
        self.0
    }

    pub(crate) fn name(self) -> &'static str {
        NAMES[self.0]
    }

    pub(crate) fn caches(self) -> bool {
        self.0 >= 1
    }

    /// Whether an answer that is done leaves the batch.
    pub(crate) fn batches_continuously(self) -> bool {
        self.0 >= 2
    }

    pub(crate) fn shares_prompts_in_generation(self) -> bool {
        self.0 >= 3
    }

    /// Whether what learns and judges computes no padding.
    pub(crate) fn packs(self) -> bool {
        self.0 >= 4
    }

    pub(crate) fn shares_prompts_in_training(self) -> bool {
        self.0 >= 5
    }

    /// Whether the engine draws with the policy's own tensors.
    pub(crate) fn refits_by_handle(self) -> bool {
        self.0 >= 6
    }

    /// Whether the log-probabilities that were drawn with are the old ones of the ratio.
    pub(crate) fn takes_the_engines_logps(self) -> bool {
        self.0 >= 7
    }
}
