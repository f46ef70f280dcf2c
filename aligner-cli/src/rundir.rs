//! The directory of one run: what is in it, and who may write there.

mod checkpoint;
mod events;
mod metrics_log;
mod samples;

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use aligner_core::Error;
use aligner_core::weights::atomic_write;
use anyhow::Context as _;

pub(crate) use checkpoint::{Checkpoints, TrainState, discard, remove_partial, write_directory};
pub(crate) use events::EventWriter;
pub use metrics_log::Record;
pub(crate) use metrics_log::{MetricsLog, read as read_metrics};
pub use samples::Answer;
pub(crate) use samples::{read as read_answers, write as write_answers};

use crate::Usage;

/// What to do with a directory that already holds a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Existing {
    /// Refuse to touch it.
    Refuse,
    /// Go on from its newest checkpoint.
    Resume,
    /// Remove that run's files first.
    Overwrite,
}

/// An opened run directory, locked against other processes.
#[derive(Debug)]
pub(crate) struct RunDir {
    path: PathBuf,
    /// Whether what an earlier run has left goes when this one begins.
    anew: bool,
    /// Held until the process ends; the kernel lets go of it also after a kill.
    _lock: File,
}

/// What `--overwrite` removes, the directories first: a kill half way leaves what is still a run. The
/// resolved configuration is written over, and the reference's log-probabilities stay: their keys
/// are the content of weights and tokens, so they are right for any run.
const OWN: [&str; 5] = ["checkpoints", "model", "metrics.jsonl", "samples.jsonl", "report.html"];
const RESOLVED: &str = "resolved.toml";
const LOCK: &str = ".lock";
const EVENTS: &str = "events.out.tfevents.";

impl RunDir {
    /// Whether a new run here would remove or replace `path`.
    pub(crate) fn writes_over(&self, path: &Path) -> bool {
        let (Ok(path), Ok(dir)) = (path.canonicalize(), self.path.canonicalize()) else { return false };
        OWN.iter().any(|own| path.starts_with(dir.join(own)))
    }

    /// Makes or opens the directory for a run with the configuration `resolved`. Nothing of an
    /// earlier run changes before [`Self::begin`].
    ///
    /// # Errors
    /// [`Usage`] where it holds another run, or something that is no run; a directory in use.
    pub(crate) fn open(path: &Path, resolved: &toml::Table, existing: Existing) -> anyhow::Result<Self> {
        let shown = path.display();
        let file = path.join(RESOLVED);
        let begun = is_begun(path);
        if begun && existing == Existing::Refuse {
            return Err(Usage(format!("{shown}: {}", describe(path))).into());
        }
        if !file.exists() && is_foreign(path) {
            let message = "is not empty, and what it holds is no run; choose another `run.dir`";
            return Err(Usage(format!("{shown}: {message}")).into());
        }
        if begun && existing == Existing::Resume {
            same_run(&file, resolved)?;
        }
        fs::create_dir_all(path).map_err(Error::io(path))?;
        let anew = !begun || existing == Existing::Overwrite;
        Ok(Self { path: path.to_path_buf(), anew, _lock: lock(path)? })
    }

