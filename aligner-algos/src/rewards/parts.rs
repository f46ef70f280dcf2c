//! Several rewards, each with a name and a weight, and their sum.

use std::panic::{AssertUnwindSafe, catch_unwind};

use aligner_core::{Error, Metrics, Result, Reward, Sample, Score};

use super::{finite, sample_name, sample_names};
use crate::guarded::panic_message;
use crate::watchdog::Watchdog;

/// Named rewards with weights.
///
/// A sample's reward is the weighted sum of its parts' scores. A part that scores tokens adds to the sample's token
/// rewards instead. Where one part has no score, the sample has no reward: no score is not 0. A part of weight 0 is a judge:
/// it is asked and logged, and neither its scores nor their absence change a sample's reward.
#[derive(Default)]
pub struct RewardParts {
    parts: Vec<Part>,
}

struct Part {
    name: String,
    weight: f64,
    reward: Box<dyn Reward + Send>,
    watchdog: Option<Watchdog>,
}

/// What one part says of the samples.
#[derive(Debug, Clone, PartialEq)]
pub struct PartScores {
    /// The part's name.
    pub name: String,
    /// What its scores are multiplied by in the sum.
    pub weight: f64,
    /// Its scores, `[samples]`, before the weight.
    pub scores: Vec<Score>,
}

/// What all parts say of the samples.
#[derive(Debug, Clone, PartialEq)]
pub struct Scored {
    /// Each part's own scores, in the order in which the parts were added.
    pub parts: Vec<PartScores>,
    /// The weighted sum of the parts that score whole samples, `[samples]`; none where a part has no score.
    pub totals: Vec<Option<f32>>,
    /// The weighted sum of the parts that score tokens, `[samples][tokens]`; empty where no part did, and where the
    /// sample has no total.
    pub token_rewards: Vec<Vec<f32>>,
    /// `rewards/NAME/mean`, `rewards/NAME/std` and `rewards/NAME/none` of each part: mean and (unbiased) standard
    /// deviation of its scores, those of tokens summed over the sample, and the share of samples without one.
    pub metrics: Metrics,
}

impl Scored {
    /// How many samples have no reward.
    pub fn unscored(&self) -> usize {
        self.totals.iter().filter(|total| total.is_none()).count()
    }
}

impl RewardParts {
    /// These parts and one more.
    ///
    /// # Errors
    /// [`Error::Setting`] for a name that is empty or taken, and a weight that is not finite.
    pub fn with(
        mut self,
        name: impl Into<String>,
        weight: f64,
        reward: Box<dyn Reward + Send>,
    ) -> Result<Self> {
        let name = name.into();
        if name.is_empty() || self.names().any(|taken| taken == name) {
            return Err(Error::setting(format!("reward.{name}"), "a part needs a name of its own"));
        }
        finite(&format!("reward.{name}.weight"), weight)?;
        self.parts.push(Part { name, weight, reward, watchdog: None });
        Ok(self)
    }

    /// Puts a limit on the time of each call of the part that was added last.
    #[must_use]
    pub fn watched(mut self, watchdog: &Watchdog) -> Self {
        if let Some(part) = self.parts.last_mut() {
            part.watchdog = Some(watchdog.clone());
        }
        self
    }

    /// The names, in the order in which the parts were added.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().map(|part| part.name.as_str())
    }

    /// How many parts there are.
    pub fn len(&self) -> usize {
        self.parts.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Scores samples with each part.
    ///
    /// # Errors
    /// All name the part: one that fails or panics, the wrong number of scores, and (with the sample) a score that is
    /// not finite, or is not one for each token. [`Error::Setting`] where there is no part.
    pub fn score(&self, samples: &[Sample]) -> Result<Scored> {
        let scores = self.ask("a batch", samples)?;
        self.sum(scores, samples)
    }

    /// What each part says of each sample; `whose` names the samples together.
    ///
    /// # Errors
    /// As [`Self::score`].
    pub(crate) fn ask(&self, whose: &str, samples: &[Sample]) -> Result<Vec<Vec<Score>>> {
        if self.parts.is_empty() {
            return Err(Error::setting("reward", "names no reward"));
        }
        self.parts.iter().map(|part| part.score(whose, samples)).collect()
    }

    /// The parts' scores together, as [`Self::ask`] gave them.
    ///
    /// # Errors
    /// Scores of other parts, or of other samples.
    pub(crate) fn sum(&self, scores: Vec<Vec<Score>>, samples: &[Sample]) -> Result<Scored> {
        if scores.len() != self.parts.len() {
            let (got, expected) = (scores.len(), self.parts.len());
            return Err(Error::Invalid(format!("scores of {got} rewards, and there are {expected}")));
        }
        let parts = self.parts.iter().zip(scores).map(|(part, scores)| {
            part.check_all(&scores, samples)?;
            Ok(PartScores { name: part.name.clone(), weight: part.weight, scores })
        });
        let parts: Vec<PartScores> = parts.collect::<Result<_>>()?;
        let mut metrics = Metrics::default();
        for part in &parts {
            part.log(&mut metrics);
        }
        let totals: Vec<Option<f32>> = (0..samples.len()).map(|at| total(&parts, at)).collect();
        let tokens = |at: usize| match totals[at] {
            Some(_) => token_rewards(&parts, at),
            None => Vec::new(),
        };
        Ok(Scored { token_rewards: (0..samples.len()).map(tokens).collect(), parts, totals, metrics })
    }
}

