//! The training step through its public face, on the smallest model.

use crate::ranks;
use aligner_algos::check::BigramPolicy;
use aligner_algos::{
    Average, Dpo, DpoConfig, Learner, LearnerConfig, Reference, RewardModel, Sft, SftConfig,
};
use aligner_core::ops::host::{to_vec, with_slice};
use aligner_core::optim::Schedule;
use aligner_core::{
    Algorithm, Batch, Communicator, Error, Forward, Group, LossOutput, Metrics, ParamSet, Result, Sample,
    StepBatch,
};
use std::sync::Arc;

const VOCAB: usize = 20;

fn config() -> LearnerConfig {
    LearnerConfig {
        learning_rate: 0.05,
        schedule: Schedule::Cosine,
        weight_decay: 0.1,
        micro_batch_tokens: 24,
        ..LearnerConfig::default()
    }
}

fn learner(config: LearnerConfig, comm: Arc<dyn Communicator>) -> Learner {
    Learner::new(Box::new(BigramPolicy::new(VOCAB, 1)), config, 10, comm).unwrap()
}

fn alone() -> Learner {
    learner(config(), ranks::alone())
}

fn singles(count: u32) -> Vec<Group> {
    let answer = |at: u32| (0..=at % 5).map(|i| 3 + (at * 7 + i) % 17).collect::<Vec<_>>();
    (0..count).map(|at| Group::single(format!("row {at}"), Sample::response(&[1, 2], &answer(at)))).collect()
}

fn pairs(count: u32) -> Vec<Group> {
    let pair = |at: u32| {
        let prompt = [1, 2 + at % 3];
        let answer = |tokens: &[u32]| Sample::response(&prompt, tokens);
        Group::pair(format!("row {at}"), answer(&[5 + at, 7]), answer(&[9, 8, 6 + at]))
    };
    let mut groups: Vec<Group> = (0..count).map(pair).collect();
    Reference::live(Box::new(BigramPolicy::new(VOCAB, 1)), 100).fill(&mut groups).unwrap();
    groups
}

fn values(params: &ParamSet) -> Vec<f32> {
    params.iter().flat_map(|param| to_vec(&param.value)).collect()
}

fn gap(one: &[f32], other: &[f32]) -> f32 {
    assert_eq!(one.len(), other.len());
    one.iter().zip(other).fold(0.0, |most, (a, b)| most.max((a - b).abs()))
}

/// Three steps, and the metrics of the last.
fn train(mut learner: Learner, algorithm: &dyn Algorithm, groups: &[Group]) -> (Vec<f32>, Metrics) {
    let mut metrics = Metrics::default();
    for _ in 0..3 {
        metrics = learner.step(algorithm, groups.to_vec()).unwrap();
    }
    (values(learner.policy().params()), metrics)
}

/// Every kind of average, with groups for it.
const KINDS: usize = 3;

fn algorithm(kind: usize) -> (Box<dyn Algorithm>, Vec<Group>) {
    match kind {
        0 => (Box::new(Sft::default()), singles(9)),
        1 => (Box::new(Sft::new(SftConfig { average: Average::Sample })), singles(9)),
        _ => (Box::new(Dpo::new(DpoConfig { beta: 0.5, ..DpoConfig::default() }).unwrap()), pairs(9)),
    }
}

#[test]
fn the_micro_batch_size_does_not_matter() {
    for kind in 0..KINDS {
        let (algorithm, groups) = algorithm(kind);
        let with = |tokens| {
            let config = LearnerConfig { micro_batch_tokens: tokens, ..config() };
            train(learner(config, ranks::alone()), algorithm.as_ref(), &groups)
        };
        let ((one_each, few), (together, all)) = (with(1), with(10_000));
        assert!(gap(&one_each, &together) < 1e-5, "{}", gap(&one_each, &together));
        assert!((few.get("loss").unwrap() - all.get("loss").unwrap()).abs() < 1e-6);
        assert!((few.get("grad_norm").unwrap() - all.get("grad_norm").unwrap()).abs() < 1e-5);
    }
}

