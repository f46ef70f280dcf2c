//! A `pytorch_model.bin`: an archive with a pickled dictionary of tensors, and their elements in records beside it.
//!
//! The reader of `burn-store` would bring a dozen crates for decompression and old formats; what `torch.save` writes
//! needs none of them, and here nothing is decompressed, nothing called, and elements are read by position as
//! those of other formats are.

mod archive;
mod pickle;
mod tensor;

use std::collections::BTreeMap;
use std::path::Path;

use super::source::{Location, Source};
use crate::{Error, Result};
use tensor::{Element, Strided};

/// Most bytes of the pickle: it describes tensors and does not hold them.
const MAX_PICKLE_BYTES: u64 = 32 << 20;

/// An open file whose pickle has been checked.
#[derive(Debug)]
pub(crate) struct PytorchFile {
    source: Source,
    /// With the first byte of each one's storage.
    tensors: BTreeMap<String, (Strided, u64)>,
}

impl PytorchFile {
    /// Reads the archive's list and the pickle; elements stay on disk.
    ///
    /// # Errors
    /// [`Error::Format`] names the file and what is wrong with it: another format, compressed records, a
    /// pickle that asks for anything but tensors, tensors that do not lie in their storages.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let source = Source::open(path)?;
        let wrong = |message: String| Error::format(path, message);
        refuse_old_formats(&source)?;
        let records = archive::records(&source)?;
        let (pickle, root) = records
            .iter()
            .find_map(|(name, record)| Some((*record, name.strip_suffix("data.pkl")?)))
            .ok_or_else(|| wrong("the archive has no data.pkl: is it one of torch.save?".into()))?;
        if let Some(order) = records.get(&format!("{root}byteorder"))
            && source.bytes(order.start, order.len.min(16) as usize)? != b"little"
        {
            return Err(wrong("its numbers are big-endian; expected little".into()));
        }
        if pickle.len > MAX_PICKLE_BYTES {
            let message = format!("data.pkl has {} bytes, more than {MAX_PICKLE_BYTES}", pickle.len);
            return Err(wrong(message));
        }
        let bytes = source.bytes(pickle.start, pickle.len as usize)?;
        let mut tensors = BTreeMap::new();
        for (name, tensor) in
            pickle::tensors(&bytes).map_err(|message| wrong(format!("data.pkl: {message}")))?
        {
            let record = records.get(&format!("{root}data/{}", tensor.key)).ok_or_else(|| {
                wrong(format!("tensor {name}: the archive has no record data/{}", tensor.key))
            })?;
            if tensor.len.checked_mul(tensor.element.bytes() as u64) != Some(record.len) {
                let (elements, bytes) = (tensor.len, record.len);
                let message = format!("tensor {name}: its storage of {elements} elements has {bytes} bytes");
                return Err(wrong(message));
            }
            let start = record.start;
            if tensors.insert(name.clone(), (tensor, start)).is_some() {
                return Err(wrong(format!("tensor {name} is there twice")));
            }
        }
        Ok(Self { source, tensors })
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    pub(crate) fn path(&self) -> &Path {
        self.source.path()
    }

    pub(crate) fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|(tensor, _)| tensor.shape.as_slice())
    }

    /// The tensor's shape and its elements as `f32`, in row-major order.
    pub(crate) fn read(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>)> {
        let wrong = |message: &str| Error::format(self.source.path(), message);
        let (tensor, start) =
            self.tensors.get(name).ok_or_else(|| wrong(&format!("no tensor named {name}")))?;
        let encoding = match tensor.element {
            Element::Number(encoding) => encoding,
            Element::Other(dtype, _) => {
                return Err(wrong(&format!("tensor {name} is {dtype}; expected floating-point numbers")));
            }
        };
        let offset = start + (tensor.offset * tensor.element.bytes()) as u64;
        let span = self.source.decode(&Location { shape: vec![tensor.span()], encoding, offset })?;
        Ok((tensor.shape.clone(), tensor.gathered(span)))
    }
}

/// What `torch.save` wrote before its version 1.6, and `TorchScript`'s archives, which are programs.
fn refuse_old_formats(source: &Source) -> Result<()> {
    let start = source.bytes(0, source.len().min(4) as usize)?;
    if start.starts_with(b"PK") {
        return Ok(());
    }
    let message = if start.starts_with(&[0x80]) {
        "it is of a version of torch before 1.6; load and save it with a newer one"
    } else {
        "expected a zip archive of torch.save; the first bytes are others"
    };
    Err(Error::format(source.path(), message))
}
