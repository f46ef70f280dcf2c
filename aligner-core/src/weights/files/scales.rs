//! Scales of weights in eight bits: a weight's element is the stored one times the scale of its block.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use rayon::prelude::*;

use super::{Files, TensorFile};
use crate::model::config::Grid;
use crate::{Error, Result};

/// What follows a module's name in that of its weight's scales. Both multiply: one is the inverse of what the weight was multiplied by.
const ENDS: [&str; 2] = [".weight_scale_inv", ".weight_scale"];
/// What the names of scales of activations and of keys and values end in, which are not quantised here.
const PASSED_OVER: [&str; 3] = [".input_scale", ".k_scale", ".v_scale"];
/// Elements that one task scales at a time.
const CHUNK_ELEMENTS: usize = 1 << 16;

/// The scales of weights, by the weights' names.
#[derive(Debug, Default)]
pub(super) struct Scales(BTreeMap<String, Scale>);

/// The scales of a matrix.
#[derive(Debug)]
pub(super) struct Scale {
    /// Their own name.
    pub(super) name: String,
    /// The file that has them.
    pub(super) owner: usize,
    /// Columns of the matrix.
    columns: usize,
    /// Rows and columns that have a scale in common.
    block: [usize; 2],
    /// Scales beside each other, for a row.
    across: usize,
}

impl Scales {
    pub(super) fn of(&self, weight: &str) -> Option<&Scale> {
        self.0.get(weight)
    }
}

impl Files {
    /// Takes scales out of the tensors' names. Every weight of eight bits has to have some, in the shape of one of the grids.
    pub(super) fn take_scales(&mut self, path: &Path, grids: &[Grid]) -> Result<Scales> {
        if self.opened.iter().any(|file| matches!(file, TensorFile::Pytorch(_))) {
            let message = "quantization_config: weights with scales are read from safetensors alone";
            return Err(Error::format(path, message));
        }
        let wrong = |message: String| Error::format(path, message);
        let mut scales = BTreeMap::new();
        for (name, owner) in self.extracted() {
            let weight = weight_of(&name).unwrap_or_default();
            let scale = self.matched(&weight, &name, owner, grids).map_err(wrong)?;
            if let Some(other) = scales.insert(weight.clone(), scale) {
                return Err(wrong(format!("tensor {weight} has both {name} and {}", other.name)));
            }
        }
        self.owners.retain(|name, _| !PASSED_OVER.iter().any(|end| name.ends_with(end)));
        let bare =
            self.owners.iter().find(|(name, _)| self.is_eight_bits(name) && !scales.contains_key(*name));
        if let Some((name, _)) = bare {
            return Err(wrong(format!(
                "tensor {name} has eight bits, but no {name}_scale_inv or {name}_scale, which quantization_config speaks of"
            )));
        }
        Ok(Scales(scales))
    }

    /// Takes out the tensors that are scales by their names and have a weight beside them.
    fn extracted(&mut self) -> Vec<(String, usize)> {
        let is_scale =
            |name: &&String| weight_of(name).is_some_and(|weight| self.owners.contains_key(&weight));
        let found: Vec<String> = self.owners.keys().filter(is_scale).cloned().collect();
        found.into_iter().filter_map(|name| self.owners.remove_entry(&name)).collect()
    }

    fn is_eight_bits(&self, name: &str) -> bool {
        let file = self.owners.get(name).map(|&owner| &self.opened[owner]);
        matches!(file, Some(TensorFile::Safetensors(file)) if file.is_eight_bits(name))
    }

    /// The scales of a weight, where shapes fit.
    fn matched(&self, weight: &str, name: &str, owner: usize, grids: &[Grid]) -> Result<Scale, String> {
        let shape = self.shape(weight).unwrap_or_default();
        let &[rows, columns] = shape else {
            return Err(format!(
                "tensor {weight}: expected a matrix, since {name} is beside it, got shape {shape:?}"
            ));
        };
        if !self.is_eight_bits(weight) {
            return Err(format!("tensor {weight} does not have eight bits, but {name} is beside it"));
        }
        let got = self.opened[owner].shape(name).unwrap_or_default();
        let fits = |grid: &&Grid| without_last_ones(got) == without_last_ones(&grid.shape([rows, columns]));
        let Some(grid) = grids.iter().find(fits) else {
            let expected: Vec<_> =
                grids.iter().map(|grid| format!("{:?}", grid.shape([rows, columns]))).collect();
            let expected = expected.join(" or ");
            return Err(format!(
                "tensor {name}: expected shape {expected} beside a weight {shape:?}, got {got:?}"
            ));
        };
        let (block, across) = (grid.block([rows, columns]), grid.shape([rows, columns])[1]);
        if grids.iter().filter(fits).any(|other| other.block([rows, columns]) != block) {
            return Err(format!(
                "tensor {name}: several groups of quantization_config fit its shape {got:?}"
            ));
        }
        Ok(Scale { name: name.to_owned(), owner, columns, block, across })
    }
}

