//! What the files that a run reads held, in a few bytes each.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use aligner_core::weights::{Gguf, WEIGHT_FILES};
use aligner_core::{Error, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Bytes that are hashed at a time.
const BLOCK_BYTES: u64 = 1 << 20;

/// Weights are hashed whole up to this many blocks; of larger files, as many blocks spread over the
/// whole length are. A model that was trained differs in all of them.
const SAMPLED_BLOCKS: u64 = 256;

/// A file's length and a hash of its content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Fingerprint {
    bytes: u64,
    sha256: String,
}

/// Fingerprints by the path under which the run file leads to the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Fingerprints(BTreeMap<String, Fingerprint>);

impl Fingerprints {
    /// Adds a file, all of which counts.
    pub(crate) fn add(&mut self, path: &Path) -> Result<()> {
        self.add_blocks(path, u64::MAX)
    }

    /// Adds what a model's directory, or its `.gguf` files, hold of configuration and weights.
    pub(crate) fn add_model(&mut self, path: &Path) -> Result<()> {
        if path.is_file() && path.extension().is_some_and(|extension| extension == "gguf") {
            return Gguf::open(path)?.files().try_for_each(|file| self.add_blocks(file, SAMPLED_BLOCKS));
        }
        if !path.is_dir() {
            return self.add_blocks(path, SAMPLED_BLOCKS);
        }
        let indices = WEIGHT_FILES.into_iter().filter(|name| name.ends_with("index.json"));
        self.add_present(path, &["config.json"].into_iter().chain(indices).collect::<Vec<_>>())?;
        weights(path)?.iter().try_for_each(|file| self.add_blocks(file, SAMPLED_BLOCKS))
    }

    /// Adds what an adapter's directory holds of settings and weights.
    pub(crate) fn add_adapter(&mut self, path: &Path) -> Result<()> {
        self.add_present(path, &["adapter_config.json", "adapter_model.safetensors"])
    }

    /// Adds what a directory holds of a tokenizer: all files that one is read from.
    pub(crate) fn add_tokenizer(&mut self, path: &Path) -> Result<()> {
        if !path.is_dir() {
            return self.add_blocks(path, SAMPLED_BLOCKS);
        }
        let names = [
            "tokenizer.json",
            "tokenizer.model",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "added_tokens.json",
            "generation_config.json",
            "config.json",
            "chat_template.jinja",
        ];
        self.add_present(path, &names)
    }

    fn add_present(&mut self, dir: &Path, names: &[&str]) -> Result<()> {
        let mut present = names.iter().map(|name| dir.join(name)).filter(|path| path.is_file());
        present.try_for_each(|path| self.add(&path))
    }

    fn add_blocks(&mut self, path: &Path, blocks: u64) -> Result<()> {
        if let Entry::Vacant(entry) = self.0.entry(path.display().to_string()) {
            entry.insert(take(path, blocks).map_err(Error::io(path))?);
        }
        Ok(())
    }

    /// What differs between the files of `self`, when the run began, and those of `now`.
    pub(crate) fn changes(&self, now: &Self) -> Vec<String> {
        let mut changes = Vec::new();
        for (path, then) in &self.0 {
            match now.0.get(path) {
                None => changes.push(format!("{path} was read then and is gone")),
                Some(now) if now.bytes != then.bytes => {
                    changes.push(format!("{path} had {} bytes, has {} now", then.bytes, now.bytes));
                }
                Some(now) if now != then => {
                    changes.push(format!("{path} has other content of the same length"));
                }
                Some(_) => {}
            }
        }
        let added = now.0.keys().filter(|path| !self.0.contains_key(*path));
        changes.extend(added.map(|path| format!("{path} was not there then")));
        changes
    }
}

/// The files of weights that a model is read from.
fn weights(dir: &Path) -> Result<Vec<PathBuf>> {
    let read = WEIGHT_FILES.into_iter().find(|name| dir.join(name).exists()).unwrap_or_default();
    let kind = if read.starts_with("pytorch") { "bin" } else { "safetensors" };
    if read.ends_with(kind) {
        return Ok(vec![dir.join(read)]);
    }
    let mut shards = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(Error::io(dir))? {
        let path = entry.map_err(Error::io(dir))?.path();
        if path.extension().is_some_and(|extension| extension == kind) {
            shards.push(path);
        }
    }
    Ok(shards)
}

