//! One safetensors file: eight bytes of header length, a JSON header, the tensors' bytes.
//!
//! The `safetensors` crate gives the header's types. Its own checks do not name the tensor at
//! fault and let a doubled name pass, so the checks are here.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorInfo};

use super::encoding::Encoding;
use super::source::{Location, Source};
use super::unique::UniqueMap;
use crate::{Error, Result};

/// Longest accepted header, as in the reference implementation.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// An open file whose header has been checked.
#[derive(Debug)]
pub(crate) struct SafetensorsFile {
    source: Source,
    /// Start of the tensors' bytes.
    data_start: u64,
    tensors: BTreeMap<String, TensorInfo>,
    metadata: BTreeMap<String, String>,
}

impl SafetensorsFile {
    /// Opens a file and checks that its header describes exactly its bytes.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let source = Source::open(path)?;
        let header_bytes = header_len(&source)?;
        let header = source.bytes(8, header_bytes)?;
        let (tensors, metadata) = parse_header(path, &header)?;
        let data_start = 8 + header_bytes as u64;
        check_layout(path, &tensors, source.len() - data_start)?;
        Ok(Self { source, data_start, tensors, metadata })
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    pub(crate) fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    pub(crate) fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|info| info.shape.as_slice())
    }

    pub(crate) fn path(&self) -> &Path {
        self.source.path()
    }

    /// Whether a tensor's elements are floating point in eight bits.
    pub(crate) fn is_eight_bits(&self, name: &str) -> bool {
        self.tensors.get(name).is_some_and(|info| matches!(info.dtype, Dtype::F8_E4M3 | Dtype::F8_E5M2))
    }

    /// The tensor's shape and its elements as `f32`.
    pub(crate) fn read(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>)> {
        let location = self.location(name)?;
        let elements = self.source.decode(&location)?;
        Ok((location.shape, elements))
    }

    /// Ranges of the tensor's elements, one after the other.
    pub(crate) fn read_pieces(&self, name: &str, pieces: &[Range<usize>]) -> Result<Vec<f32>> {
        self.source.decode_pieces(&self.location(name)?, pieces)
    }

    /// Bytes of tensors that have been read.
    pub(crate) fn bytes_read(&self) -> u64 {
        self.source.bytes_read()
    }

    fn location(&self, name: &str) -> Result<Location> {
        let path = self.source.path();
        let info =
            self.tensors.get(name).ok_or_else(|| Error::format(path, format!("no tensor named {name}")))?;
        let encoding = encoding_of(info.dtype).ok_or_else(|| {
            let dtype = info.dtype;
            Error::format(
                path,
                format!("tensor {name} is {dtype}; expected F32, F16, BF16, F64, F8_E4M3 or F8_E5M2"),
            )
        })?;
        let offset = self.data_start + info.data_offsets.0 as u64;
        Ok(Location { shape: info.shape.clone(), encoding, offset })
    }
}

fn encoding_of(dtype: Dtype) -> Option<Encoding> {
    match dtype {
        Dtype::F32 => Some(Encoding::F32),
        Dtype::F64 => Some(Encoding::F64),
        Dtype::F16 => Some(Encoding::F16),
        Dtype::BF16 => Some(Encoding::BF16),
        Dtype::F8_E4M3 => Some(Encoding::F8_E4M3),
        Dtype::F8_E5M2 => Some(Encoding::F8_E5M2),
        _ => None,
    }
}

/// The header's length, checked against the file's before anything is allocated.
fn header_len(source: &Source) -> Result<usize> {
    let (path, len) = (source.path(), source.len());
    if len < 8 {
        return Err(Error::format(path, format!("{len} bytes are too few for a safetensors file")));
    }
    let prefix: [u8; 8] = source.bytes(0, 8)?.try_into().expect("eight bytes were asked for");
    let header = u64::from_le_bytes(prefix);
    if header > MAX_HEADER_BYTES {
        return Err(Error::format(
            path,
            format!(
                "the header claims {header} bytes, more than {MAX_HEADER_BYTES}; not a safetensors file?"
            ),
        ));
    }
    if header > len - 8 {
        return Err(Error::format(
            path,
            format!("the header claims {header} bytes, but only {} follow; is the file truncated?", len - 8),
        ));
    }
    Ok(header as usize)
}

type Header = (BTreeMap<String, TensorInfo>, BTreeMap<String, String>);

fn parse_header(path: &Path, bytes: &[u8]) -> Result<Header> {
    let bad = |error: serde_json::Error| Error::format(path, format!("bad safetensors header: {error}"));
    let header: UniqueMap<Entry> = serde_json::from_slice(bytes).map_err(bad)?;
    let mut tensors = BTreeMap::new();
    let mut metadata = BTreeMap::new();
    for (name, entry) in header.0 {
        match entry {
            Entry::Tensor(info) if name != "__metadata__" => {
                tensors.insert(name, info);
            }
            Entry::Metadata(entries) if name == "__metadata__" => metadata = entries,
            _ => {
                let message =
                    format!("bad safetensors header: {name:?} has no dtype, shape and data_offsets");
                return Err(Error::format(path, message));
            }
        }
    }
    Ok((tensors, metadata))
}

/// A value of the header's object.
#[derive(serde::Deserialize)]
#[serde(untagged, expecting = "expected an object with a known dtype, a shape and data_offsets")]
enum Entry {
    Tensor(TensorInfo),
    Metadata(BTreeMap<String, String>),
}

/// Checks that the tensors cover the data exactly: no overlap, no gap, nothing past the end, and
/// each as long as its shape says.
fn check_layout(path: &Path, tensors: &BTreeMap<String, TensorInfo>, data_bytes: u64) -> Result<()> {
    let mut by_offset: Vec<_> = tensors.iter().collect();
    by_offset.sort_by_key(|(_, info)| info.data_offsets);
    let mut end = 0;
    for (name, info) in by_offset {
        let (from, to) = info.data_offsets;
        let wrong = |message: String| Err(Error::format(path, format!("tensor {name}: {message}")));
        if to < from || to as u64 > data_bytes {
            return wrong(format!(
                "bytes {from}..{to} are not within the {data_bytes} bytes of data; is the file truncated?"
            ));
        }
        if from != end {
            return wrong(format!("starts at byte {from}, but the tensor before it ends at {end}"));
        }
        if byte_len(info) != Some(to - from) {
            let (dtype, shape) = (info.dtype, &info.shape);
            return wrong(format!("{dtype} of shape {shape:?} does not take the {} bytes it has", to - from));
        }
        end = to;
    }
    if end as u64 != data_bytes {
        return Err(Error::format(path, format!("{} bytes follow the last tensor", data_bytes - end as u64)));
    }
    Ok(())
}

/// The bytes that a shape needs; none on overflow or where they are not whole.
fn byte_len(info: &TensorInfo) -> Option<usize> {
    let elements = info.shape.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim))?;
    let bits = elements.checked_mul(info.dtype.bitsize())?;
    bits.is_multiple_of(8).then_some(bits / 8)
}
