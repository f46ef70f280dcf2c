//! What became of each row.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use serde::{Deserialize, Serialize};

/// What became of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Fate {
    Unseen,
    Used,
    Truncated,
    Overlong,
    EqualPair,
}

impl Fate {
    pub(super) fn is_kept(self) -> bool {
        matches!(self, Self::Used | Self::Truncated)
    }
}

/// Rows of a data file by what became of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// Rows that the file has.
    pub rows: usize,
    /// Rows that were used so far, those included that were cut.
    pub used: usize,
    /// Rows that were cut to the longest length allowed.
    pub truncated: usize,
    /// Rows that were dropped as too long.
    pub overlong: usize,
    /// Rows that were dropped as pairs of equals.
    pub equal_pairs: usize,
}

/// A byte for each row, so that a row that is read in every epoch counts once.
#[derive(Debug)]
pub(super) struct Fates {
    rows: Vec<AtomicU8>,
    seen: [AtomicBool; 5],
}

impl Fates {
    pub(super) fn new(rows: usize) -> Self {
        Self {
            rows: (0..rows).map(|_| AtomicU8::new(Fate::Unseen as u8)).collect(),
            seen: Default::default(),
        }
    }

    /// Notes a row's fate and says whether it is the first of its kind.
    pub(super) fn set(&self, row: usize, fate: Fate) -> bool {
        self.rows[row].store(fate as u8, Ordering::Relaxed);
        !self.seen[fate as usize].swap(true, Ordering::Relaxed)
    }

    pub(super) fn stats(&self) -> Stats {
        let mut counts = [0; 5];
        for row in &self.rows {
            counts[usize::from(row.load(Ordering::Relaxed))] += 1;
        }
        let count = |fate: Fate| counts[fate as usize];
        Stats {
            rows: self.rows.len(),
            used: count(Fate::Used) + count(Fate::Truncated),
            truncated: count(Fate::Truncated),
            overlong: count(Fate::Overlong),
            equal_pairs: count(Fate::EqualPair),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_counts_once_however_often_it_is_read() {
        let fates = Fates::new(3);
        assert!(fates.set(0, Fate::Truncated));
        assert!(!fates.set(0, Fate::Truncated));
        assert!(fates.set(1, Fate::Overlong));
        let expected = Stats { rows: 3, used: 1, truncated: 1, overlong: 1, equal_pairs: 0 };
        assert_eq!(fates.stats(), expected);
    }
}