/// Writers leave out sides of one, the last first.
fn without_last_ones(shape: &[usize]) -> &[usize] {
    let sides = shape.iter().rposition(|&side| side != 1).map_or(0, |last| last + 1);
    &shape[..sides]
}

/// The weight of a tensor that has the name of scales.
fn weight_of(scales: &str) -> Option<String> {
    let module = ENDS.iter().find_map(|end| scales.strip_suffix(end))?;
    Some(format!("{module}.weight"))
}

impl Scale {
    /// Which of the scales, in their own order, belong to ranges of the weight's elements: those of all the rows of blocks that the
    /// ranges lie in.
    pub(super) fn places(&self, pieces: &[Range<usize>]) -> Range<usize> {
        let elements = self.block[0].saturating_mul(self.columns).max(1);
        let pieces = || pieces.iter().filter(|piece| !piece.is_empty());
        let first = pieces().map(|piece| piece.start / elements).min().unwrap_or(0);
        let end = pieces().map(|piece| (piece.end - 1) / elements + 1).max().unwrap_or(first);
        first * self.across..end * self.across
    }

    /// Multiplies the elements of these ranges, one range after the other in `values`, by their scales, of which those from `first`
    /// on are here.
    pub(super) fn apply(
        &self,
        pieces: &[Range<usize>],
        mut values: &mut [f32],
        first: usize,
        scales: &[f32],
    ) {
        for piece in pieces {
            let (own, rest) = std::mem::take(&mut values).split_at_mut(piece.len());
            let chunks = own.par_chunks_mut(CHUNK_ELEMENTS).enumerate();
            chunks
                .for_each(|(at, own)| self.apply_run(piece.start + at * CHUNK_ELEMENTS, own, first, scales));
            values = rest;
        }
    }

    /// The same for elements that follow each other from `at` on.
    fn apply_run(&self, mut at: usize, mut values: &mut [f32], first: usize, scales: &[f32]) {
        let [rows, columns] = self.block;
        while !values.is_empty() {
            let (row, column) = (at / self.columns, at % self.columns);
            let end = (column / columns + 1).saturating_mul(columns).min(self.columns);
            let count = (end - column).min(values.len());
            let (own, rest) = std::mem::take(&mut values).split_at_mut(count);
            let scale = scales[row / rows * self.across + column / columns - first];
            for value in own {
                *value *= scale;
            }
            at += count;
            values = rest;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A matrix of 5 rows and 7 columns in blocks of 2 and 3.
    fn scale() -> Scale {
        Scale { name: "scales".into(), owner: 0, columns: 7, block: [2, 3], across: 3 }
    }

    #[test]
    #[expect(clippy::single_range_in_vec_init, reason = "one range of elements is meant")]
    fn ranges_of_elements_have_the_scales_of_their_rows_of_blocks() {
        for (pieces, expected) in [
            (vec![0..35], 0..9),
            (vec![0..14], 0..3),
            (vec![13..15], 0..6),
            (vec![28..35], 6..9),
            (vec![30..31, 15..16], 3..9),
            (vec![3..3], 0..0),
            (vec![], 0..0),
        ] {
            assert_eq!(scale().places(&pieces), expected, "{pieces:?}");
        }
    }

    #[test]
    fn every_range_of_elements_gets_its_own_scales() {
        let scales: Vec<f32> = (1..=9).map(|scale| scale as f32).collect();
        let of_element = |at: usize| scales[at / 7 / 2 * 3 + at % 7 / 3];
        for start in 0..35 {
            for end in start..=35 {
                let pieces = [start..end, 20..25, 3..3];
                let mut values = vec![1.0; end - start + 5];
                let own = scale().places(&pieces);
                scale().apply(&pieces, &mut values, own.start, &scales[own]);
                let expected: Vec<f32> = pieces.iter().cloned().flatten().map(of_element).collect();
                assert_eq!(values, expected, "{pieces:?}");
            }
        }
    }
}
