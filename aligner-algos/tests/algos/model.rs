//! The learner on a whole model: what holds on a table of logits has to hold on a transformer.

use crate::{fixture, ranks};
use aligner_algos::{
    Dpo, DpoConfig, Learner, LearnerConfig, Ppo, PpoConfig, PreflightConfig, PreflightInput, Reference,
    ValueLoss, preflight,
};
use aligner_core::model::CausalLm;
use aligner_core::ops::host::{to_vec, with_slice};
use aligner_core::weights::Checkpoint;
use aligner_core::{Batch, Device, Group, Needs, Policy as _, Sample, StepBatch};

fn model() -> CausalLm {
    let checkpoint = Checkpoint::open(&fixture::path("models/llama_gqa_untied")).unwrap();
    CausalLm::load(&checkpoint, &Device::flex()).unwrap()
}

/// Pairs with prompts and answers of different lengths, and reference log-probabilities.
fn pairs(micro_batch_tokens: usize) -> Vec<Group> {
    let tokens =
        |seed: u32, len: u32| (0..len).map(|at| 3 + (seed * 31 + at * at * 7) % 300).collect::<Vec<_>>();
    let pair = |at: u32| {
        let prompt = tokens(at, 3 + at % 4);
        let answer = |seed, len| Sample::response(&prompt, &tokens(seed, len));
        Group::pair(format!("row {at}"), answer(50 + at, 2 + at % 5), answer(90 + at, 1 + at % 7))
    };
    let mut groups: Vec<Group> = (0..10).map(pair).collect();
    Reference::live(Box::new(model()), micro_batch_tokens).fill(&mut groups).unwrap();
    groups
}

fn learner(model: CausalLm, micro_batch_tokens: usize) -> Learner {
    let config = LearnerConfig { learning_rate: 1e-3, micro_batch_tokens, ..LearnerConfig::default() };
    Learner::new(Box::new(model), config, 10, ranks::alone()).unwrap()
}

fn dpo() -> Dpo {
    Dpo::new(DpoConfig { beta: 0.5, ..DpoConfig::default() }).unwrap()
}

fn values(learner: &Learner) -> Vec<f32> {
    learner.policy().params().iter().flat_map(|param| to_vec(&param.value)).collect()
}

fn trained(model: CausalLm, micro_batch_tokens: usize) -> Vec<f32> {
    let mut learner = learner(model, micro_batch_tokens);
    for _ in 0..3 {
        learner.step(&dpo(), pairs(1000)).unwrap();
    }
    values(&learner)
}

fn gap(one: &[f32], other: &[f32]) -> f32 {
    assert_eq!(one.len(), other.len());
    one.iter().zip(other).fold(0.0, |most, (a, b)| most.max((a - b).abs()))
}

#[test]
fn micro_batches_and_checkpointing_leave_the_trajectory() {
    let together = trained(model(), 1000);
    // Adam divides by the root of the second moment: where gradients are all but 0, rounding shows.
    let limit = 2e-5;
    let apart = gap(&trained(model(), 30), &together);
    assert!(apart < limit, "micro-batches: {apart:e}");
    let mut model = model();
    model.set_gradient_checkpointing(true);
    let checkpointed = gap(&trained(model, 1000), &together);
    assert!(checkpointed < limit, "checkpointing: {checkpointed:e}");
    println!("micro-batches {apart:e}, checkpointing {checkpointed:e}");
}

#[test]
fn a_run_is_bitwise_repeatable() {
    assert_eq!(trained(model(), 40), trained(model(), 40));
}

#[test]
fn reference_values_do_not_depend_on_their_batch() {
    let all = |groups: Vec<Group>| -> Vec<Vec<f32>> {
        groups.into_iter().flat_map(|group| group.samples).map(|sample| sample.ref_logps).collect()
    };
    assert_eq!(all(pairs(1)), all(pairs(1000)), "the cache may meet a pair in any company");
}

#[test]
fn a_fresh_run_passes_preflight() {
    let groups = pairs(1000);
    let input = PreflightInput { groups: &groups, expected_loss: Some(Dpo::LOSS_AT_REFERENCE), bos: Some(1) };
    let report = preflight(&model(), &dpo(), input, &PreflightConfig::default()).unwrap();
    println!("{report}");
    assert!((report.loss - Dpo::LOSS_AT_REFERENCE).abs() < 1e-6);
    assert!(report.kl.unwrap().abs() < 1e-6 && report.packing_error < 1e-5);
}

#[test]
fn a_step_leaves_no_second_handle_of_the_parameters() {
    let addresses = |learner: &Learner| -> Vec<usize> {
        let address = |values: &[f32]| values.as_ptr() as usize;
        learner.policy().params().iter().map(|param| with_slice(&param.value, address)).collect()
    };
    let groups = pairs(1000);
    for checkpointing in [false, true] {
        let mut model = model();
        model.set_gradient_checkpointing(checkpointing);
        let mut learner = learner(model, 30);
        let before = addresses(&learner);
        for _ in 0..2 {
            learner.step(&dpo(), groups.clone()).unwrap();
            assert_eq!(addresses(&learner), before, "an autodiff graph still holds the parameters");
        }
    }
}

/// Answers with what a rollout would have found: scores, log-probabilities and the critic's values.
fn rollout(critic: &CausalLm) -> Vec<Group> {
    let mut groups = pairs(1000);
    let batch = Batch::collate(&groups).unwrap();
    let out = critic.forward(&batch, Needs::VALUES).unwrap();
    let values = to_vec(out.values().unwrap());
    for sequence in &batch.sequences {
        let sample = &mut groups[sequence.group].samples[sequence.sample];
        sample.values = aligner_algos::ops::targets::scatter(sample, &values[sequence.targets.clone()]);
        // Policy and reference are one model here.
        sample.logps.clone_from(&sample.ref_logps);
        sample.reward = Some(sequence.sample as f32 * 2.0 - 1.0);
    }
    groups
}

#[test]
fn a_policy_and_its_critic_learn_from_one_rollout() {
    let critic = model().with_score_head(1, 7).unwrap();
    let groups = rollout(&critic);
    let (mut policy, mut critic) = (learner(model(), 60), learner(critic, 60));
    let (ppo, value) = (Ppo::new(PpoConfig::default()).unwrap(), ValueLoss::default());
    let credited = policy.credit(&ppo, StepBatch::new(groups)).unwrap();
    assert!(credited.metrics.get("objective/kl").unwrap().abs() < 1e-6, "the policy is its reference");
    let fresh = policy.update(&ppo, credited.groups.clone()).unwrap();
    assert!((fresh.get("val/ratio").unwrap() - 1.0).abs() < 1e-5, "fresh samples have a ratio of 1");
    assert_eq!(fresh.get("policy/clipfrac_avg"), Some(0.0));
    let before = critic.update(&value, credited.groups.clone()).unwrap();
    for _ in 0..3 {
        policy.update(&ppo, credited.groups.clone()).unwrap();
        critic.update(&value, credited.groups.clone()).unwrap();
    }
    let moved = policy.update(&ppo, credited.groups.clone()).unwrap();
    assert!(moved.get("loss").unwrap() < fresh.get("loss").unwrap() - 0.1, "{moved:?}");
    assert!(moved.get("policy/approxkl_avg").unwrap() > 0.0);
    let after = critic.update(&value, credited.groups).unwrap();
    assert!(after.get("loss/value_avg").unwrap() < 0.8 * before.get("loss/value_avg").unwrap(), "{after:?}");
}
