//! What the rollout loop promises beside learning: resume, defined outcomes, errors that name the culprit.

use aligner_algos::ops::filter::FilterConfig;
use aligner_algos::ops::importance::ImportanceConfig;
use aligner_algos::rewards::RewardParts;
use aligner_algos::{
    AdaptiveKlConfig, BestOfN, BestOfNConfig, Critic, Grpo, GrpoConfig, Learner, OldLogps, Online,
    OnlineState, Ppo, PpoConfig, Reference, Reinforce, ReinforceConfig, Rejection, RejectionConfig, Rloo,
    RlooConfig, RolloutConfig, ValueLoss, ValueLossConfig,
};
use aligner_core::ops::host::to_vec;
use aligner_core::{Algorithm, Needs, Policy as _, Sample, Score};

use crate::learning::{learner, parts, prompts, single, tiny};

fn by_length(sample: &Sample) -> Score {
    Score::Sample(sample.tokens.iter().skip(2).filter(|&&token| token < 4).count() as f32)
}

fn rollout() -> RolloutConfig {
    RolloutConfig { num_generations: 4, max_completion_length: 6, ..RolloutConfig::default() }
}

fn grpo() -> Grpo {
    Grpo::new(GrpoConfig { beta: 0.02, ..GrpoConfig::default() }).unwrap()
}

/// A loop with whatever the algorithm asks for. Responses end at token 9.
fn online(algorithm: &dyn Algorithm, config: RolloutConfig, rewards: RewardParts) -> (Online, Learner) {
    let policy = tiny(5, None);
    let mut parts = parts(&policy, rewards);
    parts.stop_tokens = vec![9];
    if algorithm.needs().contains(Needs::REF_LOGPS) {
        parts.reference = Some(Reference::live(Box::new(policy.clone()), 4096));
    }
    if algorithm.needs().contains(Needs::VALUES) {
        let loss = ValueLoss::new(ValueLossConfig::default()).unwrap();
        parts.critic = Some(Critic::new(learner(tiny(6, Some(1)), 1e-3), loss));
    }
    (Online::new(config, parts, 3).unwrap(), learner(policy, 1e-3))
}

fn values(learner: &Learner) -> Vec<f32> {
    learner.policy().params().iter().flat_map(|param| to_vec(&param.value)).collect()
}

/// Prompts from `asked` on: a cursor that a checkpoint keeps.
fn steps(
    online: &mut Online,
    learner: &mut Learner,
    algorithm: &dyn Algorithm,
    asked: &mut usize,
    count: usize,
) {
    for _ in 0..count {
        let mut next = |count: usize| {
            let mut all = prompts(*asked + count)?;
            let new = all.split_off(*asked);
            *asked += count;
            Ok(new)
        };
        online.step(algorithm, learner, 3, &mut next).unwrap();
    }
}

