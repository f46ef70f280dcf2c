//! Estimates, advantages and reductions against `PyTorch`, TRL and NeMo-Aligner.

use crate::fixture::{assert_close, assert_gradient, assert_value, cases, flat, leaf};
use crate::padded::{Padded, field};
use aligner_algos::ops::advantage::{
    ScaleRewards, leave_one_out, leave_one_out_of, rewards_to_go, shaped_rewards,
};
use aligner_algos::ops::kl::KlEstimator;
use aligner_algos::ops::reduce::{Moments, sequence_mean, token_mean, variance};
use aligner_algos::ops::targets::gather;
use aligner_algos::{
    Baseline, Grpo, GrpoConfig, KlConfig, Ppo, PpoConfig, Reinforce, ReinforceConfig, Rloo, RlooConfig,
    Whiten,
};
use aligner_core::ops::host::to_vec;
use aligner_core::{Algorithm, Group, Sample, StepBatch, Tensor, ops};
use serde_json::Value;

fn scalar(sum: &Tensor<1>) -> f64 {
    f64::from(sum.clone().into_scalar::<f32>())
}

#[test]
fn estimates_of_the_divergence_are_schulmans() {
    for case in cases("kl", |_| true) {
        let inputs = &case["inputs"];
        let estimator: KlEstimator = serde_json::from_value(case["name"].clone()).unwrap();
        let (padded, logps) = (Padded::new(inputs), leaf(&inputs["logp"]));
        let of_targets = padded.targets(&logps);
        let reference = aligner_core::constant(&padded.of(&inputs["ref_logp"]), &of_targets);
        let estimates = estimator.tensor(of_targets, reference);
        let expected = padded.of(&case["outputs"]["per_token"]);
        assert_close(&case, "per_token", &to_vec(&estimates), &expected);
        let pairs = padded.of(&inputs["logp"]).into_iter().zip(padded.of(&inputs["ref_logp"]));
        let on_host: Vec<f32> = pairs.map(|(logp, other)| estimator.host(logp, other) as f32).collect();
        assert_close(&case, "per_token on the host", &on_host, &expected);
        let loss = token_mean(estimates);
        assert_value(&case, scalar(&loss), &case["outputs"]["loss"]);
        assert_gradient(&case, &logps.grad(&loss.backward()).unwrap(), &case["grads"]["logp"]);
    }
}

#[test]
fn reductions_are_those_over_the_mask() {
    for case in cases("reduce", |name| !name.starts_with("masked_whiten")) {
        let (padded, x) = (Padded::new(&case["inputs"]), leaf(&case["inputs"]["x"]));
        let values = padded.targets(&x);
        let loss = match case["name"].as_str().unwrap() {
            "masked_mean_all" => token_mean(values),
            "masked_mean_rows_then_mean" => {
                sequence_mean(values, &Padded::batch(&padded.groups(1, |_, _| {})))
            }
            "masked_var_unbiased" => variance(values),
            other => panic!("{other}: a reduction without a test"),
        };
        assert_value(&case, scalar(&loss), &case["outputs"]["loss"]);
        assert_gradient(&case, &x.grad(&loss.backward()).unwrap(), &case["grads"]["x"]);
    }
}

#[test]
fn whitening_uses_the_moments_of_what_is_masked_in() {
    for case in cases("reduce", |name| name.starts_with("masked_whiten")) {
        let inputs = &case["inputs"];
        let moments = Moments::of(&Padded::new(inputs).of(&inputs["x"]));
        let keep = case["name"].as_str().unwrap().ends_with("keep_mean");
        let whiten = |&x: &f32| if keep { moments.whiten_keeping_mean(x) } else { moments.whiten(x) };
        let got: Vec<f32> = flat(&inputs["x"]).iter().map(whiten).collect();
        assert_close(&case, "out", &got, &flat(&case["outputs"]["out"]));
    }
}

/// What credit wrote on the targets of all samples.
fn credited(algorithm: &dyn Algorithm, groups: Vec<Group>, field: impl Fn(&Sample) -> &Vec<f32>) -> Vec<f32> {
    let mut step = StepBatch::new(groups);
    algorithm.credit(&mut step).unwrap();
    step.groups.iter().flat_map(|group| &group.samples).flat_map(|s| gather(s, field(s))).collect()
}

