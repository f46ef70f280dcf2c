//! Everything that a run holds while it trains, built from its file or from its newest checkpoint.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use aligner_algos::{Learner, PreflightInput, Reference, preflight};
use aligner_core::model::{CausalLm, ModelConfig};
use aligner_core::weights::{SaveDtype, atomic_write};
use aligner_core::{Device, Error, Group, Needs, ParamSet, Prompt};
use aligner_data::{Loader, LoaderState, now_secs};

use super::rollouts::{self, Rollouts};
use super::warnings::Told;
use super::{Ending, Outcome, length, newest, summary};
use crate::interrupt::Interrupt;
use crate::progress::{Count, say};
use crate::ranks::Ranks;
use crate::registry::BuiltReward;
use crate::rundir::{
    self, EventWriter, Existing, Identity, Manifest, MetricsLog, Record, RunDir, TrainState,
};
use crate::wire::{self, Beside, Data, LoadedModel, Reading};
use crate::{Report, Run, evaluate};

/// A run in progress.
pub(super) struct Session {
    pub(super) run: Run,
    pub(super) ranks: Ranks,
    pub(super) dir: RunDir,
    pub(super) model: LoadedModel,
    /// The configuration of the model that is trained: with its head.
    pub(super) model_config: ModelConfig,
    pub(super) learner: Learner,
    /// The frozen model of an algorithm on rows; the rollout loop has its own.
    pub(super) reference: Option<Reference>,
    /// The rollout loop, where the algorithm learns from its own samples.
    pub(super) rollouts: Option<Rollouts>,
    data: Data,
    pub(super) loader: Loader,
    pub(super) held_out: Vec<Group>,
    pub(super) prompts: Vec<Prompt>,
    /// Where the main rank writes what is measured.
    logs: Option<(MetricsLog, EventWriter)>,
    pub(super) total: u64,
    pub(super) tokens: u64,
    /// The step of the newest held-out loss, and that loss.
    pub(super) eval_loss: Option<(u64, f64)>,
}

