#![expect(clippy::float_cmp, reason = "small sums of binary fractions are exact")]

use super::*;
use crate::check::check_algorithm;
use crate::fixture::siblings;
use crate::ops::targets::gather;
use aligner_core::{Device, Group, Sample, Tensor};

/// Two answers, with values and the log-probabilities of policy and reference.
fn rollout() -> Vec<Group> {
    let sample = |reward: f32, tokens: &[u32]| {
        let len = tokens.len() + 1;
        Sample {
            reward: Some(reward),
            values: vec![0.5; len],
            logps: vec![-1.0; len],
            ref_logps: vec![-1.5; len],
            ..Sample::response(&[1], tokens)
        }
    };
    vec![Group::single("a", sample(2.0, &[2, 3])), Group::single("b", sample(-1.0, &[4]))]
}

fn plain() -> PpoConfig {
    PpoConfig { lambda: 1.0, whiten_advantages: false, ..PpoConfig::default() }
}

fn credited(config: PpoConfig, groups: Vec<Group>) -> StepBatch {
    let mut step = StepBatch::new(groups);
    Ppo::new(config).expect("valid").credit(&mut step).expect("complete");
    step
}

fn weights(step: &StepBatch) -> Vec<Vec<f32>> {
    let samples = step.groups.iter().flat_map(|group| &group.samples);
    samples.map(|sample| gather(sample, &sample.weights)).collect()
}

#[test]
fn an_advantage_is_the_shaped_return_less_the_value() {
    // Each token pays 0.5 · 0.5 for its divergence.
    let kl = KlConfig { coef: 0.5, ..KlConfig::default() };
    let step = credited(PpoConfig { kl, ..plain() }, rollout());
    assert_eq!(weights(&step), [vec![1.0, 1.25], vec![-1.75]]);
    let returns = step.groups.iter().map(|group| group.samples[0].returns.clone()).collect::<Vec<_>>();
    assert_eq!(returns, [vec![0.0, 1.5, 1.75], vec![0.0, -1.25]]);
    for (name, value) in [
        ("reward", 0.5),
        ("objective/scores", 0.5),
        ("objective/kl", 0.75),
        ("objective/non_score_reward", -0.375),
        ("objective/rlhf_reward", 0.125),
        ("objective/entropy", 1.5),
        ("kl", 0.5),
        ("values/mean", 0.5),
    ] {
        assert_eq!(step.metrics.get(name), Some(value), "{name}");
    }
}

#[test]
fn a_controllers_coefficient_goes_before_the_settings() {
    let mut step = StepBatch { kl_coef: Some(0.5), ..StepBatch::new(rollout()) };
    Ppo::new(plain()).expect("valid").credit(&mut step).expect("complete");
    assert_eq!(weights(&step)[1], [-1.75]);
}

#[test]
fn a_divergence_in_the_loss_is_not_in_the_reward() {
    let kl = KlConfig { coef: 0.5, place: KlPlace::Loss, ..KlConfig::default() };
    let config = PpoConfig { kl, ..plain() };
    let step = credited(config, rollout());
    assert_eq!(weights(&step), [vec![1.5, 1.5], vec![-1.5]]);
    let batch = Batch::collate(&step.groups).expect("valid");
    let logps = Tensor::<1>::from_floats([-1.0; 3], &Device::flex());
    let out = Forward { logps: Some(logps), ..Forward::default() };
    let loss = Ppo::new(config).expect("valid").loss(&out, &batch).expect("complete");
    // The ratio is 1, so the surrogate is the sum of advantages; each token adds 0.5 · 0.5.
    assert_eq!(loss.sum.into_scalar::<f32>(), -1.5 + 0.75);
    assert_eq!(loss.metrics.get("loss/policy_avg"), Some(-0.5));
    assert_eq!((loss.metrics.get("kl"), step.metrics.get("kl")), (Some(0.5), None));
}

#[test]
fn whitened_advantages_have_mean_0_and_variance_1() {
    let step = credited(PpoConfig { whiten_advantages: true, ..plain() }, rollout());
    let moments = Moments::of(&weights(&step).concat());
    assert!(moments.mean.abs() < 1e-6 && (moments.variance - 1.0).abs() < 1e-6, "{moments:?}");
    assert!(step.metrics.get("advantages/std").expect("logged") > 1.1, "logged before whitening");
}

#[test]
fn scores_are_clipped_and_cut_off_answers_masked() {
    let mut groups = rollout();
    groups[0].samples[0].ended = Some(false);
    let filter = FilterConfig { mask_truncated_completions: true, ..FilterConfig::default() };
    let kl = KlConfig { coef: 0.0, ..KlConfig::default() };
    let step = credited(PpoConfig { filter, kl, reward_clip: Some(0.5), ..plain() }, groups);
    assert_eq!(weights(&step), [vec![], vec![-1.0]]);
    assert_eq!(step.groups[0].samples[0].targets(), 0);
}

#[test]
fn the_check_of_algorithms_passes() {
    let loss = KlConfig { coef: 0.1, estimator: KlEstimator::K3, place: KlPlace::Loss };
    for config in [
        PpoConfig::default(),
        plain(),
        PpoConfig { kl: loss, entropy_coef: 0.01, dual_clip: Some(3.0), ..PpoConfig::default() },
        PpoConfig { whiten_rewards: true, gamma: 0.9, clip_high: 0.4, ..PpoConfig::default() },
    ] {
        check_algorithm(&Ppo::new(config).expect("valid"), &siblings(4, &[0.5, 2.0, -1.0])).expect("sound");
    }
}

#[test]
fn what_is_missing_is_named() {
    type Spoil = fn(&mut Sample);
    let cases: [(Spoil, &str); 4] = [
        (|sample| sample.reward = None, "no reward"),
        (|sample| sample.values.clear(), "`values`"),
        (|sample| sample.ref_logps.clear(), "`ref_logps`"),
        (|sample| sample.logps.clear(), "`logps`"),
    ];
    for (spoil, expected) in cases {
        let mut groups = rollout();
        spoil(&mut groups[1].samples[0]);
        let ppo = Ppo::new(plain()).expect("valid");
        let message = ppo.credit(&mut StepBatch::new(groups)).expect_err("incomplete").to_string();
        assert!(message.contains("group b, sample 0") && message.contains(expected), "{message}");
    }
}

#[test]
fn settings_out_of_range_are_refused_by_name() {
    let kl = KlConfig { coef: -1.0, ..KlConfig::default() };
    for (config, key) in [
        (PpoConfig { lambda: 1.5, ..plain() }, "lambda"),
        (PpoConfig { gamma: f64::NAN, ..plain() }, "gamma"),
        (PpoConfig { kl, ..plain() }, "kl.coef"),
        (PpoConfig { clip_low: -0.1, ..plain() }, "clip_low"),
        (PpoConfig { entropy_coef: f64::INFINITY, ..plain() }, "entropy_coef"),
        (PpoConfig { reward_clip: Some(0.0), ..plain() }, "reward_clip"),
    ] {
        let message = Ppo::new(config).expect_err("out of range").to_string();
        assert!(message.starts_with(key), "{message}");
    }
    assert!(serde_json::from_str::<PpoConfig>(r#"{"kl": {"in": "loss", "coef": 0.1}}"#).is_ok());
    assert!(serde_json::from_str::<PpoConfig>(r#"{"kl": {"inn": "loss"}}"#).is_err());
}
