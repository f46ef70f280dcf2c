//! GGUF, versions 2 and 3: metadata and tensors of one file, read and written, and of a model in several files, read.
//!
//! Layout: magic, version, counts; the metadata's key-value pairs; a name, shape, type and offset
//! for each tensor; then, aligned, the tensors' bytes. All numbers are little-endian.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::encoding::Encoding;
use super::source::{Location, Source};
use crate::{Error, Result};

mod dtype;
mod form;
mod names;
mod reader;
mod split;
mod value;
mod write;

pub use dtype::GgufDtype;
pub(crate) use form::GgufNames;
pub use split::gguf_name;
pub use value::GgufValue;
pub use write::save_gguf;

/// Tensors begin at multiples of it, in bytes, where a file does not say otherwise.
const DEFAULT_ALIGNMENT: u64 = 32;

/// An open GGUF file whose header has been checked, or the first of several that hold a model together.
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    /// The files in their order, the one at `path` first; none of a file that is not written yet.
    sources: Vec<Source>,
    /// That of the first file.
    metadata: BTreeMap<String, GgufValue>,
    tensors: BTreeMap<String, InFile>,
}

/// A tensor's place among the files, and in its own.
#[derive(Debug)]
struct InFile {
    file: usize,
    location: Location,
}

impl Gguf {
    /// Reads the metadata and the tensors' places; the tensors stay on disk. Of a model in several files, this is the
    /// first, and the others are found beside it.
    ///
    /// # Errors
    /// [`Error::Format`] names the file and the key or tensor at fault: another format, a version
    /// that is not supported, a truncated file, an element type that is not supported, tensors
    /// that overlap or lie outside the file; a file that is not the first of its model, one that is missing, and
    /// files that do not belong together.
    pub fn open(path: &Path) -> Result<Self> {
        split::joined(Self::open_alone(path)?)
    }

    /// One file, whatever it says of others.
    fn open_alone(path: &Path) -> Result<Self> {
        let source = Source::open(path)?;
        let (metadata, tensors) = reader::read_header(&source)?;
        let place = |(name, location)| (name, InFile { file: 0, location });
        let tensors = tensors.into_iter().map(place).collect();
        Ok(Self { path: path.to_path_buf(), sources: vec![source], metadata, tensors })
    }

    /// The file that there would be with these contents, for what its header says.
    pub fn unwritten(
        path: &Path,
        metadata: impl IntoIterator<Item = (String, GgufValue)>,
        shapes: impl IntoIterator<Item = (String, Vec<usize>)>,
    ) -> Self {
        let place = |(name, shape)| {
            let location = Location { shape, encoding: Encoding::F32, offset: 0 };
            (name, InFile { file: 0, location })
        };
        Self {
            path: path.to_path_buf(),
            sources: Vec::new(),
            metadata: metadata.into_iter().collect(),
            tensors: shapes.into_iter().map(place).collect(),
        }
    }

