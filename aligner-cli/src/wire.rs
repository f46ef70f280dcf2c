//! From a run file to the objects that it names: model, tokenizer, data, engine.

mod data;
mod engine;
mod online;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use aligner_algos::Reference;
use aligner_core::model::{CausalLm, ModelConfig};
use aligner_core::weights::{Checkpoint, SaveDtype, save_model};
use aligner_core::{Communicator, Device, Error, Group, Needs, ParamSet};
use aligner_data::{Tokenizer, now_secs};
#[cfg(feature = "cuda")]
use anyhow::Context;
use anyhow::{bail, ensure};

pub(crate) use data::Data;
pub(crate) use engine::{EngineFlags, engine};
pub(crate) use online::{online, prompt_of};

use crate::progress::Count;
use crate::rundir::{Fingerprints, Manifest};
use crate::{Run, RunConfig};

/// A model's files, opened and checked against each other; its weights are not read yet.
pub(crate) struct LoadedModel {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) tokenizer: Tokenizer,
}

impl LoadedModel {
    /// Opens the model at `path`, with the tokenizer of another directory where it has none.
    pub(crate) fn open(path: &Path, tokenizer: Option<&Path>) -> anyhow::Result<Self> {
        if let Some(message) = crate::config::not_a_model(path) {
            return Err(crate::Usage(message).into());
        }
        let checkpoint = Checkpoint::open(path)?;
        let tokenizer = match tokenizer {
            Some(dir) => Tokenizer::from_dir(dir)?,
            None => Tokenizer::from_checkpoint_path(path)?,
        };
        let (known, rows) = (tokenizer.vocab_size(), checkpoint.config().vocab_size);
        ensure!(
            known <= rows,
            Error::format(
                path,
                format!(
                    "the tokenizer has token ids up to {}, but the model's vocabulary has {rows} rows",
                    known - 1
                )
            )
        );
        Ok(Self { checkpoint, tokenizer })
    }

    /// Opens a model that writes text.
    ///
    /// # Errors
    /// As [`Self::open`]; a model that scores.
    pub(crate) fn writer(path: &Path, tokenizer: Option<&Path>) -> anyhow::Result<Self> {
        let model = Self::open(path, tokenizer)?;
        let scores = model.checkpoint.config().num_labels.is_some();
        let what = || crate::Usage(format!("{}: the model scores answers and writes none", path.display()));
        ensure!(!scores, what());
        Ok(model)
    }

    /// The model of a run file, as a run sees it that began `begun_secs` after 1970 began: chat templates
    /// may write the date.
    pub(crate) fn of_run_begun(run: &Run, begun_secs: i64) -> anyhow::Result<Self> {
        let model = &run.config.model;
        let Self { checkpoint, tokenizer } = Self::open(&model.path, model.tokenizer.as_deref())?;
        Ok(Self { checkpoint, tokenizer: tokenizer.at(begun_secs)? })
    }

    /// The model of a run file, as the run in its directory sees it, or one that begins now.
    pub(crate) fn of_run(run: &Run) -> anyhow::Result<Self> {
        let begun = Manifest::read(&run.config.run.dir)?.map(|manifest| manifest.begun_secs);
        Self::of_run_begun(run, begun.unwrap_or_else(now_secs))
    }

    /// The model with its weights.
    pub(crate) fn policy(&self, device: &Device) -> anyhow::Result<CausalLm> {
        Ok(CausalLm::load(&self.checkpoint, device)?)
    }

    /// Every token that ends an answer.
    pub(crate) fn stop_tokens(&self) -> Vec<u32> {
        let mut stops = self.tokenizer.stops().to_vec();
        stops.extend(
            self.checkpoint.config().eos_token_ids.iter().filter(|id| !self.tokenizer.stops().contains(id)),
        );
        stops
    }
}

/// What the files of a run hold: of the data all, of the models what decides about tokens and weights.
pub(crate) fn fingerprints(config: &RunConfig) -> aligner_core::Result<Fingerprints> {
    let mut prints = Fingerprints::default();
    for rows in [Some(&config.data.train), config.data.eval.as_ref()].into_iter().flatten() {
        prints.add(&rows.path)?;
    }
    prints.add_model(&config.model.path)?;
    prints.add_tokenizer(config.model.tokenizer.as_ref().unwrap_or(&config.model.path))?;
    config.reference.path.iter().try_for_each(|path| prints.add_model(path))?;
    let critic = config.critic.as_ref().and_then(|critic| critic.path.as_ref());
    critic.into_iter().try_for_each(|path| prints.add_model(path))?;
    Ok(prints)
}

