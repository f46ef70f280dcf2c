#![expect(clippy::float_cmp, reason = "small sums of binary fractions are exact")]

use super::*;
use crate::check::check_algorithm;
use crate::fixture::siblings;
use crate::ops::filter::FilterConfig;
use crate::ops::targets::gather;
use aligner_core::{Device, Group, Sample, Tensor};

fn plain() -> ReinforceConfig {
    ReinforceConfig { kl_coef: 0.0, ..ReinforceConfig::default() }
}

fn credited(config: ReinforceConfig, groups: Vec<Group>) -> StepBatch {
    let mut step = StepBatch::new(groups);
    Reinforce::new(config).expect("valid").credit(&mut step).expect("complete");
    step
}

/// The advantage of each sample's first target.
fn advantages(step: &StepBatch) -> Vec<f32> {
    let samples = step.groups.iter().flat_map(|group| &group.samples);
    samples.filter_map(|sample| gather(sample, &sample.weights).first().copied()).collect()
}

fn two_prompts() -> Vec<Group> {
    let mut groups = siblings(2, &[1.0, 2.0, 6.0]);
    groups[1].samples.iter_mut().for_each(|sample| sample.reward = Some(5.0));
    groups
}

#[test]
fn a_return_is_compared_with_its_baseline() {
    for (baseline, expected) in [
        (Baseline::None, [1.0, 2.0, 6.0, 5.0, 5.0, 5.0]),
        (Baseline::BatchMean, [-3.0, -2.0, 2.0, 1.0, 1.0, 1.0]),
        (Baseline::GroupMean, [-2.0, -1.0, 3.0, 0.0, 0.0, 0.0]),
        (Baseline::LeaveOneOut, [-3.0, -1.5, 4.5, 0.0, 0.0, 0.0]),
    ] {
        let step = credited(ReinforceConfig { baseline, ..plain() }, two_prompts());
        assert_eq!(advantages(&step), expected, "{baseline:?}");
    }
}

/// One answer of two tokens that lies 1 and 2 nats over its reference.
fn diverged() -> Group {
    let mut sample = Sample { reward: Some(4.0), ..Sample::response(&[1], &[2, 3]) };
    sample.logps = vec![0.0, -1.0, -1.0];
    sample.ref_logps = vec![0.0, -2.0, -3.0];
    Group::single("row 1", sample)
}

#[test]
fn the_penalty_is_summed_over_the_answer_or_over_what_follows() {
    let config = ReinforceConfig { baseline: Baseline::None, kl_coef: 0.5, ..plain() };
    let whole = credited(config, vec![diverged()]);
    assert_eq!(whole.groups[0].samples[0].weights, [0.0, 2.5, 2.5]);
    let to_go = credited(ReinforceConfig { reward_to_go: true, gamma: 0.5, ..config }, vec![diverged()]);
    assert_eq!(to_go.groups[0].samples[0].weights, [0.0, -0.5 + 1.5, 3.0]);
}

#[test]
fn an_answer_that_is_masked_out_is_in_no_ones_baseline() {
    let mut groups = siblings(1, &[1.0, 2.0, 6.0]);
    groups[0].samples[1].ended = Some(false);
    let filter = FilterConfig { mask_truncated_completions: true, ..FilterConfig::default() };
    let step = credited(ReinforceConfig { filter, ..plain() }, groups);
    assert_eq!(advantages(&step), [-5.0, 5.0]);
    assert_eq!(step.groups[0].samples[1].targets(), 0);
}

#[test]
fn whitening_is_over_targets_or_over_answers() {
    let groups = || siblings(2, &[1.0, 2.0, 6.0]);
    let by = |whiten_advantages| {
        credited(ReinforceConfig { whiten_advantages, baseline: Baseline::None, ..plain() }, groups())
    };
    let sequences = Moments::of(&advantages(&by(Whiten::Sequence)));
    assert!(sequences.mean.abs() < 1e-6 && (sequences.variance - 1.0).abs() < 1e-6, "{sequences:?}");
    let step = by(Whiten::Token);
    let samples = step.groups.iter().flat_map(|group| &group.samples);
    let tokens = Moments::of(&samples.flat_map(|s| gather(s, &s.weights)).collect::<Vec<_>>());
    assert!(tokens.mean.abs() < 1e-6 && (tokens.variance - 1.0).abs() < 1e-6, "{tokens:?}");
}

#[test]
fn without_clipping_the_loss_is_weighted_likelihood() {
    let reinforce = Reinforce::new(ReinforceConfig { average: Mean::Sequence, ..plain() }).expect("valid");
    let mut group = diverged();
    group.samples[0].weights = vec![0.0, 2.0, -1.0];
    let batch = Batch::collate([&group]).expect("valid");
    let logps = Tensor::<1>::from_floats([-0.5, -3.0], &Device::flex());
    let out = Forward { logps: Some(logps), ..Forward::default() };
    let loss = reinforce.loss(&out, &batch).expect("complete");
    assert_eq!(loss.sum.into_scalar::<f32>(), 1.0 - 3.0);
    assert_eq!(reinforce.per().count([&group]), 1.0);
}

#[test]
fn the_check_of_algorithms_passes() {
    let plus_plus = ReinforceConfig {
        baseline: Baseline::None,
        reward_to_go: true,
        whiten_advantages: Whiten::Token,
        clip: Some(0.2),
        ..ReinforceConfig::default()
    };
    for config in [
        ReinforceConfig::default(),
        ReinforceConfig { baseline: Baseline::BatchMean, average: Mean::Sequence, ..plain() },
        ReinforceConfig { baseline: Baseline::GroupMean, whiten_advantages: Whiten::Sequence, ..plain() },
        plus_plus,
    ] {
        let reinforce = Reinforce::new(config).expect("valid");
        check_algorithm(&reinforce, &siblings(4, &[0.5, 2.0, -1.0])).expect("sound");
    }
}

#[test]
fn bad_input_is_named() {
    let lonely = siblings(1, &[1.0]);
    let reinforce = Reinforce::new(plain()).expect("valid");
    let message = reinforce.credit(&mut StepBatch::new(lonely.clone())).expect_err("alone").to_string();
    assert!(message.contains("prompt 0") && message.contains("has 1"), "{message}");
    credited(ReinforceConfig { baseline: Baseline::BatchMean, ..plain() }, lonely);
    for (config, key) in [
        (ReinforceConfig { clip: Some(1.0), ..plain() }, "clip"),
        (ReinforceConfig { gamma: -0.1, ..plain() }, "gamma"),
        (ReinforceConfig { kl_coef: -0.1, ..plain() }, "kl_coef"),
        (
            ReinforceConfig { reward_to_go: true, whiten_advantages: Whiten::Sequence, ..plain() },
            "whiten_advantages",
        ),
    ] {
        let message = Reinforce::new(config).expect_err("out of range").to_string();
        assert!(message.starts_with(key), "{message}");
    }
}