impl Session {
    /// Opens all that the run names. Mistakes in the run file and in the data come first, then the
    /// run's directory, then the model's weights; what an earlier run left there goes after all of them.
    pub(super) fn open(mut run: Run, existing: Existing, ranks: Ranks) -> anyhow::Result<Self> {
        // A resumed run renders its templates as on the day on which it began.
        let begun_secs = rundir::begun_secs(&run.config.run.dir, existing)?.unwrap_or_else(now_secs);
        let begun_secs =
            ranks.of_main(|| u64::try_from(begun_secs).ok())?.map_or(begun_secs, |secs| secs as i64);
        let model = LoadedModel::of_run_begun(&run, begun_secs)?;
        let data = Data::open(&run, &model)?;
        let total = length::total_steps(&run, data.train_rows())?;
        let opened = ranks.is_main().then(|| directory(&run, begun_secs, existing)).transpose()?;
        // The others look when it is there.
        ranks.barrier()?;
        let (dir, identity) = match opened {
            Some((dir, identity)) => (dir, Some(identity)),
            None => (RunDir::follow(&run.config.run.dir), None),
        };
        let of_reward = |reward: &BuiltReward| {
            let key = format!("reward.{}", reward.name);
            reward.inputs.iter().map(|path| (key.clone(), path.clone())).collect::<Vec<_>>()
        };
        let inputs = run.config.inputs().map(|(key, path)| (key.to_string(), path.to_path_buf()));
        for (key, path) in inputs.chain(run.rewards.iter().flat_map(of_reward)) {
            if dir.writes_over(&path) {
                let message = "lies where this run writes its own files; copy it elsewhere first";
                return Err(run.blame(Error::setting(key, message)));
            }
        }
        let checkpoints = dir.checkpoints();
        let state: Option<TrainState<LoaderState>> = ranks
            .of_main(|| dir.newest_step())?
            .map(|step| checkpoints.state(step))
            .transpose()
            .map_err(|error| newest::blamed(&dir, error))?;
        let from = state.as_ref().map(|state| checkpoints.path(state.step));

        let device = wire::device(&ranks.device(&run.config.model.device))?;
        let loading = Count::start("reading the weights", 0);
        let reading = Reading::of_run(&run, ranks.mesh());
        let policy = wire::policy(&run, &model, from.as_deref(), reading, &device)
            .map_err(|error| newest::blamed(&dir, error))?;
        let model_config = policy.config().clone();
        let frozen = frozen(&run, &model, &policy, (from.is_some(), reading), &device)?;
        drop(loading);
        wire::tell_adapter(&policy);
        if let Some(identity) = &identity {
            dir.begin(identity)?;
        }
        // What an earlier run left is gone when the others look for it.
        ranks.barrier()?;
        let mut reference = frozen.map(|frozen| reference(&run, &ranks, frozen, &dir)).transpose()?;
        let trainer = from.as_deref().map(rundir::Checkpoints::learner);
        let step = state.as_ref().map_or(0, |state| state.step);
        let mut rollouts = None;
        if run.online {
            let prompts = data.held_out_groups()?.into_iter().filter_map(wire::prompt_of).collect();
            let critic = trainer.as_deref().map(rollouts::critic_dir);
            let scores = dir.score_files(ranks.rank())?;
            let beside = Beside {
                longest_prompt: data.longest,
                reference: reference.take(),
                steps: Some(total),
                critic: critic.as_deref(),
                scores: Some(scores),
            };
            let told = Told::as_logged(&run, &dir, step)?;
            let (online, critic) = wire::online(&mut run, &ranks, &model, &policy, beside)?;
            rollouts = Some(Rollouts { online, held_out: prompts, critic, told });
        }
        let updates = run.config.rollout.as_ref().filter(|_| run.online).map_or(total, |r| r.updates(total));
        // Ranks that read their own parts do so here.
        let learner = ranks.learner(policy, run.config.learner.clone(), updates);
        let mut learner = learner.map_err(|error| newest::blamed(&dir, error))?;
        let mut loader = Loader::new(data.train.clone(), run.config.run.seed, run.config.data.shuffle)?;
        if let (Some(state), Some(from)) = (&state, &from) {
            let loaded = learner.load_state(&rundir::Checkpoints::learner(from));
            loaded.map_err(|error| newest::blamed(&dir, error))?;
            loader.restore(&state.loader)?;
            if let (Some(Rollouts { online, .. }), Some(trainer)) = (&mut rollouts, &trainer) {
                let restored = rollouts::read_state(trainer)
                    .and_then(|state| online.restore(state, &learner.policy().whole()?, learner.steps()));
                restored.map_err(|error| newest::blamed(&dir, error))?;
            }
            say(&format!("resuming from {}", from.display()));
        }
        let mut held_out = if run.online { Vec::new() } else { data.held_out_groups()? };
        if let Some(reference) = &mut reference {
            wire::fill(reference, &mut held_out)?;
        }
        say(&data.account());
        let scores = run.algorithm.needs().contains(Needs::SCORES);
        let prompts = if scores { Vec::new() } else { data.prompts(run.config.run.sample_prompts)? };
        let resumed = if step > 0 { step + 1 } else { 0 };
        let mut logs = None;
        if ranks.is_main() {
            if step == 0 {
                dir.remove_events()?;
            }
            let log = MetricsLog::open(&dir.metrics(), step)?;
            logs = Some((log, EventWriter::create(dir.path(), resumed).map_err(Error::io(dir.path()))?));
        }
        Ok(Self {
            logs,
            ranks,
            eval_loss: None,
            tokens: state.map_or(0, |state| state.tokens),
            run,
            dir,
            model,
            model_config,
            learner,
            reference,
            rollouts,
            data,
            loader,
            held_out,
            prompts,
            total,
        })
    }

    /// Steps of the run that are done: rollouts, or updates where rows are learned.
    pub(super) fn steps_done(&self) -> u64 {
        self.rollouts.as_ref().map_or_else(|| self.learner.steps(), |rollouts| rollouts.online.steps())
    }

    /// Trains from wherever the run stands to its end.
    pub(super) fn run(&mut self, interrupt: &Interrupt) -> anyhow::Result<Ending> {
        if self.steps_done() == 0 {
            self.begin()?;
        }
        if let Ending::Interrupted(step) = self.steps(interrupt)? {
            return Ok(Ending::Interrupted(step));
        }
        self.finish()?;
        Ok(Ending::Finished)
    }

    /// What comes before the first step: checks, the held-out figures and answers to compare with.
    fn begin(&mut self) -> anyhow::Result<()> {
        // A rollout loop has checks of its own, on the samples of its first step.
        if self.run.config.run.preflight && self.rollouts.is_none() {
            self.preflight()?;
        }
        self.evaluate()?;
        self.answer()
    }

