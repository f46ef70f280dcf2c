//! From a run file to the objects that it names: model, tokenizer, data, engine.

mod adapter;
mod adapter_flag;
mod data;
mod engine;
mod online;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use aligner_algos::Reference;
use aligner_core::model::CausalLm;
use aligner_core::weights::{AdapterCheckpoint, Checkpoint};
use aligner_core::{Communicator, Device, Error, Group};
use aligner_data::{Tokenizer, now_secs};
use aligner_parallel::Mesh;
#[cfg(feature = "cuda")]
use anyhow::Context;
use anyhow::{bail, ensure};

pub(crate) use adapter::{
    Addition, ModelFlags, Subject, base_model, describe_adapter, measured_policy, planned_adapter, policy,
    save_files, tell_adapter, tell_trained_on, trained_policy,
};
pub(crate) use adapter_flag::BASE;
pub(crate) use data::Data;
pub(crate) use engine::{EngineFlags, PROBE, engine};
pub(crate) use online::{Beside, online, prompt_of, rollout_engine};

use crate::Run;
use crate::progress::Count;
use crate::rundir::{Fingerprints, Manifest};

/// When weights are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reading {
    /// At once, all of them.
    Whole,
    /// When the model is cut for the ranks of a mesh, by each rank its own.
    ByRank,
}

impl Reading {
    /// How a run reads its models: an engine and an adapter look at whole weights.
    pub(crate) fn of_run(run: &Run, mesh: Mesh) -> Self {
        let cut = mesh.size() > 1 && !run.online && run.config.model.lora.is_none();
        if cut { Self::ByRank } else { Self::Whole }
    }

    /// The model of a checkpoint.
    pub(crate) fn model(
        self,
        checkpoint: &Arc<Checkpoint>,
        device: &Device,
    ) -> aligner_core::Result<CausalLm> {
        match self {
            Self::Whole => CausalLm::load(checkpoint, device),
            Self::ByRank => CausalLm::open(checkpoint, device),
        }
    }
}

/// A model's files, opened and checked against each other; its weights are not read yet.
pub(crate) struct LoadedModel {
    pub(crate) checkpoint: Arc<Checkpoint>,
    pub(crate) tokenizer: Tokenizer,
    /// An adapter that is put on it.
    pub(crate) adapter: Option<AdapterCheckpoint>,
    /// Adapters that requests choose among by name.
    pub(crate) named: Vec<(String, AdapterCheckpoint)>,
}

impl LoadedModel {
    /// Opens the model at `path`, with the tokenizer of another directory where it has none, and with an
    /// adapter. The directory of an adapter stands for its base and itself.
    pub(crate) fn open(
        path: &Path,
        tokenizer: Option<&Path>,
        adapter: Option<&Path>,
    ) -> anyhow::Result<Self> {
        let (base, adapter) = adapter::resolve(path, adapter)?;
        let checkpoint = Arc::new(Checkpoint::open(&base)?);
        if let Some(adapter) = &adapter {
            let mut config = checkpoint.config().clone();
            config.num_labels = config.num_labels.or_else(|| adapter.score()?.first().copied());
            adapter.adapter(&config)?;
        }
        // A run's adapter comes with the tokenizer that it was trained with.
        let own = if Tokenizer::is_in(path) { path } else { base.as_path() };
        let tokenizer = match tokenizer {
            Some(dir) => Tokenizer::from_dir(dir)?,
            None => Tokenizer::from_checkpoint_path(own)?,
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
        Ok(Self { checkpoint, tokenizer, adapter, named: Vec::new() })
    }

    /// Opens a model that writes text.
    ///
    /// # Errors
    /// As [`Self::open`]; a model that scores.
    pub(crate) fn writer(
        path: &Path,
        tokenizer: Option<&Path>,
        adapter: Option<&Path>,
    ) -> anyhow::Result<Self> {
        let model = Self::open(path, tokenizer, adapter)?;
        let of_adapter = model.adapter.as_ref().and_then(AdapterCheckpoint::score);
        let scores = model.checkpoint.config().num_labels.is_some() || of_adapter.is_some();
        let what = || crate::Usage(format!("{}: the model scores answers and writes none", path.display()));
        ensure!(!scores, what());
        Ok(model)
    }

    /// The model of a run file, as a run sees it that began `begun_secs` after 1970 began: chat templates
    /// may write the date.
    pub(crate) fn of_run_begun(run: &Run, begun_secs: i64) -> anyhow::Result<Self> {
        let model = &run.config.model;
        let opened = Self::open(&model.path, model.tokenizer.as_deref(), None)?;
        planned_adapter(run, &opened.checkpoint)?;
        Ok(Self { tokenizer: opened.tokenizer.at(begun_secs)?, ..opened })
    }

    /// The model of a run file, as the run in its directory sees it, or one that begins now.
    pub(crate) fn of_run(run: &Run) -> anyhow::Result<Self> {
        let begun = Manifest::read(&run.config.run.dir)?.map(|manifest| manifest.begun_secs);
        Self::of_run_begun(run, begun.unwrap_or_else(now_secs))
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

/// What the files of a run hold: of data and of what rewards read all, of the models what decides about tokens and weights.
pub(crate) fn fingerprints(run: &Run) -> anyhow::Result<Fingerprints> {
    let Run { config, rewards, .. } = run;
    let mut prints = Fingerprints::default();
    for rows in [Some(&config.data.train), config.data.eval.as_ref()].into_iter().flatten() {
        if rows.task.is_none() {
            prints.add(&rows.path)?;
        }
    }
    prints.add_model(&config.model.path)?;
    prints.add_tokenizer(config.model.tokenizer.as_ref().unwrap_or(&config.model.path))?;
    config.reference.path.iter().try_for_each(|path| prints.add_model(path))?;
    let critic = config.critic.as_ref().and_then(|critic| critic.path.as_ref());
    critic.into_iter().try_for_each(|path| prints.add_model(path))?;
    let critic = config.critic.as_ref().and_then(|critic| critic.lora.as_ref());
    for lora in [config.model.lora.as_ref(), critic].into_iter().flatten() {
        lora.path.iter().try_for_each(|path| prints.add_adapter(path))?;
    }
    for path in rewards.iter().flat_map(|reward| &reward.inputs) {
        if path.is_file() {
            prints.add_model(path)?;
            continue;
        }
        let (base, _) = adapter::resolve(path, None)?;
        prints.add_model(&base)?;
        prints.add_tokenizer(&base)?;
        prints.add_tokenizer(path)?;
        prints.add_adapter(path)?;
    }
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
    // Burn would panic where something is missing.
    aligner_core::ops::cube::Accelerator::cuda(index)?;
    Ok(Device::cuda(index))
}

#[cfg(not(feature = "cuda"))]
fn cuda(name: &str, _: &str) -> anyhow::Result<Device> {
    bail!("device `{name}`: this program was built without CUDA; build it with `--features cuda`")
}

/// A reference other than the start model: it must know the tokens of `base`, at its positions.
pub(crate) fn reference_model(
    path: &Path,
    base: &LoadedModel,
    reading: Reading,
    device: &Device,
) -> anyhow::Result<CausalLm> {
    let checkpoint = Arc::new(Checkpoint::open(path)?);
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
    Ok(reading.model(&checkpoint, device)?)
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
