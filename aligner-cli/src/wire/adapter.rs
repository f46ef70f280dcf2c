//! Adapters: where they come from, what they belong to, and how they are written.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aligner_core::model::{Adapter, AdapterModule, CausalLm};
use aligner_core::weights::{AdapterCheckpoint, Checkpoint, SaveDtype, save_adapter, save_model};
use aligner_core::{Device, Error, Needs, ParamSet, Policy as _};
use aligner_data::Tokenizer;

use super::adapter_flag::GivenAdapters;
use super::{LoadedModel, Reading};
use crate::config::{LoraSection, not_a_model};
use crate::progress::say;
use crate::{Run, Usage};

/// A model to answer with, shared by the commands that do.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ModelFlags {
    /// A model's directory, a `.gguf` file, or a run's `model` directory.
    pub(crate) model: PathBuf,
    /// A low-rank adapter of the model, a directory as PEFT writes it; it runs beside the weights. Several go by
    /// name, as NAME=DIR, and requests choose among them.
    #[arg(long, value_name = "DIR|NAME=DIR")]
    adapter: Vec<String>,
    /// A directory with `tokenizer.json` or `tokenizer.model`, where the model's own has none.
    #[arg(long)]
    pub(crate) tokenizer: Option<PathBuf>,
}

impl ModelFlags {
    /// Opens a model that writes text.
    ///
    /// # Errors
    /// Files that are no model, no adapter of it, or score answers.
    pub(crate) fn writer(&self) -> anyhow::Result<LoadedModel> {
        let given = GivenAdapters::read(&self.adapter)?;
        let model = LoadedModel::writer(&self.model, self.tokenizer.as_deref(), given.alone.as_deref())?;
        let named = given.open()?;
        if let Some(own) = model.adapter.as_ref().filter(|_| !named.is_empty()) {
            let advice = "name the base as the model, and this as one of the adapters";
            return Err(Usage(format!("{}: is an adapter itself; {advice}", own.path().display())).into());
        }
        for (_, file) in &named {
            file.adapter(model.checkpoint.config())?;
        }
        Ok(LoadedModel { named, ..model })
    }
}

/// A model's path with the adapter that is to be put on it. An adapter's own directory leads to its base.
///
/// # Errors
/// [`Usage`] for what is no model or no adapter, and for an adapter whose base is not there.
pub(super) fn resolve(
    path: &Path,
    adapter: Option<&Path>,
) -> anyhow::Result<(PathBuf, Option<AdapterCheckpoint>)> {
    let (base, adapter) = match adapter {
        Some(adapter) => (path.to_path_buf(), Some(opened(adapter)?)),
        None if AdapterCheckpoint::is_adapter(path) && not_a_model(path).is_some() => {
            let adapter = AdapterCheckpoint::open(path)?;
            (base_of(&adapter)?, Some(adapter))
        }
        None => (path.to_path_buf(), None),
    };
    match not_a_model(&base) {
        Some(message) => Err(Usage(message).into()),
        None => Ok((base, adapter)),
    }
}

/// Where the base of an adapter lies: as its settings say, seen from here or from its own place.
fn base_of(adapter: &AdapterCheckpoint) -> anyhow::Result<PathBuf> {
    let shown = adapter.path().display();
    let advice = "give the base as the model, and this as --adapter";
    let Some(name) = adapter.base() else {
        return Err(Usage(format!("{shown}: an adapter that does not say what its base is; {advice}")).into());
    };
    let own = adapter.path();
    let places =
        [Some(PathBuf::from(name)), Some(own.join(name)), own.parent().map(|parent| parent.join(name))];
    let found = places.into_iter().flatten().find(|place| not_a_model(place).is_none());
    found.ok_or_else(|| {
        Usage(format!(
            "{shown}: an adapter of `{name}`, which is no model's directory or file here; {advice}"
        ))
        .into()
    })
}

