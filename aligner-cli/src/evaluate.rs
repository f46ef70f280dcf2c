//! Metrics on held-out groups, each with its standard error.

use std::collections::BTreeMap;

use aligner_core::{Metrics, Result};

use crate::progress::Count;
use crate::report::STANDARD_ERROR;

/// Sums and weights of one metric, group by group.
#[derive(Debug, Clone, Default, PartialEq)]
struct Sums(Vec<(f64, f64)>);

impl Sums {
    /// The weighted mean, and its standard error as the delta method gives it for a ratio of sums:
    /// `sqrt(n / (n - 1) * sum (s_i - mean * w_i)^2) / sum w_i` (Cochran, Sampling Techniques, 6.4).
    /// There is no error of a single group.
    fn mean(&self) -> Option<(f64, Option<f64>)> {
        let weight: f64 = self.0.iter().map(|pair| pair.1).sum();
        if weight == 0.0 {
            return None;
        }
        let mean = self.0.iter().map(|pair| pair.0).sum::<f64>() / weight;
        let count = self.0.len() as f64;
        let squares: f64 = self.0.iter().map(|(sum, weight)| (sum - mean * weight).powi(2)).sum();
        let error = (count > 1.0).then(|| (count / (count - 1.0) * squares).sqrt() / weight);
        Some((mean, error))
    }
}

/// Means over groups of what `evaluate` says of each, under names that begin with `eval/`; each with
/// its standard error under the same name and `_stderr`.
///
/// Groups are measured one at a time: on a group of some hundred tokens that costs little, and only
/// so is the spread between groups known.
pub(crate) fn held_out<G>(
    groups: &[G],
    mut evaluate: impl FnMut(&G) -> Result<Metrics>,
) -> Result<BTreeMap<String, f64>> {
    let mut all: BTreeMap<String, Sums> = BTreeMap::new();
    let mut progress = Count::start("held-out groups measured", groups.len());
    for (done, group) in groups.iter().enumerate() {
        progress.done(done);
        let mut metrics = evaluate(group)?;
        for (name, pair) in metrics.pairs_mut() {
            all.entry(name.to_string()).or_default().0.push(*pair);
        }
    }
    let mut values = BTreeMap::new();
    for (name, sums) in &all {
        if let Some((value, error)) = combine(name, sums, all.get("nll")) {
            values.insert(format!("eval/{name}"), value);
            values.extend(error.map(|error| (format!("eval/{name}{STANDARD_ERROR}"), error)));
        }
    }
    Ok(values)
}

/// A metric over all groups: a mean, unless its name says something else.
fn combine(name: &str, sums: &Sums, nll: Option<&Sums>) -> Option<(f64, Option<f64>)> {
    let values = || sums.0.iter().filter(|pair| pair.1 != 0.0).map(|(sum, weight)| sum / weight);
    match name {
        // The exponential of the mean, not the mean of exponentials; its error by the delta method.
        "perplexity" => nll?.mean().map(|(mean, error)| (mean.exp(), error.map(|error| mean.exp() * error))),
        "min_reward" => values().reduce(f64::min).map(|least| (least, None)),
        "max_reward" => values().reduce(f64::max).map(|most| (most, None)),
        _ => sums.mean(),
    }
}

/// One line of the figures that matter most.
pub(crate) fn line(step: u64, groups: usize, values: &BTreeMap<String, f64>) -> String {
    let shown =
        ["reward", "loss", "perplexity", "rewards/accuracies", "accuracy", "rewards/margins", "margin"];
    let figure = |name: &&str| {
        let value = values.get(&format!("eval/{name}"))?;
        let error = values.get(&format!("eval/{name}{STANDARD_ERROR}"));
        Some(error.map_or(format!("{name} {value:.4}"), |error| format!("{name} {value:.4} ± {error:.4}")))
    };
    let figures: Vec<String> = shown.iter().filter_map(figure).collect();
    format!("step {step}  held out ({groups} groups): {}", figures.join("  "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(value: f64) -> Metrics {
        let mut metrics = Metrics::default();
        metrics.add("accuracy", value, 1.0);
        metrics
    }

    #[test]
    fn the_standard_error_of_a_plain_mean_is_the_textbook_one() {
        // Values 0, 1, 1, 1: variance with n - 1 is 0.25, over 4 is 0.0625, its root 0.25.
        let values = held_out(&[0.0, 1.0, 1.0, 1.0], |value| Ok(metrics(*value))).unwrap();
        assert!((values["eval/accuracy"] - 0.75).abs() < 1e-12);
        assert!((values["eval/accuracy_stderr"] - 0.25).abs() < 1e-12);
    }

    #[test]
    fn ties_have_no_spread_and_one_group_has_no_error() {
        let ties = held_out(&[0.5, 0.5], |value| Ok(metrics(*value))).unwrap();
        assert!(ties["eval/accuracy_stderr"].abs() < 1e-12);
        let one = held_out(&[1.0], |value| Ok(metrics(*value))).unwrap();
        assert!(!one.contains_key("eval/accuracy_stderr"));
    }
}
