//! Advantages of one sample's tokens, and of one group's samples. All on the host, without gradient.

use std::cmp::Ordering;

use serde::{Deserialize, Serialize};

/// Added to a standard deviation that divides rewards; as in TRL.
pub const SCALE_EPSILON: f64 = 1e-4;

/// The rewards of one sample's targets, `[targets]`: each token's own less the KL penalty, and the whole
/// sample's score on the last one.
///
/// `r_t = token_reward_t − β·KL_t`, as in Ziegler et al. 2019 (arXiv:1909.08593), equation 2. `token_rewards`
/// and `kl` may be empty, which means 0.
pub fn shaped_rewards(targets: usize, score: f32, token_rewards: &[f32], kl: &[f64], coef: f64) -> Vec<f32> {
    let own = |at: usize| {
        let reward = f64::from(token_rewards.get(at).copied().unwrap_or(0.0));
        let last = if at + 1 == targets { f64::from(score) } else { 0.0 };
        (reward - coef * kl.get(at).copied().unwrap_or(0.0) + last) as f32
    };
    (0..targets).map(own).collect()
}

/// Generalised advantage estimates and returns of one sample's targets, both `[targets]`.
///
/// `δ_t = r_t + γ V_{t+1} − V_t` with V = 0 after the last target; `A_t = δ_t + γλ A_{t+1}`; the return is
/// `A_t + V_t`. Schulman et al. 2015 (arXiv:1506.02438), equation 16. `rewards` and `values` are as long.
pub fn gae(rewards: &[f32], values: &[f32], gamma: f64, lambda: f64) -> (Vec<f32>, Vec<f32>) {
    let targets = rewards.len().min(values.len());
    let (mut advantages, mut returns) = (vec![0.0; targets], vec![0.0; targets]);
    let (mut next_advantage, mut next_value) = (0.0, 0.0);
    for at in (0..targets).rev() {
        let value = f64::from(values[at]);
        let delta = f64::from(rewards[at]) + gamma * next_value - value;
        next_advantage = delta + gamma * lambda * next_advantage;
        next_value = value;
        advantages[at] = next_advantage as f32;
        returns[at] = (next_advantage + value) as f32;
    }
    (advantages, returns)
}

/// The discounted rewards from each target on, `[targets]`: `G_t = r_t + γ G_{t+1}`.
pub fn rewards_to_go(rewards: &[f32], gamma: f64) -> Vec<f32> {
    let mut to_go = vec![0.0; rewards.len()];
    let mut next = 0.0;
    for (at, reward) in rewards.iter().enumerate().rev() {
        next = f64::from(*reward) + gamma * next;
        to_go[at] = next as f32;
    }
    to_go
}

/// What a group's centred rewards are divided by; names as in TRL.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScaleRewards {
    /// The group's own standard deviation (GRPO, arXiv:2402.03300).
    #[default]
    Group,
    /// The standard deviation over the whole step (arXiv:2508.08221).
    Batch,
    /// Nothing (Dr. GRPO, arXiv:2503.20783): no group counts more for being nearly of one mind.
    None,
}

/// A group's rewards less their mean, over `scale` plus [`SCALE_EPSILON`] where there is a scale, `[samples]`.
///
/// Equal rewards give exactly 0.
pub fn group_advantages(rewards: &[f32], scale: Option<f64>) -> Vec<f32> {
    let mean = mean(rewards);
    let divisor = scale.map_or(1.0, |scale| scale + SCALE_EPSILON);
    rewards.iter().map(|&reward| ((f64::from(reward) - mean) / divisor) as f32).collect()
}

/// The mean of a group's other rewards for each of its samples, `[samples]`; a sample alone has its own
/// reward for a baseline.
///
/// RLOO: Ahmadian et al. 2024 (arXiv:2402.14740), equation 8.
pub fn leave_one_out(rewards: &[f32]) -> Vec<f32> {
    leave_one_out_of(rewards, &vec![true; rewards.len()])
}

