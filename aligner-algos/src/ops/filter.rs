//! What happens to rewards and masks before credit: answers that are too long or never ended.

use aligner_core::{Error, Group, Metrics, Result, Sample};
use serde::{Deserialize, Serialize};

use super::advantage::{all_equal, mean};

/// Settings shared by the algorithms that learn from rollouts, in a section `filter` of theirs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FilterConfig {
    /// Whether answers that a limit on their length cut off are masked out: their reward counts in their
    /// group, but they teach nothing (overlong filtering of DAPO, arXiv:2503.14476; TRL's name).
    pub mask_truncated_completions: bool,
    /// Taken off the reward of an answer that did not end by itself (TRL's name).
    pub missing_eos_penalty: Option<f64>,
    /// Penalty that grows with the length of an answer.
    pub overlong_penalty: Option<OverlongPenalty>,
}

/// Soft overlong punishment: 0 up to `max_length − cache` tokens, then falling evenly to −1 at `max_length`,
/// and −1 beyond. DAPO (arXiv:2503.14476), equation 13.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OverlongPenalty {
    /// Tokens of an answer at which the whole penalty is due.
    pub max_length: usize,
    /// Tokens before it in which the penalty grows.
    pub cache: usize,
}

impl OverlongPenalty {
    /// What is added to the reward of an answer of so many tokens, between −1 and 0.
    pub fn at(&self, tokens: usize) -> f64 {
        let free = self.max_length.saturating_sub(self.cache);
        if tokens <= free {
            0.0
        } else if tokens <= self.max_length {
            -((tokens - free) as f64 / self.cache as f64)
        } else {
            -1.0
        }
    }
}

impl FilterConfig {
    /// Checks the settings.
    ///
    /// # Errors
    /// [`Error::Setting`] for a penalty that is negative or not finite, or a cache that is not between 1 and
    /// the maximum length.
    pub fn check(&self) -> Result<()> {
        if let Some(penalty) = self.missing_eos_penalty {
            super::kl::check_coef("filter.missing_eos_penalty", penalty)?;
        }
        match self.overlong_penalty {
            Some(OverlongPenalty { max_length, cache }) if cache == 0 || cache > max_length => {
                let message = format!("must be between 1 and max_length = {max_length}, got {cache}");
                Err(Error::setting("filter.overlong_penalty.cache", message))
            }
            _ => Ok(()),
        }
    }

    /// Each group's rewards with their penalties, `[groups][samples]`.
    ///
    /// # Errors
    /// [`Error::Invalid`] names a sample without a reward.
    pub fn scores(&self, groups: &[Group]) -> Result<Vec<Vec<f32>>> {
        groups.iter().map(|group| self.group_scores(group)).collect()
    }

    fn group_scores(&self, group: &Group) -> Result<Vec<f32>> {
        let score = |(at, sample): (usize, &Sample)| {
            let Some(reward) = sample.reward else {
                let id = &group.id;
                return Err(Error::Invalid(format!("group {id}, sample {at}: no reward to give credit for")));
            };
            let cut = sample.ended == Some(false);
            let missing = self.missing_eos_penalty.filter(|_| cut).unwrap_or(0.0);
            let overlong = self.overlong_penalty.map_or(0.0, |penalty| penalty.at(sample.targets()));
            Ok((f64::from(reward) - missing + overlong) as f32)
        };
        group.samples.iter().enumerate().map(score).collect()
    }

    /// Whether the sample is masked out.
    pub fn masks(&self, sample: &Sample) -> bool {
        self.mask_truncated_completions && sample.ended == Some(false)
    }

    /// Takes the targets from the samples that are masked out. Lengths are gone then, so scores come first.
    pub fn mask(&self, groups: &mut [Group]) {
        for sample in groups.iter_mut().flat_map(|group| &mut group.samples) {
            if self.masks(sample) {
                sample.mask.fill(false);
            }
        }
    }
}

