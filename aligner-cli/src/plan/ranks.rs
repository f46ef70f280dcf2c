//! What a step of a run would take on ranks that are not there.

use aligner_core::Needs;
use aligner_core::model::ModelConfig;

use super::Arguments;
use super::shape::Shape;
use crate::Run;
use crate::simulate::heading;

/// Predicts a step of the run on the ranks that the arguments describe. What the run does not say of a job, as how its lengths spread, is
/// the simulator's default; responses are assumed to be half as long as they may be.
pub(super) fn describe(
    run: &Run,
    model: ModelConfig,
    shape: &Shape,
    arguments: &Arguments,
) -> anyhow::Result<String> {
    let batch = run.config.run.batch_size;
    let mut job = vec![("algorithm", kind(run).to_string()), ("prompts", batch.to_string())];
    if run.online {
        let rollout = run.config.rollout.clone().unwrap_or_default();
        let samples = batch * rollout.num_generations;
        let most = rollout.max_completion_length;
        job.extend([
            ("num_generations", rollout.num_generations.to_string()),
            ("max_response_tokens", most.to_string()),
            ("response_tokens", (most as f64 / 2.0).max(1.0).to_string()),
            ("batch_sequences", (samples / rollout.num_minibatches.max(1)).to_string()),
            ("prompt_tokens", shape.mean_tokens().round().to_string()),
        ]);
    } else {
        let sequences = if kind(run) == "dpo" { 2 * batch } else { batch };
        let tokens = (shape.mean_tokens() * batch as f64 / sequences as f64).max(1.0);
        job.extend([
            ("batch_sequences", sequences.to_string()),
            ("prompt_tokens", "0".into()),
            ("response_tokens", tokens.to_string()),
            ("max_response_tokens", shape.max_tokens().max(tokens.ceil() as usize).to_string()),
        ]);
    }
    let job: Vec<String> = job.into_iter().map(|(key, value)| format!("job.{key}={value}")).collect();
    let scenario = arguments.place.scenario(arguments.cluster.as_deref(), &job, &[], Some(model))?;
    let report = scenario.simulate()?;
    Ok(format!("\n{}{}", heading(&scenario), report.describe(&scenario)))
}

/// The kind of step that the simulator knows.
fn kind(run: &Run) -> &'static str {
    let needs = run.algorithm.needs();
    match (run.online, needs.contains(Needs::VALUES), needs.contains(Needs::REF_LOGPS)) {
        (true, true, _) => "ppo",
        (true, false, _) => "grpo",
        (false, _, true) => "dpo",
        (false, _, false) => "sft",
    }
}
