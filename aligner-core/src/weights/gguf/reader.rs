//! The header of a GGUF file, read front to back with every length checked against what is left.

use std::collections::BTreeMap;

use super::value::GgufValue;
use super::{DEFAULT_ALIGNMENT, Location, Source, encoding_of};
use crate::{Error, Result};

/// Bytes read from the file at a time.
const WINDOW_BYTES: usize = 1 << 20;
/// Arrays may hold arrays, but no real file nests deeper than this.
const MAX_NESTING: usize = 4;
/// Dimensions of a tensor, as in ggml.
const MAX_DIMENSIONS: u32 = 4;
/// Longest key or tensor name; the format allows keys of 65535 bytes.
const MAX_NAME_BYTES: u64 = 65_535;

type Header = (BTreeMap<String, GgufValue>, BTreeMap<String, Location>);

/// Reads and checks everything before the tensors' bytes.
pub(super) fn read_header(source: &Source) -> Result<Header> {
    let mut reader = Reader { source, position: 0, window: Vec::new(), window_start: 0 };
    if &reader.array::<4>("the magic number")? != b"GGUF" {
        return Err(reader.error("expected a GGUF file; the magic number is another"));
    }
    let version = reader.u32("the version")?;
    if !(2..=3).contains(&version) {
        return Err(reader.error(format!("GGUF version {version} is not supported; expected 2 or 3")));
    }
    let tensor_count = reader.u64("the tensor count")?;
    let key_count = reader.u64("the key count")?;
    let mut metadata = BTreeMap::new();
    for _ in 0..key_count {
        let key = reader.name("a metadata key")?;
        let value = reader.value(&key)?;
        if metadata.insert(key.clone(), value).is_some() {
            return Err(reader.error(format!("key {key} is there twice")));
        }
    }
    let alignment = alignment(&reader, &metadata)?;
    let mut tensors = BTreeMap::new();
    for _ in 0..tensor_count {
        let (name, location) = reader.tensor_info()?;
        if tensors.insert(name.clone(), location).is_some() {
            return Err(reader.error(format!("tensor {name} is there twice")));
        }
    }
    place(&reader, &mut tensors, alignment)?;
    Ok((metadata, tensors))
}

fn alignment(reader: &Reader<'_>, metadata: &BTreeMap<String, GgufValue>) -> Result<u64> {
    match metadata.get("general.alignment") {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(&GgufValue::Integer(bytes)) if (1..=1 << 20).contains(&bytes) && bytes.count_ones() == 1 => {
            Ok(bytes as u64)
        }
        Some(other) => {
            let got = other.describe();
            Err(reader.error(format!("key general.alignment: expected a power of two, got {got}")))
        }
    }
}

/// Turns offsets within the data into offsets within the file, and checks that each tensor lies
/// inside it and apart from the others.
fn place(reader: &Reader<'_>, tensors: &mut BTreeMap<String, Location>, alignment: u64) -> Result<()> {
    let data_start = reader.position.next_multiple_of(alignment);
    let data_bytes = reader.source.len().saturating_sub(data_start);
    let mut by_offset: Vec<_> = tensors.iter_mut().collect();
    by_offset.sort_by_key(|(_, location)| location.offset);
    let mut end = 0;
    for (name, location) in by_offset {
        let elements = location.shape.iter().product();
        let bytes = location.encoding.bytes(elements).expect("checked when its entry was read") as u64;
        let from = location.offset;
        if !from.is_multiple_of(alignment) {
            return Err(
                reader.error(format!("tensor {name}: offset {from} is not a multiple of {alignment}"))
            );
        }
        let Some(to) = from.checked_add(bytes).filter(|&to| to <= data_bytes) else {
            return Err(reader.error(format!(
                "tensor {name}: {bytes} bytes at {from} are not within the {data_bytes} bytes of data; \
                 is the file truncated?"
            )));
        };
        if from < end {
            return Err(reader.error(format!("tensor {name}: starts at byte {from}, inside another tensor")));
        }
        end = to;
        location.offset = data_start + from;
    }
    Ok(())
}

/// A position in the file with a window of bytes around it.
struct Reader<'a> {
    source: &'a Source,
    position: u64,
    window: Vec<u8>,
    window_start: u64,
}

