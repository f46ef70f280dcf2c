//! The parts of a run that learns from its own samples.

use std::path::Path;
use std::sync::Arc;

use aligner_algos::rewards::RewardParts;
use aligner_algos::{
    Critic, EngineWeights, Online, OnlineParts, Reference, RolloutConfig, ScoreFiles, ValueLoss,
};
use aligner_core::model::{CausalLm, ModelConfig};
use aligner_core::ops::rows::PAGE;
use aligner_core::weights::{AdapterCheckpoint, Checkpoint};
use aligner_core::{Device, Error, Needs, Prompt};
use aligner_infer::{CacheSize, EngineConfig};

use super::adapter::{blamed, with_lora};
use super::{LoadedModel, engine};
use crate::Run;
use crate::config::{CriticConfig, LoraSection};
use crate::progress::Phase;
use crate::ranks::Ranks;
use crate::registry::RewardContext;

/// What a rollout loop is built from beside the run's own sections.
#[derive(Default)]
pub(crate) struct Beside<'a> {
    /// Tokens of the longest prompt.
    pub(crate) longest_prompt: usize,
    /// The frozen policy, where the algorithm asks for it.
    pub(crate) reference: Option<Reference>,
    /// Steps of the run; none where nothing is learned, so that there is no critic.
    pub(crate) steps: Option<u64>,
    /// Where the newest checkpoint keeps the critic, in a run that goes on.
    pub(crate) critic: Option<&'a Path>,
    /// Keeps what rewards have said since that checkpoint.
    pub(crate) scores: Option<ScoreFiles>,
}

/// Builds the rollout loop around the weights of `policy`, and says what its critic's model is.
///
/// # Errors
/// Rewards that cannot be loaded, a critic that is none, prompts that leave no room for a response.
pub(crate) fn online(
    run: &mut Run,
    ranks: &Ranks,
    model: &LoadedModel,
    policy: &CausalLm,
    beside: Beside<'_>,
) -> anyhow::Result<(Online, Option<ModelConfig>)> {
    let Beside { longest_prompt, reference, steps, critic, scores } = beside;
    let config = run.config.rollout.clone().unwrap_or_default();
    let context = policy.config().max_positions;
    let longest = longest_prompt + config.max_completion_length;
    if longest > context {
        let message = format!(
            "{} tokens behind a prompt of {longest_prompt} are {longest}, and the model's context is {context}; shorten it, \
             or the prompts with data.train.max_length",
            config.max_completion_length
        );
        return Err(run.blame(Error::setting("rollout.max_completion_length", message)));
    }
    let engine_config = rollout_engine(run, &config, longest);
    let device = policy.device().clone();
    let rewards = rewards(run, model, &device)?;
    let wants_critic = run.algorithm.needs().contains(Needs::VALUES);
    let (critic, critic_config) = match steps.filter(|_| wants_critic) {
        Some(steps) => {
            let (critic, config) = self::critic(run, ranks, (model, policy), critic, config.updates(steps))?;
            (Some(critic), Some(config))
        }
        None => (None, None),
    };
    let mut generating = Phase::default();
    let parts = OnlineParts {
        engine: Box::new(engine(policy.clone(), &model.tokenizer, engine_config)?),
        rewards,
        score_log: scores,
        text: Arc::new(model.tokenizer.clone()),
        stop_tokens: model.stop_tokens(),
        reference,
        critic,
        watch: Box::new(move |what, done, all| generating.show(what, done, all)),
        crew: ranks.crew(),
    };
    Ok((Online::new(config, parts, run.config.run.seed)?, critic_config))
}

/// The engine of a rollout loop whose longest sequence is `longest` tokens: with room for all responses of a step, each
/// with its last page and one beside it. It must not depend on the memory that is free: which responses give way to
/// others decides which are complete first.
pub(crate) fn rollout_engine(run: &Run, config: &RolloutConfig, longest: usize) -> EngineConfig {
    let responses = (run.config.run.batch_size + config.oversampling) * config.num_generations;
    let most = responses.min(EngineConfig::default().max_running);
    let cache = CacheSize::Tokens(most * (longest + 2 * PAGE));
    EngineConfig { cache, packed: config.weights.packed(), ..EngineConfig::default() }
}