    /// Writes the configuration, and removes an earlier run's files where this one starts anew: to be
    /// called when the run's model is loaded, for a model that is broken must not cost the old run.
    pub(crate) fn begin(&self, resolved: &toml::Table) -> anyhow::Result<()> {
        if self.anew {
            self.clear()?;
        }
        // A resumed run may have other intervals: the file says what holds now.
        let text = toml::to_string_pretty(resolved).context("the configuration cannot be written as TOML")?;
        Ok(atomic_write(&self.path.join(RESOLVED), |out| out.write_all(text.as_bytes()))?)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The step to go on from: that of the newest checkpoint, unless the run starts anew.
    pub(crate) fn newest_step(&self) -> Option<u64> {
        if self.anew { None } else { self.checkpoints().steps().last().copied() }
    }

    pub(crate) fn checkpoints(&self) -> Checkpoints {
        Checkpoints::new(self.path.join("checkpoints"))
    }

    /// Where the trained model goes.
    pub(crate) fn model(&self) -> PathBuf {
        self.path.join("model")
    }

    /// Where the reference's log-probabilities are kept by default.
    pub(crate) fn reference_cache(&self) -> PathBuf {
        self.path.join("reference.cache")
    }

    pub(crate) fn metrics(&self) -> PathBuf {
        self.path.join("metrics.jsonl")
    }

    pub(crate) fn samples(&self) -> PathBuf {
        self.path.join("samples.jsonl")
    }

    pub(crate) fn report(&self) -> PathBuf {
        self.path.join("report.html")
    }

    /// Removes what `TensorBoard` would still show of a run that starts anew.
    pub(crate) fn remove_events(&self) -> anyhow::Result<()> {
        for entry in fs::read_dir(&self.path).map_err(Error::io(&self.path))?.flatten() {
            if entry.file_name().to_string_lossy().starts_with(EVENTS) {
                fs::remove_file(entry.path()).map_err(Error::io(entry.path()))?;
            }
        }
        Ok(())
    }

    fn clear(&self) -> anyhow::Result<()> {
        self.remove_events()?;
        for path in OWN.iter().map(|name| self.path.join(name)) {
            if path.is_dir() {
                discard(&path)?;
            } else if path.exists() {
                fs::remove_file(&path).map_err(Error::io(&path))?;
            }
        }
        Ok(())
    }
}

/// Whether a run has left anything that a new one would lose.
fn is_begun(path: &Path) -> bool {
    let logged = fs::metadata(path.join("metrics.jsonl")).is_ok_and(|file| file.len() > 0);
    path.join(RESOLVED).exists()
        && (logged || path.join("checkpoints").exists() || path.join("model").exists())
}

fn describe(path: &Path) -> String {
    let state = if path.join("model").exists() {
        "already holds a finished run".to_string()
    } else {
        match Checkpoints::new(path.join("checkpoints")).steps().last() {
            Some(step) => format!("already holds a run with a checkpoint at step {step}"),
            None => "already holds a run without a checkpoint".to_string(),
        }
    };
    format!("{state}; `--resume` continues it, `--overwrite` starts it anew")
}

/// Whether there is anything in a directory that holds no run.
fn is_foreign(path: &Path) -> bool {
    let Ok(entries) = fs::read_dir(path) else { return false };
    // A run killed in its first moments leaves hidden files only.
    entries.flatten().any(|entry| !entry.file_name().to_string_lossy().starts_with('.'))
}

fn lock(path: &Path) -> anyhow::Result<File> {
    let name = path.join(LOCK);
    let open = File::options().write(true).create(true).truncate(false).open(&name);
    let file = open.map_err(Error::io(&name))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => {
            Err(Usage(format!("{}: another process is training here", path.display())).into())
        }
        Err(TryLockError::Error(error)) => Err(Error::io(&name)(error).into()),
    }
}

/// Keys of `[run]` that change neither the weights nor their order of training.
const FREE: [&str; 7] =
    ["dir", "eval_every", "save_every", "keep_last", "sample_prompts", "sample_tokens", "preflight"];

/// Checks that a resumed run is the run that was begun: else its weights would be those of neither.
fn same_run(file: &Path, resolved: &toml::Table) -> anyhow::Result<()> {
    let text = fs::read_to_string(file).map_err(Error::io(file))?;
    let begun: toml::Table = text.parse().with_context(|| file.display().to_string())?;
    let mut changed = Vec::new();
    differences("", &strip(begun), &strip(resolved.clone()), &mut changed);
    if changed.is_empty() {
        return Ok(());
    }
    let message =
        format!("{}: the run was begun with other settings:\n  {}", file.display(), changed.join("\n  "));
    Err(Usage(message).into())
}

