//! Reference log-probabilities on disk.
//!
//! A file is a header and records that are only ever appended: the key (32 bytes), the number of
//! values (u32), the values (f32) and a CRC-32C of all of these, little-endian. A record that a kill
//! or a power cut left unfinished fails its length or its checksum: it and what follows are dropped
//! when the file is opened next.

use std::collections::HashMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use aligner_core::{Error, Result};

const HEADER: &[u8] = b"aligner reference log-probabilities 1\n";
const KEY_BYTES: usize = 32;
const HEAD_BYTES: usize = KEY_BYTES + 4;
const CHECKSUM_BYTES: usize = 4;

/// Content hash of a sample under one set of weights.
pub(super) type Key = [u8; KEY_BYTES];

/// Log-probabilities of targets by content hash: an index in memory, the values in a file.
#[derive(Debug)]
pub(super) struct Cache {
    path: PathBuf,
    file: File,
    /// Where each key's values start, in bytes, and how many there are.
    index: HashMap<Key, (u64, usize)>,
    /// What could not be appended because another process writes the file.
    unsaved: HashMap<Key, Vec<f32>>,
    /// Length of the file in bytes up to the last whole record.
    end: u64,
    writable: bool,
}

impl Cache {
    /// Opens or creates the file and reads its index.
    ///
    /// While another process has the file open for writing, it is read and not written.
    ///
    /// # Errors
    /// [`Error::Io`], and [`Error::Format`] for a file that is something else: it is left alone.
    pub(super) fn open(path: &Path) -> Result<Self> {
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir).map_err(Error::io(dir))?;
        }
        let mut file = (OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path))
            .map_err(Error::io(path))?;
        let writable = match file.try_lock() {
            Ok(()) => true,
            Err(TryLockError::WouldBlock) => {
                tracing::warn!(path = %path.display(), "another run writes this cache; it is only read here");
                false
            }
            Err(TryLockError::Error(error)) => return Err(Error::io(path)(error)),
        };
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(Error::io(path))?;
        let (index, end) = read_index(path, &bytes)?;
        let mut cache = Self { path: path.to_owned(), file, index, unsaved: HashMap::new(), end, writable };
        if writable {
            cache.drop_tail(bytes.len() as u64)?;
        }
        Ok(cache)
    }

    /// The values stored under `key`.
    ///
    /// # Errors
    /// [`Error::Io`] where the file cannot be read.
    pub(super) fn get(&mut self, key: &Key) -> Result<Option<Vec<f32>>> {
        if let Some(values) = self.unsaved.get(key) {
            return Ok(Some(values.clone()));
        }
        let Some(&(start, len)) = self.index.get(key) else { return Ok(None) };
        let mut bytes = vec![0; len * 4];
        self.file.seek(SeekFrom::Start(start)).map_err(Error::io(&self.path))?;
        self.file.read_exact(&mut bytes).map_err(Error::io(&self.path))?;
        Ok(Some(floats(&bytes)))
    }

    /// Appends records in one write.
    ///
    /// # Errors
    /// [`Error::Io`], also where the disk is full: the file then ends with its last whole record.
    pub(super) fn append(&mut self, records: Vec<(Key, Vec<f32>)>) -> Result<()> {
        if !self.writable {
            self.unsaved.extend(records);
            return Ok(());
        }
        let mut bytes = Vec::new();
        let mut added = Vec::with_capacity(records.len());
        for (key, values) in records {
            added.push((key, (self.end + (bytes.len() + HEAD_BYTES) as u64, values.len())));
            bytes.extend(record(&key, &values));
        }
        let written = self.file.seek(SeekFrom::Start(self.end)).and_then(|_| self.file.write_all(&bytes));
        if let Err(error) = written {
            // What was written in part is dropped here, or by the next open if this fails too.
            let _ = self.file.set_len(self.end);
            return Err(Error::io(&self.path)(error));
        }
        self.end += bytes.len() as u64;
        self.index.extend(added);
        Ok(())
    }

    /// Cuts off what follows the last whole record, and writes the header of a new file.
    fn drop_tail(&mut self, len: u64) -> Result<()> {
        if self.end < len {
            tracing::warn!(path = %self.path.display(), bytes = len - self.end, "dropped an unfinished record");
            self.file.set_len(self.end).map_err(Error::io(&self.path))?;
        }
        if self.end == 0 {
            self.file.rewind().and_then(|()| self.file.write_all(HEADER)).map_err(Error::io(&self.path))?;
            self.end = HEADER.len() as u64;
        }
        Ok(())
    }
}

fn record(key: &Key, values: &[f32]) -> Vec<u8> {
    let mut bytes = key.to_vec();
    bytes.extend((values.len() as u32).to_le_bytes());
    for value in values {
        bytes.extend(value.to_le_bytes());
    }
    bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
    bytes
}