/// The weighted sum of one sample's scores; none where one of them is.
fn total(parts: &[PartScores], at: usize) -> Option<f32> {
    let mut total = 0.0;
    for part in parts.iter().filter(|part| part.counts()) {
        match &part.scores[at] {
            Score::None => return None,
            Score::Sample(score) => total += part.weight * f64::from(*score),
            Score::Tokens(_) => {}
        }
    }
    Some(total as f32)
}

/// The weighted sum of one sample's token scores; empty where there are none.
fn token_rewards(parts: &[PartScores], at: usize) -> Vec<f32> {
    let mut sums: Vec<f64> = Vec::new();
    for part in parts.iter().filter(|part| part.counts()) {
        let Score::Tokens(scores) = &part.scores[at] else { continue };
        sums.resize(scores.len(), 0.0);
        for (sum, score) in sums.iter_mut().zip(scores) {
            *sum += part.weight * f64::from(*score);
        }
    }
    sums.into_iter().map(|sum| sum as f32).collect()
}

impl Part {
    fn score(&self, whose: &str, samples: &[Sample]) -> Result<Vec<Score>> {
        let name = &self.name;
        let ask = || self.caught(samples);
        let asked = match &self.watchdog {
            Some(watchdog) => {
                let what = format!("reward `{name}`, asked about the {} samples of {whose},", samples.len());
                watchdog.watch(what, ask)
            }
            None => ask(),
        };
        let scores = asked
            .map_err(|panic| {
                let on = self.panicking_alone(samples);
                Error::Invalid(format!("reward `{name}` panicked{on}: {}", panic_message(panic.as_ref())))
            })?
            .map_err(|error| Error::Invalid(format!("reward `{name}`: {error}")))?;
        self.check_all(&scores, samples)?;
        Ok(scores)
    }

    /// The reward's answer, or its panic: what it leaves behind in its own state then is its own affair.
    fn caught(&self, samples: &[Sample]) -> std::thread::Result<Result<Vec<Score>>> {
        catch_unwind(AssertUnwindSafe(|| self.reward.score(samples)))
    }

    /// The samples, where they are not all, on which the reward panics when it is asked about nothing else; as a part of a
    /// sentence.
    fn panicking_alone(&self, samples: &[Sample]) -> String {
        let panics = |at: &usize| self.caught(&samples[*at..=*at]).is_err();
        let places: Vec<usize> = (0..samples.len()).filter(panics).collect();
        let all = samples.len() > 1 && places.len() == samples.len();
        if all || places.is_empty() {
            return String::new();
        }
        format!(" on {}", sample_names(&places, samples))
    }

    fn check_all(&self, scores: &[Score], samples: &[Sample]) -> Result<()> {
        let name = &self.name;
        if scores.len() != samples.len() {
            let (got, expected) = (scores.len(), samples.len());
            return Err(Error::Invalid(format!("reward `{name}` gave {got} scores for {expected} samples")));
        }
        for (at, (score, sample)) in scores.iter().zip(samples).enumerate() {
            self.check(score, at, sample)?;
        }
        Ok(())
    }

    fn check(&self, score: &Score, at: usize, sample: &Sample) -> Result<()> {
        let values = match score {
            Score::None => return Ok(()),
            Score::Sample(score) => std::slice::from_ref(score),
            Score::Tokens(scores) => scores,
        };
        if matches!(score, Score::Tokens(_)) && values.len() != sample.tokens.len() {
            return Err(Error::Invalid(format!(
                "reward `{}`: {} has {} token scores for {} tokens",
                self.name,
                sample_name(at, sample),
                values.len(),
                sample.tokens.len()
            )));
        }
        if values.iter().any(|value| !(f64::from(*value) * self.weight).is_finite()) {
            return Err(Error::NotFinite {
                what: format!("reward `{}`", self.name),
                samples: vec![sample_name(at, sample)],
            });
        }
        Ok(())
    }
}