#[test]
fn two_ranks_equal_one() {
    for kind in 0..KINDS {
        let (alone_algorithm, groups) = algorithm(kind);
        let (expected, one) = train(alone(), alone_algorithm.as_ref(), &groups);
        let results = ranks::two(|rank| {
            let (algorithm, groups) = algorithm(kind);
            // The second rank gets fewer groups: counts are global, ranks are not averaged.
            let (first, second) = groups.split_at(6);
            let share = if rank.is_main() { first } else { second };
            train(learner(config(), rank), algorithm.as_ref(), share)
        });
        let [(first, metrics), (second, _)] = results.as_slice() else { panic!("two ranks") };
        assert_eq!(first, second, "ranks hold the same parameters");
        assert!(gap(first, &expected) < 1e-5, "kind {kind}: {}", gap(first, &expected));
        for name in ["loss", "grad_norm", "num_tokens"] {
            let (got, expected) = (metrics.get(name).unwrap(), one.get(name).unwrap());
            assert!((got - expected).abs() < 1e-5, "kind {kind}: {name} is {got}, alone {expected}");
        }
    }
}

#[test]
fn the_extremes_of_rewards_depend_on_neither_micro_batches_nor_ranks() {
    let extremes =
        |metrics: &Metrics| ["min_reward", "max_reward"].map(|name| metrics.get(name).unwrap().to_bits());
    let algorithm = RewardModel::default();
    let with = |tokens| {
        let config = LearnerConfig { micro_batch_tokens: tokens, ..config() };
        extremes(&learner(config, ranks::alone()).step(&algorithm, pairs(9)).unwrap())
    };
    let [least, most] = with(10_000);
    assert!(f64::from_bits(least) < f64::from_bits(most));
    assert_eq!(with(1), [least, most]);
    let both = ranks::two(|rank| {
        let groups = pairs(9);
        let (first, second) = groups.split_at(6);
        let share = if rank.is_main() { first } else { second };
        extremes(&learner(config(), rank).step(&RewardModel::default(), share.to_vec()).unwrap())
    });
    assert_eq!(both, [[least, most]; 2]);
}

#[test]
fn a_rank_without_groups_takes_part() {
    let (algorithm, groups) = algorithm(0);
    let (expected, _) = train(alone(), algorithm.as_ref(), &groups);
    let results = ranks::two(|rank| {
        let share = if rank.is_main() { singles(9) } else { Vec::new() };
        train(learner(config(), rank), &Sft::default(), &share).0
    });
    assert!(gap(&results[1], &expected) < 1e-6);
}

#[test]
fn a_failure_on_one_rank_stops_all() {
    let messages = ranks::two(|rank| {
        let mut groups = singles(4);
        if !rank.is_main() {
            groups[2].samples[0].reward = Some(f32::NAN);
        }
        learner(config(), rank).step(&Sft::default(), groups).unwrap_err().to_string()
    });
    assert!(messages[0].contains("other ranks failed"), "{}", messages[0]);
    assert!(messages[1].contains("row 2#0") && messages[1].contains("reward"), "{}", messages[1]);
}

/// The loss, or its gradient alone, is not a number where a sample's weight is 0.
struct Poisoned {
    loss_too: bool,
}

impl Algorithm for Poisoned {
    fn loss(&self, out: &Forward, batch: &Batch) -> Result<LossOutput> {
        let logps = out.logps()?;
        let weights = batch.weights(logps);
        let sum = if self.loss_too {
            (logps.clone() / weights).sum()
        } else {
            // The root has an infinite slope at 0, times the weight 0.
            (logps.clone().neg() * weights).sqrt().sum()
        };
        Ok(LossOutput::new(sum))
    }
}

