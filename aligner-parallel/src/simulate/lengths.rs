//! Lengths of responses with a long tail.

use aligner_core::rng::Rng;

use super::Job;

/// The lengths of a step's responses, and what is known of them before.
#[derive(Debug, Clone, PartialEq)]
pub struct Lengths {
    /// Tokens of each response, the samples of a prompt one after the other.
    pub tokens: Vec<usize>,
    /// What a history of its prompt's lengths would expect.
    pub expected: Vec<f64>,
}

impl Lengths {
    /// Log-normal lengths, cut at the most and with the mean of `job`: a prompt's part, which is known, times a sample's.
    pub fn draw(job: &Job) -> Self {
        let sigma = job.response_sigma;
        let (of_prompt, of_sample) =
            (sigma * job.known_variance.sqrt(), sigma * (1.0 - job.known_variance).sqrt());
        let samples = job.samples();
        let each = samples.div_ceil(job.prompts.max(1)).max(1);
        let known = |at: usize| (of_prompt * Rng::new(&[job.seed, 0]).normal((at / each) as u64)).exp();
        let own = |at: usize| (of_sample * Rng::new(&[job.seed, 1]).normal(at as u64)).exp();
        let raw: Vec<f64> = (0..samples).map(|at| known(at) * own(at)).collect();
        let most = job.max_response_tokens as f64;
        let cut = |scale: f64, raw: f64| (scale * raw).clamp(1.0, most);
        let mean = |scale: f64| raw.iter().map(|&raw| cut(scale, raw)).sum::<f64>() / samples.max(1) as f64;
        // The mean grows with the scale: halve the interval that holds the wanted one.
        let (mut low, mut high) = (0.0, most);
        while mean(high) < job.response_tokens && high < 1e12 {
            high *= 2.0;
        }
        for _ in 0..60 {
            let middle = f64::midpoint(low, high);
            if mean(middle) < job.response_tokens { low = middle } else { high = middle }
        }
        let tokens = raw.iter().map(|&raw| cut(high, raw).round() as usize).collect();
        Self { tokens, expected: (0..samples).map(|at| high * known(at)).collect() }
    }

    /// Tokens of an average response.
    pub fn mean(&self) -> f64 {
        self.tokens.iter().sum::<usize>() as f64 / self.tokens.len().max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_have_the_mean_the_spread_and_the_most_that_were_asked_for() {
        let job = Job { prompts: 500, num_generations: 8, ..Job::default() };
        let lengths = Lengths::draw(&job);
        assert_eq!(lengths.tokens.len(), 4000);
        assert!((lengths.mean() - 512.0).abs() < 1.0, "{}", lengths.mean());
        assert!(lengths.tokens.iter().all(|&tokens| (1..=4096).contains(&tokens)));
        let logs: Vec<f64> = lengths.tokens.iter().map(|&tokens| (tokens as f64).ln()).collect();
        let mean = logs.iter().sum::<f64>() / 4000.0;
        let deviation = (logs.iter().map(|log| (log - mean).powi(2)).sum::<f64>() / 4000.0).sqrt();
        assert!((deviation - 0.8).abs() < 0.04, "{deviation}");
        assert_eq!(lengths, Lengths::draw(&job));
        assert_ne!(lengths, Lengths::draw(&Job { seed: 1, ..job }));
    }

    #[test]
    fn nothing_of_a_length_is_known_or_all_of_it() {
        let correlation = |known_variance| {
            let lengths =
                Lengths::draw(&Job { known_variance, max_response_tokens: 1 << 20, ..Job::default() });
            let pairs = lengths.tokens.iter().zip(&lengths.expected);
            pairs.filter(|(tokens, expected)| (**tokens as f64 - **expected).abs() < 1.0).count()
        };
        assert_eq!(correlation(1.0), 1024);
        assert!(correlation(0.0) < 20);
    }
}