impl PartScores {
    /// Whether it is a part of the sum; else it is a judge.
    fn counts(&self) -> bool {
        self.weight != 0.0
    }

    fn log(&self, metrics: &mut Metrics) {
        let value = |score: &Score| match score {
            Score::None => None,
            Score::Sample(score) => Some(f64::from(*score)),
            Score::Tokens(scores) => Some(scores.iter().copied().map(f64::from).sum()),
        };
        let values: Vec<f64> = self.scores.iter().filter_map(value).collect();
        let (count, sum) = (values.len() as f64, values.iter().sum::<f64>());
        let name = &self.name;
        metrics.add(format!("rewards/{name}/mean"), sum, count);
        if values.len() > 1 {
            let squares: f64 = values.iter().map(|value| (value - sum / count).powi(2)).sum();
            metrics.add(format!("rewards/{name}/std"), (squares / (count - 1.0)).sqrt() * count, count);
        }
        let all = self.scores.len() as f64;
        metrics.add(format!("rewards/{name}/none"), all - count, all);
    }
}

impl std::fmt::Debug for RewardParts {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_map().entries(self.parts.iter().map(|part| (&part.name, part.weight))).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scores that do not depend on the samples.
    struct Fixed(Vec<Score>);

    impl Reward for Fixed {
        fn score(&self, _: &[Sample]) -> Result<Vec<Score>> {
            Ok(self.0.clone())
        }
    }

    struct Panics;

