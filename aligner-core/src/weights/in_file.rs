//! Parameters that are still in their file: ranks of a mesh read no more than their parts.

use std::ops::Range;
use std::sync::Arc;

use super::Checkpoint;
use crate::model::ParamSpec;
use crate::{Error, Result};

/// Elements of a parameter in a file, of which nothing has been read yet.
#[derive(Debug, Clone)]
pub struct InFile {
    checkpoint: Arc<Checkpoint>,
    spec: Arc<ParamSpec>,
    /// Which of the parameter's elements, in order.
    pieces: Vec<Range<usize>>,
}

impl InFile {
    /// All of a parameter.
    pub fn whole(checkpoint: Arc<Checkpoint>, spec: ParamSpec) -> Self {
        let elements = spec.shape.iter().product();
        Self { checkpoint, spec: Arc::new(spec), pieces: vec![0..elements] }
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
    /// What the file's reader says; [`Error::Format`] for an element that is not finite.
    pub fn read(&self) -> Result<Vec<f32>> {
        let values = self.checkpoint.read_pieces(&self.spec, &self.pieces)?;
        if values.iter().all(|value| value.is_finite()) {
            return Ok(values);
        }
        let message = format!("tensor {} holds NaN or infinity", self.spec.name);
        Err(Error::format(self.checkpoint.path(), message))
    }
}
