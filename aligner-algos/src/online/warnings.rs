//! Signs that a policy learns to please its reward and nothing else.

use aligner_core::{Error, Result};
use serde::{Deserialize, Serialize};

/// What a warning is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WarningKind {
    /// The reward has risen while a judge's score has fallen.
    Judge,
    /// Responses have grown.
    Length,
    /// The entropy has collapsed.
    Entropy,
    /// Responses repeat themselves.
    Repetition,
    /// The policy is far from its reference.
    Kl,
}

impl WarningKind {
    /// The metric that is 1 in the steps in which it holds.
    pub fn metric(self) -> &'static str {
        match self {
            Self::Judge => "warnings/judge",
            Self::Length => "warnings/length",
            Self::Entropy => "warnings/entropy",
            Self::Repetition => "warnings/repetition",
            Self::Kl => "warnings/kl",
        }
    }
}

/// Settings of [`Warnings`]. A limit of 0 is off.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WarningsConfig {
    /// Steps that figures are averaged over.
    pub window: usize,
    /// By how many standard errors a judge's score falls, and the reward rises, since the judge's best steps.
    pub judge: f64,
    /// How many times as long responses are as in the first steps.
    pub length: f64,
    /// The part of the first steps' entropy that is left.
    pub entropy: f64,
    /// By how much the share of repetitions is above that of the first steps.
    pub repetition: f64,
    /// The divergence from the reference, in nats a response.
    pub kl: f64,
    /// The warnings that end the run.
    pub stop: Vec<WarningKind>,
}

impl Default for WarningsConfig {
    fn default() -> Self {
        Self {
            window: 10,
            judge: 4.0,
            length: 2.0,
            entropy: 0.2,
            repetition: 0.2,
            kl: 10.0,
            stop: Vec::new(),
        }
    }
}

impl WarningsConfig {
    /// Everything that is wrong with the settings.
    pub fn errors(&self) -> Vec<Error> {
        let mut errors = Vec::new();
        if self.window < 2 {
            errors.push(Error::setting("window", format!("must be at least 2, got {}", self.window)));
        }
        let limits = [
            ("judge", self.judge),
            ("length", self.length),
            ("entropy", self.entropy),
            ("repetition", self.repetition),
            ("kl", self.kl),
        ];
        for (key, limit) in limits.into_iter().filter(|(_, limit)| !(limit.is_finite() && *limit >= 0.0)) {
            errors.push(Error::setting(key, format!("must be 0 or above, got {limit}")));
        }
        let off = |kind: &WarningKind| match kind {
            WarningKind::Judge => self.judge == 0.0,
            WarningKind::Length => self.length == 0.0,
            WarningKind::Entropy => self.entropy == 0.0,
            WarningKind::Repetition => self.repetition == 0.0,
            WarningKind::Kl => self.kl == 0.0,
        };
        if let Some(kind) = self.stop.iter().find(|kind| off(kind)) {
            errors
                .push(Error::setting("stop", format!("{kind:?} is off, for its limit is 0").to_lowercase()));
        }
        errors
    }
}

/// Something that holds at a step.
#[derive(Debug, Clone, PartialEq)]
pub struct Warning {
    /// What it is about.
    pub kind: WarningKind,
    /// The step.
    pub step: u64,
    /// The figures, in a sentence.
    pub message: String,
    /// Whether it did not hold at the step before.
    pub is_new: bool,
    /// Whether it is to end the run.
    pub stops: bool,
}

/// Watches the figures of a run's steps.
///
/// It depends on them alone: given a run's logged steps, it stands where it stood in that run.
#[derive(Debug, Clone)]
pub struct Warnings {
    config: WarningsConfig,
    judges: Vec<Judge>,
    length: Series,
    entropy: Series,
    repetition: Series,
    kl: Series,
    /// What held at the step before.
    held: Vec<(WarningKind, Option<String>)>,
}

