//! Metrics as (sum, weight) pairs, so that they add across micro-batches and ranks.

use std::collections::BTreeMap;

use burn::tensor::Tensor;

/// Named means that can still be added to: each is a sum and the weight it is divided by.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Metrics(BTreeMap<String, (f64, f64)>);

impl Metrics {
    /// Adds `sum / weight` to the mean called `name`.
    pub fn add(&mut self, name: impl Into<String>, sum: f64, weight: f64) {
        let entry = self.0.entry(name.into()).or_default();
        entry.0 += sum;
        entry.1 += weight;
    }

    /// Replaces `name` by a single value.
    pub fn set(&mut self, name: impl Into<String>, value: f64) {
        self.0.insert(name.into(), (value, 1.0));
    }

    /// Adds every element of `values` with weight 1.
    pub fn add_all<const D: usize>(&mut self, name: impl Into<String>, values: &Tensor<D>) {
        let count = values.shape().num_elements();
        let sum: f32 = values.clone().inner_or_self().sum().into_scalar();
        self.add(name, f64::from(sum), count as f64);
    }

    /// Adds another set's sums and weights to these.
    pub fn merge(&mut self, other: &Self) {
        for (name, &(sum, weight)) in &other.0 {
            self.add(name.as_str(), sum, weight);
        }
    }

    /// The mean called `name`; none where it was never added or has no weight.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.0.get(name).filter(|(_, weight)| *weight != 0.0).map(|(sum, weight)| sum / weight)
    }

    /// All means with a weight, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, f64)> {
        self.0.iter().filter(|(_, v)| v.1 != 0.0).map(|(name, (sum, weight))| (name.as_str(), sum / weight))
    }

    /// The sums and weights themselves, for a reduction over ranks.
    pub fn pairs_mut(&mut self) -> impl Iterator<Item = (&str, &mut (f64, f64))> {
        self.0.iter_mut().map(|(name, pair)| (name.as_str(), pair))
    }
}

trait InnerOrSelf {
    fn inner_or_self(self) -> Self;
}

impl<const D: usize> InnerOrSelf for Tensor<D> {
    fn inner_or_self(self) -> Self {
        if self.is_autodiff() { self.inner() } else { self }
    }
}

/// One entry of the metric dictionary.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// The name under which it is logged.
    pub name: &'static str,
    /// What it measures, with its unit.
    pub meaning: &'static str,
    /// The range in which a run is healthy.
    pub healthy: &'static str,
}

/// The dictionary: what each metric means and which range is healthy.
pub const DICTIONARY: &[Entry] = &[
    Entry {
        name: "loss",
        meaning: "loss per token or per sequence, as the algorithm counts, in nats",
        healthy: "falls; SFT of a pretrained model starts between 1 and 4",
    },
    Entry {
        name: "eval/loss",
        meaning: "the same loss on held-out rows",
        healthy: "falls with the training loss; a rise while `loss` falls is overfitting",
    },
    Entry {
        name: "nll",
        meaning: "mean negative log-likelihood per target token, in nats, whatever the loss averages over",
        healthy: "falls; its exponential is the perplexity",
    },
    Entry {
        name: "perplexity",
        meaning: "exp of the mean negative log-likelihood per target token",
        healthy: "1 or more, falling",
    },
    Entry {
        name: "mean_token_accuracy",
        meaning: "share of target tokens that the model ranks first",
        healthy: "0 to 1, rising",
    },
    Entry {
        name: "entropy",
        meaning: "mean entropy of the next-token distribution, in nats",
        healthy: "falls slowly; a collapse to 0 means the policy has stopped exploring",
    },
    Entry {
        name: "grad_norm",
        meaning: "global L2 norm of the gradient before clipping",
        healthy: "steady; spikes of ten times and more point at bad rows or a high learning rate",
    },
    Entry { name: "learning_rate", meaning: "the rate of this step", healthy: "follows the schedule" },
    Entry {
        name: "num_tokens",
        meaning: "tokens computed since the start, shared prompts counted once",
        healthy: "grows evenly",
    },
    Entry { name: "epoch", meaning: "passes over the data set", healthy: "grows evenly" },
    Entry { name: "step_time", meaning: "seconds of this step", healthy: "steady" },
    Entry {
        name: "tokens_per_second",
        meaning: "computed tokens per second of this step",
        healthy: "steady",
    },
    Entry {
        name: "rewards/chosen",
        meaning: "beta times (policy minus reference) log-probability of the chosen answer (DPO), or its score (reward model)",
        healthy: "DPO: may fall below 0, but more slowly than rewards/rejected",
    },
    Entry { name: "rewards/rejected", meaning: "the same for the rejected answer", healthy: "falls" },
    Entry {
        name: "rewards/margins",
        meaning: "rewards/chosen minus rewards/rejected",
        healthy: "starts at 0 for DPO, rises",
    },
    Entry {
        name: "rewards/accuracies",
        meaning: "share of pairs whose chosen reward is higher; ties count one half",
        healthy: "starts at 0.5 for DPO, rises; 1.0 early means the pairs are trivial",
    },
    Entry {
        name: "logps/chosen",
        meaning: "summed log-probability of the chosen answer, in nats",
        healthy: "a steep fall means that the policy forgets the chosen answers too",
    },
    Entry {
        name: "logps/rejected",
        meaning: "summed log-probability of the rejected answer, in nats",
        healthy: "falls",
    },
    Entry {
        name: "accuracy",
        meaning: "reward model: share of pairs ranked as labelled, ties one half",
        healthy: "0.5 at the start, rising; real preference data ends near 0.6 to 0.8",
    },
    Entry {
        name: "margin",
        meaning: "reward model: mean score difference of chosen and rejected",
        healthy: "rises",
    },
    Entry {
        name: "mean_reward",
        meaning: "reward model: mean score over all samples",
        healthy: "near 0 with centering",
    },
    Entry {
        name: "min_reward",
        meaning: "reward model: lowest score of a micro-batch, mean over the step's",
        healthy: "not running away",
    },
    Entry {
        name: "max_reward",
        meaning: "reward model: highest score of a micro-batch, mean over the step's",
        healthy: "not running away",
    },
    Entry {
        name: "kl",
        meaning: "mean per-token KL of the policy to its reference, in nats",
        healthy: "0 at the start; tens of nats a sequence mean that the policy has left its reference",
    },
];

/// The dictionary's entry for `name`; a prefix of `eval/` is looked through.
pub fn describe(name: &str) -> Option<&'static Entry> {
    let find = |name: &str| DICTIONARY.iter().find(|entry| entry.name == name);
    find(name).or_else(|| find(name.strip_prefix("eval/")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_add_by_weight() {
        let mut all = Metrics::default();
        all.add("loss", 6.0, 2.0);
        let mut more = Metrics::default();
        more.add("loss", 0.0, 4.0);
        all.merge(&more);
        assert_eq!(all.get("loss"), Some(1.0));
    }

    #[test]
    fn a_mean_of_nothing_is_absent() {
        let mut all = Metrics::default();
        all.add("kl", 0.0, 0.0);
        assert_eq!(all.get("kl"), None);
    }
}
