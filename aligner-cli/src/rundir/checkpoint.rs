//! Checkpoints that are whole or absent: written under another name, fsynced, renamed.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use aligner_core::{Error, Result};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// What a checkpoint carries beside the model, the tokenizer and the optimizer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct TrainState<L> {
    /// Optimizer steps done.
    pub(crate) step: u64,
    /// Tokens computed since the start.
    pub(crate) tokens: u64,
    /// Held-out loss at this step, where it was measured.
    pub(crate) eval_loss: Option<f64>,
    /// The cursor of the data loader.
    pub(crate) loader: L,
}

/// The directory of checkpoints of one run.
#[derive(Debug, Clone)]
pub(crate) struct Checkpoints {
    dir: PathBuf,
}

/// Subdirectory of a checkpoint for what is not the model's.
const TRAINER: &str = "trainer";
const STATE: &str = "state.json";
const PARTIAL: &str = ".partial";

impl Checkpoints {
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self { dir }
    }

    /// The directory of a step's checkpoint: a Hugging Face model with a `trainer` directory in it.
    pub(crate) fn path(&self, step: u64) -> PathBuf {
        self.dir.join(format!("step-{step:06}"))
    }

    /// Where a checkpoint's optimizer state lies.
    pub(crate) fn learner(checkpoint: &Path) -> PathBuf {
        checkpoint.join(TRAINER)
    }

    /// Writes a checkpoint; `model` and `learner` fill the directories that they are given.
    ///
    /// # Errors
    /// What could not be written. The checkpoint is then absent and the earlier ones untouched.
    pub(crate) fn save<L: Serialize>(
        &self,
        state: &TrainState<L>,
        model: impl FnOnce(&Path) -> Result<()>,
        learner: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<PathBuf> {
        let path = self.path(state.step);
        write_directory(&path, |partial| {
            model(partial)?;
            let trainer = partial.join(TRAINER);
            fs::create_dir_all(&trainer).map_err(Error::io(&trainer))?;
            learner(&trainer)?;
            let file = trainer.join(STATE);
            let text = serde_json::to_string_pretty(state)
                .map_err(|error| Error::format(&file, error.to_string()))?;
            fs::write(&file, text).map_err(Error::io(&file))
        })?;
        Ok(path)
    }

    /// Steps of all whole checkpoints, in order.
    pub(crate) fn steps(&self) -> Vec<u64> {
        let Ok(entries) = fs::read_dir(&self.dir) else { return Vec::new() };
        let step = |entry: fs::DirEntry| entry.file_name().to_str()?.strip_prefix("step-")?.parse().ok();
        let mut steps: Vec<u64> = entries.flatten().filter_map(step).collect();
        steps.sort_unstable();
        steps
    }

    /// The state of a step's checkpoint.
    ///
    /// # Errors
    /// A file that is missing or broken.
    pub(crate) fn state<L: DeserializeOwned>(&self, step: u64) -> Result<TrainState<L>> {
        let file = self.path(step).join(TRAINER).join(STATE);
        let text = fs::read_to_string(&file).map_err(Error::io(&file))?;
        serde_json::from_str(&text).map_err(|error| Error::format(&file, error.to_string()))
    }

    /// The step of the lowest held-out loss among the checkpoints; the earlier of equals.
    pub(crate) fn best(&self) -> Option<u64> {
        let loss = |step: u64| {
            let state: TrainState<serde_json::Value> = self.state(step).ok()?;
            state.eval_loss.map(|loss| (step, loss))
        };
        self.steps().into_iter().filter_map(loss).min_by(|a, b| a.1.total_cmp(&b.1)).map(|(step, _)| step)
    }

    /// Removes all but the last `keep_last`, the best, and what was never finished.
    ///
    /// # Errors
    /// A directory that could not be removed.
    pub(crate) fn prune(&self, keep_last: usize) -> Result<()> {
        let best = self.best();
        let steps = self.steps();
        // The newest always stays: it is what a resume starts from.
        let old = steps.len().saturating_sub(keep_last.max(1));
        for &step in steps[..old].iter().filter(|step| Some(**step) != best) {
            discard(&self.path(step))?;
        }
        remove_partial(&self.dir)
    }
}

/// Fills a directory under a temporary name, fsyncs all of it, and renames it to `path`.
///
/// # Errors
/// What `fill` or the file system says; nothing is left under `path`, nor changed there.
pub(crate) fn write_directory(path: &Path, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let partial = partial_name(path);
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(parent).map_err(Error::io(parent))?;
    if partial.exists() {
        fs::remove_dir_all(&partial).map_err(Error::io(&partial))?;
    }
    let result = fs::create_dir(&partial)
        .map_err(Error::io(&partial))
        .and_then(|()| fill(&partial))
        .and_then(|()| sync_tree(&partial))
        .and_then(|()| replace(&partial, path));
    if result.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_dir_all(&partial);
    }
    result?;
    sync(parent)
}

