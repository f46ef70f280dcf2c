//! A file of tensors, read by position.
//!
//! Positioned reads instead of a memory map: a file that is cut short by somebody else while it is
//! open gives an error here, where a map would kill the process, and no `unsafe` is needed. Read
//! and decoded in chunks that fit a core's cache, they are as fast.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

use super::encoding::Encoding;
use crate::{Error, Result};

/// Blocks that one task decodes at a time, in elements; a multiple of every block.
const CHUNK_ELEMENTS: usize = 1 << 16;

/// An open file with its length.
#[derive(Debug)]
pub(crate) struct Source {
    file: File,
    path: PathBuf,
    len: u64,
    /// Bytes of tensors that have been asked for.
    read: AtomicU64,
}

/// Where a tensor lies in its file. Made only after a check against the file's length.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Location {
    pub(crate) shape: Vec<usize>,
    pub(crate) encoding: Encoding,
    /// First byte, from the start of the file.
    pub(crate) offset: u64,
}

impl Source {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        // Asked before it is opened: opening a pipe waits for a writer.
        if !std::fs::metadata(path).map_err(Error::io(path))?.is_file() {
            return Err(Error::format(path, "expected a file"));
        }
        let file = File::open(path).map_err(Error::io(path))?;
        let len = file.metadata().map_err(Error::io(path))?.len();
        Ok(Self { file, path: path.to_path_buf(), len, read: AtomicU64::new(0) })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Bytes of tensors that have been read.
    pub(crate) fn bytes_read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// Reads `len` bytes at `offset`; the caller has checked them against the file's length.
    pub(crate) fn bytes(&self, offset: u64, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.file.read_exact_at(&mut bytes, offset).map_err(Error::io(&self.path))?;
        Ok(bytes)
    }

    /// Reads and decodes a tensor, in parallel.
    pub(crate) fn decode(&self, location: &Location) -> Result<Vec<f32>> {
        let elements = location.shape.iter().product();
        self.decode_pieces(location, std::slice::from_ref(&(0..elements)))
    }

    /// Reads and decodes ranges of a tensor's elements, which begin and end with a block; nothing else is read.
    pub(crate) fn decode_pieces(&self, location: &Location, pieces: &[Range<usize>]) -> Result<Vec<f32>> {
        let encoding = location.encoding;
        let bytes = |elements: usize| elements / encoding.block_elements() * encoding.block_bytes();
        let mut out = vec![0.0; pieces.iter().map(ExactSizeIterator::len).sum()];
        self.read.fetch_add(bytes(out.len()) as u64, Ordering::Relaxed);
        let mut rest = out.as_mut_slice();
        let mut tasks = Vec::with_capacity(pieces.len());
        for piece in pieces {
            for start in piece.clone().step_by(CHUNK_ELEMENTS) {
                let (own, others) = rest.split_at_mut(CHUNK_ELEMENTS.min(piece.end - start));
                tasks.push((start, own));
                rest = others;
            }
        }
        tasks
            .into_par_iter()
            .try_for_each_init(Vec::new, |buffer, (start, out)| {
                buffer.resize(bytes(out.len()), 0);
                self.file.read_exact_at(buffer, location.offset + bytes(start) as u64)?;
                encoding.decode(buffer, out);
                Ok(())
            })
            .map_err(Error::io(&self.path))?;
        Ok(out)
    }
}
