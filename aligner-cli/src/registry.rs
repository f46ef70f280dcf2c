//! Names of algorithms, and how each is built from its section of the run file.

use aligner_algos::{Dpo, DpoConfig, RewardModel, RewardModelConfig, Sft, SftConfig};
use aligner_core::{Algorithm, Error};
use aligner_data::Kind;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::config::{Node, Problems, Reading, Unsound, blame, read, unknown};

/// An algorithm as its section of the run file describes it.
pub(crate) struct Built {
    pub(crate) name: String,
    pub(crate) algorithm: Box<dyn Algorithm>,
    /// The section with its defaults.
    pub(crate) config: toml::Value,
    /// The rows that it trains on, where it has said so.
    pub(crate) kind: Option<Kind>,
    /// Its loss where policy and reference are equal, where it has said so.
    pub(crate) loss_at_reference: Option<f64>,
}

type Build = dyn Fn(&Node, &str, &mut Problems) -> Option<(Box<dyn Algorithm>, toml::Value)>;

/// The algorithms that a run file may name.
///
/// ```
/// use aligner_core::{Algorithm, Batch, Forward, LossOutput, Result};
///
/// #[derive(serde::Serialize, serde::Deserialize)]
/// #[serde(deny_unknown_fields)]
/// struct MineConfig { scale: f64 }
/// struct Mine(MineConfig);
///
/// impl Algorithm for Mine {
///     fn loss(&self, out: &Forward, _: &Batch) -> Result<LossOutput> {
///         Ok(LossOutput::new(out.logps()?.clone().sum().mul_scalar(-self.0.scale)))
///     }
/// }
///
/// // `[algorithm.mine]` with `scale = 0.5` now works in a run file.
/// let registry = aligner_cli::Registry::built_in().with("mine", |config| Ok(Mine(config)));
/// assert!(registry.names().any(|name| name == "mine"));
/// ```
pub struct Registry {
    entries: Vec<Entry>,
}

struct Entry {
    name: &'static str,
    build: Box<Build>,
    kind: Option<Kind>,
    loss_at_reference: Option<f64>,
}

impl Registry {
    /// The algorithms that the program comes with: `sft`, `reward_model` and `dpo`.
    pub fn built_in() -> Self {
        Self { entries: Vec::new() }
            .with("sft", |config: SftConfig| Ok(Sft::new(config)))
            .on(Kind::Sft)
            .with("reward_model", |config: RewardModelConfig| RewardModel::new(config))
            .on(Kind::Preference)
            .with("dpo", |config: DpoConfig| Dpo::new(config))
            .on(Kind::Preference)
            .starting_at(Dpo::LOSS_AT_REFERENCE)
    }

    /// These and one more, built from the section `[algorithm.NAME]`; a name that is taken is replaced.
    #[must_use]
    pub fn with<C, A>(
        mut self,
        name: &'static str,
        build: impl Fn(C) -> aligner_core::Result<A> + 'static,
    ) -> Self
    where
        C: DeserializeOwned + Serialize,
        A: Algorithm + 'static,
    {
        let build = move |root: &Node, path: &str, problems: &mut Problems| {
            let Reading { value, unsound } = read::<C>(root, path, problems)?;
            let resolved = toml::Value::try_from(&value);
            match (build(value), resolved) {
                (Ok(algorithm), Ok(resolved)) => Some((Box::new(algorithm) as Box<dyn Algorithm>, resolved)),
                (Err(error), _) => {
                    report(root, path, &error, &unsound, problems);
                    None
                }
                (_, Err(error)) => {
                    blame(root, path, &format!("cannot be written as TOML: {error}"), problems);
                    None
                }
            }
        };
        self.entries.retain(|entry| entry.name != name);
        self.entries.push(Entry { name, build: Box::new(build), kind: None, loss_at_reference: None });
        self
    }

    /// Says that the algorithm that was added last trains on rows of this kind: others are refused
    /// before anything is loaded.
    #[must_use]
    pub fn on(mut self, kind: Kind) -> Self {
        if let Some(entry) = self.entries.last_mut() {
            entry.kind = Some(kind);
        }
        self
    }

    /// Says which loss, in nats, the algorithm that was added last has where the policy equals its
    /// reference: the checks before step 1 then hold a run that starts there to it.
    #[must_use]
    pub fn starting_at(mut self, loss: f64) -> Self {
        if let Some(entry) = self.entries.last_mut() {
            entry.loss_at_reference = Some(loss);
        }
        self
    }

    /// The names, in the order in which they were added.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.entries.iter().map(|entry| entry.name)
    }

    /// Builds the one algorithm that the run file names.
    pub(crate) fn build(&self, root: &Node, problems: &mut Problems) -> Option<Built> {
        let sections = root.find("algorithm")?.node.entries();
        let mut built = Vec::new();
        for section in sections {
            let name = section.key.as_str();
            let Some(entry) = self.entries.iter().find(|entry| entry.name == name) else {
                let names: Vec<&str> = self.names().collect();
                problems.push(
                    Some(section.origin.clone()),
                    unknown("algorithm", name, " in [algorithm]", &names),
                );
                continue;
            };
            if let Some((algorithm, config)) = (entry.build)(root, &format!("algorithm.{name}"), problems) {
                let (kind, loss_at_reference) = (entry.kind, entry.loss_at_reference);
                built.push(Built { name: name.to_string(), algorithm, config, kind, loss_at_reference });
            }
        }
        if let [_, second, ..] = sections {
            let message = format!("one algorithm trains a run, and this is the second: `{}`", second.key);
            problems.push(Some(second.origin.clone()), message);
        }
        if sections.is_empty() {
            problems.push(None, "[algorithm] names no algorithm; write a section such as [algorithm.dpo]");
        }
        built.pop()
    }
}

/// A builder's own finding; the key of a [`Error::Setting`] may be full or relative to the section.
fn report(root: &Node, path: &str, error: &Error, unsound: &Unsound, problems: &mut Problems) {
    let Error::Setting { key, message } = error else {
        blame(root, path, &error.to_string(), problems);
        return;
    };
    let key = if key.starts_with(path) { key.clone() } else { format!("{path}.{key}") };
    if !unsound.holds(&key) {
        blame(root, &key, message, problems);
    }
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_list().entries(self.names()).finish()
    }
}