impl Warnings {
    /// Before the first step; `judges` are the rewards that are not learned from, by name.
    ///
    /// # Errors
    /// [`Error::Setting`] for settings out of range.
    pub fn new(config: WarningsConfig, judges: impl IntoIterator<Item = String>) -> Result<Self> {
        if let Some(error) = config.errors().into_iter().next() {
            return Err(error);
        }
        let judges = judges.into_iter().map(|name| Judge { name, ..Judge::default() }).collect();
        let [length, entropy, repetition, kl] = [const { Series(Vec::new()) }; 4];
        Ok(Self { config, judges, length, entropy, repetition, kl, held: Vec::new() })
    }

    /// Takes the figures of a step by their names as metrics, and says what holds then.
    pub fn observe(&mut self, step: u64, figure: impl Fn(&str) -> Option<f64>) -> Vec<Warning> {
        let window = self.config.window;
        for (series, name) in [
            (&mut self.length, "completions/mean_length"),
            (&mut self.entropy, "entropy"),
            (&mut self.repetition, "repetition"),
            (&mut self.kl, "objective/kl"),
        ] {
            series.0.extend(figure(name));
        }
        for judge in &mut self.judges {
            let score = figure(&format!("rewards/{}/mean", judge.name));
            if let (Some(score), Some(reward)) = (score, figure("reward")) {
                judge.observe(step, score, reward, window);
            }
        }
        let judged = self.judges.iter().filter_map(|judge| {
            let message = judge.falls(window, self.config.judge)?;
            Some((WarningKind::Judge, Some(judge.name.clone()), message))
        });
        let others = [
            (WarningKind::Length, self.longer()),
            (WarningKind::Entropy, self.collapsed()),
            (WarningKind::Repetition, self.repeating()),
            (WarningKind::Kl, self.far()),
        ];
        let others = others.into_iter().filter_map(|(kind, message)| Some((kind, None, message?)));
        let (mut warnings, mut holds) = (Vec::new(), Vec::new());
        for (kind, whose, message) in judged.chain(others) {
            let is_new = !self.held.contains(&(kind, whose.clone()));
            let stops = self.config.stop.contains(&kind);
            warnings.push(Warning { kind, step, message, is_new, stops });
            holds.push((kind, whose));
        }
        self.held = holds;
        warnings
    }

    fn longer(&self) -> Option<String> {
        let (window, limit) = (self.config.window, self.config.length);
        let (first, now) = self.length.first_and_now(window)?;
        (limit > 0.0 && now > limit * first).then(|| {
            let times = now / first;
            format!("responses are {now:.0} tokens long, {times:.1} times the {first:.0} of the first {window} steps")
        })
    }

    fn collapsed(&self) -> Option<String> {
        let (window, limit) = (self.config.window, self.config.entropy);
        let (first, now) = self.entropy.first_and_now(window)?;
        // Of nothing, nothing can be lost.
        (limit > 0.0 && first > 0.0 && now < limit * first).then(|| {
            let part = 100.0 * now / first;
            format!(
                "the entropy is {now:.3} nats a token, {part:.0} % of the {first:.3} of the first {window} steps"
            )
        })
    }

    fn repeating(&self) -> Option<String> {
        let (window, limit) = (self.config.window, self.config.repetition);
        let (first, now) = self.repetition.first_and_now(window)?;
        (limit > 0.0 && now > first + limit).then(|| {
            format!(
                "responses repeat {now:.2} of their runs of tokens, {first:.2} in the first {window} steps"
            )
        })
    }

    fn far(&self) -> Option<String> {
        let limit = self.config.kl;
        let now = mean(self.kl.newest(self.config.window)?);
        (limit > 0.0 && now > limit)
            .then(|| format!("the policy is {now:.2} nats a response from its reference, more than {limit}"))
    }
}

/// A figure of all steps that had it.
#[derive(Debug, Clone, Default)]
struct Series(Vec<f64>);