/// [`leave_one_out`] over the samples that are `valid`, `[samples]`; as NeMo-Aligner's
/// `calculate_rloo_baseline`.
///
/// With fewer than two valid samples each reward is its own baseline. Samples that are not valid get a
/// baseline with the same divisor, and are to be masked out.
pub fn leave_one_out_of(rewards: &[f32], valid: &[bool]) -> Vec<f32> {
    let part = |at: usize| if valid[at] { f64::from(rewards[at]) } else { 0.0 };
    let sum: f64 = (0..rewards.len()).map(part).sum();
    let count = valid.iter().filter(|&&valid| valid).count() as f64;
    let baseline = |at: usize| {
        if count < 2.0 { rewards[at] } else { ((sum - part(at)) / (count - 1.0)) as f32 }
    };
    (0..rewards.len()).map(baseline).collect()
}

/// Whether all rewards are equal: such a group teaches nothing.
pub fn all_equal(rewards: &[f32]) -> bool {
    // Not a test for closeness: scores of one mind are the same number.
    rewards.windows(2).all(|pair| pair[0].partial_cmp(&pair[1]).is_some_and(Ordering::is_eq))
}

pub(crate) fn mean(values: &[f32]) -> f64 {
    values.iter().map(|&value| f64::from(value)).sum::<f64>() / (values.len() as f64).max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_score_is_on_the_last_target_and_the_penalty_on_each() {
        let rewards = shaped_rewards(3, 2.0, &[0.5, 0.0, 0.25], &[1.0, -1.0, 2.0], 0.5);
        assert_eq!(rewards, [0.0, 0.5, 1.25]);
        assert_eq!(shaped_rewards(2, 2.0, &[], &[], 0.5), [0.0, 2.0]);
        assert!(shaped_rewards(0, 2.0, &[], &[], 0.5).is_empty());
    }

    #[test]
    fn with_lambda_1_an_advantage_is_the_reward_to_go_less_the_value() {
        let (rewards, values) = ([0.5, 0.0, 2.0], [1.0, -1.0, 0.5]);
        let (advantages, returns) = gae(&rewards, &values, 1.0, 1.0);
        assert_eq!(returns, rewards_to_go(&rewards, 1.0));
        assert_eq!(advantages, [1.5, 3.0, 1.5]);
    }

    #[test]
    fn with_lambda_0_an_advantage_is_one_step_of_surprise() {
        let (advantages, _) = gae(&[0.5, 0.0, 2.0], &[1.0, -1.0, 0.5], 0.5, 0.0);
        assert_eq!(advantages, [-1.0, 1.25, 1.5]);
    }

    #[test]
    fn equal_rewards_give_exactly_zero() {
        for reward in [0.1_f32, 1.0 / 3.0, -7.7e8] {
            for scale in [None, Some(0.0), Some(0.3)] {
                assert_eq!(group_advantages(&[reward; 7], scale), [0.0; 7]);
            }
            let rewards = [reward; 7];
            let advantages = rewards.iter().zip(leave_one_out(&rewards)).map(|(r, b)| r - b);
            assert!(advantages.into_iter().all(|advantage| advantage == 0.0));
        }
        assert_eq!(group_advantages(&[3.0], Some(0.0)), [0.0]);
    }

    #[test]
    fn a_baseline_leaves_its_own_sample_and_the_invalid_ones_out() {
        assert_eq!(leave_one_out(&[1.0, 2.0, 6.0]), [4.0, 3.5, 1.5]);
        assert_eq!(leave_one_out_of(&[1.0, 2.0, 6.0], &[true, false, true]), [6.0, 7.0, 1.0]);
        assert_eq!(leave_one_out_of(&[1.0, 2.0], &[true, false]), [1.0, 2.0]);
        assert_eq!(leave_one_out(&[5.0]), [5.0]);
    }
}