#[test]
fn a_run_that_is_killed_between_steps_ends_with_the_same_bits() {
    let ppo = Ppo::new(PpoConfig::default()).unwrap();
    let adaptive_kl = Some(AdaptiveKlConfig { target: 0.01, horizon: 20.0, ..AdaptiveKlConfig::default() });
    let cases: [(&str, &dyn Algorithm, RolloutConfig); 5] = [
        ("on-policy", &grpo(), rollout()),
        ("staleness", &grpo(), RolloutConfig { max_staleness: 2, ..rollout() }),
        ("carried", &grpo(), RolloutConfig { oversampling: 3, ..rollout() }),
        ("minibatches", &grpo(), RolloutConfig { num_minibatches: 2, num_iterations: 2, ..rollout() }),
        ("critic", &ppo, RolloutConfig { adaptive_kl, ..rollout() }),
    ];
    for (name, algorithm, config) in cases {
        let (mut whole, mut whole_learner) = online(algorithm, config.clone(), single("r", by_length));
        steps(&mut whole, &mut whole_learner, algorithm, &mut 0, 5);

        let (mut first, mut first_learner) = online(algorithm, config.clone(), single("r", by_length));
        let mut asked = 0;
        steps(&mut first, &mut first_learner, algorithm, &mut asked, 2);
        let (state, dir) = (serde_json::to_vec(&first.state()).unwrap(), tempfile::tempdir().unwrap());
        first_learner.save_state(dir.path()).unwrap();
        let params = first_learner.policy().params().clone();
        let critic = first.critic().map(|critic| critic.learner().policy().params().clone());
        let critic_dir = tempfile::tempdir().unwrap();
        if let Some(critic) = first.critic() {
            critic.learner().save_state(critic_dir.path()).unwrap();
        }
        drop((first, first_learner));

        // What another process reads from disk.
        let policy = tiny(5, None);
        let mut parts = parts(&policy, single("r", by_length));
        parts.stop_tokens = vec![9];
        parts.reference = Some(Reference::live(Box::new(policy.clone()), 4096));
        if let Some(critic) = critic {
            let mut policy = tiny(6, Some(1));
            *policy.params_mut() = critic;
            let mut learner = learner(policy, 1e-3);
            learner.load_state(critic_dir.path()).unwrap();
            parts.critic = Some(Critic::new(learner, ValueLoss::new(ValueLossConfig::default()).unwrap()));
        }
        let mut second = Online::new(config, parts, 3).unwrap();
        let mut policy = tiny(5, None);
        *policy.params_mut() = params;
        let mut second_learner = learner(policy, 1e-3);
        second_learner.load_state(dir.path()).unwrap();
        let state: OnlineState = serde_json::from_slice(&state).unwrap();
        second.restore(state, second_learner.policy().params(), second_learner.steps()).unwrap();
        steps(&mut second, &mut second_learner, algorithm, &mut asked, 3);
        assert_eq!(values(&second_learner), values(&whole_learner), "{name}");
        assert_eq!(second.state(), whole.state(), "{name}");
    }
}

#[test]
fn carried_responses_keep_the_version_of_each_token() {
    // Alone in their groups, responses are complete at different times.
    let config =
        RolloutConfig { oversampling: 4, num_generations: 1, max_completion_length: 20, ..rollout() };
    let (mut online, mut learner) = online(&grpo(), config, single("r", by_length));
    let mut mixed = 0;
    for _ in 0..6 {
        let iteration = online.step(&grpo(), &mut learner, 2, &mut prompts).unwrap();
        assert_eq!(iteration.groups.len(), 2);
        for sample in iteration.groups.iter().flat_map(|group| &group.samples) {
            let versions = &sample.versions[2..];
            assert!(versions.is_sorted(), "{versions:?}");
            mixed += usize::from(versions.first() != versions.last());
        }
    }
    assert!(mixed > 0, "no response was drawn by two versions");
}

#[test]
fn staleness_is_counted_in_updates() {
    let config = RolloutConfig { max_staleness: 2, ..rollout() };
    let (mut online, mut learner) = online(&grpo(), config, single("r", by_length));
    let mut ages = Vec::new();
    for step in 0..5_u64 {
        let iteration = online.step(&grpo(), &mut learner, 2, &mut prompts).unwrap();
        let versions =
            iteration.groups.iter().flat_map(|group| &group.samples).flat_map(|s| s.versions[2..].to_vec());
        ages.extend(versions.map(|version| step - version).max());
    }
    assert_eq!(ages, [0, 1, 2, 2, 2]);
}

#[test]
fn groups_without_spread_are_asked_again_or_learn_nothing() {
    // Half of the prompts are worth the same whatever is said.
    let some = |sample: &Sample| {
        if sample.tokens[0].is_multiple_of(2) { Score::Sample(1.0) } else { by_length(sample) }
    };
    let config = RolloutConfig { dynamic_sampling: true, ..rollout() };
    let (mut online, mut learner) = self::online(&grpo(), config, single("some", some));
    let mut asked = 0;
    let mut next = |count: usize| {
        let mut all = prompts(asked + count)?;
        let new = all.split_off(asked);
        asked += count;
        Ok(new)
    };
    let iteration = online.step(&grpo(), &mut learner, 3, &mut next).unwrap();
    assert!(iteration.groups.iter().all(|group| group.samples[0].tokens[0] % 2 == 1));
    assert_eq!(iteration.groups.len(), 3);

    let same = |_: &Sample| Score::Sample(1.0);
    let (mut online, mut learner) = self::online(&grpo(), rollout(), single("same", same));
    let iteration = online.step(&grpo(), &mut learner, 3, &mut prompts).unwrap();
    assert_eq!(iteration.metrics.get("frac_reward_zero_std"), Some(1.0));
    assert!(iteration.metrics.get("grad_norm").unwrap() < 1e-6);
}