/// Checks the bound of a score's magnitude.
pub(crate) fn check_reward_clip(bound: Option<f64>) -> Result<()> {
    match bound.filter(|bound| !(bound.is_finite() && *bound > 0.0)) {
        Some(bound) => Err(Error::setting("reward_clip", format!("must be above 0, got {bound}"))),
        None => Ok(()),
    }
}

/// Clips scores `[groups][samples]` to a magnitude.
pub(crate) fn clip_scores(scores: &mut [Vec<f32>], bound: Option<f64>) {
    if let Some(bound) = bound {
        let bound = bound as f32;
        scores.iter_mut().flatten().for_each(|score| *score = score.clamp(-bound, bound));
    }
}

/// Logs a step's scores `[groups][samples]` under TRL's names: `reward`, the mean; `reward_std`, the mean of
/// the groups' standard deviations; `frac_reward_zero_std`, the share of groups whose scores are all equal.
pub(crate) fn log_scores(metrics: &mut Metrics, scores: &[Vec<f32>]) {
    for group in scores {
        let count = group.len() as f64;
        metrics.add("reward", mean(group) * count, count);
        metrics.add("reward_std", super::reduce::Moments::of(group).std(), 1.0);
        metrics.add("frac_reward_zero_std", f64::from(u8::from(all_equal(group))), 1.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(tokens: usize, ended: Option<bool>) -> Sample {
        Sample { reward: Some(1.0), ended, ..Sample::response(&[1], &vec![2; tokens]) }
    }

    #[test]
    fn the_overlong_penalty_grows_within_its_cache() {
        let penalty = OverlongPenalty { max_length: 12, cache: 4 };
        let at: Vec<f64> = [0, 8, 9, 10, 12, 13].into_iter().map(|tokens| penalty.at(tokens)).collect();
        assert_eq!(at, [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]);
    }

    #[test]
    fn penalties_change_scores_and_leave_rewards() {
        let filter = FilterConfig {
            missing_eos_penalty: Some(0.5),
            overlong_penalty: Some(OverlongPenalty { max_length: 4, cache: 2 }),
            ..FilterConfig::default()
        };
        let samples =
            vec![answer(2, Some(true)), answer(3, Some(false)), answer(4, None), answer(1, Some(false))];
        let group = Group { id: "row 1".into(), samples, ..Group::default() };
        assert_eq!(filter.scores(std::slice::from_ref(&group)).expect("rewards"), [[1.0, 0.0, 0.0, 0.5]]);
        assert!(group.samples.iter().all(|sample| sample.reward == Some(1.0)));
    }

    #[test]
    fn only_answers_known_to_be_cut_off_are_masked() {
        let samples = vec![answer(2, Some(true)), answer(2, Some(false)), answer(2, None)];
        let mut groups = [Group { id: "row 1".into(), samples, ..Group::default() }];
        FilterConfig::default().mask(&mut groups);
        let targets = |groups: &[Group]| groups[0].samples.iter().map(Sample::targets).collect::<Vec<_>>();
        assert_eq!(targets(&groups), [2, 2, 2]);
        FilterConfig { mask_truncated_completions: true, ..FilterConfig::default() }.mask(&mut groups);
        assert_eq!(targets(&groups), [2, 0, 2]);
    }

    #[test]
    fn a_sample_without_a_reward_is_named() {
        let mut group = Group::single("row 7", answer(1, None));
        group.samples[0].reward = None;
        let message = FilterConfig::default().scores(&[group]).expect_err("no reward").to_string();
        assert!(message.contains("row 7, sample 0"), "{message}");
    }

    #[test]
    fn settings_out_of_range_are_refused_by_name() {
        let penalty = |cache| FilterConfig {
            overlong_penalty: Some(OverlongPenalty { max_length: 8, cache }),
            ..FilterConfig::default()
        };
        for filter in [penalty(0), penalty(9)] {
            let message = filter.check().expect_err("out of range").to_string();
            assert!(message.starts_with("filter.overlong_penalty.cache"), "{message}");
        }
        penalty(8).check().expect("in range");
        let filter = FilterConfig { missing_eos_penalty: Some(-1.0), ..FilterConfig::default() };
        assert!(filter.check().is_err());
    }
}