type Index = HashMap<Key, (u64, usize)>;

/// The whole records of a file, and where they end.
fn read_index(path: &Path, bytes: &[u8]) -> Result<(Index, u64)> {
    let mut index = HashMap::new();
    if !bytes.starts_with(HEADER) {
        // A header that is cut short is a kill's work, too.
        if HEADER.starts_with(bytes) {
            return Ok((index, 0));
        }
        return Err(Error::format(path, "not a cache of reference log-probabilities; move it away"));
    }
    let mut at = HEADER.len();
    while let Some((key, len)) = read_record(&bytes[at..]) {
        index.insert(key, ((at + HEAD_BYTES) as u64, len));
        at += HEAD_BYTES + len * 4 + CHECKSUM_BYTES;
    }
    Ok((index, at as u64))
}

/// Key and number of values of the record that `bytes` begin with, where it is whole.
fn read_record(bytes: &[u8]) -> Option<(Key, usize)> {
    let key: Key = bytes.get(..KEY_BYTES)?.try_into().ok()?;
    let len = u32::from_le_bytes(bytes.get(KEY_BYTES..HEAD_BYTES)?.try_into().ok()?) as usize;
    let end = len.checked_mul(4)?.checked_add(HEAD_BYTES)?;
    let checksum = bytes.get(end..end.checked_add(CHECKSUM_BYTES)?)?;
    (crc32c::crc32c(&bytes[..end]).to_le_bytes() == checksum).then_some((key, len))
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(byte: u8) -> Key {
        [byte; KEY_BYTES]
    }

    fn filled(path: &Path) -> Cache {
        let mut cache = Cache::open(path).expect("a new file");
        cache.append(vec![(key(1), vec![-1.0, -2.5]), (key(2), vec![])]).expect("space");
        cache.append(vec![(key(3), vec![f32::MIN_POSITIVE])]).expect("space");
        cache
    }

    #[test]
    fn values_come_back_bitwise_after_reopening() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("sub/reference.cache");
        drop(filled(&path));
        let mut cache = Cache::open(&path).expect("its own file");
        assert_eq!(cache.get(&key(1)).expect("readable"), Some(vec![-1.0, -2.5]));
        assert_eq!(cache.get(&key(2)).expect("readable"), Some(vec![]));
        assert_eq!(cache.get(&key(3)).expect("readable"), Some(vec![f32::MIN_POSITIVE]));
        assert_eq!(cache.get(&key(4)).expect("readable"), None);
    }

    #[test]
    fn a_kill_at_any_byte_loses_only_the_last_record() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("reference.cache");
        drop(filled(&path));
        let whole = std::fs::read(&path).expect("written");
        let last = whole.len() - (HEAD_BYTES + 4 + CHECKSUM_BYTES);
        for cut in 0..whole.len() {
            std::fs::write(&path, &whole[..cut]).expect("space");
            let mut cache = Cache::open(&path).expect("a cut file");
            assert!(cache.get(&key(3)).expect("readable").is_none(), "cut at {cut}");
            assert_eq!(
                cache.get(&key(1)).expect("readable").is_some(),
                cut >= HEADER.len() + 48,
                "cut at {cut}"
            );
            cache.append(vec![(key(9), vec![9.0])]).expect("space");
            drop(cache);
            let mut again = Cache::open(&path).expect("its own file");
            assert_eq!(again.get(&key(9)).expect("readable"), Some(vec![9.0]), "cut at {cut}");
        }
        assert!(last > HEADER.len());
    }

    #[test]
    fn a_flipped_bit_is_not_believed() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("reference.cache");
        drop(filled(&path));
        let mut bytes = std::fs::read(&path).expect("written");
        bytes[HEADER.len() + HEAD_BYTES] ^= 1;
        std::fs::write(&path, bytes).expect("space");
        assert_eq!(Cache::open(&path).expect("damaged").get(&key(1)).expect("readable"), None);
    }

    #[test]
    fn another_file_is_left_alone() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("notes.txt");
        std::fs::write(&path, "precious").expect("space");
        assert!(Cache::open(&path).expect_err("not a cache").to_string().contains("notes.txt"));
        assert_eq!(std::fs::read(&path).expect("still there"), b"precious");
    }

    #[test]
    fn a_second_writer_reads_and_keeps_its_own() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("reference.cache");
        let _first = filled(&path);
        let mut second = Cache::open(&path).expect("readable");
        assert!(second.get(&key(1)).expect("readable").is_some());
        second.append(vec![(key(7), vec![1.0])]).expect("in memory");
        assert_eq!(second.get(&key(7)).expect("readable"), Some(vec![1.0]));
    }
}