#[test]
fn samples_without_a_score_are_left_out_and_a_step_without_samples_learns_nothing() {
    let some =
        |sample: &Sample| if sample.tokens.len().is_multiple_of(2) { Score::None } else { by_length(sample) };
    let (mut online, mut learner) = self::online(&grpo(), rollout(), single("some", some));
    let iteration = online.step(&grpo(), &mut learner, 3, &mut prompts).unwrap();
    assert!(iteration.groups.iter().flat_map(|g| &g.samples).all(|sample| sample.tokens.len() % 2 == 1));
    assert!(iteration.metrics.get("rewards/some/none").unwrap() > 0.0);

    let (mut online, mut learner) =
        self::online(&grpo(), rollout(), single("none", |_: &Sample| Score::None));
    let before = values(&learner);
    let iteration = online.step(&grpo(), &mut learner, 3, &mut prompts).unwrap();
    assert_eq!(iteration.metrics.get("skipped_updates"), Some(1.0));
    assert_eq!(values(&learner), before);
    assert_eq!(online.steps(), 1);
}

/// Every algorithm, with or without learning from responses that were cut off.
fn algorithms(mask_truncated_completions: bool) -> Vec<(&'static str, Box<dyn Algorithm>)> {
    let filter = FilterConfig { mask_truncated_completions, ..FilterConfig::default() };
    vec![
        ("grpo", Box::new(Grpo::new(GrpoConfig { filter, beta: 0.02, ..GrpoConfig::default() }).unwrap())),
        ("rloo", Box::new(Rloo::new(RlooConfig { filter, ..RlooConfig::default() }).unwrap())),
        ("reinforce", Box::new(Reinforce::new(ReinforceConfig { filter, ..Default::default() }).unwrap())),
        ("ppo", Box::new(Ppo::new(PpoConfig { filter, ..PpoConfig::default() }).unwrap())),
        ("rejection", Box::new(Rejection::new(RejectionConfig { filter, ..Default::default() }).unwrap())),
        ("best_of_n", Box::new(BestOfN::new(BestOfNConfig { filter, ..Default::default() }).unwrap())),
    ]
}

#[test]
fn a_step_whose_responses_are_all_cut_off_learns_from_them_or_skips_and_counts() {
    // What ends a response is never drawn.
    let config = RolloutConfig {
        min_completion_length: 6,
        old_logps: OldLogps::Trainer,
        importance: Some(ImportanceConfig::default()),
        ..rollout()
    };
    for masks in [false, true] {
        for (name, algorithm) in algorithms(masks) {
            let algorithm = algorithm.as_ref();
            let (mut online, mut learner) = online(algorithm, config.clone(), single("r", by_length));
            let before = values(&learner);
            for step in 1..=2 {
                let metrics = online.step(algorithm, &mut learner, 3, &mut prompts).unwrap().metrics;
                let broken = metrics.iter().find(|(_, value)| !value.is_finite());
                assert_eq!(broken, None, "{name}, masks: {masks}");
                assert_eq!(metrics.get("completions/clipped_ratio"), Some(1.0));
                assert!(metrics.get("reward").is_some(), "{name}: what was drawn is logged");
                assert_eq!(metrics.get("skipped_updates"), masks.then_some(1.0), "{name}");
                assert_eq!((online.steps(), learner.steps()), (step, if masks { 0 } else { step }));
            }
            assert_eq!(values(&learner) == before, masks, "{name}");
        }
    }
}

