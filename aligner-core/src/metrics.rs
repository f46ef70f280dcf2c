//! Metrics that still combine across micro-batches and ranks: means as (sum, weight) pairs, extremes.

use std::collections::BTreeMap;

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

/// How a metric's parts combine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// Sums and weights add.
    Mean,
    /// The smallest stays.
    Min,
    /// The largest stays.
    Max,
}

/// A metric so far: a sum and its weight, or an extreme and a weight of 1.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Value {
    kind: Kind,
    pair: (f64, f64),
}

impl Value {
    fn combine(&mut self, (sum, weight): (f64, f64)) {
        match self.kind {
            Kind::Mean => self.pair = (self.pair.0 + sum, self.pair.1 + weight),
            Kind::Min => self.pair.0 = self.pair.0.min(sum),
            Kind::Max => self.pair.0 = self.pair.0.max(sum),
        }
    }

    /// None where nothing has a weight.
    fn get(self) -> Option<f64> {
        (self.pair.1 != 0.0).then(|| self.pair.0 / self.pair.1)
    }
}

/// Named values that can still be added to: means, each a sum and the weight it is divided by, and
/// extremes. A name keeps the kind that it was given first.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Metrics(BTreeMap<String, Value>);

impl Metrics {
    /// Adds `sum / weight` to the mean called `name`.
    pub fn add(&mut self, name: impl Into<String>, sum: f64, weight: f64) {
        self.combine(name.into(), Value { kind: Kind::Mean, pair: (sum, weight) });
    }

    /// Lowers the minimum called `name` to `value`, where it is smaller.
    pub fn add_min(&mut self, name: impl Into<String>, value: f64) {
        self.combine(name.into(), Value { kind: Kind::Min, pair: (value, 1.0) });
    }

    /// Raises the maximum called `name` to `value`, where it is larger.
    pub fn add_max(&mut self, name: impl Into<String>, value: f64) {
        self.combine(name.into(), Value { kind: Kind::Max, pair: (value, 1.0) });
    }

    fn combine(&mut self, name: String, value: Value) {
        self.0.entry(name).and_modify(|own| own.combine(value.pair)).or_insert(value);
    }

    /// Replaces `name` by a single value.
    pub fn set(&mut self, name: impl Into<String>, value: f64) {
        self.0.insert(name.into(), Value { kind: Kind::Mean, pair: (value, 1.0) });
    }

    /// Adds every element of `values` with weight 1.
    pub fn add_all<const D: usize>(&mut self, name: impl Into<String>, values: &Tensor<D>) {
        let count = values.shape().num_elements();
        let sum: f32 = values.clone().inner_or_self().sum().into_scalar();
        self.add(name, f64::from(sum), count as f64);
    }

    /// Combines another set's values with these.
    pub fn merge(&mut self, other: &Self) {
        for (name, &value) in &other.0 {
            self.combine(name.clone(), value);
        }
    }

    /// The same under names that begin with `prefix`, those excepted that have a family (`a/b`) already.
    #[must_use]
    pub fn prefixed(&self, prefix: &str) -> Self {
        let named = |(name, &value): (&String, &Value)| {
            (if name.contains('/') { name.clone() } else { format!("{prefix}{name}") }, value)
        };
        Self(self.0.iter().map(named).collect())
    }

