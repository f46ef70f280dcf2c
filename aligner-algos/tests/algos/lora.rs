//! The learner on a model with a low-rank adapter.

use crate::{fixture, ranks};
use aligner_algos::{
    Dpo, DpoConfig, Learner, LearnerConfig, PreflightConfig, PreflightInput, Reference, preflight,
};
use aligner_core::model::{Adapter, CausalLm, LoraConfig, Targets};
use aligner_core::ops::host::{to_vec, with_slice};
use aligner_core::weights::{Checkpoint, checksum, read_tensors};
use aligner_core::{Device, Group, ParamSet, Policy, Sample};

fn base() -> CausalLm {
    let checkpoint = Checkpoint::open(&fixture::path("models/llama_gqa_untied")).unwrap();
    CausalLm::load(&checkpoint, &Device::flex()).unwrap()
}

fn adapted(dropout: f64) -> CausalLm {
    let config = LoraConfig { r: 4, dropout, targets: Targets::AllLinear, ..LoraConfig::default() };
    let mut model = base().with_adapter(config, 3).unwrap();
    model.set_dropout_seed(5);
    model
}

/// Pairs with the log-probabilities of the model without its adapter.
fn pairs() -> Vec<Group> {
    let tokens =
        |seed: u32, len: u32| (0..len).map(|at| 3 + (seed * 31 + at * at * 7) % 300).collect::<Vec<_>>();
    let pair = |at: u32| {
        let prompt = tokens(at, 3 + at % 4);
        let answer = |seed, len| Sample::response(&prompt, &tokens(seed, len));
        Group::pair(format!("row {at}"), answer(50 + at, 2 + at % 5), answer(90 + at, 1 + at % 7))
    };
    let mut groups: Vec<Group> = (0..8).map(pair).collect();
    let frozen = adapted(0.0).without_adapter().unwrap();
    Reference::live(Box::new(frozen), 1000).fill(&mut groups).unwrap();
    groups
}

fn learner(model: CausalLm, micro_batch_tokens: usize) -> Learner {
    let config = LearnerConfig { learning_rate: 5e-3, micro_batch_tokens, ..LearnerConfig::default() };
    Learner::new(Box::new(model), config, 10, ranks::alone()).unwrap()
}

fn dpo() -> Dpo {
    Dpo::new(DpoConfig { beta: 0.5, ..DpoConfig::default() }).unwrap()
}

fn run(learner: &mut Learner, groups: &[Group], steps: usize) -> f64 {
    let losses = (0..steps).map(|_| learner.step(&dpo(), groups.to_vec()).unwrap().get("loss").unwrap());
    losses.last().unwrap()
}

fn base_of(params: &ParamSet) -> ParamSet {
    let mut base = ParamSet::default();
    for param in params.iter().filter(|param| !Adapter::owns(&param.name)) {
        base.insert(param.name.as_str(), &param.shape, param.value.clone()).unwrap();
    }
    base
}

fn addresses(params: &ParamSet) -> Vec<usize> {
    params.iter().map(|param| with_slice(&param.value, |values| values.as_ptr() as usize)).collect()
}

fn values(params: &ParamSet) -> Vec<f32> {
    params.iter().filter(|param| param.trainable).flat_map(|param| to_vec(&param.value)).collect()
}

#[test]
fn preferences_start_at_ln_2_and_only_the_adapter_moves() {
    let (groups, model) = (pairs(), adapted(0.1));
    let input = PreflightInput { groups: &groups, expected_loss: Some(Dpo::LOSS_AT_REFERENCE), bos: Some(1) };
    let report = preflight(&model, &dpo(), input, &PreflightConfig::default()).unwrap();
    assert!((report.loss - Dpo::LOSS_AT_REFERENCE).abs() < 1e-6, "{report}");
    assert!(report.reference_distance.unwrap() < 1e-9, "the same kernels on the same weights: {report}");
    let untouched = checksum(base().params());
    let mut learner = learner(model, 30);
    let before = addresses(learner.policy().params());
    let start = values(learner.policy().params());
    let loss = run(&mut learner, &groups, 6);
    assert!(loss < 0.6, "{loss}");
    let params = learner.policy().params();
    assert_eq!(checksum(&base_of(params)), untouched);
    assert_ne!(values(params), start);
    assert_eq!(addresses(params), before, "nothing was copied");
    let dir = tempfile::tempdir().unwrap();
    learner.save_state(dir.path()).unwrap();
    let moments = read_tensors(&dir.path().join("optimizer.safetensors")).unwrap();
    assert!(
        moments.len() == 14 * 4 && moments.keys().all(|name| Adapter::owns(name)),
        "{:?}",
        moments.keys()
    );
}

#[test]
fn a_run_with_dropout_goes_on_with_the_same_bits() {
    let groups = pairs();
    let mut whole = learner(adapted(0.2), 40);
    run(&mut whole, &groups, 4);
    let mut first = learner(adapted(0.2), 40);
    run(&mut first, &groups, 2);
    let dir = tempfile::tempdir().unwrap();
    first.save_state(dir.path()).unwrap();
    let mut model = adapted(0.2);
    *model.params_mut() = first.policy().params().clone();
    let mut second = learner(model, 40);
    second.load_state(dir.path()).unwrap();
    run(&mut second, &groups, 2);
    assert_eq!(values(second.policy().params()), values(whole.policy().params()));
    let mut other = adapted(0.2);
    other.set_dropout_seed(6);
    let mut other = learner(other, 40);
    run(&mut other, &groups, 4);
    assert_ne!(values(other.policy().params()), values(whole.policy().params()), "another seed drops others");
}

#[test]
fn micro_batches_and_checkpointing_leave_the_trajectory_also_with_dropout() {
    let groups = pairs();
    let trained = |micro_batch_tokens, checkpointing| {
        let mut model = adapted(0.2);
        model.set_gradient_checkpointing(checkpointing);
        let mut learner = learner(model, micro_batch_tokens);
        // The first step moves B alone: A's gradient is exactly 0, so Adam does not divide rounding by itself.
        run(&mut learner, &groups, 2);
        values(learner.policy().params())
    };
    let together = trained(1000, false);
    let gap =
        |other: Vec<f32>| together.iter().zip(&other).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
    for (micro_batch_tokens, checkpointing) in [(30, false), (1000, true)] {
        let gap = gap(trained(micro_batch_tokens, checkpointing));
        println!("micro-batches of {micro_batch_tokens}, checkpointing {checkpointing}: {gap:e}");
        // A step is 5e-3 for every element.
        assert!(gap < 5e-5, "{gap:e}");
    }
}
