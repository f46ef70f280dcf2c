//! Recorded batches `[rows, tokens]` with a mask, as packed ones.

use crate::fixture::flat;
use aligner_core::{Batch, Group, Sample, Tensor};
use burn::tensor::{Int, TensorData};
use serde_json::Value;

/// The mask of a recorded batch.
pub(crate) struct Padded {
    rows: Vec<Vec<bool>>,
}

impl Padded {
    /// Of the inputs' `mask`.
    pub(crate) fn new(inputs: &Value) -> Self {
        let rows = inputs["mask"].as_array().unwrap().iter();
        Self { rows: rows.map(|row| flat(row).iter().map(|&mask| mask > 0.0).collect()).collect() }
    }

    /// A sample for each row, after a prompt of one token; `fill` gives it what it carries beside tokens.
    /// `siblings` neighbours share a group.
    pub(crate) fn groups(&self, siblings: usize, fill: impl Fn(usize, &mut Sample)) -> Vec<Group> {
        let sample = |(at, row): (usize, &Vec<bool>)| {
            let ids = (0..row.len()).map(|token| 2 + (at * 100 + token) as u32);
            let mut sample =
                Sample::new(std::iter::once(1).chain(ids).collect(), [&[false], row.as_slice()].concat());
            fill(at, &mut sample);
            sample
        };
        let samples: Vec<Sample> = self.rows.iter().enumerate().map(sample).collect();
        let group = |(at, samples): (usize, &[Sample])| Group {
            id: format!("row {}", at * siblings),
            samples: samples.to_vec(),
            ..Group::default()
        };
        samples.chunks(siblings).enumerate().map(group).collect()
    }

    /// Places of the targets in the recorded `[rows, tokens]`, in the order of the packed batch.
    pub(crate) fn places(&self) -> Vec<usize> {
        let width = self.rows[0].len();
        let places = self.rows.iter().enumerate().flat_map(|(at, row)| {
            (0..width).filter(move |&token| row[token]).map(move |token| at * width + token)
        });
        places.collect()
    }

    /// The targets' elements of a leaf `[rows * tokens]`: `[targets]`.
    pub(crate) fn targets(&self, leaf: &Tensor<1>) -> Tensor<1> {
        let places: Vec<i64> = self.places().into_iter().map(|place| place as i64).collect();
        let places = Tensor::<1, Int>::from_data(TensorData::from(places.as_slice()), &leaf.device());
        leaf.clone().select(0, places)
    }

    /// The targets' elements of a recorded value: `[targets]`.
    pub(crate) fn of(&self, recorded: &Value) -> Vec<f32> {
        let all = flat(recorded);
        self.places().into_iter().map(|place| all[place]).collect()
    }

    /// A batch of one group a row.
    pub(crate) fn batch(groups: &[Group]) -> Batch {
        Batch::collate(groups).unwrap()
    }
}

/// A row of a recorded `[rows, tokens]` as a sample's per-token field: 0 on the prompt.
pub(crate) fn field(recorded: &Value, row: usize) -> Vec<f32> {
    [&[0.0], flat(&recorded[row]).as_slice()].concat()
}

/// The same value on every token of a row.
pub(crate) fn everywhere(recorded: &Value, row: usize, tokens: usize) -> Vec<f32> {
    vec![flat(recorded)[row]; tokens]
}
