//! The rewards of a group's samples, and their log.

use aligner_core::{Error, Group, Metrics, Result, Score};

use super::score_log::{ScoreFiles, ScoreLog, key};
use crate::rewards::RewardParts;

/// Asks the rewards about groups, and nothing twice that the log knows.
pub(super) struct Scorer {
    rewards: RewardParts,
    log: Option<ScoreLog>,
}

impl Scorer {
    /// Keeps scores in the files `log`, where they are given, until they are in a checkpoint.
    pub(super) fn new(rewards: RewardParts, log: Option<&ScoreFiles>) -> Result<Self> {
        Ok(Self { rewards, log: log.map(ScoreLog::open).transpose()? })
    }

    /// Sets `reward`, `parts` and `token_rewards` of a group's samples, and takes out those that a part could say
    /// nothing of.
    pub(super) fn score(&mut self, group: &mut Group) -> Result<Metrics> {
        let id = group.id.clone();
        self.score_named(group).map_err(|error| match error {
            Error::Invalid(message) => Error::Invalid(format!("group {id}: {message}")),
            Error::NotFinite { what, samples } => {
                let named = samples.into_iter().map(|sample| format!("{id}, {sample}"));
                Error::NotFinite { what, samples: named.collect() }
            }
            other => other,
        })
    }

    fn score_named(&mut self, group: &mut Group) -> Result<Metrics> {
        if group.samples.is_empty() {
            return Ok(Metrics::default());
        }
        let scores = self.ask(group)?;
        let scored = self.rewards.sum(scores, &group.samples)?;
        let sums = scored.totals.iter().zip(scored.token_rewards);
        for (at, (sample, (total, tokens))) in group.samples.iter_mut().zip(sums).enumerate() {
            (sample.reward, sample.token_rewards) = (*total, tokens);
            let part = |part: &crate::rewards::PartScores| match &part.scores[at] {
                Score::None => None,
                Score::Sample(score) => Some((part.name.clone(), *score)),
                Score::Tokens(scores) => Some((part.name.clone(), scores.iter().sum())),
            };
            sample.parts = scored.parts.iter().filter_map(part).collect();
        }
        group.samples.retain(|sample| sample.reward.is_some());
        Ok(scored.metrics)
    }

    /// What each part says of each sample, from the log where it is there.
    fn ask(&mut self, group: &Group) -> Result<Vec<Vec<Score>>> {
        let whose = format!("group {}", group.id);
        let Some(log) = &mut self.log else { return self.rewards.ask(&whose, &group.samples) };
        let key = key(self.rewards.names(), group);
        if let Some(scores) = log.get(&key) {
            return Ok(scores.clone());
        }
        let scores = self.rewards.ask(&whose, &group.samples)?;
        log.add(key, &scores)?;
        Ok(scores)
    }

    /// Empties the log: what it holds is in a checkpoint now.
    pub(super) fn forget_log(&mut self) -> Result<()> {
        self.log.as_mut().map_or(Ok(()), ScoreLog::clear)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use aligner_core::Sample;

    use super::*;

    fn group() -> Group {
        let sample = |token| Sample::response(&[1], &[token]);
        Group { id: "row 1".into(), samples: vec![sample(2), sample(3)], ..Group::default() }
    }

    /// The last token; counts how often it is asked.
    fn counted(asked: &Arc<AtomicUsize>) -> RewardParts {
        let asked = asked.clone();
        let reward = move |sample: &Sample| {
            asked.fetch_add(1, Ordering::Relaxed);
            sample.tokens.last().map_or(Score::None, |&token| Score::Sample(token as f32))
        };
        RewardParts::default().with("last", 1.0, Box::new(reward)).expect("a name of its own")
    }

    #[test]
    fn a_score_that_is_in_the_log_is_not_asked_for_again() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("scores.jsonl");
        let asked = Arc::new(AtomicUsize::new(0));
        let files = ScoreFiles { own: path.clone(), others: Vec::new() };
        let mut first = Scorer::new(counted(&asked), Some(&files)).expect("a log");
        let mut scored = group();
        first.score(&mut scored).expect("scores");
        drop(first);
        let neighbour = ScoreFiles { own: dir.path().join("scores.1.jsonl"), others: vec![path.clone()] };
        let mut neighbour = Scorer::new(counted(&asked), Some(&neighbour)).expect("a log");
        neighbour.score(&mut group()).expect("scores");
        assert_eq!(asked.load(Ordering::Relaxed), 2, "another rank has asked");
        // A kill in the middle of a line.
        let mut file = std::fs::File::options().append(true).open(&path).expect("the log");
        std::io::Write::write_all(&mut file, b"{\"key\": \"ab").expect("room");
        let mut second = Scorer::new(counted(&asked), Some(&files)).expect("a log");
        let mut again = group();
        second.score(&mut again).expect("scores");
        assert_eq!((again, asked.load(Ordering::Relaxed)), (scored, 2));
        second.forget_log().expect("an empty log");
        second.score(&mut group()).expect("scores");
        assert_eq!(asked.load(Ordering::Relaxed), 4);
    }

    #[test]
    fn errors_name_the_group_and_samples_without_a_score_go() {
        let parts = |reward: fn(&Sample) -> Score| {
            RewardParts::default().with("mine", 1.0, Box::new(reward)).expect("a name of its own")
        };
        let mut scorer = Scorer::new(parts(|_| Score::Sample(f32::NAN)), None).expect("no log");
        let message = scorer.score(&mut group()).expect_err("no number").to_string();
        assert!(message.contains("row 1") && message.contains("mine"), "{message}");
        let some = |sample: &Sample| if sample.tokens[1] == 2 { Score::None } else { Score::Sample(0.5) };
        let mut group = group();
        Scorer::new(parts(some), None).expect("no log").score(&mut group).expect("scores");
        assert_eq!((group.samples.len(), group.samples[0].parts["mine"]), (1, 0.5));
    }
}
