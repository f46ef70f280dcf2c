//! Drawing a token from logits.

use aligner_core::rng::Rng;

/// A drawn token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Drawn {
    /// The token id.
    pub token: u32,
    /// Its log-probability under the distribution it was drawn from, in nats. A greedy draw has that
    /// of the model's own distribution.
    pub logp: f32,
}

/// Draws from `softmax(logits / temperature)`, or takes the largest logit at temperature 0 (the first
/// of equals). `logits` is `[vocab]`; the draw is the `counter`-th of `rng`'s stream.
pub fn draw(logits: &[f32], temperature: f32, rng: Rng, counter: u64) -> Drawn {
    let divisor = if temperature > 0.0 { temperature } else { 1.0 };
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |logit: f32| f64::from((logit - largest) / divisor).exp();
    let sum: f64 = logits.iter().map(|&logit| weight(logit)).sum();
    let token = if temperature > 0.0 {
        sampled(logits, rng.uniform(counter) * sum, weight)
    } else {
        logits.iter().position(|&logit| logit >= largest).unwrap_or(0)
    };
    let logp = f64::from((logits.get(token).copied().unwrap_or(largest) - largest) / divisor) - sum.ln();
    Drawn { token: token as u32, logp: logp as f32 }
}

fn sampled(logits: &[f32], mut threshold: f64, weight: impl Fn(f32) -> f64) -> usize {
    let mut last = 0;
    for (token, &logit) in logits.iter().enumerate() {
        let weight = weight(logit);
        if weight > 0.0 {
            last = token;
        }
        if threshold < weight {
            return token;
        }
        threshold -= weight;
    }
    // Rounding left the threshold at the very end: the last token that has any probability.
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_takes_the_first_of_equals() {
        let drawn = draw(&[0.0, 2.0, 2.0], 0.0, Rng::new(&[0]), 0);
        assert_eq!(drawn.token, 1);
        let expected = (2f32.exp() / (1.0 + 2.0 * 2f32.exp())).ln();
        assert!((drawn.logp - expected).abs() < 1e-6);
    }

    #[test]
    fn frequencies_follow_the_tempered_distribution() {
        let logits = [1.0f32, 0.0, -1.0];
        let temperature = 0.5;
        let rng = Rng::new(&[7]);
        let mut counts = [0usize; 3];
        let draws = 20_000;
        for counter in 0..draws {
            counts[draw(&logits, temperature, rng, counter).token as usize] += 1;
        }
        let weights: Vec<f64> = logits.iter().map(|l| f64::from(l / temperature).exp()).collect();
        let sum: f64 = weights.iter().sum();
        for (count, weight) in counts.iter().zip(&weights) {
            let p = weight / sum;
            let deviation = (p * (1.0 - p) / draws as f64).sqrt();
            assert!((*count as f64 / draws as f64 - p).abs() < 4.0 * deviation, "{counts:?}");
        }
    }
}
