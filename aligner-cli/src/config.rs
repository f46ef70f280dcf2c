//! The run file: TOML in which every mistake is reported at once, with its place.

mod check;
mod failure;
mod lora;
mod mesh;
mod overrides;
mod problem;
mod read;
mod sections;
mod tree;

use std::path::Path;

use aligner_algos::{Guarded, Watchdog};
use aligner_core::{Algorithm, Error, Needs};
use anyhow::Context as _;
use serde::de::DeserializeOwned;
use toml::de::DeTable;

pub use lora::LoraSection;
pub use mesh::MeshSection;
pub use sections::{
    CriticConfig, DataConfig, ModelConfig, Precision, ReferenceConfig, RunConfig, RunSection,
};

pub(crate) use check::not_a_model;
pub(crate) use problem::{Problems, unknown};
pub(crate) use read::{Reading, Unsound, read};
pub(crate) use tree::{Node, Value};

use crate::registry::{Built, BuiltReward};
use crate::{Registry, hang};
use tree::Origin;

/// A run file that has been read and found good, with its algorithm.
pub struct Run {
    /// The sections.
    pub config: RunConfig,
    /// The algorithm's name in the registry.
    pub name: String,
    /// The algorithm.
    pub algorithm: Box<dyn Algorithm>,
    /// The rows that the algorithm can train on, where it has said so.
    pub(crate) kind: Option<aligner_data::Kind>,
    /// Whether it learns from samples of its own.
    pub(crate) online: bool,
    /// What these are worth, until the rollout loop takes them.
    pub(crate) rewards: Vec<BuiltReward>,
    /// Limits the time of calls of its code, and of a reward's.
    pub(crate) watchdog: Option<Watchdog>,
    /// Its loss where policy and reference are equal, where it has said so.
    pub(crate) loss_at_reference: Option<f64>,
    /// Everything with its defaults, as it is written to the run directory.
    pub resolved: toml::Table,
    source: Source,
}

/// The file and its tree, kept so that later findings can point into it.
struct Source {
    root: Node,
    problems: Problems,
}

impl std::fmt::Debug for Run {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Run")
            .field("name", &self.name)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl Run {
    /// Reads the run file `path` with `overrides` of the form `key=value` written over it.
    ///
    /// # Errors
    /// [`crate::Usage`] with every mistake of the file and of the overrides.
    pub fn load(path: &Path, overrides: &[String], registry: &Registry) -> anyhow::Result<Self> {
        let text = read_text(path)?;
        let mut problems = Problems::new(path, &text);
        let mut root = parse(&text, &mut problems);
        overrides::apply(&mut root, overrides, &mut problems);
        let reading = read::<RunConfig>(&root, "", &mut problems);
        let built = registry.build(&root, &mut problems);
        let rewards = registry.rewards(&root, &mut problems);
        if let Some(reading) = &reading {
            check::values(reading, &root, &mut problems);
        }
        if let (Some(reading), Some(built)) = (&reading, &built) {
            check::online(&reading.value, built, &rewards, &root, &mut problems);
        }
        problems.clone().into_result()?;
        let (Some(Reading { value: config, .. }), Some(built)) = (reading, built) else {
            anyhow::bail!("{}: nothing could be read", path.display());
        };
        let without_rate = root.find("critic.learner.learning_rate").is_none();
        let source = Source { root, problems };
        let mut config = config;
        if built.online {
            config.rollout.get_or_insert_default();
            config.warnings.get_or_insert_default();
        }
        if built.online && built.algorithm.needs().contains(Needs::VALUES) {
            config.critic.get_or_insert_default();
        }
        config.model.lora = config.model.lora.map(|lora| lora.filled());
        if let Some(critic) = &mut config.critic {
            critic.lora = critic.lora.take().map(|lora| lora.filled());
            if without_rate {
                critic.learner.learning_rate = CriticConfig::default().learner.learning_rate;
            }
        }
        let resolved = resolve(&config, &built, &rewards)?;
        Ok(Self {
            watchdog: hang::watchdog(config.run.call_timeout_secs),
            config,
            name: built.name,
            algorithm: built.algorithm,
            kind: built.kind,
            online: built.online,
            rewards,
            loss_at_reference: built.loss_at_reference,
            resolved,
            source,
        })
    }

    /// The algorithm, whose panics and hangs are told with its name; `when` says what it is called for, as `step 3`.
    pub(crate) fn guarded(&self, when: impl Into<String>) -> Guarded<'_> {
        Guarded::new(self.algorithm.as_ref(), when).named(&self.name).watched(self.watchdog.as_ref())
    }

    /// Reports a setting that turned out wrong after the file was read, with its place.
    pub(crate) fn blame(&self, error: Error) -> anyhow::Error {
        let Error::Setting { key, message } = &error else { return error.into() };
        let mut problems = self.source.problems.clone();
        blame(&self.source.root, key, message, &mut problems);
        problems.into_result().err().unwrap_or_else(|| error.into())
    }
}

/// Records a finding about the key at a dotted path.
pub(crate) fn blame(root: &Node, path: &str, message: &str, problems: &mut Problems) {
    let origin = root.find(path).map(|entry| entry.node.origin.clone());
    problems.push(origin, format!("`{path}`: {message}"));
}

/// Reads a file as run files are read, with every mistake at once: `defaults` of the form `key=value` are written where
/// it says nothing, `overrides` over what it says. Without a file these are all there is.
pub(crate) fn read_file<T: DeserializeOwned>(
    path: Option<&Path>,
    defaults: &[String],
    overrides: &[String],
) -> anyhow::Result<T> {
    let text = path.map(read_text).transpose()?.unwrap_or_default();
    let mut problems = Problems::new(path.unwrap_or(Path::new("defaults")), &text);
    let mut root = parse(&text, &mut problems);
    let absent = |default: &&String| default.split_once('=').is_none_or(|(key, _)| root.find(key).is_none());
    let defaults: Vec<String> = defaults.iter().filter(absent).cloned().collect();
    overrides::apply(&mut root, &defaults, &mut problems);
    overrides::apply(&mut root, overrides, &mut problems);
    let reading = read::<T>(&root, "", &mut problems);
    problems.into_result()?;
    reading.map(|reading| reading.value).context("nothing could be read")
}

fn read_text(path: &Path) -> anyhow::Result<String> {
    let bytes = std::fs::read(path).map_err(|error| crate::Usage(format!("{}: {error}", path.display())))?;
    String::from_utf8(bytes).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        let line = String::from_utf8_lossy(&error.as_bytes()[..valid]).matches('\n').count() + 1;
        crate::Usage(format!("{}:{line}: not UTF-8 text", path.display())).into()
    })
}

/// The file's tree; syntax errors are problems, and what could be read beside them is kept.
fn parse(text: &str, problems: &mut Problems) -> Node {
    let (table, errors) = DeTable::parse_recoverable(text);
    for error in errors {
        problems.push(error.span().map(Origin::File), error.message());
    }
    Node::from_table(table, &Origin::File)
}

fn resolve(config: &RunConfig, built: &Built, rewards: &[BuiltReward]) -> anyhow::Result<toml::Table> {
    let mut resolved =
        toml::Table::try_from(config).context("the configuration cannot be written as TOML")?;
    let algorithm = toml::Table::from_iter([(built.name.clone(), built.config.clone())]);
    resolved.insert("algorithm".into(), toml::Value::Table(algorithm));
    if !rewards.is_empty() {
        let sections = rewards.iter().map(|reward| (reward.name.clone(), reward.config.clone())).collect();
        resolved.insert("reward".into(), toml::Value::Table(sections));
    }
    Ok(resolved)
}
