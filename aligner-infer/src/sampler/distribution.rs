//! The distribution that a token is drawn from.

use aligner_core::ops::logits::{BLOCK, softmax_weights};

use super::truncate::{Candidate, Tempered};

/// Probabilities of the tokens that may be drawn; the buffers are used again when it is refilled.
///
/// An empty one, as `default` makes it, holds no token yet.
#[derive(Debug, Clone, Default)]
pub struct Distribution {
    /// Ascending, as long as `weights`; empty where every token of the vocabulary has its weight.
    tokens: Vec<u32>,
    /// Probabilities up to the common factor `total`.
    weights: Vec<f32>,
    /// Sums of the weights over blocks of [`BLOCK`]; only where `tokens` is empty.
    sums: Vec<f64>,
    total: f64,
    /// Log-probability of the one token of a greedy distribution under the model's own, in nats.
    greedy_logp: Option<f64>,
    /// What a raw logit is less than its log-probability under the model alone by, in nats.
    pub(super) raw_log_sum: f64,
}

impl Distribution {
    /// The probability of `token`: 0 where it is not kept.
    pub fn probability(&self, token: u32) -> f64 {
        let weight = self.weight(token);
        if weight > 0.0 { weight / self.total } else { 0.0 }
    }

    /// The log-probability of `token` in nats, negative infinity where it is not kept. A greedy token
    /// has that of the model's own distribution after penalties, bias and masks.
    pub fn logp(&self, token: u32) -> f64 {
        let weight = self.weight(token);
        match self.greedy_logp {
            _ if weight <= 0.0 => f64::NEG_INFINITY,
            Some(logp) => logp,
            None => weight.ln() - self.total.ln(),
        }
    }

    /// The tokens with a probability above 0, ascending.
    pub fn iter(&self) -> impl Iterator<Item = (u32, f64)> + '_ {
        let factor = 1.0 / self.total;
        let entry = move |(at, &weight): (usize, &f32)| (self.token(at), f64::from(weight) * factor);
        self.weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0).map(entry)
    }

    /// The token at `uniform`, in [0, 1), of the cumulative distribution in the order of ids.
    pub fn draw(&self, uniform: f64) -> u32 {
        let mut left = uniform * self.total;
        let mut start = 0;
        for &sum in &self.sums {
            if left < sum {
                break;
            }
            left -= sum;
            start += BLOCK;
        }
        for (at, &weight) in self.weights.iter().enumerate().skip(start) {
            if left < f64::from(weight) {
                return self.token(at);
            }
            left -= f64::from(weight);
        }
        // Rounding left the point at the very end: the last token that has any probability.
        self.token(self.weights.iter().rposition(|&weight| weight > 0.0).unwrap_or(0))
    }

    pub(super) fn set_greedy(&mut self, token: u32, logp: f64) {
        self.clear();
        self.tokens.push(token);
        self.weights.push(1.0);
        self.total = 1.0;
        self.greedy_logp = Some(logp);
    }

    pub(super) fn set_whole(&mut self, row: Tempered<'_>) {
        self.tokens.clear();
        self.greedy_logp = None;
        softmax_weights(row.logits, row.largest, row.scale, &mut self.weights, &mut self.sums);
        self.total = self.sums.iter().sum();
    }

    pub(super) fn set_kept(&mut self, kept: &[Candidate]) {
        self.clear();
        self.tokens.extend(kept.iter().map(|candidate| candidate.token));
        self.weights.extend(kept.iter().map(|candidate| candidate.weight));
        self.total = self.weights.iter().copied().map(f64::from).sum();
    }

    /// Logarithm of the sum of the weights.
    pub(super) fn log_total(&self) -> f64 {
        self.total.ln()
    }

    fn clear(&mut self) {
        self.tokens.clear();
        self.weights.clear();
        self.sums.clear();
        self.greedy_logp = None;
    }

    fn token(&self, at: usize) -> u32 {
        self.tokens.get(at).copied().unwrap_or(at as u32)
    }

    fn weight(&self, token: u32) -> f64 {
        let at = match self.tokens.as_slice() {
            [] => Some(token as usize),
            tokens => tokens.binary_search(&token).ok(),
        };
        at.and_then(|at| self.weights.get(at)).map_or(0.0, |&weight| f64::from(weight))
    }
}
