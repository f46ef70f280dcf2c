//! Rates of a model of costs from measured runs.

use aligner_core::{Error, Result};

/// A measured run: what the model multiplies with its rates, and the seconds that it took.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// One for each rate.
    pub features: Vec<f64>,
    /// Above 0.
    pub seconds: f64,
}

impl Measured {
    /// A collective over a ring: its rates are α, in seconds, and 1 / β, in seconds for each byte. `rounds` is 2 for an
    /// all-reduce and 1 for an all-gather or a reduce-scatter.
    pub fn ring(rounds: f64, ranks: usize, bytes: f64, seconds: f64) -> Self {
        let steps = rounds * ranks.saturating_sub(1) as f64;
        Self { features: vec![steps, steps / ranks.max(1) as f64 * bytes], seconds }
    }

    /// Work that parts over `n` ranks and work that does not: its rates are A and B of A / n + B.
    pub fn scaling(ranks: usize, seconds: f64) -> Self {
        Self { features: vec![1.0 / ranks.max(1) as f64, 1.0], seconds }
    }
}

/// The rates, none below 0, with which features times rates are nearest to the seconds: the sum of squares of the
/// relative errors is least.
///
/// # Errors
/// No runs, fewer than rates or of different features, seconds that are not above 0, and runs that are too alike.
pub fn least_squares(runs: &[Measured]) -> Result<Vec<f64>> {
    let count = runs.first().map_or(0, |run| run.features.len());
    if count == 0 || count > 6 || runs.len() < count || runs.iter().any(|run| run.features.len() != count) {
        let message =
            format!("expected at least as many runs as rates, of 1 to 6 rates each; got {} runs", runs.len());
        return Err(Error::Invalid(message));
    }
    if let Some(run) = runs.iter().find(|run| !(run.seconds > 0.0 && run.seconds.is_finite())) {
        return Err(Error::Invalid(format!("expected seconds above 0, got {}", run.seconds)));
    }
    // With so few rates, every set of those that are above 0 can be tried.
    let tried = (1u32..1 << count).filter_map(|set| {
        let used: Vec<usize> = (0..count).filter(|rate| set & 1 << rate != 0).collect();
        let solved = solve(&used, runs)?;
        let mut rates = vec![0.0; count];
        used.iter().zip(&solved).for_each(|(&rate, &value)| rates[rate] = value);
        solved.iter().all(|&rate| rate >= 0.0).then_some(rates)
    });
    let best = tried.min_by(|a, b| error(runs, a).total_cmp(&error(runs, b)));
    best.ok_or_else(|| Error::Invalid("the runs are too alike to tell their rates apart".into()))
}

/// The value between `low` and `high` at which `seconds`, which grows or falls with it, is `target`; the nearer end where
/// it is at none.
///
/// # Errors
/// What `seconds` returns.
pub fn rate(
    target: f64,
    (mut low, mut high): (f64, f64),
    seconds: impl Fn(f64) -> Result<f64>,
) -> Result<f64> {
    let grows = seconds(high)? > seconds(low)?;
    for _ in 0..60 {
        let middle = f64::midpoint(low, high);
        if (seconds(middle)? < target) == grows { low = middle } else { high = middle }
    }
    Ok(f64::midpoint(low, high))
}

/// The sum of the squares of the relative errors.
fn error(runs: &[Measured], rates: &[f64]) -> f64 {
    let of = |run: &Measured| {
        let predicted: f64 = run.features.iter().zip(rates).map(|(feature, rate)| feature * rate).sum();
        (predicted / run.seconds - 1.0).powi(2)
    };
    runs.iter().map(of).sum()
}