    /// Where it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files that it is read from, in their order.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.sources.iter().map(Source::path)
    }

    /// The keys of the metadata, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.metadata.keys().map(String::as_str)
    }

    /// The metadata's value of `key`.
    pub fn value(&self, key: &str) -> Option<&GgufValue> {
        self.metadata.get(key)
    }

    /// A string.
    ///
    /// # Errors
    /// A value of another type.
    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, "a string", |value| match value {
            GgufValue::Text(text) => Some(text.as_str()),
            _ => None,
        })
    }

    /// A whole number that is not negative.
    ///
    /// # Errors
    /// A value of another type or sign.
    pub fn size(&self, key: &str) -> Result<Option<usize>> {
        self.typed(key, "a whole number", |value| match value {
            GgufValue::Integer(number) => usize::try_from(*number).ok(),
            _ => None,
        })
    }

    /// A number; a whole one counts.
    ///
    /// # Errors
    /// A value of another type.
    pub fn number(&self, key: &str) -> Result<Option<f32>> {
        self.typed(key, "a number", |value| match value {
            GgufValue::Float(number) => Some(*number as f32),
            GgufValue::Integer(number) => Some(*number as f32),
            _ => None,
        })
    }

    /// True or false.
    ///
    /// # Errors
    /// A value of another type.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", |value| match value {
            GgufValue::Flag(flag) => Some(*flag),
            _ => None,
        })
    }

    /// A token id.
    ///
    /// # Errors
    /// A value of another type, or one that does not fit 32 bits.
    pub fn token(&self, key: &str) -> Result<Option<u32>> {
        self.typed(key, "a token id", |value| match value {
            GgufValue::Integer(number) => u32::try_from(*number).ok(),
            _ => None,
        })
    }

    /// An array of strings: tokens, merges.
    ///
    /// # Errors
    /// A value of another type.
    pub fn texts(&self, key: &str) -> Result<Option<&[String]>> {
        self.typed(key, "an array of strings", |value| match value {
            GgufValue::Texts(texts) => Some(texts.as_slice()),
            _ => None,
        })
    }

    /// An array of whole numbers: token types.
    ///
    /// # Errors
    /// A value of another type.
    pub fn integers(&self, key: &str) -> Result<Option<&[i64]>> {
        self.typed(key, "an array of whole numbers", |value| match value {
            GgufValue::Integers(numbers) => Some(numbers.as_slice()),
            _ => None,
        })
    }

    /// An array of bytes, signed or not.
    ///
    /// # Errors
    /// A value of another type.
    pub fn bytes(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let byte = |&number: &i64| {
            u8::try_from(number).or_else(|_| i8::try_from(number).map(i8::cast_unsigned)).ok()
        };
        self.typed(key, "an array of bytes", |value| match value {
            GgufValue::Bytes(bytes) => Some(bytes.clone()),
            GgufValue::Integers(numbers) => numbers.iter().map(byte).collect(),
            _ => None,
        })
    }

    /// An array of numbers: token scores.
    ///
    /// # Errors
    /// A value of another type.
    pub fn numbers(&self, key: &str) -> Result<Option<&[f64]>> {
        self.typed(key, "an array of numbers", |value| match value {
            GgufValue::Floats(numbers) => Some(numbers.as_slice()),
            _ => None,
        })
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        pick: impl FnOnce(&'a GgufValue) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.metadata.get(key) else { return Ok(None) };
        let wrong = || {
            let message = format!("key {key}: expected {expected}, got {}", value.describe());
            Error::format(self.path(), message)
        };
        pick(value).ok_or_else(wrong).map(Some)
    }

    /// The tensors' names as the file has them, sorted.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// A tensor's shape, row-major: `[out, in]`. The file itself lists the innermost first.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|place| place.location.shape.as_slice())
    }

    /// A tensor's shape and elements, dequantised, in the file's own order of rows.
    ///
    /// # Errors
    /// A name that is not there, a failed read.
    pub fn read(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>)> {
        let (source, location) = self.find(name)?;
        Ok((location.shape.clone(), source.decode(location)?))
    }

    fn find(&self, name: &str) -> Result<(&Source, &Location)> {
        let absent = || Error::format(self.path(), format!("no tensor named {name}"));
        let place = self.tensors.get(name).ok_or_else(absent)?;
        let source = self.sources.get(place.file).ok_or_else(absent)?;
        Ok((source, &place.location))
    }

    /// One of a tensor's matrices, `[rows, columns]` each, dequantised.
    ///
    /// # Errors
    /// A name that is not there, a tensor without so many matrices, a failed read.
    pub(crate) fn read_matrix(&self, name: &str, index: usize) -> Result<Vec<f32>> {
        let (source, location) = self.find(name)?;
        let matrix = match location.shape.as_slice() {
            &[count, rows, columns] if index < count => Some([rows, columns]),
            _ => None,
        };
        // No block spans two rows: a matrix is whole blocks.
        let bytes = matrix.and_then(|[rows, columns]| location.encoding.bytes(rows * columns));
        let (Some(matrix), Some(bytes)) = (matrix, bytes) else {
            let shape = &location.shape;
            let message = format!("tensor {name}: no matrix {index} in shape {shape:?}");
            return Err(Error::format(source.path(), message));
        };
        let offset = location.offset + (index * bytes) as u64;
        source.decode(&Location { shape: matrix.to_vec(), encoding: location.encoding, offset })
    }
}

/// The element types that are read, by their numbers in the format.
const ENCODINGS: [(u32, Encoding); 14] = [
    (0, Encoding::F32),
    (1, Encoding::F16),
    (2, Encoding::Q4_0),
    (3, Encoding::Q4_1),
    (6, Encoding::Q5_0),
    (7, Encoding::Q5_1),
    (8, Encoding::Q8_0),
    (10, Encoding::Q2_K),
    (11, Encoding::Q3_K),
    (12, Encoding::Q4_K),
    (13, Encoding::Q5_K),
    (14, Encoding::Q6_K),
    (28, Encoding::F64),
    (30, Encoding::BF16),
];

fn encoding_of(number: u32) -> Option<Encoding> {
    ENCODINGS.into_iter().find(|(known, _)| *known == number).map(|(_, encoding)| encoding)
}

fn number_of(encoding: Encoding) -> u32 {
    // Every type that is written is among those that are read.
    ENCODINGS.into_iter().find(|(_, known)| *known == encoding).map_or(0, |(number, _)| number)
}
