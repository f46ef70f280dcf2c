//! What is logged of a step's responses; the names are TRL's.

use aligner_core::{Group, Metrics, Sample};

use crate::ops::targets::places;

/// Lengths, endings and rewards.
pub(super) fn of_responses(groups: &[Group], metrics: &mut Metrics) {
    for sample in groups.iter().flat_map(|group| &group.samples) {
        let length = sample.targets() as f64;
        metrics.add("completions/mean_length", length, 1.0);
        metrics.add_min("completions/min_length", length);
        metrics.add_max("completions/max_length", length);
        if let Some(ended) = sample.ended {
            metrics.add("completions/clipped_ratio", f64::from(u8::from(!ended)), 1.0);
            if ended {
                metrics.add("completions/mean_terminated_length", length, 1.0);
            }
        }
        metrics.add("repetition", repetition(sample), 1.0);
    }
}

/// Share of a response's runs of three tokens that were there before in it.
fn repetition(sample: &Sample) -> f64 {
    let response = &sample.tokens[sample.prompt_len().min(sample.tokens.len())..];
    let runs = response.windows(3);
    let all = runs.len();
    let distinct = runs.collect::<std::collections::HashSet<_>>().len();
    if all == 0 { 0.0 } else { (all - distinct) as f64 / all as f64 }
}

/// Logs `objective/kl`, the mean over samples of Σ (log-probability − reference's), in nats: an unbiased estimate of the KL divergence
/// of the sampling policy from the reference (k1 of Schulman 2020), and `objective/ref_nll`, nats a token of the responses
/// under the reference: the logarithm of their perplexity. Returns the divergence; None where the reference was not asked.
pub fn divergence(groups: &[Group], metrics: &mut Metrics) -> Option<f64> {
    let mut sum = 0.0;
    let mut count = 0.0;
    for sample in groups.iter().flat_map(|group| &group.samples) {
        if sample.ref_logps.len() != sample.tokens.len() || sample.logps.len() != sample.tokens.len() {
            return None;
        }
        let gap = |at: usize| f64::from(sample.logps[at] - sample.ref_logps[at]);
        sum += places(sample).map(gap).sum::<f64>();
        count += 1.0;
        let surprise: f64 = places(sample).map(|at| -f64::from(sample.ref_logps[at])).sum();
        metrics.add("objective/ref_nll", surprise, places(sample).count() as f64);
    }
    metrics.add("objective/kl", sum, count);
    (count > 0.0).then(|| sum / count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_runs_are_counted() {
        let sample = |response: &[u32]| Sample::response(&[9], response);
        assert!(repetition(&sample(&[1, 2, 3, 4, 5])).abs() < 1e-12);
        assert!((repetition(&sample(&[1, 1, 1, 1, 1])) - 2.0 / 3.0).abs() < 1e-12);
        assert!(repetition(&sample(&[1])).abs() < 1e-12);
    }

    #[test]
    fn the_divergence_is_summed_over_a_response_and_averaged_over_responses() {
        let mut sample = Sample::response(&[9], &[1, 2]);
        sample.logps = vec![0.0, -1.0, -2.0];
        sample.ref_logps = vec![0.0, -1.5, -2.25];
        let mut metrics = Metrics::default();
        let kl = divergence(&[Group::single("a", sample)], &mut metrics);
        assert_eq!((kl, metrics.get("objective/kl")), (Some(0.75), Some(0.75)));
        assert_eq!(metrics.get("objective/ref_nll"), Some(3.75 / 2.0));
    }
}
