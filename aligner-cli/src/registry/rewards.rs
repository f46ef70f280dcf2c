//! Kinds of rewards, and how each is built from a section `[reward.NAME]`.

use std::path::PathBuf;

use aligner_algos::rewards::{
    Answer, Format, JsonSchema, Length, Lexicon, LexiconConfig, ModelReward, ModelRewardConfig,
    ProcessReward, RegexReward, RemoteReward, TaskReward,
};
use aligner_core::{Device, Reward};
use aligner_data::Tokenizer;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::configured;
use crate::config::{Node, Problems, Value, blame, unknown};
use crate::wire::LoadedModel;

/// What a reward of the run file is, before the run has a device.
pub(crate) struct BuiltReward {
    /// The section's name: under which its scores are logged.
    pub(crate) name: String,
    /// What its scores are multiplied by.
    pub(crate) weight: f64,
    /// The section with its defaults.
    pub(crate) config: toml::Value,
    pub(crate) make: Box<Make>,
}

/// Makes the reward; what is large is loaded here.
pub(crate) type Make = dyn FnOnce(&RewardContext) -> anyhow::Result<Box<dyn Reward + Send>>;

/// What a reward may need of the run.
pub(crate) struct RewardContext {
    pub(crate) device: Device,
    /// The policy's tokenizer.
    pub(crate) tokenizer: Tokenizer,
    /// Most tokens of a pass.
    pub(crate) micro_batch_tokens: usize,
}

/// Reads a section: the reward's maker and its configuration with defaults.
type Build = dyn Fn(&Node, &str, &mut Problems) -> Option<(Box<Make>, toml::Value)>;

pub(super) struct Entry {
    pub(super) kind: &'static str,
    build: Box<Build>,
}

impl Entry {
    /// A kind whose settings are `C`; `check` says what is wrong with them, and gives what makes the reward.
    pub(super) fn new<C, M>(
        kind: &'static str,
        check: impl Fn(C) -> aligner_core::Result<M> + 'static,
    ) -> Self
    where
        C: DeserializeOwned + Serialize,
        M: FnOnce(&RewardContext) -> anyhow::Result<Box<dyn Reward + Send>> + 'static,
    {
        let build = move |root: &Node, path: &str, problems: &mut Problems| {
            let (make, resolved) = configured(root, path, problems, &check)?;
            Some((Box::new(make) as Box<Make>, resolved))
        };
        Self { kind, build: Box::new(build) }
    }
}

/// Builds what the sections `[reward.NAME]` describe, in the file's order.
pub(super) fn build(entries: &[Entry], root: &Node, problems: &mut Problems) -> Vec<BuiltReward> {
    let sections = root.find("reward").map_or(&[][..], |entry| entry.node.entries());
    let mut built = Vec::new();
    for section in sections {
        let path = format!("reward.{}", section.key);
        // These two belong to every kind, and the kind's own settings know nothing of them.
        let (mut rest, mut kind, mut weight) = (root.clone(), section.key.clone(), 1.0);
        for own in section.node.entries() {
            let place = format!("{path}.{}", own.key);
            match (own.key.as_str(), &own.node.value) {
                ("kind", Value::String(text)) => kind.clone_from(text),
                ("weight", Value::Float(number)) if number.is_finite() => weight = *number,
                ("weight", Value::Integer(number)) => weight = *number as f64,
                ("kind", other) => {
                    blame(root, &place, &format!("expected a string, got {}", other.kind()), problems);
                }
                ("weight", other) => {
                    blame(root, &place, &format!("expected a finite number, got {}", other.kind()), problems);
                }
                _ => continue,
            }
            rest.remove(&place);
        }
        let Some(entry) = entries.iter().find(|entry| entry.kind == kind) else {
            let kinds: Vec<&str> = entries.iter().map(|entry| entry.kind).collect();
            problems.push(Some(section.origin.clone()), unknown("reward", &kind, " in [reward]", &kinds));
            continue;
        };
        if let Some((make, config)) = (entry.build)(&rest, &path, problems) {
            let config = with_own(config, &kind, weight);
            built.push(BuiltReward { name: section.key.clone(), weight, config, make });
        }
    }
    built
}

fn with_own(mut config: toml::Value, kind: &str, weight: f64) -> toml::Value {
    if let Some(table) = config.as_table_mut() {
        table.insert("kind".into(), kind.into());
        table.insert("weight".into(), weight.into());
    }
    config
}

/// A kind that needs nothing of the run.
pub(super) fn simple<C, R>(
    kind: &'static str,
    build: impl Fn(C) -> aligner_core::Result<R> + 'static,
) -> Entry
where
    C: DeserializeOwned + Serialize,
    R: Reward + Send + 'static,
{
    Entry::new(kind, move |config: C| {
        let reward = build(config)?;
        Ok(move |_: &RewardContext| Ok(Box::new(reward) as Box<dyn Reward + Send>))
    })
}

/// The kinds that the program comes with.
pub(super) fn built_in() -> Vec<Entry> {
    vec![
        simple("lexicon", |config: LexiconConfig| Ok(Lexicon::new(config))),
        simple("regex", RegexReward::new),
        simple("answer", Answer::new),
        simple("json_schema", JsonSchema::new),
        simple("format", Format::new),
        simple("length", Length::new),
        simple("task", TaskReward::new),
        simple("process", ProcessReward::new),
        simple("remote", RemoteReward::new),
        Entry::new("model", |config: ModelSection| {
            Ok(move |context: &RewardContext| model(&config, context))
        }),
    ]
}

/// `[reward.NAME]` with `kind = "model"`: a reward model of our own.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelSection {
    /// A model with a scalar head, or an adapter of one.
    path: PathBuf,
    /// Which of the head's outputs is the score.
    #[serde(default)]
    output: usize,
}

fn model(config: &ModelSection, context: &RewardContext) -> anyhow::Result<Box<dyn Reward + Send>> {
    let judge = LoadedModel::open(&config.path, None, None)?;
    ModelReward::check_vocabulary(&context.tokenizer, &judge.tokenizer)?;
    let model = judge.policy(&context.device)?;
    let settings =
        ModelRewardConfig { output: config.output, micro_batch_tokens: context.micro_batch_tokens };
    Ok(Box::new(ModelReward::of_model(model, settings)?))
}