    fn preflight(&mut self) -> anyhow::Result<()> {
        let started = Instant::now();
        // A loader of its own: the run's must begin with its first row.
        let config = &self.run.config;
        let mut loader = Loader::new(self.loader.dataset().clone(), config.run.seed, config.data.shuffle)?;
        let mut groups = loader.next(config.run.batch_size)?;
        if let Some(reference) = &mut self.reference {
            wire::fill(reference, &mut groups)?;
        }
        let from_reference = config.starts_at_reference();
        let input = PreflightInput {
            groups: &groups,
            expected_loss: self.run.loss_at_reference.filter(|_| from_reference),
            bos: self.model.tokenizer.bos(),
        };
        let checking = Count::start("checking before step 1", 0);
        let algorithm = self.run.guarded("the checks before step 1");
        let report = preflight(self.learner.policy(), &algorithm, input, &config.preflight)?;
        drop(checking);
        say(&format!("preflight in {:.1}s: {report}", started.elapsed().as_secs_f64()));
        Ok(())
    }

    /// Measures the held-out rows, unless this step's figures are logged already.
    pub(super) fn evaluate(&mut self) -> anyhow::Result<()> {
        let step = self.steps_done();
        let held_out = self.rollouts.as_ref().map_or(self.held_out.len(), |r| r.held_out.len());
        if held_out == 0 || self.logged_evaluation(step)? {
            return Ok(());
        }
        let values = if let Some(values) = self.held_out_rewards()? {
            values
        } else {
            let algorithm = self.run.guarded(format!("the measurement after step {step}"));
            evaluate::held_out(&self.held_out, |group| {
                self.learner.evaluate(&algorithm, std::slice::from_ref(group))
            })?
        };
        self.eval_loss = self.judged(&values).map(|loss| (step, loss));
        say(&evaluate::line(step, held_out, &values));
        self.write_record(step, values)
    }

    /// What decides which checkpoint is the best, the less the better: the held-out loss, or what a reward lacks.
    fn judged(&self, values: &BTreeMap<String, f64>) -> Option<f64> {
        match self.rollouts {
            Some(_) => values.get("eval/reward").map(|reward| -reward),
            None => values.get("eval/loss").copied(),
        }
    }

    fn logged_evaluation(&mut self, step: u64) -> anyhow::Result<bool> {
        let records = rundir::read_metrics(&self.dir.metrics())?;
        let mut of_step = records.iter().filter(|record| record.step == step);
        let loss = of_step.find_map(|record| self.judged(&record.values));
        self.eval_loss = loss.map(|loss| (step, loss)).or(self.eval_loss);
        Ok(loss.is_some())
    }

    /// Logs one step's values; those that are not finite have no place in JSON and are left out.
    pub(super) fn write_record(
        &mut self,
        step: u64,
        mut values: BTreeMap<String, f64>,
    ) -> anyhow::Result<()> {
        values.retain(|_, value| value.is_finite());
        let Some((log, events)) = &mut self.logs else { return Ok(()) };
        let named = values.iter().map(|(name, value)| (name.as_str(), *value));
        events.scalars(step, named).map_err(Error::io(self.dir.path()))?;
        Ok(log.write(&Record { step, values })?)
    }

    /// Writes a checkpoint of the present step, unless there is one.
    pub(super) fn save(&mut self) -> anyhow::Result<()> {
        let checkpoints = self.dir.checkpoints();
        let step = self.steps_done();
        if self.ranks.any(self.ranks.is_main() && checkpoints.steps().contains(&step))? {
            return Ok(());
        }
        let params = self.learner.policy().whole()?;
        if !self.ranks.is_main() {
            self.learner.save_state(self.dir.path())?;
            return self.take_part_in_saving();
        }
        let eval_loss = self.eval_loss.filter(|(at, _)| *at == step).map(|(_, loss)| loss);
        let state = TrainState { step, tokens: self.tokens, eval_loss, loader: self.loader.state() };
        let path = checkpoints.save(
            &state,
            |dir| self.save_model(dir, &params, SaveDtype::F32),
            |dir| {
                self.learner.save_state(dir)?;
                self.save_rollouts(dir)
            },
        )?;
        tracing::info!("saved {}", path.display());
        if let Some(Rollouts { online, .. }) = &mut self.rollouts {
            online.saved()?;
        }
        checkpoints.prune(self.run.config.run.keep_last)?;
        self.report()
    }

    fn save_model(&self, dir: &Path, params: &ParamSet, dtype: SaveDtype) -> aligner_core::Result<()> {
        wire::save_files(
            dir,
            (&self.model_config, params),
            &self.run.config.model.path,
            &self.model.tokenizer,
            dtype,
        )
    }

