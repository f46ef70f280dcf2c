//! Several rewards with names and weights, held to what a reward promises.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use aligner_core::{Error, Group, Metrics, Result, Reward, Sample, Score};

use super::score_log::{ScoreLog, key};

/// Named rewards whose weighted sum is a sample's reward.
#[derive(Default)]
pub struct RewardParts {
    parts: Vec<Part>,
    log: Option<ScoreLog>,
}

struct Part {
    name: String,
    weight: f32,
    reward: Box<dyn Reward + Send>,
}

impl RewardParts {
    /// No part yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// A single reward with weight 1.
    pub fn single(name: impl Into<String>, reward: impl Reward + Send + 'static) -> Self {
        Self::new().with(name, 1.0, Box::new(reward))
    }

    /// These and one more.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, weight: f32, reward: Box<dyn Reward + Send>) -> Self {
        self.parts.push(Part { name: name.into(), weight, reward });
        self
    }

    /// Keeps each score in the file `path` as soon as it is known, and asks no reward for one that is there already: a
    /// run that is killed and goes on asks nobody twice.
    ///
    /// # Errors
    /// A file that cannot be read or made.
    pub fn logged_in(mut self, path: &Path) -> Result<Self> {
        self.log = Some(ScoreLog::open(path)?);
        Ok(self)
    }

    /// Empties the log: what it holds is in a checkpoint now.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn forget_log(&mut self) -> Result<()> {
        self.log.as_mut().map_or(Ok(()), ScoreLog::clear)
    }

    /// The names of the parts, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().map(|part| part.name.as_str())
    }

    /// Scores a group's samples: sets `reward`, `parts` and `token_rewards`, and takes out those that a part could say
    /// nothing of. Returns the parts' means and spreads as `rewards/NAME/mean` and `rewards/NAME/std` (within the
    /// group), and the share of samples without a score as `rewards/NAME/none`.
    ///
    /// # Errors
    /// What a reward says of itself; with the name of the part, a panic, a wrong number of scores, and a score that is
    /// no number.
    pub fn score_group(&mut self, group: &mut Group) -> Result<Metrics> {
        let mut metrics = Metrics::default();
        let mut unscored = vec![false; group.samples.len()];
        let scores = self.scores(group)?;
        for sample in &mut group.samples {
            (sample.reward, sample.parts) = (Some(0.0), BTreeMap::new());
            sample.token_rewards.clear();
        }
        for (part, scores) in self.parts.iter().zip(scores) {
            let mut known = Vec::new();
            for (at, (sample, score)) in group.samples.iter_mut().zip(scores).enumerate() {
                let value = match score {
                    Score::None => {
                        unscored[at] = true;
                        continue;
                    }
                    Score::Sample(value) => {
                        sample.reward = sample.reward.map(|sum| sum + part.weight * value);
                        value
                    }
                    Score::Tokens(values) => {
                        if sample.token_rewards.is_empty() {
                            sample.token_rewards = vec![0.0; sample.tokens.len()];
                        }
                        for (sum, value) in sample.token_rewards.iter_mut().zip(&values) {
                            *sum += part.weight * value;
                        }
                        values.iter().sum()
                    }
                };
                sample.parts.insert(part.name.clone(), value);
                known.push(f64::from(value));
            }
            part.log(&known, group.samples.len(), &mut metrics);
        }
        let mut unscored = unscored.into_iter();
        group.samples.retain(|_| !unscored.next().unwrap_or(false));
        Ok(metrics)
    }
}

impl RewardParts {
    /// What each part says of each sample, from the log where it is there.
    fn scores(&mut self, group: &Group) -> Result<Vec<Vec<Score>>> {
        let key = self.log.is_some().then(|| key(self.names(), group));
        if let (Some(log), Some(key)) = (&self.log, &key)
            && let Some(scores) = log.get(key)
        {
            return Ok(scores.clone());
        }
        let scores = self.parts.iter().map(|part| part.scores(&group.id, &group.samples));
        let scores: Vec<Vec<Score>> = scores.collect::<Result<_>>()?;
        if let (Some(log), Some(key)) = (&mut self.log, key) {
            log.add(key, &scores)?;
        }
        Ok(scores)
    }
}

impl Part {
    fn scores(&self, group: &str, samples: &[Sample]) -> Result<Vec<Score>> {
        let name = &self.name;
        let scores = catch_unwind(AssertUnwindSafe(|| self.reward.score(samples))).map_err(|panic| {
            let what = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let what = what.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
            Error::Invalid(format!("reward {name} panicked on group {group}: {what}"))
        })?;
        let scores = scores.map_err(|error| match error {
            Error::Invalid(message) => Error::Invalid(format!("reward {name}, group {group}: {message}")),
            other => other,
        })?;
        if scores.len() != samples.len() {
            let (got, asked) = (scores.len(), samples.len());
            let message = format!("reward {name}, group {group}: {got} scores for {asked} samples");
            return Err(Error::Invalid(message));
        }
        for (at, (score, sample)) in scores.iter().zip(samples).enumerate() {
            let finite = match score {
                Score::None => true,
                Score::Sample(value) => value.is_finite(),
                Score::Tokens(values) if values.len() != sample.tokens.len() => {
                    let (got, tokens) = (values.len(), sample.tokens.len());
                    let message =
                        format!("reward {name}: {got} scores for the {tokens} tokens of {group}#{at}");
                    return Err(Error::Invalid(message));
                }
                Score::Tokens(values) => values.iter().all(|value| value.is_finite()),
            };
            if !finite {
                let samples = vec![format!("{group}#{at}")];
                return Err(Error::NotFinite { what: format!("the reward {name}"), samples });
            }
        }
        Ok(scores)
    }