impl Series {
    /// The newest `window`, or fewer at the start; none where there is nothing.
    fn newest(&self, window: usize) -> Option<&[f64]> {
        let from = self.0.len().saturating_sub(window);
        self.0.get(from..).filter(|newest| !newest.is_empty())
    }

    /// Means over the first and the newest `window`; none where they overlap.
    fn first_and_now(&self, window: usize) -> Option<(f64, f64)> {
        let all = &self.0;
        (all.len() >= 2 * window).then(|| (mean(&all[..window]), mean(&all[all.len() - window..])))
    }
}

/// A judge's scores beside the reward.
#[derive(Debug, Clone, Default)]
struct Judge {
    name: String,
    /// Of each step.
    scores: Vec<f64>,
    rewards: Vec<f64>,
    /// The steps before the newest in which the judge was most content.
    best: Option<Best>,
}

#[derive(Debug, Clone, Copy)]
struct Best {
    score: Moments,
    reward: Moments,
    /// Their last step.
    step: u64,
}

impl Judge {
    fn observe(&mut self, step: u64, score: f64, reward: f64, window: usize) {
        self.scores.push(score);
        self.rewards.push(reward);
        // The newest window has nothing in common with those that it is compared with.
        let Some(end) = self.scores.len().checked_sub(window).filter(|end| *end >= window) else { return };
        let of = |values: &[f64]| Moments::of(&values[end - window..end]);
        let earlier = Best { score: of(&self.scores), reward: of(&self.rewards), step: step - window as u64 };
        if self.best.is_none_or(|best| earlier.score.mean > best.score.mean) {
            self.best = Some(earlier);
        }
    }

    /// Whether the score has fallen and the reward has risen since the judge's best steps, each by `limit` standard
    /// errors of the difference.
    fn falls(&self, window: usize, limit: f64) -> Option<String> {
        let best = self.best.filter(|_| limit > 0.0)?;
        let newest = |values: &[f64]| Moments::of(&values[values.len() - window..]);
        let (score, reward) = (newest(&self.scores), newest(&self.rewards));
        let falls = best.score.mean - score.mean > limit * score.error(best.score, window);
        let rises = reward.mean - best.reward.mean > limit * reward.error(best.reward, window);
        (falls && rises).then(|| {
            format!(
                "judge `{}` has gone from {:.3} to {:.3} since step {}, while the reward has risen from {:.3} to {:.3}",
                self.name, best.score.mean, score.mean, best.step, best.reward.mean, reward.mean
            )
        })
    }
}

#[derive(Debug, Clone, Copy)]
struct Moments {
    mean: f64,
    /// With one less than their number for a divisor.
    variance: f64,
}

impl Moments {
    fn of(values: &[f64]) -> Self {
        let mean = mean(values);
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        Self { mean, variance: squares / (values.len() as f64 - 1.0) }
    }

