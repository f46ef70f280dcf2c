//! What a run that learns from its own samples draws, and the memory that this takes beside the learner's.

use std::fmt::Write as _;

use aligner_algos::RolloutConfig;
use aligner_core::Needs;
use aligner_core::model::{Adapter, ModelConfig};
use aligner_infer::EngineConfig;

use super::memory::bytes;
use crate::Run;
use crate::wire::rollout_engine;

/// The algebra of a step, and the engine's memory. `longest` is the longest prompt in tokens; `trained` how many
/// parameters are trained.
pub(super) fn describe(
    run: &Run,
    config: &ModelConfig,
    longest: usize,
    trained: usize,
    steps: u64,
) -> String {
    let rollout = run.config.rollout.clone().unwrap_or_default();
    let RolloutConfig { num_generations, num_iterations, num_minibatches, max_completion_length, .. } =
        rollout;
    let prompts = run.config.run.batch_size;
    let (responses, most) = (prompts * num_generations, longest + max_completion_length);
    let mut out = format!(
        "rollouts    {prompts} prompts x {num_generations} responses a step, of up to {max_completion_length} tokens behind \
         prompts of up to {longest}; {num_iterations} x {num_minibatches} updates a step, {} in all\n",
        rollout.updates(steps)
    );
    if rollout.max_staleness > 0 {
        let _ = writeln!(out, "staleness   up to {} steps are drawn ahead", rollout.max_staleness);
    }
    let engine = rollout_engine(run, &rollout, most);
    let cache = (engine.pages(config) * EngineConfig::page_bytes(config)) as f64;
    let _ = write!(out, "engine      {} of keys and values for {responses} responses", bytes(cache));
    if engine.packed.is_some() {
        let _ = write!(out, ", {} of smaller weights", bytes(engine.packed_bytes(config) as f64));
    }
    // The optimizer writes a copy where the engine still holds the version before.
    let _ = writeln!(out, ", {} of trained weights a second time", bytes(4.0 * trained as f64));
    if run.algorithm.needs().contains(Needs::VALUES) {
        let critic = run.config.critic.clone().unwrap_or_default();
        let weights = 4.0 * config.num_params() as f64;
        // Of what is trained: weights, gradients and two moments.
        let (kind, size) = match critic.lora {
            Some(lora) => {
                let own = Adapter::new(lora.config(), config).map_or(0, |adapter| adapter.num_params());
                let own = 16.0 * own as f64;
                match (critic.path, &run.config.model.lora) {
                    (None, Some(of_policy)) if of_policy.base() == lora.base() => {
                        ("with an adapter on the policy's base", own)
                    }
                    _ => ("with an adapter", weights + own),
                }
            }
            None => ("all of it trained", 4.0 * weights),
        };
        let _ = writeln!(out, "critic      {} beside, {kind}", bytes(size));
    }
    out
}