impl Reader<'_> {
    fn error(&self, message: impl Into<String>) -> Error {
        Error::format(self.source.path(), message)
    }

    fn remaining(&self) -> u64 {
        self.source.len() - self.position
    }

    /// The next `len` bytes; `what` is for the message where they are not there.
    fn take(&mut self, len: u64, what: &str) -> Result<&[u8]> {
        if len > self.remaining() {
            let left = self.remaining();
            return Err(
                self.error(format!("{what} needs {len} bytes, but {left} are left; is the file truncated?"))
            );
        }
        let window_end = self.window_start + self.window.len() as u64;
        if self.position + len > window_end {
            let size = len.max(WINDOW_BYTES as u64).min(self.remaining());
            self.window = self.source.bytes(self.position, size as usize)?;
            self.window_start = self.position;
        }
        let start = (self.position - self.window_start) as usize;
        self.position += len;
        Ok(&self.window[start..start + len as usize])
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        Ok(self.take(N as u64, what)?.try_into().expect("N bytes were taken"))
    }

    fn u32(&mut self, what: &str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    fn text(&mut self, what: &str) -> Result<String> {
        let len = self.u64(what)?;
        let bytes = self.take(len, what)?.to_vec();
        String::from_utf8(bytes).map_err(|_| self.error(format!("{what} is not valid UTF-8")))
    }

    fn name(&mut self, what: &str) -> Result<String> {
        let name = self.text(what)?;
        if name.is_empty() || name.len() as u64 > MAX_NAME_BYTES {
            return Err(self.error(format!("{what} has {} bytes", name.len())));
        }
        Ok(name)
    }

    /// A key's type and value.
    fn value(&mut self, key: &str) -> Result<GgufValue> {
        let what = format!("key {key}");
        match self.u32(&what)? {
            9 => self.list(&what, 1),
            kind => self.scalar(kind, &what),
        }
    }

    fn scalar(&mut self, kind: u32, what: &str) -> Result<GgufValue> {
        Ok(match kind {
            6 | 12 => GgufValue::Float(self.float(kind, what)?),
            7 => GgufValue::Flag(self.flag(what)?),
            8 => GgufValue::Text(self.text(what)?),
            _ => GgufValue::Integer(self.integer(kind, what)?),
        })
    }

    fn integer(&mut self, kind: u32, what: &str) -> Result<i64> {
        Ok(match kind {
            0 => u8::from_le_bytes(self.array(what)?).into(),
            1 => i8::from_le_bytes(self.array(what)?).into(),
            2 => u16::from_le_bytes(self.array(what)?).into(),
            3 => i16::from_le_bytes(self.array(what)?).into(),
            4 => u32::from_le_bytes(self.array(what)?).into(),
            5 => i32::from_le_bytes(self.array(what)?).into(),
            10 => {
                let number = self.u64(what)?;
                i64::try_from(number).map_err(|_| self.error(format!("{what}: {number} is too large")))?
            }
            11 => i64::from_le_bytes(self.array(what)?),
            _ => return Err(self.error(format!("{what}: value type {kind} is unknown"))),
        })
    }

    fn float(&mut self, kind: u32, what: &str) -> Result<f64> {
        if kind == 6 {
            return Ok(f32::from_le_bytes(self.array(what)?).into());
        }
        Ok(f64::from_le_bytes(self.array(what)?))
    }

    fn flag(&mut self, what: &str) -> Result<bool> {
        match self.array::<1>(what)?[0] {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(self.error(format!("{what}: expected 0 or 1, got {other}"))),
        }
    }

    /// An array. Its elements are pushed as they are read, so a false count costs nothing.
    fn list(&mut self, what: &str, depth: usize) -> Result<GgufValue> {
        let kind = self.u32(what)?;
        let count = self.u64(what)?;
        // Every element takes a byte at least.
        if count > self.remaining() {
            let left = self.remaining();
            return Err(self.error(format!("{what}: {count} elements cannot be in the {left} bytes left")));
        }
        if kind == 9 && depth == MAX_NESTING {
            return Err(self.error(format!("{what}: arrays are nested deeper than {MAX_NESTING}")));
        }
        Ok(match kind {
            6 | 12 => GgufValue::Floats(self.repeat(count, |reader| reader.float(kind, what))?),
            7 => GgufValue::Flags(self.repeat(count, |reader| reader.flag(what))?),
            8 => GgufValue::Texts(self.repeat(count, |reader| reader.text(what))?),
            9 => GgufValue::Lists(self.repeat(count, |reader| reader.list(what, depth + 1))?),
            _ => GgufValue::Integers(self.repeat(count, |reader| reader.integer(kind, what))?),
        })
    }

    fn repeat<T>(&mut self, count: u64, mut read: impl FnMut(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        (0..count).map(|_| read(self)).collect()
    }

    /// A tensor's name, and its place with the offset still counted from the data's start.
    fn tensor_info(&mut self) -> Result<(String, Location)> {
        let name = self.name("a tensor name")?;
        let what = format!("tensor {name}");
        let dimensions = self.u32(&what)?;
        if dimensions > MAX_DIMENSIONS {
            return Err(self.error(format!("{what} has {dimensions} dimensions, more than {MAX_DIMENSIONS}")));
        }
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            let dim = self.u64(&what)?;
            shape.push(
                usize::try_from(dim)
                    .map_err(|_| self.error(format!("{what}: dimension {dim} is too large")))?,
            );
        }
        let kind = self.u32(&what)?;
        let offset = self.u64(&what)?;
        let encoding = encoding_of(kind).ok_or_else(|| {
            self.error(format!(
                "{what}: element type {kind} is not supported; known are F32, F64, F16, BF16, Q4_0, Q4_1, \
                 Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K and Q6_K"
            ))
        })?;
        // The innermost dimension comes first, and a block never spans two rows.
        let row = shape.first().copied().unwrap_or(1);
        shape.reverse();
        let elements = shape.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim));
        let bytes = elements.and_then(|elements| encoding.bytes(elements));
        if bytes.is_none() || !row.is_multiple_of(encoding.block_elements()) {
            return Err(self.error(format!("{what}: shape {shape:?} is impossible for {encoding:?}")));
        }
        Ok((name, Location { shape, encoding, offset }))
    }
}