fn partial_name(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}{PARTIAL}"))
}

/// Where a directory goes before it is removed.
fn discarded_name(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.old{PARTIAL}"))
}

/// Puts `partial` in the place of `path`. The old content goes last: until the new one is there, it
/// can be had back.
fn replace(partial: &Path, path: &Path) -> Result<()> {
    let aside = path.exists().then(|| set_aside(path)).transpose()?;
    let renamed = fs::rename(partial, path).map_err(Error::io(path));
    match aside {
        Some(old) if renamed.is_ok() => fs::remove_dir_all(&old).map_err(Error::io(&old)),
        Some(old) => {
            // The first error is the one to report.
            let _ = fs::rename(&old, path);
            renamed
        }
        None => renamed,
    }
}

/// Renames a directory to where nobody takes it for a whole one, and says where that is.
fn set_aside(path: &Path) -> Result<PathBuf> {
    let old = discarded_name(path);
    if old.exists() {
        fs::remove_dir_all(&old).map_err(Error::io(&old))?;
    }
    fs::rename(path, &old).map_err(Error::io(path))?;
    Ok(old)
}

/// Removes a directory so that a kill half way leaves no half of it under a good name.
pub(crate) fn discard(path: &Path) -> Result<()> {
    let old = set_aside(path)?;
    fs::remove_dir_all(&old).map_err(Error::io(&old))
}

/// Removes what a killed run left unfinished in `dir`.
pub(crate) fn remove_partial(dir: &Path) -> Result<()> {
    let Ok(entries) = fs::read_dir(dir) else { return Ok(()) };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with('.') && name.ends_with(PARTIAL) {
            fs::remove_dir_all(entry.path()).map_err(Error::io(entry.path()))?;
        }
    }
    Ok(())
}

fn sync_tree(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir).map_err(Error::io(dir))? {
        let path = entry.map_err(Error::io(dir))?.path();
        if path.is_dir() { sync_tree(&path)? } else { sync(&path)? }
    }
    sync(dir)
}

fn sync(path: &Path) -> Result<()> {
    File::open(path).and_then(|file| file.sync_all()).map_err(Error::io(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(step: u64, eval_loss: Option<f64>) -> TrainState<u32> {
        TrainState { step, tokens: 0, eval_loss, loader: 5 }
    }

    /// Fills a checkpoint's directory with one file.
    fn one_file(dir: &Path) -> Result<()> {
        fs::write(dir.join("weights"), "").map_err(Error::io(dir))
    }

    #[test]
    fn the_last_and_the_best_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(dir.path().join("checkpoints"));
        for (step, loss) in [(1, Some(3.0)), (2, Some(1.0)), (3, Some(2.0)), (4, None), (5, Some(2.5))] {
            checkpoints.save(&state(step, loss), one_file, one_file).unwrap();
            checkpoints.prune(2).unwrap();
        }
        assert_eq!(checkpoints.steps(), [2, 4, 5]);
        assert_eq!(checkpoints.best(), Some(2));
        assert_eq!(checkpoints.state::<u32>(5).unwrap().loader, 5);
    }

    #[test]
    fn a_failed_save_leaves_nothing_and_touches_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(dir.path().to_path_buf());
        checkpoints.save(&state(1, None), one_file, one_file).unwrap();
        let full = |_: &Path| Err(Error::Invalid("disk full".into()));
        assert!(checkpoints.save(&state(1, Some(1.0)), full, one_file).is_err());
        assert!(checkpoints.state::<u32>(1).unwrap().eval_loss.is_none());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_directory_is_replaced_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model");
        let named =
            |name: &'static str| move |dir: &Path| fs::write(dir.join(name), "").map_err(Error::io(dir));
        write_directory(&path, named("old")).unwrap();
        assert!(replace(&dir.path().join("absent"), &path).is_err());
        assert!(path.join("old").exists(), "what could not be replaced is still there");
        write_directory(&path, named("new")).unwrap();
        assert!(path.join("new").exists() && !path.join("old").exists());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_was_never_finished_is_ignored_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(dir.path().to_path_buf());
        checkpoints.save(&state(1, None), one_file, one_file).unwrap();
        fs::create_dir(dir.path().join(".step-000002.partial")).unwrap();
        assert_eq!(checkpoints.steps(), [1]);
        checkpoints.prune(1).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