fn rewards(run: &mut Run, model: &LoadedModel, device: &Device) -> anyhow::Result<RewardParts> {
    let context = RewardContext {
        device: device.clone(),
        tokenizer: model.tokenizer.clone(),
        micro_batch_tokens: run.config.learner.micro_batch_tokens,
    };
    let mut parts = RewardParts::default();
    for built in std::mem::take(&mut run.rewards) {
        let section = format!("reward.{}", built.name);
        let reward = (built.make)(&context).map_err(|error| match error.downcast::<Error>() {
            Ok(Error::Setting { key, message }) => {
                run.blame(Error::setting(format!("{section}.{key}"), message))
            }
            Ok(error) => error.into(),
            Err(error) => error,
        })?;
        parts = parts.with(built.name, built.weight, reward)?;
        if let Some(watchdog) = run.watchdog.as_ref().filter(|_| !built.limits_itself) {
            parts = parts.watched(watchdog);
        }
    }
    Ok(parts)
}

fn critic(
    run: &Run,
    ranks: &Ranks,
    (model, actor): (&LoadedModel, &CausalLm),
    from: Option<&Path>,
    updates: u64,
) -> anyhow::Result<(Critic, ModelConfig)> {
    let device = actor.device();
    let CriticConfig { path, lora, loss, learner } = run.config.critic.clone().unwrap_or_default();
    let seed = run.config.run.seed;
    let opened;
    let checkpoint = match (from, &path) {
        // With an adapter, what was saved is the adapter alone.
        (Some(saved), _) if lora.is_none() => {
            opened = Checkpoint::open(saved)?;
            &opened
        }
        (_, Some(path)) => {
            opened = Checkpoint::open(path)?;
            &opened
        }
        _ => &model.checkpoint,
    };
    // Two adapters on one frozen base: its weights are there once.
    let base = lora.as_ref().map_or(EngineWeights::F32, LoraSection::base);
    let of_actor = run.config.model.lora.as_ref().map(LoraSection::base);
    let shares = path.is_none() && lora.is_some() && of_actor == Some(base);
    let mut policy = if shares {
        actor.without_adapter()?
    } else {
        CausalLm::load_packed(checkpoint, device, base.packed())?
    };
    match policy.config().num_labels {
        Some(1) => {}
        Some(outputs) => {
            let message = format!("a critic has one output, this model {outputs}");
            return Err(run.blame(Error::setting("critic.path", message)));
        }
        None => policy = policy.with_value_head(seed)?,
    }
    if let Some(section) = &lora {
        let file = from.or(section.path.as_deref()).map(AdapterCheckpoint::open).transpose()?;
        let adapted = with_lora(policy, section, file.as_ref(), seed);
        policy = adapted.map_err(|error| blamed(run, "critic", error))?;
    }
    if policy.config().vocab_size < model.tokenizer.vocab_size() {
        let (rows, ids) = (policy.config().vocab_size, model.tokenizer.vocab_size());
        let message = format!("the critic's vocabulary has {rows} rows, but the tokenizer has {ids} ids");
        return Err(run.blame(Error::setting("critic.path", message)));
    }
    policy.set_gradient_checkpointing(learner.gradient_checkpointing);
    policy.set_bf16_products(run.config.is_in_bf16());
    let config = policy.config().clone();
    let mut learner = ranks.learner(policy, learner, updates)?;
    if let Some(saved) = from {
        learner.load_state(saved)?;
    }
    Ok((Critic::new(learner, ValueLoss::new(loss)?), config))
}

/// Prompts with what they ask as text.
pub(crate) fn prompt_of(group: aligner_core::Group) -> Option<Prompt> {
    let sample = group.samples.into_iter().next()?;
    let len = sample.prompt_len();
    let mut tokens = sample.tokens;
    tokens.truncate(len);
    Some(Prompt { id: group.id, tokens, metadata: group.metadata })
}