    fn log(&self, known: &[f64], samples: usize, metrics: &mut Metrics) {
        let (name, count) = (&self.name, known.len() as f64);
        let mean = known.iter().sum::<f64>() / count.max(1.0);
        metrics.add(format!("rewards/{name}/mean"), mean * count, count);
        if known.len() > 1 {
            let squares: f64 = known.iter().map(|value| (value - mean).powi(2)).sum();
            metrics.add(format!("rewards/{name}/std"), (squares / (count - 1.0)).sqrt(), 1.0);
        }
        metrics.add(format!("rewards/{name}/none"), samples as f64 - count, samples as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group() -> Group {
        let sample = |token| Sample::response(&[1], &[token]);
        Group { id: "row 1".into(), samples: vec![sample(2), sample(3)], ..Group::default() }
    }

    fn last(sample: &Sample) -> Score {
        sample.tokens.last().map_or(Score::None, |&token| Score::Sample(token as f32))
    }

    #[test]
    fn parts_are_weighted_and_a_sample_without_a_score_is_taken_out() {
        let second = |sample: &Sample| if sample.tokens[1] == 2 { Score::None } else { Score::Sample(1.0) };
        let mut parts = RewardParts::single("last", last).with("second", -0.5, Box::new(second));
        let mut group = group();
        let metrics = parts.score_group(&mut group).unwrap();
        assert_eq!(group.samples.len(), 1);
        assert_eq!(group.samples[0].reward, Some(2.5));
        assert_eq!(metrics.get("rewards/last/mean"), Some(2.5));
        assert_eq!(metrics.get("rewards/second/none"), Some(0.5));
    }

    #[test]
    fn token_scores_are_summed_for_the_log_and_kept_for_credit() {
        let each = |sample: &Sample| Score::Tokens(vec![0.5; sample.tokens.len()]);
        let mut group = group();
        RewardParts::new().with("each", 2.0, Box::new(each)).score_group(&mut group).unwrap();
        assert_eq!((group.samples[0].reward, &group.samples[0].token_rewards), (Some(0.0), &vec![1.0, 1.0]));
        assert_eq!(group.samples[0].parts["each"], 1.0);
    }

    #[test]
    fn a_score_that_is_in_the_log_is_not_asked_for_again() {
        let path = tempfile::tempdir().unwrap();
        let path = path.path().join("scores.jsonl");
        let asked = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let counted = |asked: &std::sync::Arc<std::sync::atomic::AtomicUsize>| {
            let asked = asked.clone();
            move |sample: &Sample| {
                asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                last(sample)
            }
        };
        let mut first = RewardParts::single("last", counted(&asked)).logged_in(&path).unwrap();
        let mut scored = group();
        first.score_group(&mut scored).unwrap();
        drop(first);
        // A kill in the middle of a line.
        let mut file = std::fs::File::options().append(true).open(&path).unwrap();
        std::io::Write::write_all(&mut file, b"{\"key\": \"ab").unwrap();
        let mut second = RewardParts::single("last", counted(&asked)).logged_in(&path).unwrap();
        let mut again = group();
        second.score_group(&mut again).unwrap();
        assert_eq!((again, asked.load(std::sync::atomic::Ordering::Relaxed)), (scored, 2));
        second.forget_log().unwrap();
        second.score_group(&mut group()).unwrap();
        assert_eq!(asked.load(std::sync::atomic::Ordering::Relaxed), 4);
    }

    struct Short;

    impl Reward for Short {
        fn score(&self, _: &[Sample]) -> Result<Vec<Score>> {
            Ok(vec![Score::None])
        }
    }

    #[test]
    fn what_a_reward_must_not_do_is_an_error_with_its_name() {
        let nan = |_: &Sample| Score::Sample(f32::NAN);
        let panics = |_: &Sample| -> Score { panic!("out of cheese") };
        let ragged = |_: &Sample| Score::Tokens(vec![1.0]);
        for (mut parts, message) in [
            (RewardParts::single("mine", nan), "the reward mine"),
            (RewardParts::single("mine", panics), "reward mine panicked on group row 1: out of cheese"),
            (RewardParts::single("mine", ragged), "reward mine: 1 scores for the 2 tokens of row 1#0"),
            (RewardParts::single("mine", Short), "reward mine, group row 1: 1 scores for 2 samples"),
        ] {
            let error = parts.score_group(&mut group()).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }
}