    /// The standard error of the difference of two means, each over `window` values.
    fn error(self, other: Self, window: usize) -> f64 {
        ((self.variance + other.variance) / window as f64).sqrt()
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> WarningsConfig {
        WarningsConfig { window: 3, ..WarningsConfig::default() }
    }

    fn warnings(config: WarningsConfig) -> Warnings {
        Warnings::new(config, ["judge".to_string()]).expect("valid")
    }

    /// The kinds that hold at each of some steps of a figure.
    fn kinds(name: &str, values: &[f64]) -> Vec<Vec<WarningKind>> {
        let mut warnings = warnings(config());
        let observe = |(at, value): (usize, &f64)| {
            warnings
                .observe(at as u64, |asked| (asked == name).then_some(*value))
                .iter()
                .map(|w| w.kind)
                .collect()
        };
        values.iter().enumerate().map(observe).collect()
    }

    #[test]
    fn figures_are_compared_with_those_of_the_first_steps() {
        let steps = [1.0, 2.0, 3.0, 4.0, 4.0, 4.2];
        assert_eq!(kinds("completions/mean_length", &steps).concat(), [WarningKind::Length]);
        let steps = [1.0, 1.0, 1.0, 0.1, 0.1, 0.3, 0.1];
        let expected =
            [vec![], vec![], vec![], vec![], vec![], vec![WarningKind::Entropy], vec![WarningKind::Entropy]];
        assert_eq!(kinds("entropy", &steps), expected);
        let steps = [0.1, 0.1, 0.1, 0.3, 0.3, 0.3, 0.4];
        assert_eq!(kinds("repetition", &steps).concat(), [WarningKind::Repetition]);
    }

    #[test]
    fn the_divergence_counts_from_the_first_step() {
        assert_eq!(kinds("objective/kl", &[12.0, 6.0, 0.0, 4.0]).concat(), [WarningKind::Kl]);
    }

    /// What holds at the last of some steps.
    fn last(config: WarningsConfig, steps: &[(f64, f64)]) -> Vec<Warning> {
        let mut warnings = warnings(config);
        let mut held = Vec::new();
        for (at, (reward, judge)) in steps.iter().enumerate() {
            held = warnings.observe(1 + at as u64, |name| match name {
                "reward" => Some(*reward),
                "rewards/judge/mean" => Some(*judge),
                _ => None,
            });
        }
        held
    }

    #[test]
    fn a_judge_that_falls_while_the_reward_rises_is_told_of() {
        let hacked: Vec<(f64, f64)> = (0..12)
            .map(|at| (0.1 * f64::from(at), if at < 6 { 0.1 } else { -0.1 } * f64::from(at)))
            .collect();
        let [warning] = last(config(), &hacked).try_into().expect("one");
        assert_eq!(warning.kind, WarningKind::Judge);
        assert!(
            warning.message.contains("`judge` has gone from 0.400 to -1.000 since step 6"),
            "{warning:?}"
        );
        let both_rise: Vec<(f64, f64)> = hacked.iter().map(|(reward, _)| (*reward, *reward)).collect();
        assert_eq!(last(config(), &both_rise), []);
        let both_fall: Vec<(f64, f64)> = hacked.iter().map(|(_, judge)| (*judge, *judge)).collect();
        assert_eq!(last(config(), &both_fall), []);
        // Noise around a level, of a size that hides what moves.
        let noise: Vec<(f64, f64)> =
            (0..12).map(|at| (0.1 * f64::from(at), if at % 2 == 0 { 1.0 } else { -1.0 })).collect();
        assert_eq!(last(config(), &noise), []);
        assert_eq!(last(WarningsConfig { judge: 0.0, ..config() }, &hacked), []);
    }

    #[test]
    fn a_warning_is_new_once_and_stops_where_that_is_asked() {
        let mut warnings = warnings(WarningsConfig { stop: vec![WarningKind::Kl], ..config() });
        let mut observe = |step, kl| {
            let held = warnings.observe(step, |name| (name == "objective/kl").then_some(kl));
            held.into_iter().map(|warning| (warning.is_new, warning.stops)).collect::<Vec<_>>()
        };
        assert_eq!(observe(1, 40.0), [(true, true)]);
        assert_eq!(observe(2, 0.0), [(false, true)]);
        assert_eq!(observe(3, -30.0), []);
        assert_eq!(observe(4, 100.0), [(true, true)]);
    }

    #[test]
    fn settings_that_cannot_work_are_named() {
        for (config, key) in [
            (WarningsConfig { window: 1, ..config() }, "window"),
            (WarningsConfig { length: -1.0, ..config() }, "length"),
            (WarningsConfig { kl: f64::NAN, ..config() }, "kl"),
            (
                WarningsConfig { entropy: 0.0, stop: vec![WarningKind::Entropy], ..config() },
                "stop: entropy is off",
            ),
        ] {
            let errors = config.errors();
            assert!(errors.len() == 1 && errors[0].to_string().starts_with(key), "{key}: {errors:?}");
        }
    }
}
