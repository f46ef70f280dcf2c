#![expect(clippy::float_cmp, reason = "small sums of binary fractions are exact")]

use super::*;
use crate::check::check_algorithm;
use crate::fixture::siblings;
use crate::ops::filter::FilterConfig;
use aligner_core::{Device, Group, Sample};

const LOSSES: [GrpoLoss; 4] = [GrpoLoss::Grpo, GrpoLoss::Bnpo, GrpoLoss::Dapo, GrpoLoss::DrGrpo];

fn with(loss_type: GrpoLoss) -> GrpoConfig {
    GrpoConfig { loss_type, max_completion_length: Some(8), ..GrpoConfig::default() }
}

/// Answers of 1 and 3 tokens with advantages 1 and −1, fresh from the policy.
fn two_answers() -> Vec<Group> {
    let sample = |tokens: &[u32], advantage: f32| {
        let mut sample = Sample::response(&[1], tokens);
        sample.weights = vec![advantage; sample.tokens.len()];
        sample
    };
    vec![Group::pair("p", sample(&[2], 1.0), sample(&[3, 4, 5], -1.0))]
}

fn loss(config: GrpoConfig, groups: &[Group], logps: &[f32]) -> f64 {
    let (grpo, batch) = (Grpo::new(config).expect("valid"), Batch::collate(groups).expect("valid"));
    let out = Forward { logps: Some(Tensor::<1>::from_floats(logps, &Device::flex())), ..Forward::default() };
    let sum: f32 = grpo.loss(&out, &batch).expect("complete").sum.into_scalar();
    f64::from(sum) / grpo.per().count(groups)
}

#[test]
fn normalisers_differ_as_their_papers_say() {
    // On fresh samples the ratio is 1: each token's loss is its advantage with the sign changed.
    for (loss_type, expected) in [
        (GrpoLoss::Grpo, 0.0),
        (GrpoLoss::Bnpo, (3.0 - 1.0) / 4.0),
        (GrpoLoss::Dapo, (3.0 - 1.0) / 4.0),
        (GrpoLoss::DrGrpo, (3.0 - 1.0) / (2.0 * 8.0)),
    ] {
        let got = loss(with(loss_type), &two_answers(), &[-1.0; 4]);
        assert!((got - expected).abs() < 1e-7, "{loss_type:?}: {got} for {expected}");
    }
}

#[test]
fn the_divergence_shares_the_normaliser_and_not_the_advantage() {
    let mut groups = two_answers();
    for sample in groups.iter_mut().flat_map(|group| &mut group.samples) {
        sample.weights.fill(0.0);
        sample.ref_logps = vec![-2.0; sample.tokens.len()];
    }
    let kl = (-1.0_f64).exp() + 1.0 - 1.0;
    for loss_type in LOSSES {
        let config = GrpoConfig { beta: 0.5, ..with(loss_type) };
        let expected = 0.5 * kl * if loss_type == GrpoLoss::DrGrpo { 4.0 / 16.0 } else { 1.0 };
        let got = loss(config, &groups, &[-1.0; 4]);
        assert!((got - expected).abs() < 1e-6, "{loss_type:?}: {got} for {expected}");
    }
}

#[test]
fn equal_rewards_give_exactly_zero_and_are_counted() {
    for scale_rewards in [ScaleRewards::Group, ScaleRewards::Batch, ScaleRewards::None] {
        let mut step = StepBatch::new([siblings(1, &[0.1; 3]), siblings(1, &[0.0, 1.0, 1.0])].concat());
        Grpo::new(GrpoConfig { scale_rewards, ..GrpoConfig::default() })
            .expect("valid")
            .credit(&mut step)
            .expect("rewards");
        let samples = |group: usize| step.groups[group].samples.iter().flat_map(|s| s.weights.clone());
        assert!(samples(0).all(|weight| weight == 0.0), "{scale_rewards:?}");
        assert!(samples(1).any(|weight| weight != 0.0), "{scale_rewards:?}");
        assert_eq!(step.metrics.get("frac_reward_zero_std"), Some(0.5));
    }
}

#[test]
fn a_cut_off_answer_counts_in_its_group_and_teaches_nothing() {
    let mut step = StepBatch::new(siblings(1, &[0.0, 3.0]));
    step.groups[0].samples[1].ended = Some(false);
    let filter = FilterConfig { mask_truncated_completions: true, ..FilterConfig::default() };
    let config = GrpoConfig { filter, scale_rewards: ScaleRewards::None, ..GrpoConfig::default() };
    Grpo::new(config).expect("valid").credit(&mut step).expect("rewards");
    assert_eq!(*step.groups[0].samples[0].weights.last().expect("a target"), -1.5);
    assert_eq!(step.groups[0].samples[1].targets(), 0);
}

#[test]
fn the_check_of_algorithms_passes() {
    let base = |loss_type| GrpoConfig { beta: 0.04, ..with(loss_type) };
    let mut configs: Vec<GrpoConfig> = LOSSES.map(base).to_vec();
    configs.push(GrpoConfig { level: RatioLevel::Sequence, ..base(GrpoLoss::Grpo) });
    configs.push(GrpoConfig { scale_rewards: ScaleRewards::Batch, delta: Some(2.0), ..base(GrpoLoss::Dapo) });
    configs.push(GrpoConfig { use_bias_correction_kl: true, ..base(GrpoLoss::Dapo) });
    for config in configs {
        let grpo = Grpo::new(config).expect("valid");
        let checked = check_algorithm(&grpo, &siblings(4, &[0.5, 2.0, -1.0]));
        checked.unwrap_or_else(|error| panic!("{config:?}: {error}"));
    }
}

/// The weights of CISPO have no gradient, so its loss is checked where they are constant: at the bound.
#[test]
fn the_check_of_algorithms_passes_for_cispo_at_its_bound() {
    let mut groups = siblings(4, &[0.5, 2.0, -1.0]);
    for sample in groups.iter_mut().flat_map(|group| &mut group.samples) {
        sample.logps = vec![-20.0; sample.tokens.len()];
    }
    let config = GrpoConfig { clip_high: 1.25, beta: 0.04, ..with(GrpoLoss::Cispo) };
    check_algorithm(&Grpo::new(config).expect("valid"), &groups).expect("sound");
}

#[test]
fn settings_that_do_not_go_together_are_refused_by_name() {
    let plain = GrpoConfig::default();
    let cispo = with(GrpoLoss::Cispo);
    for (config, key) in [
        (GrpoConfig { loss_type: GrpoLoss::DrGrpo, ..plain }, "max_completion_length"),
        (GrpoConfig { max_completion_length: Some(0), ..plain }, "max_completion_length"),
        (GrpoConfig { beta: -0.1, ..plain }, "beta"),
        (GrpoConfig { delta: Some(1.0), ..plain }, "delta"),
        (GrpoConfig { delta: Some(4.0), ..cispo }, "delta"),
        (GrpoConfig { level: RatioLevel::Sequence, ..cispo }, "level"),
        (GrpoConfig { clip_high: 0.0, ..cispo }, "clip_high"),
    ] {
        let message = Grpo::new(config).expect_err("refused").to_string();
        assert!(message.starts_with(key), "{message}");
    }
    assert!(serde_json::from_str::<GrpoConfig>(r#"{"loss_type": "dr_grpo"}"#).is_ok());
    assert!(serde_json::from_str::<GrpoConfig>(r#"{"loss_typ": "grpo"}"#).is_err());
}
