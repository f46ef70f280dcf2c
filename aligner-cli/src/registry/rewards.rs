//! Kinds of rewards, and how each is built from a section `[reward.NAME]`.

use std::path::{Path, PathBuf};

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
    /// Whether it has a limit of its own on the time of a call.
    pub(crate) limits_itself: bool,
    /// Files, and directories of models, on which its scores depend.
    pub(crate) inputs: Vec<PathBuf>,
}

impl BuiltReward {
    /// Whether it is asked and logged, but not learned from.
    pub(crate) fn is_judge(&self) -> bool {
        self.weight == 0.0
    }
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
type Build = dyn Fn(&Node, &str, &mut Problems) -> Option<(Box<Make>, toml::Value)> + Send + Sync;

pub(super) struct Entry {
    pub(super) kind: &'static str,
    build: Box<Build>,
    limits_itself: bool,
    inputs: fn(&toml::Value) -> Vec<PathBuf>,
}

impl Entry {
    /// A kind whose settings are `C`; `check` says what is wrong with them, and gives what makes the reward.
    pub(super) fn new<C, M>(
        kind: &'static str,
        check: impl Fn(C) -> aligner_core::Result<M> + Send + Sync + 'static,
    ) -> Self
    where
        C: DeserializeOwned + Serialize,
        M: FnOnce(&RewardContext) -> anyhow::Result<Box<dyn Reward + Send>> + 'static,
    {
        let build = move |root: &Node, path: &str, problems: &mut Problems| {
            let (make, resolved) = configured(root, path, problems, &check)?;
            Some((Box::new(make) as Box<Make>, resolved))
        };
        Self { kind, build: Box::new(build), limits_itself: false, inputs: |_| Vec::new() }
    }

    /// The same kind, said to have a limit of its own on the time of a call.
    fn limiting_itself(self) -> Self {
        Self { limits_itself: true, ..self }
    }

    /// The same kind, said to depend on files that its section names.
    fn reading(self, inputs: fn(&toml::Value) -> Vec<PathBuf>) -> Self {
        Self { inputs, ..self }
    }
}

/// What every kind has, and no kind's own settings know of.
struct Common {
    kind: String,
    weight: f64,
    files: Vec<PathBuf>,
}

impl Common {
    /// Takes its keys out of the section `path`.
    fn take(root: &mut Node, path: &str, name: &str, problems: &mut Problems) -> Self {
        let mut common = Self { kind: name.to_string(), weight: 1.0, files: Vec::new() };
        let own = root.find(path).map_or_else(Vec::new, |section| section.node.entries().to_vec());
        for entry in own {
            let place = format!("{path}.{}", entry.key);
            let value = &entry.node.value;
            let expected = match (entry.key.as_str(), value) {
                ("kind", Value::String(text)) => {
                    common.kind.clone_from(text);
                    None
                }
                ("weight", Value::Float(number)) if number.is_finite() => {
                    common.weight = *number;
                    None
                }
                ("weight", Value::Integer(number)) => {
                    common.weight = *number as f64;
                    None
                }
                ("files", Value::Array(items)) => common.add_files(items),
                ("kind", _) => Some("a string"),
                ("weight", _) => Some("a finite number"),
                ("files", _) => Some(FILES),
                _ => continue,
            };
            if let Some(expected) = expected {
                blame(root, &place, &format!("expected {expected}, got {}", value.kind()), problems);
            }
            root.remove(&place);
        }
        for file in common.files.iter().filter(|file| !file.is_file()) {
            blame(root, path, &format!("`files`: {}: no such file", file.display()), problems);
        }
        common
    }

    /// Adds the items of `files`; says what was expected where one is no text.
    fn add_files(&mut self, items: &[Node]) -> Option<&'static str> {
        for item in items {
            let Value::String(text) = &item.value else { return Some(FILES) };
            self.files.push(text.into());
        }
        None
    }

    fn write(&self, mut config: toml::Value) -> toml::Value {
        if let Some(table) = config.as_table_mut() {
            table.insert("kind".into(), self.kind.as_str().into());
            table.insert("weight".into(), self.weight.into());
            if !self.files.is_empty() {
                let files = self.files.iter().map(|file| file.display().to_string());
                table.insert("files".into(), files.collect::<Vec<_>>().into());
            }
        }
        config
    }
}

const FILES: &str = "a list of paths";

/// Builds what the sections `[reward.NAME]` describe, in the file's order.
pub(super) fn build(entries: &[Entry], root: &Node, problems: &mut Problems) -> Vec<BuiltReward> {
    let sections = root.find("reward").map_or(&[][..], |entry| entry.node.entries());
    let mut built = Vec::new();
    for section in sections {
        let (name, path) = (&section.key, format!("reward.{}", section.key));
        let mut rest = root.clone();
        let common = Common::take(&mut rest, &path, name, problems);
        let Some(entry) = entries.iter().find(|entry| entry.kind == common.kind) else {
            let kinds: Vec<&str> = entries.iter().map(|entry| entry.kind).collect();
            problems
                .push(Some(section.origin.clone()), unknown("reward", &common.kind, " in [reward]", &kinds));
            continue;
        };
        if let Some((make, config)) = (entry.build)(&rest, &path, problems) {
            let inputs = [(entry.inputs)(&config), common.files.clone()].concat();
            built.push(BuiltReward {
                name: name.clone(),
                weight: common.weight,
                config: common.write(config),
                make,
                limits_itself: entry.limits_itself,
                inputs,
            });
        }
    }
    built
}

/// A kind that needs nothing of the run.
pub(super) fn simple<C, R>(
    kind: &'static str,
    build: impl Fn(C) -> aligner_core::Result<R> + Send + Sync + 'static,
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
        simple("json_schema", JsonSchema::new).reading(|config| path(config, "schema_file")),
        simple("format", Format::new),
        simple("length", Length::new),
        simple("task", TaskReward::new),
        simple("process", ProcessReward::new).limiting_itself().reading(of_program),
        simple("remote", RemoteReward::new).limiting_itself(),
        Entry::new("model", |config: ModelSection| {
            Ok(move |context: &RewardContext| model(&config, context))
        })
        .reading(|config| path(config, "path")),
    ]
}

/// The path at a key; none where it is not set.
fn path(config: &toml::Value, key: &str) -> Vec<PathBuf> {
    config.get(key).and_then(toml::Value::as_str).map(PathBuf::from).into_iter().collect()
}

/// What says how a program scores: itself, where its command is a path below where it runs, and the first argument that is a
/// file. Programs of the system change with the system, and further files may be what it writes.
fn of_program(config: &toml::Value) -> Vec<PathBuf> {
    let directory = path(config, "directory").pop().unwrap_or_default();
    let words = config.get("command").and_then(toml::Value::as_array).map_or(&[][..], Vec::as_slice);
    let mut words = words.iter().filter_map(toml::Value::as_str);
    let program = words.next().filter(|word| word.contains('/') && Path::new(word).is_relative());
    let mut files = words.map(|word| directory.join(word)).filter(|path| path.is_file());
    let script = files.next();
    program.map(|word| directory.join(word)).filter(|path| path.is_file()).into_iter().chain(script).collect()
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
