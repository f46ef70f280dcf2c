//! What GGUF files do to elements, and its undoing.

use std::collections::BTreeMap;

use super::Gguf;
use super::names::{Form, Names, Place};
use crate::model::ModelConfig;
use crate::model::config::ROPE_DIVISORS;
use crate::{Error, Result};

impl Form {
    /// A model's elements of stored ones; `rows` is the first dimension.
    pub(crate) fn restored(self, elements: Vec<f32>, rows: usize) -> Vec<f32> {
        match self {
            Self::Plain => elements,
            Self::Interleaved(width) => {
                moved_rows(&elements, rows, width, |row| 2 * (row % (width / 2)) + row / (width / 2))
            }
            Self::PlusOne => elements.into_iter().map(|value| value - 1.0).collect(),
        }
    }

    /// Stored elements of a model's.
    pub(crate) fn stored(self, elements: Vec<f32>, rows: usize) -> Vec<f32> {
        match self {
            Self::Plain => elements,
            Self::Interleaved(width) => {
                moved_rows(&elements, rows, width, |row| row / 2 + row % 2 * (width / 2))
            }
            Self::PlusOne => elements.into_iter().map(|value| value + 1.0).collect(),
        }
    }
}

/// Within each head of `width` rows, takes each row from where `from` says.
///
/// GGUF's llama files keep the pair that is rotated together in neighbouring rows, Hugging Face in
/// the two halves of a head.
fn moved_rows(elements: &[f32], rows: usize, width: usize, from: impl Fn(usize) -> usize) -> Vec<f32> {
    let columns = elements.len() / rows.max(1);
    let mut out = Vec::with_capacity(elements.len());
    for head in elements.chunks_exact((width * columns).max(1)) {
        for row in 0..width {
            out.extend_from_slice(&head[from(row) * columns..][..columns]);
        }
    }
    out
}

/// The parameters in a GGUF file, by their names in Hugging Face's.
#[derive(Debug)]
pub(crate) struct GgufNames(BTreeMap<String, Place>);

impl GgufNames {
    /// Maps every tensor of the file.
    ///
    /// # Errors
    /// A tensor that the family does not have: leaving it out would change the model. A
    /// tensor with another number of dimensions than the family's. A query or key projection whose
    /// rows are not whole heads; another number of experts than the configuration's.
    pub(crate) fn new(file: &Gguf, config: &ModelConfig) -> Result<Self> {
        let names = Names::of(config);
        let mut places = BTreeMap::new();
        for name in file.tensor_names().filter(|&name| name != ROPE_DIVISORS) {
            let wrong = |message: String| Error::format(file.path(), format!("tensor {name}{message}"));
            let stored = names.stored(name).ok_or_else(|| {
                wrong(format!(" is not known in the {} family", config.family.gguf.architecture))
            })?;
            let shape = file.shape(name).unwrap_or_default();
            if !stored.dimensions.contains(&shape.len()) {
                let known: Vec<String> = stored.dimensions.iter().map(usize::to_string).collect();
                let known = known.join(" or ");
                return Err(wrong(format!(": expected {known} dimensions, got {shape:?}")));
            }
            if let Form::Interleaved(width) = stored.place.form
                && !shape[0].is_multiple_of(width)
            {
                return Err(wrong(format!(": {} rows are not whole heads of {width}", shape[0])));
            }
            if stored.place.is_row && shape.len() == 2 && shape[0] != 1 {
                return Err(wrong(format!(": expected one row, got {shape:?}")));
            }
            if !stored.hub.contains("{}") {
                places.insert(stored.hub, stored.place);
                continue;
            }
            let count = config.experts.as_ref().map_or(0, |experts| experts.count);
            // Without a zero among them, the file has a byte at least for each name made here.
            if shape[0] != count || shape.contains(&0) {
                return Err(wrong(format!(": expected {count} experts that are not empty, got {shape:?}")));
            }
            for expert in 0..count {
                let place = Place { expert: Some(expert), ..stored.place.clone() };
                places.insert(stored.hub.replace("{}", &expert.to_string()), place);
            }
        }
        Ok(Self(places))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// A parameter's place in the file.
    pub(crate) fn place(&self, hub: &str) -> Option<&Place> {
        self.0.get(hub)
    }
}

impl Gguf {
    /// The shape of a parameter, as the model has it.
    pub(crate) fn parameter_shape(&self, place: &Place) -> Option<Vec<usize>> {
        let shape = self.shape(&place.stored)?;
        let shape = if place.expert.is_some() { shape.get(1..)? } else { shape };
        Some(match shape {
            &[width] if place.is_row => vec![1, width],
            shape => shape.to_vec(),
        })
    }

    /// A parameter's shape and elements, as the model has them.
    ///
    /// # Errors
    /// A tensor that is not there, a failed read.
    pub(crate) fn read_parameter(&self, place: &Place) -> Result<(Vec<usize>, Vec<f32>)> {
        let elements = match place.expert {
            Some(expert) => self.read_matrix(&place.stored, expert)?,
            None => self.read(&place.stored)?.1,
        };
        let shape = self.parameter_shape(place).unwrap_or_default();
        let rows = shape.first().copied().unwrap_or(0);
        Ok((shape, place.form.restored(elements, rows)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_pairs_move_to_the_halves_of_their_head_and_back() {
        // Two heads of 4 rows with one column each.
        let rows = vec![0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0];
        let form = Form::Interleaved(4);
        let halves = form.restored(rows.clone(), 8);
        assert_eq!(halves, [0.0, 2.0, 1.0, 3.0, 10.0, 12.0, 11.0, 13.0]);
        assert_eq!(form.stored(halves, 8), rows);
        // One head of 6 rows with two columns.
        let rows: Vec<f32> = (0..12).map(|value| value as f32).collect();
        let form = Form::Interleaved(6);
        let halves = form.restored(rows.clone(), 6);
        assert_eq!(halves, [0.0, 1.0, 4.0, 5.0, 8.0, 9.0, 2.0, 3.0, 6.0, 7.0, 10.0, 11.0]);
        assert_eq!(form.stored(halves, 6), rows);
    }

    #[test]
    fn a_norm_s_one_is_added_and_taken_away() {
        assert_eq!(Form::PlusOne.stored(vec![0.5, -1.0], 2), [1.5, 0.0]);
        assert_eq!(Form::PlusOne.restored(vec![1.5, 0.0], 2), [0.5, -1.0]);
    }
}
