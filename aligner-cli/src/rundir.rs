//! The directory of one run: what is in it, and who may write there.

mod checkpoint;
mod events;
mod fingerprint;
mod manifest;
mod metrics_log;
mod rollouts;
mod samples;

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use aligner_algos::ScoreFiles;
use aligner_core::Error;
use aligner_core::weights::atomic_write;
use anyhow::Context as _;

pub(crate) use checkpoint::{Checkpoints, TrainState, discard, remove_partial, write_directory};
pub(crate) use events::EventWriter;
pub(crate) use fingerprint::Fingerprints;
pub(crate) use manifest::Manifest;
pub use metrics_log::Record;
pub(crate) use metrics_log::{MetricsLog, read as read_metrics};
pub use rollouts::Drawn;
pub(crate) use rollouts::{read as read_rollouts, write as write_rollouts};
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

/// A run as its directory knows it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Identity {
    /// Its configuration with all defaults.
    pub(crate) resolved: toml::Table,
    /// When it began, and from which files.
    pub(crate) manifest: Manifest,
}

/// An opened run directory, locked against other processes.
#[derive(Debug)]
pub(crate) struct RunDir {
    path: PathBuf,
    /// Whether what an earlier run has left goes when this one begins.
    anew: bool,
    /// Held until the process ends; the kernel lets go of it also after a kill. The main rank has it.
    _lock: Option<File>,
}

/// What `--overwrite` removes, the directories first: a kill half way leaves what is still a run. The
/// resolved configuration is written over, and the reference's log-probabilities stay: their keys
/// are the content of weights and tokens, so they are right for any run.
const OWN: [&str; 7] = [
    "checkpoints",
    "model",
    "metrics.jsonl",
    "samples.jsonl",
    "rollouts.jsonl",
    "scores.jsonl",
    "report.html",
];
const RESOLVED: &str = "resolved.toml";
const LOCK: &str = ".lock";
const EVENTS: &str = "events.out.tfevents.";

impl RunDir {
    /// Whether a new run here would remove or replace `path`.
    pub(crate) fn writes_over(&self, path: &Path) -> bool {
        let (Ok(path), Ok(dir)) = (path.canonicalize(), self.path.canonicalize()) else { return false };
        OWN.iter().any(|own| path.starts_with(dir.join(own)))
    }

    /// Makes or opens the directory for a run. Nothing of an earlier run changes before [`Self::begin`].
    ///
    /// # Errors
    /// [`Usage`] where it holds another run, or something that is no run; a directory in use.
    pub(crate) fn open(path: &Path, run: &Identity, existing: Existing) -> anyhow::Result<Self> {
        let shown = path.display();
        let earlier = Manifest::read(path)?;
        let begun = earlier.is_some() && has_begun(path);
        if begun && existing == Existing::Refuse {
            return Err(Usage(format!("{shown}: {}", describe(path))).into());
        }
        if earlier.is_none() && is_foreign(path) {
            let message = "is not empty, and what it holds is no run: it has no run.json that this program has \
                           written; choose another `run.dir`";
            return Err(Usage(format!("{shown}: {message}")).into());
        }
        if let Some(earlier) = earlier.filter(|_| begun && existing == Existing::Resume) {
            same_run(&path.join(RESOLVED), &run.resolved)?;
            same_inputs(path, &earlier, &run.manifest)?;
        }
        fs::create_dir_all(path).map_err(Error::io(path))?;
        let anew = !begun || existing == Existing::Overwrite;
        Ok(Self { path: path.to_path_buf(), anew, _lock: Some(lock(path)?) })
    }

    /// The directory that the main rank has opened, for another rank, which writes nothing there.
    pub(crate) fn follow(path: &Path) -> Self {
        Self { path: path.to_path_buf(), anew: false, _lock: None }
    }

    /// Writes the configuration, and removes an earlier run's files where this one starts anew: to be
    /// called when the run's model is loaded, for a model that is broken must not cost the old run.
    pub(crate) fn begin(&self, run: &Identity) -> anyhow::Result<()> {
        if self.anew {
            self.clear()?;
        }
        // First, for it says that what follows is a run's.
        run.manifest.write(&self.path)?;
        // A resumed run may have other intervals: the file says what holds now.
        let text =
            toml::to_string_pretty(&run.resolved).context("the configuration cannot be written as TOML")?;
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

    /// Samples that the run has learned from.
    pub(crate) fn rollouts(&self) -> PathBuf {
        self.path.join("rollouts.jsonl")
    }

    /// What a rank's rewards have said since the last checkpoint, and those of other ranks.
    pub(crate) fn score_files(&self, rank: usize) -> anyhow::Result<ScoreFiles> {
        let name = if rank == 0 { "scores.jsonl".into() } else { format!("scores.{rank}.jsonl") };
        let own = self.path.join(name);
        let is_other = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            *path != own && name.starts_with("scores.") && name.ends_with(".jsonl")
        };
        let all = fs::read_dir(&self.path).map_err(Error::io(&self.path))?.flatten();
        let mut others: Vec<PathBuf> = all.map(|entry| entry.path()).filter(is_other).collect();
        others.sort();
        Ok(ScoreFiles { own, others })
    }

    pub(crate) fn report(&self) -> PathBuf {
        self.path.join("report.html")
    }

    /// Removes what `TensorBoard` would still show of a run that starts anew.
    pub(crate) fn remove_events(&self) -> anyhow::Result<()> {
        self.remove_files(|name| name.starts_with(EVENTS))
    }