#[test]
fn ppo_gives_generalised_advantage_estimates() {
    for case in cases("gae", |name| name.starts_with("gae_")) {
        let (inputs, params) = (&case["inputs"], &case["params"]);
        let ppo = Ppo::new(PpoConfig {
            gamma: params["gamma"].as_f64().unwrap(),
            lambda: params["lambda"].as_f64().unwrap(),
            kl: KlConfig { coef: 0.0, ..KlConfig::default() },
            whiten_advantages: false,
            ..PpoConfig::default()
        })
        .unwrap();
        let padded = Padded::new(inputs);
        let groups = padded.groups(1, |row, sample| {
            sample.token_rewards = field(&inputs["rewards"], row);
            sample.values = field(&inputs["values"], row);
            sample.reward = Some(0.0);
        });
        let advantages = credited(&ppo, groups.clone(), |sample| &sample.weights);
        assert_close(&case, "advantages", &advantages, &padded.of(&case["outputs"]["advantages"]));
        let returns = credited(&ppo, groups, |sample| &sample.returns);
        assert_close(&case, "returns", &returns, &padded.of(&case["outputs"]["returns"]));
    }
}

/// Samples with a score, and log-probabilities of policy and reference.
fn scored(inputs: &Value, siblings: usize) -> Vec<Group> {
    Padded::new(inputs).groups(siblings, |row, sample| {
        sample.logps = field(&inputs["logp"], row);
        sample.ref_logps = field(&inputs["ref_logp"], row);
        sample.reward = Some(flat(&inputs["score"])[row]);
    })
}

#[test]
fn rewards_carry_the_penalty_on_each_token_and_the_score_on_the_last() {
    for case in cases("gae", |name| name == "kl_shaped_rewards") {
        let (inputs, coef) = (&case["inputs"], case["params"]["kl_coef"].as_f64().unwrap());
        let padded = Padded::new(inputs);
        // With γ = λ = 0 and a critic of zeros an advantage is the reward itself.
        let kl = KlConfig { coef, ..KlConfig::default() };
        let config =
            PpoConfig { gamma: 0.0, lambda: 0.0, kl, whiten_advantages: false, ..PpoConfig::default() };
        let mut groups = scored(inputs, 1);
        groups.iter_mut().flat_map(|group| &mut group.samples).for_each(|sample| {
            sample.values = vec![0.0; sample.tokens.len()];
        });
        let rewards = credited(&Ppo::new(config).unwrap(), groups, |sample| &sample.weights);
        assert_close(&case, "rewards", &rewards, &padded.of(&case["outputs"]["rewards"]));
    }
}

/// Groups of answers of one token each, with these rewards.
fn outcomes(rewards: &[f32], siblings: usize) -> Vec<Group> {
    let sample = |reward: &f32| Sample { reward: Some(*reward), ..Sample::response(&[1], &[2]) };
    let group = |(at, rewards): (usize, &[f32])| Group {
        id: format!("prompt {at}"),
        samples: rewards.iter().map(sample).collect(),
        ..Group::default()
    };
    rewards.chunks(siblings).enumerate().map(group).collect()
}

fn siblings(case: &Value) -> usize {
    case["params"]["num_generations"].as_u64().unwrap() as usize
}

#[test]
fn grpo_scales_rewards_as_trl_does() {
    for case in cases("advantages", |name| name.starts_with("grpo_scale")) {
        let scale_rewards: ScaleRewards =
            serde_json::from_value(case["params"]["scale_rewards"].clone()).unwrap();
        let grpo = Grpo::new(GrpoConfig { scale_rewards, ..GrpoConfig::default() }).unwrap();
        let groups = outcomes(&flat(&case["inputs"]["rewards"]), siblings(&case));
        let got = credited(&grpo, groups, |sample| &sample.weights);
        assert_close(&case, "advantages", &got, &flat(&case["outputs"]["advantages"]));
    }
}

#[test]
fn leave_one_out_is_that_of_trl() {
    for case in cases("advantages", |name| ["rloo", "rloo_normalized"].contains(&name)) {
        let normalize_advantages = case["name"] == "rloo_normalized";
        let rloo =
            Rloo::new(RlooConfig { beta: 0.0, normalize_advantages, ..RlooConfig::default() }).unwrap();
        let rewards = flat(&case["inputs"]["rewards"]);
        let groups = outcomes(&rewards, siblings(&case));
        let expected = flat(&case["outputs"]["advantages"]);
        let got = credited(&rloo, groups.clone(), |sample| &sample.weights);
        assert_close(&case, "advantages", &got, &expected);
        let baselines: Vec<f32> = rewards.chunks(siblings(&case)).flat_map(leave_one_out).collect();
        assert_close(&case, "baseline", &baselines, &flat(&case["outputs"]["baseline"]));
        if !normalize_advantages {
            let reinforce = Reinforce::new(ReinforceConfig { kl_coef: 0.0, ..ReinforceConfig::default() });
            let got = credited(&reinforce.unwrap(), groups, |sample| &sample.weights);
            assert_close(&case, "advantages of REINFORCE", &got, &expected);
        }
    }
}