/// Solves the normal equations for the rates in `used`; nothing where they have no single solution.
fn solve(used: &[usize], runs: &[Measured]) -> Option<Vec<f64>> {
    let size = used.len();
    let cell = |run: &Measured, at: usize| run.features[used[at]] / run.seconds;
    let mut rows: Vec<Vec<f64>> = (0..size)
        .map(|row| {
            let sum = |column: usize| runs.iter().map(|run| cell(run, row) * cell(run, column)).sum();
            let right = runs.iter().map(|run| cell(run, row)).sum();
            (0..size).map(sum).chain([right]).collect()
        })
        .collect();
    // Features differ by orders of magnitude: each is scaled to 1 first.
    let scales: Vec<f64> = (0..size).map(|at| rows[at][at].sqrt()).collect();
    for (row, cells) in rows.iter_mut().enumerate() {
        for (column, cell) in cells.iter_mut().enumerate() {
            *cell /= scales[row] * scales.get(column).copied().unwrap_or(1.0);
        }
    }
    for column in 0..size {
        let pivot =
            (column..size).max_by(|&a, &b| rows[a][column].abs().total_cmp(&rows[b][column].abs()))?;
        rows.swap(column, pivot);
        let top = rows[column].clone();
        if top[column].is_nan() || top[column].abs() <= 1e-12 {
            return None;
        }
        for (_, row) in rows.iter_mut().enumerate().filter(|(row, _)| *row != column) {
            let factor = row[column] / top[column];
            row.iter_mut().zip(&top).for_each(|(cell, above)| *cell -= factor * above);
        }
    }
    Some((0..size).map(|at| rows[at][size] / rows[at][at] / scales[at]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_of_exact_runs_are_found() {
        let (alpha, per_byte) = (12e-6, 1.0 / 3.4e9);
        let seconds = |n: usize, bytes: f64| {
            2.0 * (n - 1) as f64 * alpha + 2.0 * (n - 1) as f64 / n as f64 * bytes * per_byte
        };
        let runs: Vec<Measured> = [(2, 1e4), (4, 1e4), (2, 1e7), (8, 1e8)]
            .map(|(n, bytes)| Measured::ring(2.0, n, bytes, seconds(n, bytes)))
            .to_vec();
        let rates = least_squares(&runs).unwrap();
        assert!(
            (rates[0] / alpha - 1.0).abs() < 1e-6 && (rates[1] / per_byte - 1.0).abs() < 1e-6,
            "{rates:?}"
        );
    }

    #[test]
    fn strong_scaling_of_published_rows_is_predicted_from_the_first_two() {
        // NeMo-Aligner's Llama 3 70B, 8+4 and 16+8 nodes: the other two within 6 %.
        let rows = [(12, 366.7), (24, 190.4), (48, 108.0), (96, 56.9)];
        let runs: Vec<Measured> = rows.iter().map(|&(n, seconds)| Measured::scaling(n, seconds)).collect();
        let rates = least_squares(&runs[..2]).unwrap();
        let errors = [2, 3].map(|at| {
            let (n, seconds) = rows[at];
            (rates[0] / n as f64 + rates[1]) / seconds - 1.0
        });
        assert!((errors[0] + 0.053).abs() < 0.001 && (errors[1] - 0.022).abs() < 0.001, "{errors:?}");
    }

    #[test]
    fn no_rate_is_below_zero() {
        // Faster than linear: the fixed part would be negative.
        let runs = [Measured::scaling(1, 10.0), Measured::scaling(2, 4.0)];
        let rates = least_squares(&runs).unwrap();
        assert!(rates[0] > 0.0 && rates[1].abs() < 1e-15, "{rates:?}");
    }

    #[test]
    fn runs_that_say_nothing_are_errors() {
        let alike = [Measured::scaling(2, 10.0), Measured::scaling(2, 10.0)];
        // One of both rates explains them.
        assert!(least_squares(&alike).is_ok());
        assert!(least_squares(&alike[..1]).is_err());
        assert!(least_squares(&[Measured::scaling(1, 0.0), Measured::scaling(2, 1.0)]).is_err());
        assert!(least_squares(&[]).is_err());
    }

    #[test]
    fn a_rate_is_found_whether_seconds_grow_or_fall() {
        let falls = rate(4.0, (0.01, 1.0), |rate| Ok(2.0 / rate)).unwrap();
        assert!((falls - 0.5).abs() < 1e-9);
        let grows = rate(4.0, (0.0, 10.0), |rate| Ok(1.0 + rate)).unwrap();
        assert!((grows - 3.0).abs() < 1e-9);
        assert!((rate(1e9, (0.0, 10.0), |rate| Ok(1.0 + rate)).unwrap() - 10.0).abs() < 1e-9);
    }
}
