use super::*;
use crate::check::check_algorithm;
use crate::fixture::siblings;
use aligner_core::{Device, Sample, Tensor};

fn rloo(config: RlooConfig) -> Rloo {
    Rloo::new(config).expect("valid")
}

fn free() -> RlooConfig {
    RlooConfig { beta: 0.0, ..RlooConfig::default() }
}

#[test]
fn the_penalty_is_taken_off_before_rewards_are_compared() {
    let sample = |reward: f32, gap: f32| {
        let mut sample = Sample { reward: Some(reward), ..Sample::response(&[1], &[2, 3]) };
        sample.logps = vec![-1.0; 3];
        sample.ref_logps = vec![-1.0 - gap; 3];
        sample
    };
    let samples = vec![sample(1.0, 1.0), sample(2.0, 3.0)];
    let mut step = StepBatch::new(vec![Group { id: "p".into(), samples, ..Group::default() }]);
    rloo(RlooConfig { beta: 0.5, ..RlooConfig::default() }).credit(&mut step).expect("complete");
    // 1 − 0.5·2 and 2 − 0.5·6: each is compared with the other.
    assert_eq!(step.groups[0].samples[0].weights, [0.0, 1.0, 1.0]);
    assert_eq!(step.groups[0].samples[1].weights, [0.0, -1.0, -1.0]);
    assert_eq!(step.metrics.get("objective/kl"), Some(4.0));
}

#[test]
fn the_ratio_is_of_the_whole_answer() {
    let mut group = Group::single("p", Sample::response(&[1], &[2, 3]));
    group.samples[0].logps = vec![-1.0; 3];
    group.samples[0].weights = vec![0.0, 2.0, 2.0];
    let batch = Batch::collate([&group]).expect("valid");
    let logps = Tensor::<1>::from_floats([-0.95, -0.95], &Device::flex());
    let out = Forward { logps: Some(logps), ..Forward::default() };
    let loss = rloo(free()).loss(&out, &batch).expect("complete").sum.into_scalar::<f32>();
    assert!((loss + 2.0 * 0.1_f32.exp()).abs() < 1e-5, "{loss}");
}

#[test]
fn a_group_of_one_mind_gets_exactly_zero() {
    let mut step = StepBatch::new(siblings(2, &[0.3; 5]));
    rloo(RlooConfig { normalize_advantages: true, ..free() }).credit(&mut step).expect("complete");
    let weights = step.groups.iter().flat_map(|group| &group.samples).flat_map(|s| &s.weights);
    assert!(weights.into_iter().all(|&weight| weight == 0.0));
    assert_eq!(step.metrics.get("frac_reward_zero_std"), Some(1.0));
}

#[test]
fn the_check_of_algorithms_passes() {
    for config in [RlooConfig::default(), RlooConfig { normalize_advantages: true, ..free() }] {
        check_algorithm(&rloo(config), &siblings(4, &[0.5, 2.0, -1.0])).expect("sound");
    }
}

#[test]
fn bad_input_is_named() {
    let refused = rloo(free()).credit(&mut StepBatch::new(siblings(1, &[1.0])));
    let message = refused.expect_err("alone").to_string();
    assert!(message.contains("prompt 0") && message.contains("at least 2"), "{message}");
    let refused = rloo(RlooConfig::default()).credit(&mut StepBatch::new(siblings(1, &[1.0, 2.0])));
    let message = refused.expect_err("no log-probabilities").to_string();
    assert!(message.contains("prompt 0, sample 0") && message.contains("`logps`"), "{message}");
    for (config, key) in [
        (RlooConfig { beta: -1.0, ..free() }, "beta"),
        (RlooConfig { clip_high: f64::NAN, ..free() }, "clip_high"),
        (RlooConfig { reward_clip: Some(-1.0), ..free() }, "reward_clip"),
    ] {
        let message = Rloo::new(config).expect_err("out of range").to_string();
        assert!(message.starts_with(key), "{message}");
    }
}