#[test]
fn the_masked_baseline_is_that_of_nemo_aligner() {
    for case in cases("advantages", |name| name == "rloo_baseline_masked_nemo") {
        let valid: Vec<bool> = flat(&case["inputs"]["valid"]).iter().map(|&valid| valid > 0.0).collect();
        let rewards = flat(&case["inputs"]["rewards"]);
        let groups = rewards.chunks(siblings(&case)).zip(valid.chunks(siblings(&case)));
        let got: Vec<f32> = groups.flat_map(|(rewards, valid)| leave_one_out_of(rewards, valid)).collect();
        assert_close(&case, "baseline", &got, &flat(&case["outputs"]["baseline"]));
    }
}

#[test]
fn reinforce_plus_plus_is_that_of_its_paper() {
    for case in cases("advantages", |name| name == "reinforce_pp") {
        let (inputs, params) = (&case["inputs"], &case["params"]);
        let config = ReinforceConfig {
            baseline: Baseline::None,
            reward_to_go: true,
            whiten_advantages: Whiten::Token,
            kl_coef: params["kl_coef"].as_f64().unwrap(),
            kl_estimator: KlEstimator::K1,
            gamma: params["gamma"].as_f64().unwrap(),
            ..ReinforceConfig::default()
        };
        let (padded, groups) = (Padded::new(inputs), scored(inputs, 1));
        let to_go: Vec<f32> = (groups.iter().map(|group| &group.samples[0]))
            .flat_map(|sample| {
                let pairs = gather(sample, &sample.logps).into_iter().zip(gather(sample, &sample.ref_logps));
                let kl: Vec<f64> = pairs.map(|(logp, other)| KlEstimator::K1.host(logp, other)).collect();
                let rewards = shaped_rewards(kl.len(), sample.reward.unwrap(), &[], &kl, config.kl_coef);
                rewards_to_go(&rewards, config.gamma)
            })
            .collect();
        assert_close(&case, "returns", &to_go, &padded.of(&case["outputs"]["returns"]));
        let got = credited(&Reinforce::new(config).unwrap(), groups, |sample| &sample.weights);
        assert_close(&case, "advantages", &got, &padded.of(&case["outputs"]["advantages"]));
    }
}

#[test]
fn reinforce_plus_plus_with_a_baseline_is_that_of_its_paper() {
    for case in cases("advantages", |name| name == "reinforce_pp_baseline") {
        let config = ReinforceConfig {
            baseline: Baseline::GroupMean,
            whiten_advantages: Whiten::Sequence,
            kl_coef: 0.0,
            ..ReinforceConfig::default()
        };
        let groups = outcomes(&flat(&case["inputs"]["score"]), siblings(&case));
        let got = credited(&Reinforce::new(config).unwrap(), groups, |sample| &sample.weights);
        assert_close(&case, "advantages", &got, &flat(&case["outputs"]["advantages"]));
    }
}

#[test]
fn entropies_and_log_probabilities_are_those_of_trl() {
    for case in cases("entropy", |_| true) {
        let inputs = &case["inputs"];
        let (padded, logits) = (Padded::new(inputs), leaf(&inputs["logits"]));
        let vocab = flat(&inputs["logits"][0][0]).len();
        let rows = logits.dims()[0] / vocab;
        let targets: Vec<u32> = match inputs.get("index") {
            Some(index) => flat(index).into_iter().map(|token| token as u32).collect(),
            None => vec![0; rows],
        };
        // With the identity for a weight, hidden states are logits.
        let (hidden, identity) =
            (logits.clone().reshape([rows, vocab]), Tensor::<2>::eye(vocab, &logits.device()));
        let every_row: Vec<u32> = (0..rows as u32).collect();
        let scores = ops::linear_cross_entropy(hidden, identity, &every_row, &targets).unwrap();
        let entropy = case["name"] == "entropy_masked_mean";
        let per_token = if entropy { scores.entropy } else { scores.logps };
        assert_close(&case, "per_token", &to_vec(&per_token), &flat(&case["outputs"]["per_token"]));
        let of_targets = padded.targets(&per_token);
        let loss = if entropy { token_mean(of_targets) } else { of_targets.sum() };
        assert_value(&case, scalar(&loss), &case["outputs"]["loss"]);
        assert_gradient(&case, &logits.grad(&loss.backward()).unwrap(), &case["grads"]["logits"]);
    }
}