#[test]
fn a_value_that_is_no_number_names_its_samples_and_moves_nothing() {
    let mut groups = singles(9);
    groups[7].samples[0].weights = vec![0.0; groups[7].samples[0].tokens.len()];
    let mut learner = learner(LearnerConfig { micro_batch_tokens: 1, ..config() }, ranks::alone());
    let before = values(learner.policy().params());
    for (loss_too, what) in [(true, "the loss"), (false, "the gradient of logits")] {
        let error = learner.step(&Poisoned { loss_too }, groups.clone()).unwrap_err();
        let Error::NotFinite { what: got, samples } = error else { panic!("{error}") };
        assert_eq!((got.as_str(), samples), (what, vec!["row 7#0".to_string()]));
    }
    assert_eq!(values(learner.policy().params()), before);
    assert_eq!(learner.steps(), 0);
}

#[test]
fn a_sample_without_targets_changes_nothing() {
    for kind in 0..KINDS {
        let (algorithm, groups) = algorithm(kind);
        let mut more = groups.clone();
        more.insert(2, groups[0].clone());
        more[2].samples.iter_mut().for_each(|sample| sample.mask.fill(false));
        let alone_values = train(alone(), algorithm.as_ref(), &groups).0;
        assert_eq!(train(alone(), algorithm.as_ref(), &more).0, alone_values, "kind {kind}");
    }
}

#[test]
fn a_step_without_any_target_is_an_error() {
    let mut groups = singles(3);
    for group in &mut groups {
        group.samples[0].mask.fill(false);
    }
    let message = alone().step(&Sft::default(), groups).unwrap_err().to_string();
    assert!(message.contains("nothing to learn from"), "{message}");
}

#[test]
fn parameters_are_written_in_place_unless_an_engine_holds_them() {
    let addresses = |learner: &Learner| -> Vec<usize> {
        let address = |values: &[f32]| values.as_ptr() as usize;
        learner.policy().params().iter().map(|param| with_slice(&param.value, address)).collect()
    };
    let mut learner = alone();
    let before = addresses(&learner);
    learner.step(&Sft::default(), singles(4)).unwrap();
    assert_eq!(addresses(&learner), before, "nobody else holds the parameters");
    let engine = learner.policy().params().clone();
    let version = values(&engine);
    learner.step(&Sft::default(), singles(4)).unwrap();
    assert_eq!(values(&engine), version, "the engine keeps its version");
    assert_ne!(values(learner.policy().params()), version);
}

#[test]
fn a_resumed_run_is_bitwise_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let (algorithm, groups) = algorithm(2);
    let mut first = alone();
    first.step(algorithm.as_ref(), groups.clone()).unwrap();
    first.save_state(dir.path()).unwrap();
    let policy = BigramPolicy::new(VOCAB, 1);
    let params = first.policy().params().clone();
    let policy = aligner_core::Policy::with_params(&policy, params);
    let mut resumed = Learner::new(policy, config(), 10, ranks::alone()).unwrap();
    resumed.load_state(dir.path()).unwrap();
    for _ in 0..3 {
        let one = first.step(algorithm.as_ref(), groups.clone()).unwrap();
        let other = resumed.step(algorithm.as_ref(), groups.clone()).unwrap();
        assert_eq!(one, other);
    }
    assert_eq!(values(first.policy().params()), values(resumed.policy().params()));
}

#[test]
fn damaged_state_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let mut learner = alone();
    assert!(learner.load_state(dir.path()).unwrap_err().to_string().contains("optimizer.safetensors"));
    learner.step(&Sft::default(), singles(4)).unwrap();
    learner.save_state(dir.path()).unwrap();
    let path = dir.path().join("optimizer.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    assert!(learner.load_state(dir.path()).unwrap_err().to_string().contains("optimizer.safetensors"));
}

#[test]
fn evaluation_measures_and_moves_nothing() {
    let mut learner = alone();
    let before = values(learner.policy().params());
    let evaluated = learner.evaluate(&Sft::default(), &singles(9)).unwrap();
    assert_eq!(values(learner.policy().params()), before);
    let stepped = learner.step(&Sft::default(), singles(9)).unwrap();
    for name in ["loss", "nll", "perplexity"] {
        let (one, other) = (evaluated.get(name).unwrap(), stepped.get(name).unwrap());
        assert!((one - other).abs() < 1e-5 * other, "{name}: {one} and {other}");
    }
    assert!((evaluated.get("perplexity").unwrap().ln() - evaluated.get("nll").unwrap()).abs() < 1e-9);
}