    /// What comes after the last step.
    fn finish(&mut self) -> anyhow::Result<()> {
        say(&self.data.account());
        self.answer()?;
        let dtype = self.run.config.run.save_dtype;
        let params = self.learner.policy().whole()?;
        if self.ranks.is_main() {
            rundir::write_directory(&self.dir.model(), |dir| self.save_model(dir, &params, dtype))?;
            self.report()?;
        }
        Ok(self.ranks.barrier()?)
    }

    /// Writes the page that shows the run, as far as it is.
    fn report(&self) -> anyhow::Result<()> {
        let title = self.run.config.run.dir.display().to_string();
        let (done, total) = (self.steps_done(), self.total);
        let steps = if done < total { format!("{done} of {total} steps") } else { format!("{total} steps") };
        let subtitle = format!(
            "{} on {}, {steps} of {} groups, from {}",
            self.run.name,
            self.run.config.data.train.name(),
            self.run.config.run.batch_size,
            self.run.config.model.path.display(),
        );
        let rollouts = self.rollouts.as_ref();
        let report = Report {
            title: &title,
            subtitle: &subtitle,
            records: &rundir::read_metrics(&self.dir.metrics())?,
            answers: &rundir::read_answers(&self.dir.samples())?,
            rollouts: &rundir::read_rollouts(&self.dir.rollouts())?,
            warnings: rollouts.map_or(&[], |rollouts| &rollouts.told.all),
            judges: rollouts.map_or(&[], |rollouts| &rollouts.told.judges),
            config: &toml::to_string_pretty(&self.run.resolved)?,
        };
        let html = report.html();
        Ok(atomic_write(&self.dir.report(), |file| file.write_all(html.as_bytes()))?)
    }

    /// Held-out numbers before and after.
    pub(super) fn outcome(&self) -> anyhow::Result<Outcome> {
        Ok(Outcome::of(&rundir::read_metrics(&self.dir.metrics())?))
    }

    /// What standard output says at the end.
    pub(super) fn summary(&self) -> anyhow::Result<String> {
        let answers = rundir::read_answers(&self.dir.samples())?;
        Ok(summary::text(&self.outcome()?, &answers, &self.dir))
    }
}

/// The frozen model, where the algorithm asks for its log-probabilities.
fn frozen(
    run: &Run,
    model: &LoadedModel,
    policy: &CausalLm,
    (resumed, reading): (bool, Reading),
    device: &Device,
) -> anyhow::Result<Option<CausalLm>> {
    if !run.algorithm.needs().contains(Needs::REF_LOGPS) {
        return Ok(None);
    }
    let mut frozen = match &run.config.reference.path {
        Some(path) => wire::reference_model(path, model, reading, device)?,
        // The base, whose handles nobody writes to.
        None if policy.config().adapter.is_some() => policy.without_adapter()?,
        None if resumed => reading.model(&model.checkpoint, device)?,
        // The same handles: they are copied when the policy first moves.
        None => policy.clone(),
    };
    frozen.set_bf16_products(run.config.is_in_bf16());
    if let Some(rollout) = &run.config.rollout {
        frozen.set_temperature(rollout.temperature)?;
    }
    Ok(Some(frozen))
}

/// The run's directory, without what an earlier run left half written.
fn directory(run: &Run, begun_secs: i64, existing: Existing) -> anyhow::Result<(RunDir, Identity)> {
    let manifest = Manifest::new(begun_secs, wire::fingerprints(run)?);
    let identity = Identity { resolved: run.resolved.clone(), manifest };
    let dir = RunDir::open(&run.config.run.dir, &identity, existing)?;
    rundir::remove_partial(dir.path())?;
    rundir::remove_partial(&dir.path().join("checkpoints"))?;
    Ok((dir, identity))
}

/// The frozen model's log-probabilities, kept on disk or computed each time.
fn reference(run: &Run, ranks: &Ranks, frozen: CausalLm, dir: &RunDir) -> anyhow::Result<Reference> {
    let budget = run.config.learner.micro_batch_tokens;
    // Samples that are drawn anew are never met again; a cache is one rank's.
    if !run.config.reference.cache || run.online || ranks.mesh().size() > 1 {
        return Ok(Reference::live(ranks.policy(frozen)?, budget));
    }
    let file = wire::reference_cache(run, dir.reference_cache());
    Ok(Reference::cached(Box::new(frozen), budget, &file)?)
}
