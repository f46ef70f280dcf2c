//! Tensors that are still in their file: ranks of a mesh read no more than their parts.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::Checkpoint;
use super::safetensors_file::SafetensorsFile;
use crate::model::ParamSpec;
use crate::{Error, Result};

/// Elements of a tensor of which nothing has been read yet.
#[derive(Debug, Clone)]
pub struct Unread {
    source: Source,
    /// Which of the tensor's elements, in order.
    pieces: Vec<Range<usize>>,
}

#[derive(Debug, Clone)]
enum Source {
    Parameter(Arc<Checkpoint>, Arc<ParamSpec>),
    Tensor(Arc<SafetensorsFile>, Arc<str>),
    Held(Arc<Vec<f32>>),
}

/// A tensor's shape, with elements that may still be in a file.
pub type UnreadTensor = (Vec<usize>, Unread);

/// The tensors of a safetensors file, of which nothing but the header is read.
///
/// # Errors
/// A file that is missing, truncated or inconsistent, with the tensor at fault.
pub fn open_tensors(path: &Path) -> Result<BTreeMap<String, UnreadTensor>> {
    let file = Arc::new(SafetensorsFile::open(path)?);
    let tensor = |name: &str| {
        let shape = file.shape(name).unwrap_or_default().to_vec();
        let pieces = all(shape.iter().product());
        (name.to_owned(), (shape, Unread { source: Source::Tensor(file.clone(), name.into()), pieces }))
    };
    Ok(file.names().map(tensor).collect())
}

/// All of so many elements.
fn all(elements: usize) -> Vec<Range<usize>> {
    std::iter::once(0..elements).collect()
}

impl Unread {
    /// All of a model's parameter.
    pub fn parameter(checkpoint: Arc<Checkpoint>, spec: ParamSpec) -> Self {
        let elements = spec.shape.iter().product();
        Self { source: Source::Parameter(checkpoint, Arc::new(spec)), pieces: all(elements) }
    }

    /// Elements that are in memory.
    pub fn held(values: Vec<f32>) -> Self {
        let pieces = all(values.len());
        Self { source: Source::Held(Arc::new(values)), pieces }
    }

    /// How many elements these are.
    pub fn len(&self) -> usize {
        self.pieces.iter().map(ExactSizeIterator::len).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Ranges of these elements, one after the other.
    #[must_use]
    pub fn part(&self, ranges: &[Range<usize>]) -> Self {
        let mut pieces: Vec<Range<usize>> = Vec::new();
        for range in ranges {
            let mut before = 0;
            for piece in &self.pieces {
                let start = range.start.max(before);
                let end = range.end.min(before + piece.len());
                if start < end {
                    let found = piece.start + start - before..piece.start + end - before;
                    match pieces.last_mut() {
                        Some(last) if last.end == found.start => last.end = found.end,
                        _ => pieces.push(found),
                    }
                }
                before += piece.len();
            }
        }
        Self { pieces, ..self.clone() }
    }

    /// Reads them.
    ///
    /// # Errors
    /// What the file's reader says; [`Error::Format`] for an element of a parameter that is not finite.
    pub fn read(&self) -> Result<Vec<f32>> {
        match &self.source {
            Source::Parameter(checkpoint, spec) => {
                let values = checkpoint.read_pieces(spec, &self.pieces)?;
                if values.iter().all(|value| value.is_finite()) {
                    return Ok(values);
                }
                let message = format!("tensor {} holds NaN or infinity", spec.name);
                Err(Error::format(checkpoint.path(), message))
            }
            Source::Tensor(file, name) => file.read_pieces(name, &self.pieces),
            Source::Held(values) => {
                Ok(self.pieces.iter().flat_map(|piece| &values[piece.clone()]).copied().collect())
            }
        }
    }
}
