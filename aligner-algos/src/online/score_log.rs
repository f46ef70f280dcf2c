//! Scores on disk, from the moment that they are known until a checkpoint has them.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use aligner_core::{Error, Group, Result, Score};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The files that a rank's scores are in.
#[derive(Debug, Clone)]
pub struct ScoreFiles {
    /// Where this rank writes.
    pub own: PathBuf,
    /// What other ranks have written: after a restart another rank may draw what they have drawn.
    pub others: Vec<PathBuf>,
}

/// A file of JSON lines, one for each scored group.
pub(super) struct ScoreLog {
    path: PathBuf,
    file: File,
    known: HashMap<String, Vec<Vec<Score>>>,
}

#[derive(Serialize, Deserialize)]
struct Record {
    key: String,
    /// Part by part, sample by sample.
    scores: Vec<Vec<Score>>,
}

impl ScoreLog {
    /// Reads what is there, of each file up to a line that was cut by a kill.
    pub(super) fn open(files: &ScoreFiles) -> Result<Self> {
        let path = files.own.as_path();
        let mut known = HashMap::new();
        for other in &files.others {
            read(other, &mut known)?;
        }
        let whole = read(path, &mut known)?;
        let file = File::options().create(true).append(true).open(path).map_err(Error::io(path))?;
        file.set_len(whole as u64).map_err(Error::io(path))?;
        Ok(Self { path: path.to_path_buf(), file, known })
    }

    pub(super) fn get(&self, key: &str) -> Option<&Vec<Vec<Score>>> {
        self.known.get(key)
    }

    pub(super) fn add(&mut self, key: String, scores: &[Vec<Score>]) -> Result<()> {
        let record = Record { key, scores: scores.to_vec() };
        let mut line =
            serde_json::to_vec(&record).map_err(|error| Error::format(&self.path, error.to_string()))?;
        line.push(b'\n');
        self.file.write_all(&line).map_err(Error::io(&self.path))?;
        self.known.insert(record.key, record.scores);
        Ok(())
    }

    pub(super) fn clear(&mut self) -> Result<()> {
        self.known.clear();
        self.file.set_len(0).map_err(Error::io(&self.path))
    }
}

/// Adds a file's scores to those that are known; returns the bytes of its whole lines.
fn read(path: &Path, known: &mut HashMap<String, Vec<Vec<Score>>>) -> Result<usize> {
    let text = if path.exists() { fs::read(path).map_err(Error::io(path))? } else { Vec::new() };
    let mut whole = 0;
    for line in text.split_inclusive(|&byte| byte == b'\n').filter(|line| line.ends_with(b"\n")) {
        let Ok(Record { key, scores }) = serde_json::from_slice(line) else { break };
        known.insert(key, scores);
        whole += line.len();
    }
    Ok(whole)
}

/// What a group's scores depend on: the parts, and the prompt and tokens of each sample.
pub(super) fn key<'a>(parts: impl Iterator<Item = &'a str>, group: &'a Group) -> String {
    let mut hash = Sha256::new();
    for text in parts.chain([group.id.as_str()]) {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    }
    for sample in &group.samples {
        hash.update((sample.tokens.len() as u64).to_le_bytes());
        sample.tokens.iter().for_each(|token| hash.update(token.to_le_bytes()));
    }
    format!("{:x}", hash.finalize())
}
