//! Names of algorithms, and how each is built from its section of the run file.

mod rewards;

use aligner_algos::{
    BestOfN, BestOfNConfig, Dpo, DpoConfig, Grpo, GrpoConfig, Ppo, PpoConfig, Reinforce, ReinforceConfig,
    Rejection, RejectionConfig, RewardModel, RewardModelConfig, Rloo, RlooConfig, Sft, SftConfig,
};
use aligner_core::{Algorithm, Error, Reward};
use aligner_data::Kind;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::config::{Node, Problems, Reading, Unsound, blame, read, unknown};

pub(crate) use rewards::{BuiltReward, RewardContext};

/// An algorithm as its section of the run file describes it.
pub(crate) struct Built {
    pub(crate) name: String,
    pub(crate) algorithm: Box<dyn Algorithm>,
    /// The section with its defaults.
    pub(crate) config: toml::Value,
    /// The rows that it trains on, where it has said so.
    pub(crate) kind: Option<Kind>,
    /// Whether it learns from samples of its own.
    pub(crate) online: bool,
    /// Whether it takes a KL penalty off the rewards, whose coefficient a step may set.
    pub(crate) penalising: bool,
    /// Its loss where policy and reference are equal, where it has said so.
    pub(crate) loss_at_reference: Option<f64>,
}

type Build = dyn Fn(&Node, &str, &mut Problems) -> Option<(Box<dyn Algorithm>, toml::Value)> + Send + Sync;

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
    rewards: Vec<rewards::Entry>,
}

struct Entry {
    name: &'static str,
    build: Box<Build>,
    kind: Option<Kind>,
    online: bool,
    penalising: bool,
    loss_at_reference: Option<f64>,
}

impl Registry {
    /// The algorithms and rewards that the program comes with.
    pub fn built_in() -> Self {
        Self { entries: Vec::new(), rewards: rewards::built_in() }
            .with("sft", |config: SftConfig| Ok(Sft::new(config)))
            .on(Kind::Sft)
            .with("reward_model", |config: RewardModelConfig| RewardModel::new(config))
            .on(Kind::Preference)
            .with("dpo", |config: DpoConfig| Dpo::new(config))
            .on(Kind::Preference)
            .starting_at(Dpo::LOSS_AT_REFERENCE)
            .with("ppo", |config: PpoConfig| Ppo::new(config))
            .online()
            .penalising()
            .with("reinforce", |config: ReinforceConfig| Reinforce::new(config))
            .online()
            .penalising()
            .with("rloo", |config: RlooConfig| Rloo::new(config))
            .online()
            .penalising()
            .with("grpo", |config: GrpoConfig| Grpo::new(config))
            .online()
            .with("rejection", |config: RejectionConfig| Rejection::new(config))
            .online()
            .with("best_of_n_dpo", |config: BestOfNConfig| BestOfN::new(config))
            .online()
    }

    /// These and one more, built from the section `[algorithm.NAME]`; a name that is taken is replaced.
    #[must_use]
    pub fn with<C, A>(
        mut self,
        name: &'static str,
        build: impl Fn(C) -> aligner_core::Result<A> + Send + Sync + 'static,
    ) -> Self
    where
        C: DeserializeOwned + Serialize,
        A: Algorithm + 'static,
    {
        let build = move |root: &Node, path: &str, problems: &mut Problems| {
            let (algorithm, resolved) = configured(root, path, problems, &build)?;
            Some((Box::new(algorithm) as Box<dyn Algorithm>, resolved))
        };
        self.entries.retain(|entry| entry.name != name);
        let build = Box::new(build);
        self.entries.push(Entry {
            name,
            build,
            kind: None,
            online: false,
            penalising: false,
            loss_at_reference: None,
        });
        self
    }

    /// These and one more kind of reward, built from a section `[reward.KIND]`, or from `[reward.NAME]` with
    /// `kind = "KIND"`; a kind that is taken is replaced.
    #[must_use]
    pub fn with_reward<C, R>(
        mut self,
        kind: &'static str,
        build: impl Fn(C) -> aligner_core::Result<R> + Send + Sync + 'static,
    ) -> Self
    where
        C: DeserializeOwned + Serialize,
        R: Reward + Send + 'static,
    {
        self.rewards.retain(|entry| entry.kind != kind);
        self.rewards.push(rewards::simple(kind, build));
        self
    }

    /// Says that the algorithm that was added last learns from samples that the policy draws itself: it is given
    /// prompts, and rewards say what the samples are worth.
    #[must_use]
    pub fn online(mut self) -> Self {
        if let Some(entry) = self.entries.last_mut() {
            entry.online = true;
            entry.kind = Some(Kind::Prompt);
        }
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

    /// Says that the algorithm that was added last takes a KL penalty off the rewards in its credit, by
    /// [`aligner_core::StepBatch::kl_coef`] where that is set: so `rollout.adaptive_kl` may lead it.
    #[must_use]
    pub fn penalising(mut self) -> Self {
        if let Some(entry) = self.entries.last_mut() {
            entry.penalising = true;
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

    /// What the run file's sections `[reward.NAME]` describe.
    pub(crate) fn rewards(&self, root: &Node, problems: &mut Problems) -> Vec<BuiltReward> {
        rewards::build(&self.rewards, root, problems)
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
                let Entry { kind, online, penalising, loss_at_reference, .. } = *entry;
                built.push(Built {
                    name: name.to_string(),
                    algorithm,
                    config,
                    kind,
                    online,
                    penalising,
                    loss_at_reference,
                });
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

/// What `build` makes of the section at `path`, and the section with its defaults; none where something is wrong with it.
fn configured<C: DeserializeOwned + Serialize, T>(
    root: &Node,
    path: &str,
    problems: &mut Problems,
    build: impl Fn(C) -> aligner_core::Result<T>,
) -> Option<(T, toml::Value)> {
    let Reading { value, unsound } = read::<C>(root, path, problems)?;
    let resolved = toml::Value::try_from(&value);
    match (build(value), resolved) {
        (Ok(built), Ok(resolved)) => Some((built, resolved)),
        (Err(error), _) => {
            report(root, path, &error, &unsound, problems);
            None
        }
        (_, Err(error)) => {
            blame(root, path, &format!("cannot be written as TOML: {error}"), problems);
            None
        }
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