fn strip(mut table: toml::Table) -> toml::Table {
    table.remove("preflight");
    if let Some(run) = table.get_mut("run").and_then(toml::Value::as_table_mut) {
        run.retain(|key, _| !FREE.contains(&key));
    }
    table
}

fn differences(prefix: &str, begun: &toml::Table, now: &toml::Table, changed: &mut Vec<String>) {
    let keys: std::collections::BTreeSet<&String> = begun.keys().chain(now.keys()).collect();
    for key in keys {
        let name = format!("{prefix}{key}");
        match (begun.get(key), now.get(key)) {
            (Some(toml::Value::Table(a)), Some(toml::Value::Table(b))) => {
                differences(&format!("{name}."), a, b, changed);
            }
            (a, b) if a == b => {}
            (a, b) => {
                let show =
                    |value: Option<&toml::Value>| value.map_or("unset".to_string(), ToString::to_string);
                changed.push(format!("{name} was {}, is now {}", show(a), show(b)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(text: &str) -> toml::Table {
        text.parse().unwrap()
    }

    /// Opens a directory and begins the run, and ends the process that did so.
    fn begin(path: &Path, resolved: &toml::Table, existing: Existing) {
        RunDir::open(path, resolved, existing).unwrap().begin(resolved).unwrap();
    }

    #[test]
    fn a_directory_with_a_run_is_not_touched_unless_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run");
        let resolved = table("[run]\nseed = 1\nsave_every = 1\n");
        begin(&path, &resolved, Existing::Refuse);
        // Nothing has happened yet: a second start loses nothing.
        begin(&path, &resolved, Existing::Refuse);
        fs::write(path.join("metrics.jsonl"), "{}").unwrap();
        let message = RunDir::open(&path, &resolved, Existing::Refuse).unwrap_err().to_string();
        assert!(message.contains("already holds a run without a checkpoint"), "{message}");
        begin(&path, &resolved, Existing::Resume);
        fs::write(path.join("report.html"), "old").unwrap();
        fs::write(path.join("reference.cache"), "keyed by content").unwrap();
        fs::create_dir_all(path.join("checkpoints/step-000003")).unwrap();
        let opened = RunDir::open(&path, &resolved, Existing::Overwrite).unwrap();
        assert!(path.join("report.html").exists(), "until the run begins, the old one is whole");
        assert_eq!(opened.newest_step(), None);
        opened.begin(&resolved).unwrap();
        assert!(!path.join("report.html").exists() && !path.join("checkpoints").exists());
        assert!(path.join("reference.cache").exists());
    }

    #[test]
    fn a_resumed_run_must_be_the_same_run() {
        let dir = tempfile::tempdir().unwrap();
        let begun = table("[algorithm.dpo]\nbeta = 0.1\n[run]\nseed = 1\nsave_every = 1\n");
        begin(dir.path(), &begun, Existing::Refuse);
        fs::write(dir.path().join("metrics.jsonl"), "{}").unwrap();
        let saved_more_often = table("[algorithm.dpo]\nbeta = 0.1\n[run]\nseed = 1\nsave_every = 5\n");
        begin(dir.path(), &saved_more_often, Existing::Resume);
        let other = table("[algorithm.dpo]\nbeta = 0.2\n[run]\nseed = 1\n");
        let message = RunDir::open(dir.path(), &other, Existing::Resume).unwrap_err().to_string();
        assert!(message.contains("algorithm.dpo.beta was 0.1, is now 0.2"), "{message}");
    }

    #[test]
    fn one_process_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let resolved = table("");
        let _held = RunDir::open(dir.path(), &resolved, Existing::Refuse).unwrap();
        let message = RunDir::open(dir.path(), &resolved, Existing::Resume).unwrap_err().to_string();
        assert!(message.contains("another process"), "{message}");
    }

    #[test]
    fn files_of_somebody_else_are_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("thesis.tex"), "").unwrap();
        let message = RunDir::open(dir.path(), &table(""), Existing::Overwrite).unwrap_err().to_string();
        assert!(message.contains("no run"), "{message}");
    }
}