#[test]
fn a_minibatch_without_a_sample_left_is_skipped_and_the_others_are_learned() {
    let filter = FilterConfig { mask_truncated_completions: true, ..FilterConfig::default() };
    let grpo = Grpo::new(GrpoConfig { filter, ..GrpoConfig::default() }).unwrap();
    let config = RolloutConfig { num_generations: 2, num_minibatches: 3, ..rollout() };
    let (mut online, mut learner) = online(&grpo, config, single("r", by_length));
    let (mut skipped, mut partly) = (0.0, false);
    for step in 1..=6 {
        let metrics = online.step(&grpo, &mut learner, 3, &mut prompts).unwrap().metrics;
        let of_step = metrics.get("skipped_updates").unwrap_or(0.0);
        skipped += of_step;
        partly |= of_step > 0.0 && of_step < 3.0;
        assert!((learner.steps() as f64 - (3.0 * f64::from(step) - skipped)).abs() < 1e-9);
    }
    assert!(partly, "no step had both");
}

#[test]
fn what_stops_a_step_says_why_and_moves_nothing() {
    let nan = |_: &Sample| Score::Sample(f32::NAN);
    let panics = |_: &Sample| -> Score { panic!("no such word") };
    for (rewards, part) in [(single("mine", nan), "p0, sample 0"), (single("mine", panics), "no such word")] {
        let (mut online, mut learner) = self::online(&grpo(), rollout(), rewards);
        let before = values(&learner);
        let message = online.step(&grpo(), &mut learner, 3, &mut prompts).unwrap_err().to_string();
        assert!(message.contains("mine") && message.contains(part), "{message}");
        assert_eq!(values(&learner), before);
    }

    let rloo = Rloo::new(RlooConfig { beta: 0.0, ..RlooConfig::default() }).unwrap();
    let config = RolloutConfig { num_generations: 1, ..rollout() };
    let (mut online, mut learner) = self::online(&rloo, config, single("r", by_length));
    let message = online.step(&rloo, &mut learner, 3, &mut prompts).unwrap_err().to_string();
    assert!(message.contains("p0"), "{message}");

    let config = RolloutConfig { max_kl: Some(1e-9), ..rollout() };
    let (mut online, mut learner) = self::online(&grpo(), config, single("r", by_length));
    let mut message = String::new();
    for _ in 0..5 {
        if let Err(error) = online.step(&grpo(), &mut learner, 3, &mut prompts) {
            message = error.to_string();
            break;
        }
    }
    assert!(message.contains("rollout.max_kl"), "{message}");
}

#[test]
fn an_engine_with_other_weights_than_the_learner_s_is_noticed_on_the_first_step() {
    let (mut online, _) = online(&grpo(), rollout(), single("r", by_length));
    let mut other = learner(tiny(77, None), 1e-3);
    let message = online.step(&grpo(), &mut other, 3, &mut prompts).unwrap_err().to_string();
    assert!(message.contains("max_ratio_error"), "{message}");
}

#[test]
fn fresh_samples_have_the_ratio_1_and_no_divergence() {
    for temperature in [1.0, 0.7] {
        let mut policy = tiny(5, None);
        policy.set_temperature(temperature).unwrap();
        let mut parts = parts(&policy, single("r", by_length));
        parts.reference = Some(Reference::live(Box::new(policy.clone()), 4096));
        let mut online = Online::new(RolloutConfig { temperature, ..rollout() }, parts, 3).unwrap();
        let mut learner = learner(policy, 1e-3);
        let metrics = online.step(&grpo(), &mut learner, 3, &mut prompts).unwrap().metrics;
        assert!(metrics.get("sampling/max_ratio_error").unwrap() < 1e-3);
        assert!(metrics.get("objective/kl").unwrap().abs() < 1e-5);
    }
}

#[test]
fn samples_of_every_step_are_drawn_with_the_learner_s_weights() {
    let (mut online, mut learner) = online(&grpo(), rollout(), single("r", by_length));
    for step in 0..4 {
        let iteration = online.step(&grpo(), &mut learner, 3, &mut prompts).unwrap();
        let ids: Vec<&str> = iteration.groups.iter().map(|group| group.id.as_str()).collect();
        assert_eq!(ids, ["p0", "p1", "p2"], "each prompt once");
        let metrics = iteration.metrics;
        for name in ["val/ratio_max", "val/ratio_min"] {
            let ratio = metrics.get(name).unwrap();
            assert!((ratio - 1.0).abs() < 1e-3, "step {step}, {name}: {ratio}");
        }
    }
}