/// What a policy adds to a checkpoint's weights.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Addition<'a> {
    /// What the run file says: nothing, a fresh adapter, or one to start from.
    OfRun,
    /// This adapter.
    File(&'a AdapterCheckpoint),
    /// Nothing, whatever the run file says.
    None,
}

/// The policy that a run trains: `checkpoint` with the head that the algorithm reads, and an adapter.
pub(crate) fn trained_policy(
    run: &Run,
    checkpoint: &Arc<Checkpoint>,
    addition: Addition<'_>,
    reading: Reading,
    device: &Device,
) -> anyhow::Result<CausalLm> {
    let (section, seed) = (run.config.model.lora.as_ref(), run.config.run.seed);
    let opened = match (addition, section.and_then(|section| section.path.as_ref())) {
        (Addition::OfRun, Some(path)) => Some(AdapterCheckpoint::open(path)?),
        _ => None,
    };
    let file = match addition {
        Addition::File(file) => Some(file),
        _ => opened.as_ref(),
    };
    // What is trained whole, or measured as a plain model, has no frozen base.
    let kind = match addition {
        Addition::None => None,
        Addition::OfRun | Addition::File(_) => section.and_then(|section| section.base().packed()),
    };
    let mut policy = match kind {
        None => reading.model(checkpoint, device)?,
        kind => CausalLm::load_packed(checkpoint, device, kind)?,
    };
    let scores = run.algorithm.needs().contains(Needs::SCORES);
    match (scores, policy.config().num_labels) {
        (true, None) => policy = policy.with_score_head(file.map_or(1, labels), seed)?,
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
    policy.set_bf16_products(run.config.is_in_bf16());
    match (file, addition, section) {
        (Some(file), _, None) => policy = policy.with_adapter_from(file)?,
        (_, Addition::File(_) | Addition::OfRun, Some(section)) => {
            policy = with_lora(policy, section, file, seed).map_err(|error| blamed(run, "model", error))?;
        }
        _ => {}
    }
    if let Some(rollout) = &run.config.rollout {
        policy.set_temperature(rollout.temperature)?;
    }
    Ok(policy)
}

/// A model with the adapter of a section of the run file, or of `file` with that section's dropout.
pub(super) fn with_lora(
    model: CausalLm,
    section: &LoraSection,
    file: Option<&AdapterCheckpoint>,
    seed: u64,
) -> aligner_core::Result<CausalLm> {
    let mut model = match file {
        Some(file) => model.with_adapter_from(file)?,
        None => model.with_adapter(section.config(), seed)?,
    };
    if let Some(rate) = section.dropout {
        model = model.with_dropout(rate)?;
    }
    model.set_dropout_seed(seed);
    Ok(model)
}

/// Outputs of an adapter's score head, or one.
fn labels(file: &AdapterCheckpoint) -> usize {
    file.score().and_then(|shape| shape.first().copied()).unwrap_or(1)
}

/// The policy at the run's start, or at the checkpoint `from`.
pub(crate) fn policy(
    run: &Run,
    model: &LoadedModel,
    from: Option<&Path>,
    reading: Reading,
    device: &Device,
) -> anyhow::Result<CausalLm> {
    match from {
        // The base is where it was: its files are known not to have changed.
        Some(path) if run.config.model.lora.is_some() => trained_policy(
            run,
            &model.checkpoint,
            Addition::File(&AdapterCheckpoint::open(path)?),
            reading,
            device,
        ),
        Some(path) => {
            trained_policy(run, &Arc::new(Checkpoint::open(path)?), Addition::None, reading, device)
        }
        None => trained_policy(run, &model.checkpoint, Addition::OfRun, reading, device),
    }
}

/// What an evaluation measures.
#[derive(Debug)]
pub(crate) enum Subject {
    /// What the run starts from.
    Start,
    /// A model, or an adapter of the run's model.
    Model(PathBuf),
    /// An adapter on a model; on the run's where there is none.
    Adapter { model: Option<PathBuf>, adapter: PathBuf },
}

impl Subject {
    /// As a message names it.
    pub(crate) fn shown(&self) -> String {
        match self {
            Self::Start => "the model that the run starts from".into(),
            Self::Model(path) | Self::Adapter { adapter: path, .. } => path.display().to_string(),
        }
    }
}

/// The policy to measure.
///
/// # Errors
/// Files that are no model, or no adapter of it.
pub(crate) fn measured_policy(
    run: &Run,
    model: &LoadedModel,
    subject: &Subject,
    device: &Device,
) -> anyhow::Result<CausalLm> {
    let on = |base: Option<&PathBuf>, adapter: &Path| {
        let file = opened(adapter)?;
        match base {
            Some(base) => trained_policy(
                run,
                &Arc::new(Checkpoint::open(base)?),
                Addition::File(&file),
                Reading::Whole,
                device,
            ),
            None => trained_policy(run, &model.checkpoint, Addition::File(&file), Reading::Whole, device),
        }
    };
    match subject {
        Subject::Start => trained_policy(run, &model.checkpoint, Addition::OfRun, Reading::Whole, device),
        Subject::Adapter { model, adapter } => on(model.as_ref(), adapter),
        Subject::Model(path) if AdapterCheckpoint::is_adapter(path) && not_a_model(path).is_some() => {
            on(None, path)
        }
        Subject::Model(path) => {
            trained_policy(run, &Arc::new(Checkpoint::open(path)?), Addition::None, Reading::Whole, device)
        }
    }
}

/// The adapter that a flag names.
pub(super) fn opened(path: &Path) -> anyhow::Result<AdapterCheckpoint> {
    if !AdapterCheckpoint::is_adapter(path) {
        return Err(Usage(format!("--adapter: {}: no adapter_config.json there", path.display())).into());
    }
    Ok(AdapterCheckpoint::open(path)?)
}

/// Says what is trained, where that is an adapter.
pub(crate) fn tell_adapter(policy: &CausalLm) {
    let Some(adapter) = &policy.config().adapter else { return };
    let (trained, all) = (policy.params().elements(true), policy.params().elements(false));
    let share = 100.0 * trained as f64 / all.max(1) as f64;
    say(&format!(
        "adapter: {}; {trained} of {all} parameters are trained ({share:.2} %)",
        adapter.describe()
    ));
    tell_base(policy);
}

/// The adapter that a run file describes, on its model, before any weight is read.
///
/// # Errors
/// What makes it none of this model.
pub(crate) fn planned_adapter(run: &Run, checkpoint: &Checkpoint) -> anyhow::Result<Option<Adapter>> {
    let Some(section) = &run.config.model.lora else { return Ok(None) };
    let mut model = checkpoint.config().clone();
    if run.algorithm.needs().contains(Needs::SCORES) {
        model.num_labels = model.num_labels.or(Some(1));
    }
    let adapter = match &section.path {
        Some(path) => {
            let file = AdapterCheckpoint::open(path)?;
            model.num_labels = model.num_labels.map(|own| file.score().map_or(own, |_| labels(&file)));
            file.adapter(&model)?
        }
        None => Adapter::new(section.config(), &model).map_err(|error| blamed(run, "model", error))?,
    };
    Ok(Some(adapter))
}

/// The base of a run's adapter as the run holds it, without the adapter; the model itself where there is none.
pub(crate) fn base_model(run: &Run, checkpoint: &Checkpoint, device: &Device) -> anyhow::Result<CausalLm> {
    let kind = run.config.model.lora.as_ref().and_then(|section| section.base().packed());
    Ok(CausalLm::load_packed(checkpoint, device, kind)?)
}

/// Says how a run holds the base, where that is in fewer bits.
fn tell_base(policy: &CausalLm) {
    let packed = policy.params().iter().filter_map(|param| param.packed.as_ref());
    let (count, values, bytes, kinds) =
        packed.fold((0, 0, 0, BTreeSet::new()), |(count, values, bytes, mut kinds), own| {
            kinds.insert(format!("{:?}", own.kind()).to_lowercase());
            (count + 1, values + own.shape().iter().product::<usize>(), bytes + own.bytes(), kinds)
        });
    if count > 0 {
        let kinds: Vec<String> = kinds.into_iter().collect();
        say(&format!(
            "base: {count} frozen weights of {values} values in {} take {:.1} MiB",
            kinds.join(" and "),
            bytes as f64 / f64::from(1 << 20)
        ));
    }
}

/// Says on which weights an adapter was trained, where these were not the base's own.
pub(crate) fn tell_trained_on(file: &AdapterCheckpoint) {
    if let Some(kind) = file.trained_on() {
        say(&format!(
            "{}: trained on the base in {kind}; merged into the base's own weights, as PEFT recommends",
            file.path().display()
        ));
    }
}

/// The linears of an adapter with the rank and the scale of each addition, for a reader.
///
/// # Errors
/// What is no adapter, or none of this model.
pub(crate) fn describe_adapter(path: &Path, model: &LoadedModel) -> anyhow::Result<String> {
    let file = opened(path)?;
    let mut config = model.checkpoint.config().clone();
    config.num_labels = config.num_labels.or_else(|| file.score().map(|_| labels(&file)));
    let adapter = file.adapter(&config)?;
    let mut out = format!(
        "{}: {}\nbase        {}\nparameters  {}\ndropout     {}\n\n rank     scale  linear, out x in\n",
        path.display(),
        adapter.describe(),
        file.base().unwrap_or("not said"),
        adapter.num_params(),
        adapter.config.dropout
    );
    for AdapterModule { name, rank, scale, shape: [outputs, inputs] } in &adapter.modules {
        let _ = writeln!(out, "{rank:>5} {scale:>9.4}  {name}, {outputs} x {inputs}");
    }
    if let Some(shape) = file.score() {
        let _ = writeln!(out, "\nwith a score head of shape {shape:?}");
    }
    for (name, shape) in adapter.saved.iter().filter(|(name, _)| name != "score.weight") {
        let _ = writeln!(out, "\nin full: {name}, {shape:?}");
    }
    if let Some(kind) = file.trained_on() {
        let _ = writeln!(out, "\ntrained on the base in {kind}");
    }
    Ok(out)
}

/// An adapter's own finding with its place in the run file.
pub(super) fn blamed(run: &Run, section: &str, error: Error) -> anyhow::Error {
    match error {
        Error::Setting { key, message } => {
            run.blame(Error::setting(format!("{section}.lora.{key}"), message))
        }
        error => error.into(),
    }
}

impl LoadedModel {
    /// The model with its weights, and with its adapter where it has one.
    pub(crate) fn policy(&self, device: &Device) -> anyhow::Result<CausalLm> {
        let policy = CausalLm::load(&self.checkpoint, device)?;
        let Some(file) = &self.adapter else { return Ok(policy) };
        let gets_head = file.score().is_some() && policy.config().num_labels.is_none();
        let policy = if gets_head { policy.with_score_head(labels(file), 0)? } else { policy };
        Ok(policy.with_adapter_from(file)?)
    }
}

/// Writes a model's files to a directory that exists: weights, configuration and tokenizer; of a model with
/// an adapter, the adapter and the name of its base.
pub(crate) fn save_files(
    dir: &Path,
    model: (&aligner_core::model::ModelConfig, &ParamSet),
    base: &Path,
    tokenizer: &Tokenizer,
    dtype: SaveDtype,
) -> aligner_core::Result<()> {
    let (config, params) = model;
    match &config.adapter {
        Some(_) => save_adapter(dir, config, params, &base.display().to_string(), dtype)?,
        None => save_model(dir, config, params, dtype)?,
    }
    tokenizer.save(dir)
}