    fn remove_files(&self, chosen: impl Fn(&str) -> bool) -> anyhow::Result<()> {
        for entry in fs::read_dir(&self.path).map_err(Error::io(&self.path))?.flatten() {
            if chosen(&entry.file_name().to_string_lossy()) {
                fs::remove_file(entry.path()).map_err(Error::io(entry.path()))?;
            }
        }
        Ok(())
    }

    fn clear(&self) -> anyhow::Result<()> {
        self.remove_events()?;
        // Of ranks that there may not be any more.
        self.remove_files(|name| name.starts_with("scores."))?;
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

/// When the run that `existing` goes on with began, in seconds since 1970; none where a new one begins.
pub(crate) fn begun_secs(path: &Path, existing: Existing) -> anyhow::Result<Option<i64>> {
    if existing != Existing::Resume || !has_begun(path) {
        return Ok(None);
    }
    Ok(Manifest::read(path)?.map(|earlier| earlier.begun_secs))
}

/// Whether the run in `path` has left anything that a new one would lose.
fn has_begun(path: &Path) -> bool {
    let logged = fs::metadata(path.join("metrics.jsonl")).is_ok_and(|file| file.len() > 0);
    logged || path.join("checkpoints").exists() || path.join("model").exists()
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
const FREE: [&str; 11] = [
    "dir",
    "eval_every",
    "save_every",
    "keep_last",
    "sample_prompts",
    "sample_tokens",
    "rollouts_every",
    "rollout_groups",
    "preflight",
    "call_timeout_secs",
    "save_dtype",
];

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

/// Checks that the files that a resumed run reads are those that it was begun with.
fn same_inputs(path: &Path, earlier: &Manifest, now: &Manifest) -> anyhow::Result<()> {
    let changes = earlier.inputs.changes(&now.inputs);
    if changes.is_empty() {
        return Ok(());
    }
    let message = format!(
        "{}: the run cannot go on, for its files are no longer those that it was begun with:\n  {}\n\
         put them back as they were, or start anew: `--overwrite`, or another `run.dir`",
        path.display(),
        changes.join("\n  ")
    );
    Err(Usage(message).into())
}

fn strip(mut table: toml::Table) -> toml::Table {
    for free in ["preflight", "warnings", "mesh"] {
        table.remove(free);
    }
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

    fn identity(text: &str) -> Identity {
        Identity { resolved: text.parse().unwrap(), manifest: Manifest::new(0, Fingerprints::default()) }
    }

    /// Opens a directory and begins the run, and ends the process that did so.
    fn begin(path: &Path, run: &Identity, existing: Existing) {
        RunDir::open(path, run, existing).unwrap().begin(run).unwrap();
    }

    #[test]
    fn a_directory_with_a_run_is_not_touched_unless_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run");
        let resolved = identity("[run]\nseed = 1\nsave_every = 1\n");
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
        let begun = identity("[algorithm.dpo]\nbeta = 0.1\n[run]\nseed = 1\nsave_every = 1\n");
        begin(dir.path(), &begun, Existing::Refuse);
        fs::write(dir.path().join("metrics.jsonl"), "{}").unwrap();
        let saved_more_often = identity("[algorithm.dpo]\nbeta = 0.1\n[run]\nseed = 1\nsave_every = 5\n");
        begin(dir.path(), &saved_more_often, Existing::Resume);
        let other = identity("[algorithm.dpo]\nbeta = 0.2\n[run]\nseed = 1\n");
        let message = RunDir::open(dir.path(), &other, Existing::Resume).unwrap_err().to_string();
        assert!(message.contains("algorithm.dpo.beta was 0.1, is now 0.2"), "{message}");
    }

    #[test]
    fn a_resumed_run_must_find_its_files_as_they_were() {
        let dir = tempfile::tempdir().unwrap();
        let rows = dir.path().join("rows.jsonl");
        let reading = |content: &str| {
            fs::write(&rows, content).unwrap();
            let mut inputs = Fingerprints::default();
            inputs.add(&rows).unwrap();
            Identity { manifest: Manifest::new(0, inputs), ..identity("[run]\nseed = 1\n") }
        };
        let run = dir.path().join("run");
        begin(&run, &reading("one"), Existing::Refuse);
        fs::write(run.join("metrics.jsonl"), "{}").unwrap();
        begin(&run, &reading("one"), Existing::Resume);
        let message = RunDir::open(&run, &reading("two"), Existing::Resume).unwrap_err().to_string();
        for part in ["rows.jsonl has other content", "put them back", "`--overwrite`"] {
            assert!(message.contains(part), "{message}");
        }
        begin(&run, &reading("two"), Existing::Overwrite);
    }

    #[test]
    fn a_file_named_as_ours_makes_no_run() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("resolved.toml"), "[run]\n").unwrap();
        fs::create_dir(dir.path().join("model")).unwrap();
        for existing in [Existing::Refuse, Existing::Resume, Existing::Overwrite] {
            let message = RunDir::open(dir.path(), &identity(""), existing).unwrap_err().to_string();
            assert!(message.contains("no run.json"), "{message}");
        }
        assert!(dir.path().join("model").exists());
    }

    #[test]
    fn one_process_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let resolved = identity("");
        let _held = RunDir::open(dir.path(), &resolved, Existing::Refuse).unwrap();
        let message = RunDir::open(dir.path(), &resolved, Existing::Resume).unwrap_err().to_string();
        assert!(message.contains("another process"), "{message}");
    }

    #[test]
    fn files_of_somebody_else_are_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("thesis.tex"), "").unwrap();
        let message = RunDir::open(dir.path(), &identity(""), Existing::Overwrite).unwrap_err().to_string();
        assert!(message.contains("no run"), "{message}");
    }
}