fn take(path: &Path, most_blocks: u64) -> std::io::Result<Fingerprint> {
    let mut file = File::open(path)?;
    let bytes = file.metadata()?.len();
    let blocks = bytes.div_ceil(BLOCK_BYTES);
    let sampled = blocks.min(most_blocks);
    let mut hash = Sha256::new();
    let mut block = Vec::new();
    for sample in 0..sampled {
        // The first and the last block are always among them; a file of so few is read in order.
        let at = if sampled == blocks { sample } else { spread(sample, sampled, blocks) };
        file.seek(SeekFrom::Start(at * BLOCK_BYTES))?;
        block.clear();
        (&mut file).take(BLOCK_BYTES).read_to_end(&mut block)?;
        hash.update(&block);
    }
    Ok(Fingerprint { bytes, sha256: format!("{:x}", hash.finalize()) })
}

/// The place among `blocks` of the `sample`-th of `sampled` blocks, the first at the start and the last
/// at the end.
fn spread(sample: u64, sampled: u64, blocks: u64) -> u64 {
    (u128::from(sample) * u128::from(blocks - 1) / u128::from(sampled.max(2) - 1)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(path: &Path) -> Fingerprints {
        let mut prints = Fingerprints::default();
        prints.add(path).unwrap();
        prints
    }

    #[test]
    fn changes_are_named_by_file_and_kind() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.jsonl");
        std::fs::write(&path, "one").unwrap();
        let then = of(&path);
        assert_eq!(then.changes(&of(&path)), [] as [String; 0]);
        std::fs::write(&path, "two").unwrap();
        assert!(then.changes(&of(&path))[0].ends_with("rows.jsonl has other content of the same length"));
        std::fs::write(&path, "three").unwrap();
        assert!(then.changes(&of(&path))[0].ends_with("rows.jsonl had 3 bytes, has 5 now"));
        assert!(then.changes(&Fingerprints::default())[0].ends_with("was read then and is gone"));
        assert!(Fingerprints::default().changes(&then)[0].ends_with("was not there then"));
    }

    #[test]
    fn a_long_file_is_sampled_at_both_ends_and_between() {
        let places: Vec<u64> = (0..5).map(|sample| spread(sample, 5, 1001)).collect();
        assert_eq!(places, [0, 250, 500, 750, 1000]);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        let mut content = vec![0; 3 * BLOCK_BYTES as usize + 5];
        let sampled = |content: &[u8]| {
            std::fs::write(&path, content).unwrap();
            take(&path, 2).unwrap()
        };
        let then = sampled(&content);
        *content.last_mut().unwrap() = 1;
        assert_ne!(sampled(&content), then, "the last block counts");
        *content.last_mut().unwrap() = 0;
        content[0] = 1;
        assert_ne!(sampled(&content), then, "the first block counts");
    }

    #[test]
    fn a_model_counts_with_the_weights_that_are_read_from_it() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str| std::fs::write(dir.path().join(name), name).unwrap();
        write("config.json");
        write("part-2.safetensors");
        write("notes.txt");
        let mut prints = Fingerprints::default();
        prints.add_model(dir.path()).unwrap();
        assert_eq!(prints.0.len(), 2);
        write("model.safetensors");
        let mut prints = Fingerprints::default();
        prints.add_model(dir.path()).unwrap();
        assert!(prints.0.keys().all(|path| !path.contains("part-2")), "{prints:?}");
        for name in ["model.safetensors", "part-2.safetensors"] {
            std::fs::remove_file(dir.path().join(name)).unwrap();
        }
        write("pytorch_model-00001-of-00001.bin");
        write("pytorch_model.bin.index.json");
        let mut prints = Fingerprints::default();
        prints.add_model(dir.path()).unwrap();
        assert_eq!(prints.0.len(), 3, "{prints:?}");
    }
}
