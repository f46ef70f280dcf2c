//! The steps of a run that learns from its own samples.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use aligner_algos::{Online, OnlineState, divergence};
use aligner_core::model::ModelConfig;
use aligner_core::weights::{SaveDtype, atomic_write};
use aligner_core::{Error, Group, Metrics, Prompt, Result};

use super::session::Session;
use super::steps::Done;
use super::warnings::Told;
use crate::evaluate;
use crate::rundir::{self, Drawn};
use crate::wire;

/// The rollout loop with the prompts that it is measured on.
pub(super) struct Rollouts {
    pub(super) online: Online,
    pub(super) held_out: Vec<Prompt>,
    /// What its critic's model is.
    pub(super) critic: Option<ModelConfig>,
    /// What it has warned of.
    pub(super) told: Told,
}

/// Beside the optimizer's state in a checkpoint.
const STATE: &str = "rollouts.json";
/// The critic's model and optimizer, there too.
const CRITIC: &str = "critic";

impl Session {
    /// One step.
    pub(super) fn rollout(&mut self) -> anyhow::Result<Done> {
        let started = Instant::now();
        let Self { run, learner, loader, rollouts, .. } = self;
        let Some(Rollouts { online, told, .. }) = rollouts else { return Ok(Done::default()) };
        let config = &run.config.run;
        let mut prompts = |count: usize| {
            Ok(loader.next(count)?.into_iter().filter_map(wire::prompt_of).collect::<Vec<Prompt>>())
        };
        let algorithm = run.guarded(format!("step {}", online.steps() + 1));
        let iteration = online.step(&algorithm, learner, config.batch_size, &mut prompts)?;
        let step = online.steps();
        let tokens: usize = iteration.groups.iter().map(Group::packed_tokens).sum();
        if config.rollouts_every > 0 && (step == 1 || step.is_multiple_of(config.rollouts_every as u64)) {
            let groups = online.of_all_ranks(iteration.groups)?;
            let shown = groups.iter().take(config.rollout_groups);
            let drawn: Vec<Drawn> = shown.flat_map(|group| Drawn::of(step, group)).collect();
            if self.ranks.is_main() {
                rundir::write_rollouts(&self.dir.rollouts(), step, &drawn)?;
            }
        }
        let mut values: BTreeMap<String, f64> =
            iteration.metrics.iter().map(|(name, value)| (name.to_string(), value)).collect();
        let seconds = started.elapsed().as_secs_f64();
        let tokens_per_second = tokens as f64 / seconds;
        self.tokens += tokens as u64;
        values.insert("num_tokens".into(), self.tokens as f64);
        values.insert("step_time".into(), seconds);
        values.insert("tokens_per_second".into(), tokens_per_second);
        values.insert("epoch".into(), self.loader.progress());
        let stop = told.observe(step, &mut values);
        let value = values.get("reward").copied().unwrap_or(f64::NAN);
        self.write_record(step, values)?;
        Ok(Done { value, tokens_per_second, stop })
    }

    /// What the held-out prompts' responses are worth, each with its standard error.
    pub(super) fn held_out_rewards(&mut self) -> anyhow::Result<Option<BTreeMap<String, f64>>> {
        let Some(Rollouts { online, held_out, .. }) = &mut self.rollouts else { return Ok(None) };
        Ok(Some(rewards_of(online, held_out.clone())?))
    }

    /// Writes what the loop and the critic depend on beside the policy's own state.
    pub(super) fn save_rollouts(&self, dir: &Path) -> Result<()> {
        let Some(Rollouts { online, critic: config, .. }) = &self.rollouts else { return Ok(()) };
        let file = dir.join(STATE);
        let text =
            serde_json::to_vec(&online.state()).map_err(|error| Error::format(&file, error.to_string()))?;
        atomic_write(&file, |out| out.write_all(&text))?;
        let (Some(critic), Some(config)) = (online.critic(), config) else { return Ok(()) };
        let params = critic.learner().policy().whole()?;
        let dir = dir.join(CRITIC);
        std::fs::create_dir_all(&dir).map_err(Error::io(&dir))?;
        let run = &self.run.config;
        let base = run.critic.as_ref().and_then(|critic| critic.path.as_ref()).unwrap_or(&run.model.path);
        wire::save_files(&dir, (config, &params), base, &self.model.tokenizer, SaveDtype::F32)?;
        critic.learner().save_state(&dir)
    }

    /// What a rank that writes no checkpoint does while the main one does: its part of the critic's.
    pub(super) fn take_part_in_saving(&mut self) -> anyhow::Result<()> {
        let Some(Rollouts { online, .. }) = &mut self.rollouts else { return Ok(()) };
        if let Some(critic) = online.critic() {
            critic.learner().policy().whole()?;
            critic.learner().save_state(self.dir.path())?;
        }
        Ok(online.saved()?)
    }
}

/// The state of the loop at a checkpoint, whose trainer's directory is `dir`.
pub(super) fn read_state(dir: &Path) -> Result<OnlineState> {
    let file = dir.join(STATE);
    let text = std::fs::read(&file).map_err(Error::io(&file))?;
    serde_json::from_slice(&text).map_err(|error| Error::format(&file, error.to_string()))
}

/// Where the checkpoint whose trainer's directory is `dir` keeps its critic.
pub(super) fn critic_dir(dir: &Path) -> std::path::PathBuf {
    dir.join(CRITIC)
}

/// What a policy's responses to held-out prompts are worth, each figure with its standard error.
pub(crate) fn rewards_of(online: &mut Online, prompts: Vec<Prompt>) -> anyhow::Result<BTreeMap<String, f64>> {
    let groups = online.evaluate(prompts)?;
    Ok(evaluate::held_out(&groups, |group| Ok(measures(group)))?)
}

/// Of one prompt's responses.
fn measures(group: &Group) -> Metrics {
    let mut metrics = Metrics::default();
    divergence(std::slice::from_ref(group), &mut metrics);
    for sample in &group.samples {
        if let Some(reward) = sample.reward {
            metrics.add("reward", f64::from(reward), 1.0);
        }
        for (name, value) in &sample.parts {
            metrics.add(format!("rewards/{name}/mean"), f64::from(*value), 1.0);
        }
        metrics.add("completions/mean_length", sample.targets() as f64, 1.0);
        metrics.add("completions/clipped_ratio", f64::from(u8::from(sample.ended != Some(true))), 1.0);
    }
    metrics
}
