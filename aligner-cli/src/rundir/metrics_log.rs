//! `metrics.jsonl`: one object for each logged step.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use aligner_core::weights::atomic_write;
use aligner_core::{Error, Result};
use serde::{Deserialize, Serialize};

/// The metrics of one step; those of an evaluation have names that begin with `eval/`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Optimizer steps done when it was taken; 0 is before the first.
    pub step: u64,
    /// Means by name.
    #[serde(flatten)]
    pub values: BTreeMap<String, f64>,
}

/// Appends records to a file.
#[derive(Debug)]
pub(crate) struct MetricsLog {
    path: PathBuf,
    file: File,
}

impl MetricsLog {
    /// Opens `path` for appending, without the records past `last_step` and without a torn last line:
    /// a resumed run writes those again.
    pub(crate) fn open(path: &Path, last_step: u64) -> Result<Self> {
        let kept: Vec<Record> = read(path)?.into_iter().filter(|record| record.step <= last_step).collect();
        let mut text = String::new();
        for record in &kept {
            text.push_str(&line(record));
        }
        // Not in place: a kill between truncation and writing would lose the whole log.
        atomic_write(path, |file| file.write_all(text.as_bytes()))?;
        let file = OpenOptions::new().append(true).open(path).map_err(Error::io(path))?;
        Ok(Self { path: path.to_path_buf(), file })
    }

    /// Appends one record.
    pub(crate) fn write(&mut self, record: &Record) -> Result<()> {
        // One write call a line, so that a kill tears at most the last one.
        self.file.write_all(line(record).as_bytes()).map_err(Error::io(&self.path))
    }
}

/// The records of a file, up to the first line that is torn; none where there is no file.
pub(crate) fn read(path: &Path) -> Result<Vec<Record>> {
    if !path.exists() {
        return Ok(Vec::new());
    }
    let text = std::fs::read_to_string(path).map_err(Error::io(path))?;
    Ok(text.lines().map_while(|line| serde_json::from_str(line).ok()).collect())
}

fn line(record: &Record) -> String {
    // JSON has no NaN; such values are left out by the caller.
    let mut line = serde_json::to_string(record).unwrap_or_default();
    line.push('\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(step: u64) -> Record {
        Record { step, values: BTreeMap::from([("loss".into(), 0.1 + step as f64)]) }
    }

    #[test]
    fn a_resumed_log_forgets_what_came_after_the_checkpoint_and_a_torn_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut log = MetricsLog::open(&path, 0).unwrap();
        for step in 1..=4 {
            log.write(&record(step)).unwrap();
        }
        let mut torn = OpenOptions::new().append(true).open(&path).unwrap();
        torn.write_all(br#"{"step":5,"lo"#).unwrap();
        let mut log = MetricsLog::open(&path, 3).unwrap();
        log.write(&record(4)).unwrap();
        assert_eq!(read(&path).unwrap(), [record(1), record(2), record(3), record(4)]);
    }
}
