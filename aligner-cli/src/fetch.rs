//! `aligner fetch`: models and data sets from the Hugging Face hub.
//!
//! The hub's own environment variables hold: `HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME`, `HF_HUB_CACHE` and
//! `HF_HUB_OFFLINE`. Downloads go to the cache that the Python tools share, and go on where they broke
//! off.

mod hub;

use std::path::PathBuf;

use anyhow::{Context as _, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};

use crate::Usage;
use crate::progress::{result, say};
use hub::{Hub, RemoteFile};

/// Fetch a model or a data set from the Hugging Face hub and print where it lies.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The repository, as in `HuggingFaceTB/SmolLM2-135M-Instruct`.
    repository: String,
    /// It is a data set.
    #[arg(long)]
    dataset: bool,
    /// Branch, tag or commit.
    #[arg(long, default_value = "main")]
    revision: String,
    /// Only files of this name; `*` stands for anything; may be repeated. Without it: weights,
    /// tokenizer and configuration of a model, rows of a data set.
    #[arg(long, value_name = "PATTERN")]
    include: Vec<String>,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    check_name("repository", &arguments.repository, 1)?;
    check_name("revision", &arguments.revision, 8)?;
    let hub = Hub::from_environment(&arguments.repository, arguments.dataset, &arguments.revision)?;
    if hub.offline() {
        result(&hub.cached()?.display().to_string());
        return Ok(());
    }
    let files = wanted(hub.files()?, arguments);
    if files.is_empty() {
        bail!(
            "{}: no file of the repository is asked for by {}",
            hub.shown(),
            patterns(arguments).join(", ")
        );
    }
    let mut snapshot = None;
    for file in &files {
        let path = hub.download(file)?;
        say(&format!("{}  {}", size(file.size), file.name));
        snapshot = path.ancestors().nth(file.name.split('/').count()).map(PathBuf::from);
    }
    result(&snapshot.context("the hub's cache has no directory")?.display().to_string());
    Ok(())
}

/// The name goes into addresses and paths: letters, digits and `-_.` only, and few slashes.
fn check_name(what: &str, name: &str, slashes: usize) -> anyhow::Result<()> {
    let plain = |part: &str| {
        let dots = part.chars().all(|c| c == '.');
        !dots && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    let good = name.split('/').all(plain) && name.matches('/').count() <= slashes;
    ensure!(
        good,
        Usage(format!(
            "`{name}`: expected a {what} such as `owner/name` of letters, digits, `-`, `_` and `.`"
        ))
    );
    Ok(())
}

const OF_MODELS: [&str; 5] = ["*.json", "*.safetensors", "*.jinja", "*.gguf", "tokenizer.model"];
const OF_DATA_SETS: [&str; 4] = ["*.parquet", "*.json", "*.jsonl", "README.md"];

fn patterns(arguments: &Arguments) -> Vec<&str> {
    match (arguments.include.as_slice(), arguments.dataset) {
        ([], true) => OF_DATA_SETS.to_vec(),
        ([], false) => OF_MODELS.to_vec(),
        (include, _) => include.iter().map(String::as_str).collect(),
    }
}

fn wanted(files: Vec<RemoteFile>, arguments: &Arguments) -> Vec<RemoteFile> {
    let mut patterns = patterns(arguments);
    if patterns == OF_MODELS {
        patterns.extend(pickles(files.iter().map(|file| file.name.as_str())));
    }
    files.into_iter().filter(|file| patterns.iter().any(|pattern| matches(pattern, &file.name))).collect()
}

/// Pickled weights are asked for where a repository has no others.
fn pickles<'a>(mut names: impl Iterator<Item = &'a str>) -> Option<&'static str> {
    let others = names.any(|name| matches("*.safetensors", name) || matches("*.gguf", name));
    (!others).then_some("pytorch_model*.bin")
}

/// Whether `name` is `pattern`, in which `*` stands for anything.
fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((head, rest)) => name.strip_prefix(head).is_some_and(|tail| {
            tail.char_indices().map(|(at, _)| at).chain([tail.len()]).any(|at| matches(rest, &tail[at..]))
        }),
    }
}

fn size(bytes: Option<u64>) -> String {
    match bytes {
        None => "       ?".into(),
        Some(bytes) => format!("{:>8}", indicatif::HumanBytes(bytes).to_string()),
    }
}

/// A download's bar; silent where standard error is no terminal.
#[derive(Debug)]
pub(crate) struct DownloadBar(ProgressBar);

impl DownloadBar {
    fn new() -> Self {
        let style = ProgressStyle::with_template(
            "{msg:32!}  {bar:28.blue}  {bytes}/{total_bytes}  {bytes_per_sec}  {eta}",
        );
        let bar = ProgressBar::new(0);
        Self(style.map_or_else(|_| bar.clone(), |style| bar.clone().with_style(style)))
    }
}

impl hf_hub::api::Progress for DownloadBar {
    fn init(&mut self, size: usize, name: &str) {
        self.0.set_length(size as u64);
        self.0.set_position(0);
        self.0.set_message(name.to_string());
    }

    fn update(&mut self, size: usize) {
        self.0.inc(size as u64);
    }

    fn finish(&mut self) {
        self.0.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_stand_for_anything() {
        assert!(matches("*.safetensors", "model-00001-of-00002.safetensors"));
        assert!(matches("data/*-test*.parquet", "data/a-test-0.parquet"));
        assert!(!matches("*.json", "model.jsonl"));
        assert!(!matches("model", "model.json"));
    }

    #[test]
    fn pickles_are_fetched_where_there_is_nothing_else() {
        let of = |names: &[&str]| pickles(names.iter().copied());
        assert_eq!(of(&["config.json", "pytorch_model.bin"]), Some("pytorch_model*.bin"));
        assert_eq!(of(&["pytorch_model.bin", "model.safetensors"]), None);
        assert_eq!(of(&["model-q8_0.gguf"]), None);
    }

    #[test]
    fn names_that_leave_the_cache_are_refused() {
        assert!(check_name("repository", "owner/name-1.0_x", 1).is_ok());
        for name in ["../x", "a/b/c", "a b", "a/..", ""] {
            assert!(check_name("repository", name, 1).is_err(), "{name}");
        }
    }
}
