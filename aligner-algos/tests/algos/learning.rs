//! Each algorithm finds the optimum of a task that has a known one, and broken ones do not.

use std::sync::Arc;

use aligner_algos::rewards::RewardParts;
use aligner_algos::{
    BestOfN, BestOfNConfig, Critic, Grpo, GrpoConfig, Learner, LearnerConfig, Online, OnlineParts, Ppo,
    PpoConfig, Reference, Reinforce, ReinforceConfig, Rejection, RejectionConfig, Rloo, RlooConfig,
    RolloutConfig, ValueLoss, ValueLossConfig,
};
use aligner_core::model::{CausalLm, ModelConfig};
use aligner_core::optim::Schedule;
use aligner_core::{
    Algorithm, Batch, Detokenize, Device, Forward, LossOutput, Needs, Per, Prompt, Result, Reward, Sample,
    Score, StepBatch,
};
use aligner_infer::{CacheSize, EngineConfig, PagedEngine};
use serde_json::{Value, json};

const VOCAB: u32 = 12;
const RESPONSE: usize = 4;

/// One reward with weight 1.
pub(crate) fn single(name: &str, reward: impl Reward + Send + 'static) -> RewardParts {
    RewardParts::default().with(name, 1.0, Box::new(reward)).unwrap()
}

/// Tokens have no text here.
pub(crate) struct NoText;

impl Detokenize for NoText {
    fn text(&self, _: &[u32]) -> String {
        String::new()
    }
}

pub(crate) fn tiny(seed: u64, labels: Option<usize>) -> CausalLm {
    let config = json!({
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    });
    let model =
        CausalLm::init(ModelConfig::from_json("tiny".as_ref(), &config).unwrap(), seed, &Device::flex());
    let model = model.unwrap();
    labels.map_or(model.clone(), |labels| model.with_score_head(labels, seed).unwrap())
}

/// 1 where the last token of a response is below 3 of 12, whatever stands before it. The optimum is 1, chance 0.25.
fn last_token(sample: &Sample) -> Score {
    let last = sample.tokens.last().copied();
    last.map_or(Score::None, |last| Score::Sample(f32::from(u8::from(last < 3))))
}

#[expect(clippy::unnecessary_wraps, reason = "a source of prompts may fail")]
pub(crate) fn prompts(count: usize) -> Result<Vec<Prompt>> {
    let prompt = |at: usize| {
        let first = at as u32 % 4;
        Prompt { id: format!("p{at}"), tokens: vec![first, 11], metadata: Value::Null }
    };
    Ok((0..count).map(prompt).collect())
}

pub(crate) fn learner(policy: CausalLm, learning_rate: f64) -> Learner {
    let config = LearnerConfig { learning_rate, schedule: Schedule::Constant, ..LearnerConfig::default() };
    Learner::new(Box::new(policy), config, 1000, Arc::new(aligner_parallel::Solo)).unwrap()
}

pub(crate) fn engine(policy: &CausalLm) -> PagedEngine {
    let config = EngineConfig { cache: CacheSize::Tokens(1 << 14), ..EngineConfig::default() };
    PagedEngine::new(policy.clone(), config).unwrap()
}

pub(crate) fn parts(policy: &CausalLm, rewards: RewardParts) -> OnlineParts {
    OnlineParts {
        engine: Box::new(engine(policy)),
        rewards,
        score_log: None,
        text: Arc::new(NoText),
        stop_tokens: Vec::new(),
        reference: None,
        critic: None,
        watch: Box::new(|_, _, _| {}),
        crew: None,
    }
}

/// The mean reward of the last of `steps` steps.
fn train(algorithm: &dyn Algorithm, config: RolloutConfig, seed: u64, steps: usize) -> f64 {
    let policy = tiny(seed, None);
    let rewards = single("last_token", last_token);
    let mut parts = parts(&policy, rewards);
    if algorithm.needs().contains(Needs::VALUES) {
        let loss = ValueLoss::new(ValueLossConfig::default()).unwrap();
        parts.critic = Some(Critic::new(learner(tiny(seed + 100, Some(1)), 5e-3), loss));
    }
    if algorithm.needs().contains(Needs::REF_LOGPS) {
        parts.reference = Some(Reference::live(Box::new(policy.clone()), 4096));
    }
    let mut learner = learner(policy, 5e-3);
    let mut online = Online::new(config, parts, seed).unwrap();
    let mut reward = 0.0;
    for _ in 0..steps {
        let iteration = online.step(algorithm, &mut learner, 8, &mut prompts).unwrap();
        // What was drawn, whether or not there was something to learn from it.
        reward = iteration.metrics.get("reward").unwrap();
    }
    reward
}

fn rollout() -> RolloutConfig {
    RolloutConfig {
        num_generations: 16,
        max_completion_length: RESPONSE,
        min_completion_length: RESPONSE,
        ..RolloutConfig::default()
    }
}

/// An algorithm with a flaw in its credit.
struct Broken<A> {
    algorithm: A,
    flaw: fn(&mut StepBatch, &A) -> Result<()>,
}