/// The communicator of a run on one rank.
pub(crate) fn alone() -> Arc<dyn Communicator> {
    Arc::new(aligner_parallel::Solo)
}

/// The device that computes.
///
/// # Errors
/// A name that is unknown, or that this build has no backend for.
pub(crate) fn device(name: &str) -> anyhow::Result<Device> {
    match name.split_once(':').map_or((name, "0"), |(kind, index)| (kind, index)) {
        ("cpu", "0") => Ok(Device::flex()),
        ("cuda", index) => cuda(name, index),
        _ => bail!("device `{name}`: expected `cpu`, `cuda` or `cuda:N`"),
    }
}

#[cfg(feature = "cuda")]
fn cuda(name: &str, index: &str) -> anyhow::Result<Device> {
    let index: usize = index.parse().with_context(|| format!("device `{name}`: expected `cuda:N`"))?;
    Ok(Device::cuda(index))
}

#[cfg(not(feature = "cuda"))]
fn cuda(name: &str, _: &str) -> anyhow::Result<Device> {
    bail!("device `{name}`: this program was built without CUDA; build it with `--features cuda`")
}

/// The policy that a run trains: `model` with the head that the algorithm reads.
pub(crate) fn trained_policy(
    run: &Run,
    checkpoint: &Checkpoint,
    device: &Device,
) -> anyhow::Result<CausalLm> {
    let mut policy = CausalLm::load(checkpoint, device)?;
    let scores = run.algorithm.needs().contains(Needs::SCORES);
    match (scores, policy.config().num_labels) {
        (true, None) => policy = policy.with_score_head(1, run.config.run.seed)?,
        (false, Some(_)) => {
            let message = format!(
                "{}: the model scores, but `{}` trains a language model",
                checkpoint.path().display(),
                run.name
            );
            return Err(run.blame(Error::setting("model.path", message)));
        }
        _ => {}
    }
    policy.set_gradient_checkpointing(run.config.learner.gradient_checkpointing);
    if let Some(rollout) = &run.config.rollout {
        policy.set_temperature(rollout.temperature)?;
    }
    Ok(policy)
}

/// Writes a model's files to a directory that exists: weights, configuration and tokenizer.
pub(crate) fn save_files(
    dir: &Path,
    config: &ModelConfig,
    params: &ParamSet,
    tokenizer: &Tokenizer,
    dtype: SaveDtype,
) -> aligner_core::Result<()> {
    save_model(dir, config, params, dtype)?;
    tokenizer.save(dir)
}

/// A reference other than the start model: it must know the tokens of `base`, at its positions.
pub(crate) fn reference_model(path: &Path, base: &LoadedModel, device: &Device) -> anyhow::Result<CausalLm> {
    let checkpoint = Checkpoint::open(path)?;
    let (config, own) = (checkpoint.config(), base.checkpoint.config());
    let wrong =
        |message: String| Err(Error::format(path, format!("not usable as the reference: {message}")).into());
    if config.num_labels.is_some() {
        return wrong("it scores, but a reference is a language model".into());
    }
    if config.vocab_size < base.tokenizer.vocab_size() {
        let (rows, ids) = (config.vocab_size, base.tokenizer.vocab_size());
        return wrong(format!("its vocabulary has {rows} rows, but the tokenizer has {ids} ids"));
    }
    if config.max_positions < own.max_positions {
        let (short, long) = (config.max_positions, own.max_positions);
        return wrong(format!("its context is {short} tokens, the trained model's {long}"));
    }
    Ok(CausalLm::load(&checkpoint, device)?)
}

/// Asks the reference for the log-probabilities of `groups`, and shows how far it is.
pub(crate) fn fill(reference: &mut Reference, groups: &mut [Group]) -> aligner_core::Result<()> {
    let mut progress = Count::start("groups under the reference", groups.len());
    reference.fill_watched(groups, &mut |filled| progress.done(filled))
}

/// Where a run keeps its reference's log-probabilities.
pub(crate) fn reference_cache(run: &Run, in_run: PathBuf) -> PathBuf {
    run.config.reference.cache_file.clone().unwrap_or(in_run)
}
