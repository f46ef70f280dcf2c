//! A GGUF file's content in several files, as llama.cpp's `gguf-split` lays them out.
#![allow(dead_code, reason = "every test file uses a part of it")]

use std::ops::Range;
use std::path::{Path, PathBuf};

/// Offsets of tensors are multiples of it where a file does not say otherwise.
const ALIGNMENT: usize = 32;

/// The parts of a file, as bytes.
pub(crate) struct Whole {
    keys: Vec<Vec<u8>>,
    tensors: Vec<Tensor>,
}

struct Tensor {
    /// Name, shape and type: all of its entry but the offset.
    entry: Vec<u8>,
    data: Vec<u8>,
}

/// What a file says of its place among the others.
#[derive(Clone)]
pub(crate) struct Stated {
    pub(crate) number: u16,
    pub(crate) count: u16,
    /// How many tensors the files have together.
    pub(crate) tensors: i32,
}

impl Whole {
    /// Reads a file of the default alignment.
    pub(crate) fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let mut cursor = Cursor { bytes: &bytes, at: 8 };
        let [tensors, keys] = [cursor.long(), cursor.long()];
        let keys = (0..keys).map(|_| cursor.taken(Cursor::skip_key)).collect();
        let entries: Vec<(Vec<u8>, usize)> =
            (0..tensors).map(|_| (cursor.taken(Cursor::skip_entry), cursor.long())).collect();
        let data = &bytes[cursor.at.next_multiple_of(ALIGNMENT)..];
        let mut starts: Vec<usize> = entries.iter().map(|(_, offset)| *offset).collect();
        starts.push(data.len());
        starts.sort_unstable();
        let tensor = |(entry, offset): (Vec<u8>, usize)| {
            let end = starts[starts.partition_point(|&start| start <= offset)];
            let mut data = data[offset..end].to_vec();
            data.resize(data.len().next_multiple_of(ALIGNMENT), 0);
            Tensor { entry, data }
        };
        Self { keys, tensors: entries.into_iter().map(tensor).collect() }
    }

    pub(crate) fn tensors(&self) -> usize {
        self.tensors.len()
    }

    /// A file with some of the tensors; the first one has the metadata.
    pub(crate) fn file(&self, tensors: Range<usize>, stated: &Stated) -> Vec<u8> {
        let Stated { number, count, tensors: total } = stated;
        let mut keys = if *number == 0 { self.keys.clone() } else { Vec::new() };
        keys.push([text("split.no"), typed(2, &number.to_le_bytes())].concat());
        keys.push([text("split.count"), typed(2, &count.to_le_bytes())].concat());
        keys.push([text("split.tensors.count"), typed(5, &total.to_le_bytes())].concat());
        let tensors = &self.tensors[tensors];
        let mut out = [b"GGUF".as_slice(), &3_u32.to_le_bytes()].concat();
        out.extend((tensors.len() as u64).to_le_bytes());
        out.extend((keys.len() as u64).to_le_bytes());
        out.extend(keys.concat());
        let mut offset = 0_u64;
        for tensor in tensors {
            out.extend(&tensor.entry);
            out.extend(offset.to_le_bytes());
            offset += tensor.data.len() as u64;
        }
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        for tensor in tensors {
            out.extend(&tensor.data);
        }
        out
    }

    /// Writes files whose tensors end at these places, and returns their paths.
    pub(crate) fn write(&self, dir: &Path, stem: &str, ends: &[usize]) -> Vec<PathBuf> {
        let count = ends.len() as u16;
        let starts = std::iter::once(&0).chain(ends);
        let file = |(number, (&start, &end)): (u16, (&usize, &usize))| {
            let path = dir.join(format!("{stem}-{:05}-of-{count:05}.gguf", number + 1));
            let stated = Stated { number, count, tensors: self.tensors.len() as i32 };
            std::fs::write(&path, self.file(start..end, &stated)).unwrap();
            path
        };
        (0..).zip(starts.zip(ends)).map(file).collect()
    }
}

fn text(text: &str) -> Vec<u8> {
    [(text.len() as u64).to_le_bytes().as_slice(), text.as_bytes()].concat()
}

fn typed(kind: u32, value: &[u8]) -> Vec<u8> {
    [kind.to_le_bytes().as_slice(), value].concat()
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Cursor<'_> {
    fn taken(&mut self, skip: impl FnOnce(&mut Self)) -> Vec<u8> {
        let start = self.at;
        skip(self);
        self.bytes[start..self.at].to_vec()
    }

    fn word(&mut self) -> u32 {
        self.at += 4;
        u32::from_le_bytes(self.bytes[self.at - 4..self.at].try_into().unwrap())
    }

    fn long(&mut self) -> usize {
        self.at += 8;
        u64::from_le_bytes(self.bytes[self.at - 8..self.at].try_into().unwrap()) as usize
    }

    fn skip_text(&mut self) {
        self.at += self.long();
    }

    fn skip_key(&mut self) {
        self.skip_text();
        let kind = self.word();
        self.skip_value(kind);
    }

    fn skip_value(&mut self, kind: u32) {
        match kind {
            8 => self.skip_text(),
            9 => {
                let (kind, count) = (self.word(), self.long());
                (0..count).for_each(|_| self.skip_value(kind));
            }
            kind => self.at += [1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8][kind as usize],
        }
    }

    fn skip_entry(&mut self) {
        self.skip_text();
        self.at += 8 * self.word() as usize + 4;
    }
}