    /// The value called `name`; none where it was never added or has no weight.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.0.get(name).and_then(|value| value.get())
    }

    /// All values with a weight, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, f64)> {
        self.0.iter().filter_map(|(name, value)| Some((name.as_str(), value.get()?)))
    }

    /// The sums and weights themselves; an extreme is its value and a weight of 1.
    pub fn pairs_mut(&mut self) -> impl Iterator<Item = (&str, &mut (f64, f64))> {
        self.0.iter_mut().map(|(name, value)| (name.as_str(), &mut value.pair))
    }

    /// Each name with its kind, and its sum and weight, for a reduction over ranks.
    pub fn parts(&self) -> impl Iterator<Item = (&str, Kind, (f64, f64))> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.kind, value.pair))
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
        meaning: "reward model: lowest score of the step",
        healthy: "not running away",
    },
    Entry {
        name: "max_reward",
        meaning: "reward model: highest score of the step",
        healthy: "not running away",
    },
    Entry {
        name: "reward",
        meaning: "mean score of the step's answers, penalties for length included",
        healthy: "rises; a rise while answers grow or entropy falls fast is reward hacking until shown otherwise",
    },
    Entry {
        name: "reward_std",
        meaning: "standard deviation of a group's scores, mean over groups",
        healthy: "above 0; near 0 there is nothing to learn from",
    },
    Entry {
        name: "frac_reward_zero_std",
        meaning: "share of groups whose scores are all equal",
        healthy: "below 0.5; such groups teach nothing: prompts are too easy or too hard",
    },
    Entry {
        name: "rewards/selected",
        meaning: "mean score of the answers that are trained on",
        healthy: "above `reward`; the gap is what selection gains",
    },
    Entry {
        name: "kl",
        meaning: "estimated divergence from the reference for each target token, in nats",
        healthy: "starts at 0 and grows slowly; k1 may be negative in a step, k2, k3 and abs may not",
    },
    Entry {
        name: "objective/kl",
        meaning: "estimated divergence from the reference summed over an answer, in nats",
        healthy: "below about 10 for a policy that still speaks like its reference",
    },
    Entry {
        name: "objective/ref_nll",
        meaning: "negative log-probability of a response's token under the reference, in nats: the logarithm of the perplexity",
        healthy: "moves little; higher is a language that the reference does not speak, far lower is repetition",
    },
    Entry {
        name: "objective/entropy",
        meaning: "negative log-probability of an answer when it was sampled, in nats",
        healthy: "falls slowly with `entropy`",
    },
    Entry {
        name: "objective/non_score_reward",
        meaning: "the KL penalty on an answer, as it is added to its score",
        healthy: "0 or below, small beside the scores",
    },
    Entry {
        name: "objective/rlhf_reward",
        meaning: "score less the KL penalty: what is maximised",
        healthy: "rises",
    },
    Entry {
        name: "objective/scores",
        meaning: "mean score of answers, clipped where the settings say so",
        healthy: "rises",
    },
    Entry { name: "advantages/mean", meaning: "mean advantage before whitening", healthy: "near 0" },
    Entry {
        name: "advantages/std",
        meaning: "standard deviation of the advantages before whitening",
        healthy: "steady; 0 means that nothing is learned",
    },
    Entry {
        name: "returns/mean",
        meaning: "mean return of a token: what the critic should say",
        healthy: "rises with the reward",
    },
    Entry { name: "returns/std", meaning: "standard deviation of the returns", healthy: "steady" },
    Entry { name: "values/mean", meaning: "mean value by the critic", healthy: "follows returns/mean" },
    Entry {
        name: "values/std",
        meaning: "standard deviation of the critic's values",
        healthy: "below returns/std, rising to it",
    },
    Entry {
        name: "critic/vf_explained_var",
        meaning: "share of the returns' variance that the critic explains",
        healthy: "0 to 1, rising; below 0 the critic is worse than a constant",
    },
    Entry {
        name: "loss/policy_avg",
        meaning: "the clipped surrogate, mean over targets",
        healthy: "near 0; its level means little",
    },
    Entry {
        name: "loss/value_avg",
        meaning: "the critic's squared error, halved, mean over targets",
        healthy: "falls",
    },
    Entry {
        name: "val/clipfrac_avg",
        meaning: "share of targets whose value was clipped",
        healthy: "below 0.2",
    },
    Entry {
        name: "policy/approxkl_avg",
        meaning: "half the squared log-ratio to the policy that sampled, mean, in nats",
        healthy: "0 in the first update after a rollout, below 0.05 after; above 0.1 the steps are too large",
    },
    Entry {
        name: "policy/clipfrac_avg",
        meaning: "share of targets whose ratio was clipped",
        healthy: "0 in the first update after a rollout, below 0.2 after",
    },
    Entry {
        name: "val/ratio",
        meaning: "mean ratio to the policy that sampled",
        healthy: "1 in the first update after a rollout, near 1 after",
    },
    Entry { name: "val/ratio_min", meaning: "smallest ratio", healthy: "above 0.1" },
    Entry {
        name: "val/ratio_max",
        meaning: "largest ratio",
        healthy: "below 10; more points at log-probabilities that do not belong to the tokens",
    },
    Entry {
        name: "clip_ratio/low_mean",
        meaning: "share of ratios below the clip range where the advantage is negative",
        healthy: "below 0.2",
    },
    Entry {
        name: "clip_ratio/high_mean",
        meaning: "share of ratios above the clip range where the advantage is positive",
        healthy: "below 0.2",
    },
    Entry {
        name: "clip_ratio/region_mean",
        meaning: "share of ratios that clipping leaves without a gradient",
        healthy: "0 in the first update after a rollout, below 0.2 after",
    },
    Entry {
        name: "cispo_clip_ratio",
        meaning: "share of targets whose weight is at its bound where the advantage is positive",
        healthy: "below 0.2",
    },
    Entry {
        name: "completions/mean_length",
        meaning: "mean tokens of a response",
        healthy: "steady; a steady rise that the reward does not ask for is length hacking",
    },
    Entry {
        name: "completions/min_length",
        meaning: "tokens of the shortest response",
        healthy: "above 0; responses of a token or two point at a reward that silence pleases",
    },
    Entry {
        name: "completions/max_length",
        meaning: "tokens of the longest response",
        healthy: "below the limit, unless responses are cut off",
    },
    Entry {
        name: "completions/clipped_ratio",
        meaning: "share of responses that a limit cut off",
        healthy: "low; near 1 the limit is too small, or the model never ends",
    },
    Entry {
        name: "completions/mean_terminated_length",
        meaning: "mean tokens of the responses that ended by themselves",
        healthy: "as the task asks",
    },
    Entry {
        name: "repetition",
        meaning: "share of a response's runs of three tokens that it held before",
        healthy: "low; a rise beside the reward's is reward hacking",
    },
    Entry {
        name: "frac_groups_kept",
        meaning: "share of the groups drawn that are learned from",
        healthy: "1, or lower with dynamic sampling; a fall means that the task became too easy or too hard",
    },
    Entry {
        name: "kl_coef",
        meaning: "the adaptive coefficient of the KL penalty",
        healthy: "settles where objective/kl is near its target",
    },
    Entry {
        name: "skipped_updates",
        meaning: "updates of the step that no sample was left for",
        healthy: "absent",
    },
    Entry {
        name: "warnings/judge",
        meaning: "1 where the reward has risen while a judge's score has fallen",
        healthy: "absent; else the policy learns what the reward likes and the judge does not",
    },
    Entry {
        name: "warnings/length",
        meaning: "1 where responses are far longer than in the first steps",
        healthy: "absent, unless the task asks for longer ones",
    },
    Entry {
        name: "warnings/entropy",
        meaning: "1 where little of the first steps' entropy is left",
        healthy: "absent; else the policy has stopped exploring",
    },
    Entry {
        name: "warnings/repetition",
        meaning: "1 where responses repeat themselves far more than in the first steps",
        healthy: "absent",
    },
    Entry {
        name: "warnings/kl",
        meaning: "1 where the policy is far from its reference",
        healthy: "absent; else raise the KL coefficient or lower the learning rate",
    },
    Entry {
        name: "sampling/idle",
        meaning: "part of the time of generation that ranks wait for the slowest, on average",
        healthy: "below 0.1; prompts of long-tailed lengths want `mesh.prompts = \"stealing\"`",
    },
    Entry {
        name: "sampling/max_ratio_error",
        meaning: "on the first step: the farthest that a ratio of the trainer's to the engine's probability is from 1",
        healthy: "below 1e-3",
    },
    Entry {
        name: "timing_s/generate",
        meaning: "seconds of drawing responses",
        healthy: "most of a step where responses are long",
    },
    Entry {
        name: "timing_s/score",
        meaning: "seconds that rewards took beyond the end of drawing",
        healthy: "near 0",
    },
    Entry {
        name: "timing_s/logprobs",
        meaning: "seconds of the reference, the critic and old log-probabilities",
        healthy: "a third of timing_s/learn, or less",
    },
    Entry { name: "timing_s/learn", meaning: "seconds of credit and updates", healthy: "steady" },
    Entry { name: "timing_s/refit", meaning: "seconds of giving the engine new weights", healthy: "near 0" },
    Entry { name: "timing_s/step", meaning: "seconds of all phases", healthy: "steady" },
    Entry {
        name: "sampling/importance_sampling_ratio/mean",
        meaning: "weight of trainer over engine, truncated or masked, mean",
        healthy: "near 1; a fall means that much is masked",
    },
    Entry {
        name: "sampling/importance_sampling_ratio/min",
        meaning: "the smallest such weight",
        healthy: "above 0.3; 0 where something is masked",
    },
    Entry {
        name: "sampling/importance_sampling_ratio/max",
        meaning: "the largest such weight",
        healthy: "at most the cap",
    },
    Entry {
        name: "sampling/importance_sampling_ratio/raw_mean",
        meaning: "the same ratio before truncation or masking, mean",
        healthy: "near 1; far from it engine and trainer disagree",
    },
    Entry {
        name: "sampling/importance_sampling_ratio/raw_max",
        meaning: "the largest such ratio",
        healthy: "below 10; growth over steps comes before a collapse",
    },
    Entry {
        name: "sampling/sampling_logp_difference/mean",
        meaning: "difference of a token's log-probability between trainer and engine, magnitude, in nats",
        healthy: "below 0.01; with a quantised engine below 0.1",
    },
    Entry {
        name: "sampling/sampling_logp_difference/max",
        meaning: "the largest such difference, in nats",
        healthy: "below 1",
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
    fn extremes_stay_extremes() {
        let mut all = Metrics::default();
        for value in [2.0, -3.0, 1.0] {
            let mut part = Metrics::default();
            part.add_min("min_reward", value);
            part.add_max("max_reward", value);
            all.merge(&part);
        }
        assert_eq!(all.iter().collect::<Vec<_>>(), [("max_reward", 2.0), ("min_reward", -3.0)]);
    }

    #[test]
    fn a_mean_of_nothing_is_absent() {
        let mut all = Metrics::default();
        all.add("nll", 0.0, 0.0);
        assert_eq!(all.get("nll"), None);
    }
}
