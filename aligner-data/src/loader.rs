//! Groups in a seeded order, epoch after epoch, resumable at any row.

use aligner_core::{Error, Group, Result};
use serde::{Deserialize, Serialize};

use crate::Dataset;
use crate::shuffle::{epoch_seed, permutation};

/// Where a loader stands: all that is needed to go on with the next row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoaderState {
    /// Seed of the order.
    pub seed: u64,
    /// Whether rows are shuffled.
    pub shuffle: bool,
    /// Epochs that were begun before the current one.
    pub epoch: u64,
    /// Rows of the current epoch that are behind, dropped ones included.
    pub position: usize,
    /// Rows of the data set.
    pub rows: usize,
    /// Id of the row that comes next.
    pub next_id: String,
}

/// Walks a data set without end: each epoch is a permutation of its own.
#[derive(Debug)]
pub struct Loader {
    dataset: Dataset,
    seed: u64,
    shuffle: bool,
    epoch: u64,
    position: usize,
    order: Vec<usize>,
}

impl Loader {
    /// A loader at the beginning of its first epoch.
    ///
    /// # Errors
    /// A data set without rows.
    pub fn new(dataset: Dataset, seed: u64, shuffle: bool) -> Result<Self> {
        if dataset.is_empty() {
            return Err(Error::Invalid("there is no row to load: the data set's part is empty".into()));
        }
        let mut loader = Self { dataset, seed, shuffle, epoch: 0, position: 0, order: Vec::new() };
        loader.begin_epoch();
        Ok(loader)
    }

    /// The next `count` groups. Where an epoch ends, the next one goes on in the same batch, so that
    /// every batch is full; dropped rows are passed over.
    ///
    /// # Errors
    /// As [`Dataset::group`]; and if a whole epoch's rows are all dropped.
    pub fn next(&mut self, count: usize) -> Result<Vec<Group>> {
        let mut groups = Vec::with_capacity(count.min(self.dataset.len()));
        let mut dropped = 0;
        while groups.len() < count {
            if let Some(group) = self.dataset.group(self.order[self.position])? {
                groups.push(group);
                dropped = 0;
            } else {
                dropped += 1;
                // With a single good row, it may be the first of one epoch and the last of the next.
                if dropped == 2 * self.dataset.len() - 1 {
                    let rows = self.dataset.len();
                    let path = &self.dataset.config().path;
                    return Err(Error::format(
                        path,
                        format!("all {rows} rows are dropped: none can be trained on"),
                    ));
                }
            }
            self.advance();
        }
        Ok(groups)
    }

    /// Epochs that were completed.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Epochs that were completed, with the current one's share.
    pub fn progress(&self) -> f64 {
        self.epoch as f64 + self.position as f64 / self.dataset.len() as f64
    }

    /// The data set.
    pub fn dataset(&self) -> &Dataset {
        &self.dataset
    }

    /// Where the loader stands.
    pub fn state(&self) -> LoaderState {
        LoaderState {
            seed: self.seed,
            shuffle: self.shuffle,
            epoch: self.epoch,
            position: self.position,
            rows: self.dataset.len(),
            next_id: self.dataset.id(self.order[self.position]),
        }
    }

    /// Goes to where `state` was taken: the groups that follow are those that followed then.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the data set is not the one of then: another number of rows, or
    /// another row in the place of the next.
    pub fn restore(&mut self, state: &LoaderState) -> Result<()> {
        let len = self.dataset.len();
        if state.rows != len || state.position >= len {
            let (rows, position) = (state.rows, state.position);
            return Err(Error::Invalid(format!(
                "cannot resume: the data had {rows} rows (next was row {position} of the epoch) and has {len} now"
            )));
        }
        let order = epoch_order(len, state.seed, state.epoch, state.shuffle);
        let found = self.dataset.id(order[state.position]);
        if found != state.next_id {
            let expected = &state.next_id;
            return Err(Error::Invalid(format!(
                "cannot resume: the next row was {expected} and is {found} now"
            )));
        }
        self.order = order;
        (self.seed, self.shuffle) = (state.seed, state.shuffle);
        (self.epoch, self.position) = (state.epoch, state.position);
        Ok(())
    }

    fn advance(&mut self) {
        self.position += 1;
        if self.position == self.order.len() {
            self.epoch += 1;
            self.begin_epoch();
        }
    }

    fn begin_epoch(&mut self) {
        self.position = 0;
        self.order = epoch_order(self.dataset.len(), self.seed, self.epoch, self.shuffle);
    }
}

fn epoch_order(len: usize, seed: u64, epoch: u64, shuffle: bool) -> Vec<usize> {
    if shuffle { permutation(len, epoch_seed(seed, epoch)) } else { (0..len).collect() }
}