impl<A: Algorithm> Algorithm for Broken<A> {
    fn loss(&self, out: &Forward, batch: &Batch) -> Result<LossOutput> {
        self.algorithm.loss(out, batch)
    }

    fn credit(&self, step: &mut StepBatch) -> Result<()> {
        (self.flaw)(step, &self.algorithm)
    }

    fn needs(&self) -> Needs {
        self.algorithm.needs()
    }

    fn per(&self) -> Per {
        self.algorithm.per()
    }
}

fn sign_flipped<A: Algorithm>(step: &mut StepBatch, algorithm: &A) -> Result<()> {
    algorithm.credit(step)?;
    let samples = step.groups.iter_mut().flat_map(|group| &mut group.samples);
    samples.flat_map(|sample| &mut sample.weights).for_each(|weight| *weight = -*weight);
    Ok(())
}

/// Each token is credited as a target one place too early, so that the last one never is.
fn mask_shifted<A: Algorithm>(step: &mut StepBatch, algorithm: &A) -> Result<()> {
    algorithm.credit(step)?;
    for sample in step.groups.iter_mut().flat_map(|group| &mut group.samples) {
        sample.mask.rotate_left(1);
        sample.weights.rotate_left(1);
    }
    Ok(())
}

/// Each sample has the reward of its neighbour.
fn reward_on_the_wrong_sample<A: Algorithm>(step: &mut StepBatch, algorithm: &A) -> Result<()> {
    for group in &mut step.groups {
        let mut rewards: Vec<Option<f32>> = group.samples.iter().map(|sample| sample.reward).collect();
        rewards.rotate_right(1);
        group.samples.iter_mut().zip(rewards).for_each(|(sample, reward)| sample.reward = reward);
    }
    algorithm.credit(step)
}

/// An algorithm reaches the optimum with three seeds.
fn finds_the_optimum(name: &str, algorithm: &dyn Algorithm, config: &RolloutConfig, steps: usize) {
    for seed in 1..=3 {
        let began = std::time::Instant::now();
        let reward = train(algorithm, config.clone(), seed, steps);
        println!("{name}, seed {seed}: {reward:.3} in {:.1} s", began.elapsed().as_secs_f64());
        assert!(reward >= 0.95, "{name}, seed {seed}: {reward}");
    }
}

fn misses_it(name: &str, algorithm: &dyn Algorithm, config: &RolloutConfig, steps: usize) {
    for seed in 1..=3 {
        let reward = train(algorithm, config.clone(), seed, steps);
        println!("{name}, seed {seed}: {reward:.3}");
        assert!(reward < 0.95, "{name}, seed {seed}: {reward}");
    }
}

const STEPS: usize = 60;

fn ppo() -> Ppo {
    Ppo::new(PpoConfig::default()).unwrap()
}

fn grpo() -> Grpo {
    Grpo::new(GrpoConfig::default()).unwrap()
}

#[test]
fn ppo_finds_the_optimum_and_broken_ones_do_not() {
    let config = RolloutConfig { num_iterations: 2, ..rollout() };
    finds_the_optimum("ppo", &ppo(), &config, STEPS);
    let broken = |flaw| Broken { algorithm: ppo(), flaw };
    misses_it("ppo, sign flipped", &broken(sign_flipped), &config, STEPS);
    misses_it("ppo, mask shifted", &broken(mask_shifted), &config, STEPS);
    misses_it("ppo, reward on the wrong sample", &broken(reward_on_the_wrong_sample), &config, STEPS);
}

#[test]
fn grpo_finds_the_optimum_and_broken_ones_do_not() {
    finds_the_optimum("grpo", &grpo(), &rollout(), STEPS);
    let broken = |flaw| Broken { algorithm: grpo(), flaw };
    misses_it("grpo, sign flipped", &broken(sign_flipped), &rollout(), STEPS);
    misses_it("grpo, mask shifted", &broken(mask_shifted), &rollout(), STEPS);
    misses_it("grpo, reward on the wrong sample", &broken(reward_on_the_wrong_sample), &rollout(), STEPS);
}

#[test]
fn reinforce_and_rloo_find_the_optimum() {
    let reinforce = Reinforce::new(ReinforceConfig::default()).unwrap();
    finds_the_optimum("reinforce", &reinforce, &rollout(), STEPS);
    finds_the_optimum("rloo", &Rloo::new(RlooConfig::default()).unwrap(), &rollout(), STEPS);
}

#[test]
fn rejection_sampling_and_best_of_n_find_the_optimum() {
    let rejection = Rejection::new(RejectionConfig::default()).unwrap();
    finds_the_optimum("rejection", &rejection, &rollout(), STEPS);
    let best_of_n = BestOfN::new(BestOfNConfig::default()).unwrap();
    // One pair of sixteen answers learns less than all of them.
    finds_the_optimum("best of n", &best_of_n, &rollout(), 4 * STEPS);
}