#[test]
fn learning_lowers_the_loss_and_counts_tokens() {
    let (algorithm, groups) = algorithm(2);
    let mut learner = learner(LearnerConfig { warmup_steps: 2, ..config() }, ranks::alone());
    let first = learner.step(algorithm.as_ref(), groups.clone()).unwrap();
    assert!((first.get("loss").unwrap() - Dpo::LOSS_AT_REFERENCE).abs() < 1e-6);
    assert_eq!(first.get("learning_rate"), Some(0.0), "a warmup begins at 0");
    let computed: usize = groups.iter().map(Group::packed_tokens).sum();
    assert_eq!(first.get("num_tokens"), Some(computed as f64));
    let later = (0..5).map(|_| learner.step(algorithm.as_ref(), groups.clone()).unwrap()).last().unwrap();
    assert!(later.get("loss").unwrap() < first.get("loss").unwrap());
    assert!(later.get("rewards/accuracies").unwrap() > 0.5);
    assert_eq!(later.get("num_tokens"), Some(6.0 * computed as f64));
}

/// Weighs each sample by its share of all ranks' rewards, and logs their sum.
struct Share;

impl Algorithm for Share {
    fn loss(&self, out: &Forward, batch: &Batch) -> Result<LossOutput> {
        let logps = out.logps()?;
        Ok(LossOutput::new((logps.clone() * batch.weights(logps)).sum().neg()))
    }

    fn credit(&self, step: &mut StepBatch) -> Result<()> {
        let rewards = step.groups.iter().flat_map(|group| &group.samples).map(|sample| sample.reward);
        let own: Option<f32> = rewards.sum();
        let own = own.ok_or_else(|| Error::Invalid("a sample without a reward".into()));
        let [sum] = step.sum_over_ranks(own.map(|sum| [f64::from(sum)]))?;
        for sample in step.groups.iter_mut().flat_map(|group| &mut group.samples) {
            sample.weights = vec![sample.reward.unwrap() / sum as f32; sample.tokens.len()];
        }
        step.metrics.set("reward_sum", sum);
        Ok(())
    }
}

fn rewarded(count: u32) -> Vec<Group> {
    let mut groups = singles(count);
    for (at, group) in groups.iter_mut().enumerate() {
        group.samples[0].reward = Some(at as f32);
    }
    groups
}

#[test]
fn credit_over_ranks_equals_credit_of_one() {
    let (expected, metrics) = train(alone(), &Share, &rewarded(6));
    assert_eq!(metrics.get("reward_sum"), Some(15.0));
    let results = ranks::two(|rank| {
        let groups = rewarded(6);
        let (first, second) = groups.split_at(2);
        let share = if rank.is_main() { first } else { second };
        train(learner(config(), rank), &Share, share)
    });
    for (got, metrics) in results {
        assert!(gap(&got, &expected) < 1e-5, "{}", gap(&got, &expected));
        assert_eq!(metrics.get("reward_sum"), Some(15.0));
    }
}

#[test]
fn credit_that_fails_on_one_rank_fails_on_all() {
    let errors = ranks::two(|rank| {
        let mut groups = rewarded(4);
        if !rank.is_main() {
            groups[1].samples[0].reward = None;
        }
        learner(config(), rank).step(&Share, groups).unwrap_err().to_string()
    });
    assert!(errors[0].contains("1 other ranks failed"), "{errors:?}");
    assert!(errors[1].contains("without a reward"), "{errors:?}");
}

#[test]
fn an_update_leaves_credit_as_it_is() {
    let (mut whole, mut apart) = (alone(), alone());
    let metrics = whole.step(&Share, rewarded(6)).unwrap();
    let credited = apart.credit(&Share, StepBatch::new(rewarded(6))).unwrap();
    let updated = apart.update(&Share, credited.groups).unwrap();
    assert_eq!(values(whole.policy().params()), values(apart.policy().params()));
    assert_eq!((updated.get("loss"), updated.get("reward_sum")), (metrics.get("loss"), None));
}
