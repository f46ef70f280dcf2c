//! `run.json`: that a directory is a run's, when the run began, and what it was begun from.

use std::fs;
use std::path::Path;

use aligner_core::weights::atomic_write;
use aligner_core::{Error, Result};
use serde::{Deserialize, Serialize};

use super::fingerprint::Fingerprints;

const FILE: &str = "run.json";
const FORMAT: &str = "aligner run";
const VERSION: u32 = 1;

/// What a run must find again when it is resumed. Only runs write this file: a directory without it is
/// none, whatever else lies there.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    format: String,
    version: u32,
    /// The moment that chat templates take for now, in seconds since 1970.
    pub(crate) begun_secs: i64,
    /// The files that the run reads.
    pub(crate) inputs: Fingerprints,
}

/// The part that every version has.
#[derive(Deserialize)]
struct Head {
    format: String,
    version: u32,
}

impl Manifest {
    pub(crate) fn new(begun_secs: i64, inputs: Fingerprints) -> Self {
        Self { format: FORMAT.into(), version: VERSION, begun_secs, inputs }
    }

    /// That of the run in `dir`; none where no run is.
    ///
    /// # Errors
    /// A run of another version of this program, or a damaged file.
    pub(crate) fn read(dir: &Path) -> Result<Option<Self>> {
        let path = dir.join(FILE);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::io(&path)(error)),
        };
        // Another program's file of this name says nothing about a run.
        let Ok(Head { format, version }) = serde_json::from_slice(&text) else { return Ok(None) };
        if format != FORMAT {
            return Ok(None);
        }
        if version != VERSION {
            let message = format!("a run of format version {version}; this program reads version {VERSION}");
            return Err(Error::format(&path, message));
        }
        serde_json::from_slice(&text).map(Some).map_err(|error| Error::format(&path, error.to_string()))
    }

    pub(crate) fn write(&self, dir: &Path) -> Result<()> {
        let path = dir.join(FILE);
        let text =
            serde_json::to_vec_pretty(self).map_err(|error| Error::format(&path, error.to_string()))?;
        atomic_write(&path, |out| out.write_all(&text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_file_of_ours_makes_a_run() {
        let dir = tempfile::tempdir().unwrap();
        let write = |text: &str| fs::write(dir.path().join(FILE), text).unwrap();
        assert_eq!(Manifest::read(dir.path()).unwrap(), None);
        for foreign in ["", "[]", "{\"name\": \"tracker\"}", "{\"format\": \"other\", \"version\": 1}"] {
            write(foreign);
            assert_eq!(Manifest::read(dir.path()).unwrap(), None, "{foreign}");
        }
        let own = Manifest::new(7, Fingerprints::default());
        own.write(dir.path()).unwrap();
        assert_eq!(Manifest::read(dir.path()).unwrap(), Some(own));
        write("{\"format\": \"aligner run\", \"version\": 2, \"more\": []}");
        let message = Manifest::read(dir.path()).unwrap_err().to_string();
        assert!(message.contains("run.json: a run of format version 2"), "{message}");
    }
}
