//! Dropout whose mask is a function of a row's name: it depends neither on the batch that the row is in
//! nor on what was drawn before, so that a layer that is computed again drops the same elements.

use std::sync::Arc;

use crate::rng::Rng;
use crate::{Error, Result};

/// Elements that share a draw of 64 bits.
const SHARED: usize = 4;
/// Values of an element's 16 bits.
const VALUES: f64 = 65536.0;

/// Drops elements of a batch's rows and scales up the others (Srivastava et al. 2014), so that the mean is
/// kept.
#[derive(Debug, Clone)]
pub struct Dropout {
    /// A name for each row, `[rows]`.
    rows: Arc<[u64]>,
    /// An element is dropped where its 16 bits are below this.
    threshold: u16,
    /// Tells linears of the same rows apart.
    module: u64,
}

impl Dropout {
    /// Dropout of a share `rate` of the elements, rounded to a multiple of 2^-16, in rows of these names.
    ///
    /// # Errors
    /// [`Error::Setting`] for a rate outside of 0 to below 1.
    pub fn new(rate: f64, rows: Arc<[u64]>) -> Result<Self> {
        if !(0.0..1.0).contains(&rate) {
            return Err(Error::setting("dropout", format!("must be at least 0 and below 1, got {rate}")));
        }
        Ok(Self { rows, threshold: (rate * VALUES).round().min(VALUES - 1.0) as u16, module: 0 })
    }

    /// The same rows in front of another linear: other elements are dropped.
    #[must_use]
    pub fn for_module(&self, module: usize) -> Self {
        Self { module: module as u64, ..self.clone() }
    }

    /// The rows `kept` alone.
    #[must_use]
    pub fn select(&self, kept: &[u32]) -> Self {
        Self { rows: kept.iter().map(|&row| self.rows[row as usize]).collect(), ..self.clone() }
    }

    /// How many rows have a name.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// What each element of a row is multiplied by: 0, or the inverse of the share that is kept.
    pub(super) fn factors(&self, row: usize, factors: &mut [f32]) {
        let keep = (VALUES / (VALUES - f64::from(self.threshold))) as f32;
        let rng = Rng::new(&[self.rows[row], self.module]);
        for (at, factors) in factors.chunks_mut(SHARED).enumerate() {
            let bits = rng.bits(at as u64);
            for (lane, factor) in factors.iter_mut().enumerate() {
                *factor = if (bits >> (16 * lane)) as u16 >= self.threshold { keep } else { 0.0 };
            }
        }
    }

    /// The factors of all rows, `[rows, columns]`.
    pub(super) fn all_factors(&self, columns: usize) -> Vec<f32> {
        let mut all = vec![0.0; self.rows() * columns];
        let rows = all.chunks_exact_mut(columns.max(1)).enumerate();
        rows.for_each(|(row, factors)| self.factors(row, factors));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_drops_the_same_elements_in_any_company() {
        let names: Arc<[u64]> = (0..50).map(|row| row * 7919).collect();
        let all = Dropout::new(0.3, names).unwrap().for_module(2);
        let some = all.select(&[3, 40]);
        assert_eq!(some.all_factors(33)[..33], all.all_factors(33)[3 * 33..4 * 33]);
        assert_eq!(some.all_factors(33)[33..], all.all_factors(33)[40 * 33..41 * 33]);
        assert_ne!(all.for_module(3).all_factors(33), all.all_factors(33));
    }

    #[test]
    fn the_mean_is_kept_and_the_rate_is_met() {
        let factors = Dropout::new(0.25, (0..100).collect()).unwrap().all_factors(400);
        let dropped = factors.iter().filter(|factor| **factor == 0.0).count() as f64 / factors.len() as f64;
        let mean = factors.iter().map(|factor| f64::from(*factor)).sum::<f64>() / factors.len() as f64;
        assert!((dropped - 0.25).abs() < 0.01 && (mean - 1.0).abs() < 0.01, "{dropped} {mean}");
        let all = Dropout::new(0.0, (0..3).collect()).unwrap().all_factors(9);
        assert!(all.iter().all(|&factor| (factor - 1.0).abs() < 1e-9));
    }

    #[test]
    fn a_rate_that_keeps_nothing_is_refused() {
        for rate in [1.0, -0.1, f64::NAN] {
            assert!(Dropout::new(rate, Arc::new([])).unwrap_err().to_string().starts_with("dropout: "));
        }
    }
}