    impl Reward for Panics {
        fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
            assert!(samples.is_empty(), "boom at {}", samples.len());
            Ok(Vec::new())
        }
    }

    fn samples() -> Vec<Sample> {
        let mut samples = vec![Sample::response(&[1], &[2, 3]); 3];
        samples[1].metadata = serde_json::json!({"id": "row 7"});
        samples
    }

    fn sample_scores(scores: [f32; 3]) -> Box<dyn Reward + Send> {
        Box::new(Fixed(scores.map(Score::Sample).to_vec()))
    }

    fn scored(parts: &RewardParts) -> Result<Scored> {
        parts.score(&samples())
    }

    fn alone(scores: Vec<Score>) -> Result<Scored> {
        scored(&RewardParts::default().with("mine", 2.0, Box::new(Fixed(scores)))?)
    }

    #[test]
    fn the_reward_is_the_weighted_sum() {
        let parts = RewardParts::default().with("a", 2.0, sample_scores([1.0, 0.5, 0.0])).expect("a part");
        let parts = parts.with("b", -1.0, sample_scores([1.0, 1.0, 3.0])).expect("a part");
        let scored = scored(&parts).expect("sound");
        assert_eq!(scored.totals, [Some(1.0), Some(0.0), Some(-3.0)]);
        assert!(scored.token_rewards.iter().all(Vec::is_empty));
        assert_eq!(scored.parts[1].scores[2], Score::Sample(3.0), "before the weight");
        assert_eq!(scored.metrics.get("rewards/a/mean"), Some(0.5));
        assert_eq!(scored.metrics.get("rewards/a/std"), Some(0.5));
        assert_eq!(scored.metrics.get("rewards/b/none"), Some(0.0));
    }

    #[test]
    fn no_score_is_not_zero() {
        let some = vec![Score::Sample(1.0), Score::None, Score::Sample(3.0)];
        let parts = RewardParts::default().with("some", 1.0, Box::new(Fixed(some))).expect("a part");
        let parts = parts.with("all", 1.0, sample_scores([1.0; 3])).expect("a part");
        let scored = scored(&parts).expect("sound");
        assert_eq!(scored.totals, [Some(2.0), None, Some(4.0)]);
        assert_eq!(scored.unscored(), 1);
        assert_eq!(scored.metrics.get("rewards/some/mean"), Some(2.0), "over those with a score");
        assert_eq!(scored.metrics.get("rewards/some/none"), Some(1.0 / 3.0));
    }

    #[test]
    fn a_judge_is_asked_and_logged_and_changes_no_reward() {
        let parts =
            RewardParts::default().with("learned", 1.0, sample_scores([1.0, 2.0, 3.0])).expect("a part");
        let judge = vec![Score::Sample(5.0), Score::None, Score::Tokens(vec![1.0, 1.0, 1.0])];
        let parts = parts.with("judge", 0.0, Box::new(Fixed(judge))).expect("a part");
        let scored = scored(&parts).expect("sound");
        assert_eq!(scored.totals, [Some(1.0), Some(2.0), Some(3.0)]);
        assert!(scored.token_rewards.iter().all(Vec::is_empty));
        assert_eq!(scored.metrics.get("rewards/judge/mean"), Some(4.0));
        assert_eq!(scored.metrics.get("rewards/judge/none"), Some(1.0 / 3.0));
    }

    #[test]
    fn a_reward_that_hangs_is_told_of() {
        let (tell, told) = std::sync::mpsc::channel();
        let watchdog = Watchdog::new(std::time::Duration::from_millis(20), move |line| {
            tell.send(line.to_owned()).expect("heard");
        });
        let told = std::sync::Mutex::new(told);
        let slow = move |_: &Sample| {
            let line = told.lock().expect("one thread").recv_timeout(std::time::Duration::from_secs(30));
            let expected =
                "reward `slow`, asked about the 1 samples of group p0, has not returned within 0.02 seconds";
            assert_eq!(line.expect("told"), expected);
            Score::Sample(1.0)
        };
        let parts = RewardParts::default().with("slow", 1.0, Box::new(slow)).expect("a part");
        let scores =
            parts.watched(&watchdog).ask("group p0", &samples()[..1]).expect("it returns in the end");
        assert_eq!(scores, [[Score::Sample(1.0)]]);
    }

    #[test]
    fn token_scores_go_to_their_tokens() {
        let tokens = vec![Score::Tokens(vec![0.0, 1.0, 2.0]), Score::Sample(5.0), Score::None];
        let parts = RewardParts::default().with("t", 2.0, Box::new(Fixed(tokens.clone()))).expect("a part");
        let parts = parts.with("u", 1.0, Box::new(Fixed(tokens))).expect("a part");
        let parts = parts.with("s", 1.0, sample_scores([7.0; 3])).expect("a part");
        let scored = scored(&parts).expect("sound");
        assert_eq!(scored.totals, [Some(7.0), Some(22.0), None]);
        assert_eq!(scored.token_rewards, [vec![0.0, 3.0, 6.0], vec![], vec![]]);
        assert_eq!(scored.metrics.get("rewards/t/mean"), Some(4.0), "tokens are summed");
    }

    #[test]
    fn a_part_that_panics_or_fails_is_named() {
        let parts = RewardParts::default().with("mine", 1.0, Box::new(Panics)).expect("a part");
        let message = scored(&parts).expect_err("panics").to_string();
        assert_eq!(message, "reward `mine` panicked: boom at 3");

        let seventh = |sample: &Sample| {
            assert!(sample.metadata["id"] != "row 7", "no such word");
            Score::Sample(1.0)
        };
        let parts = RewardParts::default().with("mine", 1.0, Box::new(seventh)).expect("a part");
        let message = scored(&parts).expect_err("panics").to_string();
        assert_eq!(message, "reward `mine` panicked on sample 1 (row 7): no such word");
        let message = alone(vec![Score::None]).expect_err("one score").to_string();
        assert_eq!(message, "reward `mine` gave 1 scores for 3 samples");
    }

    #[test]
    fn scores_that_are_not_finite_name_part_and_sample() {
        for bad in [f32::NAN, f32::INFINITY] {
            let message = alone(vec![Score::None, Score::Sample(bad), Score::None])
                .expect_err("not finite")
                .to_string();
            assert!(message.contains("`mine`") && message.contains("sample 1 (row 7)"), "{message}");
            let tokens = Score::Tokens(vec![0.0, bad, 0.0]);
            assert!(alone(vec![tokens, Score::None, Score::None]).is_err());
        }
        let message =
            alone(vec![Score::Tokens(vec![1.0]), Score::None, Score::None]).expect_err("too few").to_string();
        assert!(message.contains("sample 0") && message.contains("1 token scores for 3 tokens"), "{message}");
    }

    #[test]
    fn parts_have_names_of_their_own_and_finite_weights() {
        let one = || RewardParts::default().with("a", 1.0, sample_scores([0.0; 3])).expect("a part");
        let refused = |parts: RewardParts, name: &str, weight: f64| {
            parts.with(name, weight, sample_scores([0.0; 3])).expect_err("no part").to_string()
        };
        assert!(refused(one(), "a", 1.0).starts_with("reward.a: "));
        assert!(refused(one(), "", 1.0).starts_with("reward.: "));
        assert!(refused(one(), "b", f64::NAN).starts_with("reward.b.weight: "));
        assert!(scored(&RewardParts::default()).expect_err("no part").to_string().starts_with("reward: "));
    }
}
