//! The sampler against a plain one that sorts the whole vocabulary in f64.

use std::sync::Arc;

use aligner_core::TokenMask;

use super::*;

mod settings;

/// Probabilities `[vocab]`, and how far the closest truncation was from keeping another set.
struct Reference {
    probabilities: Vec<f64>,
    margin: f64,
}

fn adjusted(logits: &[f32], sampling: &Sampling, prompt: &[u32], response: &[u32]) -> Vec<f64> {
    let vocab = logits.len() as u32;
    let adjust = |token: u32| {
        let mut logit = f64::from(logits[token as usize]);
        let count = response.iter().filter(|&&t| t == token).count();
        if count > 0 || prompt.contains(&token) {
            let penalty = f64::from(sampling.repetition_penalty);
            logit = if logit > 0.0 { logit / penalty } else { logit * penalty };
        }
        if count > 0 {
            logit -= f64::from(sampling.presence_penalty);
            logit -= f64::from(sampling.frequency_penalty) * count as f64;
        }
        for &(biased, bias) in &sampling.logit_bias {
            if biased == token {
                logit += f64::from(bias);
            }
        }
        let early = response.len() < sampling.min_tokens && sampling.stop_tokens.contains(&token);
        let allowed = sampling.allowed.as_ref().is_none_or(|allowed| allowed.contains(token));
        if early || !allowed { f64::NEG_INFINITY } else { logit }
    };
    (0..vocab).map(adjust).collect()
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = logits.iter().map(|logit| (logit - largest).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / sum).collect()
}

/// Tokens that have a probability, by `key` ascending, then by id.
fn sorted(probabilities: &[f64], key: impl Fn(usize) -> f64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..probabilities.len()).filter(|&i| probabilities[i] > 0.0).collect();
    order.sort_by(|&a, &b| key(a).total_cmp(&key(b)).then(a.cmp(&b)));
    order
}

impl Reference {
    fn new(logits: &[f64], sampling: &Sampling) -> Self {
        // Adding 0 makes a negative zero equal to zero.
        let tempered: Vec<f64> = logits.iter().map(|l| l / f64::from(sampling.temperature) + 0.0).collect();
        let mut reference = Self { probabilities: softmax(&tempered), margin: f64::INFINITY };
        if sampling.top_k > 0 {
            let order = sorted(&reference.probabilities, |i| 0.0 - tempered[i]);
            reference.cut(&order, sampling.top_k, |i| tempered[i]);
        }
        if sampling.top_p < 1.0 {
            let order = sorted(&reference.probabilities, |i| 0.0 - tempered[i]);
            reference.cut_mass(&order, sampling.top_p.into());
        }
        if sampling.min_p > 0.0 {
            let most = reference.probabilities.iter().copied().fold(0.0, f64::max);
            for p in &mut reference.probabilities {
                let part = *p / most;
                reference.margin = reference.margin.min((part - f64::from(sampling.min_p)).abs());
                if part < f64::from(sampling.min_p) {
                    *p = 0.0;
                }
            }
            reference.renormalise();
        }
        if sampling.typical_p < 1.0 {
            let p = reference.probabilities.clone();
            let entropy: f64 = p.iter().filter(|p| **p > 0.0).map(|p| -p * p.ln()).sum();
            // Rounded, so that equal logits have equal keys.
            let key = |i: usize| (((-p[i].ln() - entropy).abs() * 1e9).round()) / 1e9;
            let order = sorted(&p, key);
            let kept = reference.cut_mass(&order, sampling.typical_p.into());
            if let Some(&next) = order.get(kept) {
                let gap = key(next) - key(order[kept - 1]);
                let equal = logits[next].total_cmp(&logits[order[kept - 1]]).is_eq();
                reference.margin = reference.margin.min(if equal { f64::INFINITY } else { gap });
            }
        }
        reference
    }

    /// Keeps the first `count` of `order`.
    fn cut(&mut self, order: &[usize], count: usize, key: impl Fn(usize) -> f64) {
        if let Some(&next) = order.get(count) {
            let gap = (key(next) - key(order[count - 1])).abs();
            self.margin = self.margin.min(if gap > 0.0 { gap } else { f64::INFINITY });
        }
        order.iter().skip(count).for_each(|&i| self.probabilities[i] = 0.0);
        self.renormalise();
    }

    fn cut_mass(&mut self, order: &[usize], part: f64) -> usize {
        let (mut before, mut kept) = (0.0, 0);
        for &i in order {
            self.margin = self.margin.min((part - before).abs());
            if before >= part {
                break;
            }
            before += self.probabilities[i];
            kept += 1;
        }
        order.iter().skip(kept).for_each(|&i| self.probabilities[i] = 0.0);
        self.renormalise();
        kept
    }

    fn renormalise(&mut self) {
        let sum: f64 = self.probabilities.iter().sum();
        self.probabilities.iter_mut().for_each(|p| *p /= sum);
    }
}

fn row<'a>(logits: &'a [f32], sampling: &'a Sampling, seen: &'a Seen) -> Row<'a> {
    Row { logits, sampling, seen, id: "row 7" }
}

fn random_logits(rng: Rng, vocab: usize, spread: f64, steps: f64) -> Vec<f32> {
    // Steps make ties.
    (0..vocab as u64).map(|i| ((rng.normal(i) * spread * steps).round() / steps) as f32).collect()
}

/// Kept tokens and probabilities are the reference's, unless a truncation was closer than `margin` to
/// keeping another set; says whether it was compared.
fn compare(got: &Distribution, reference: &Reference, margin: f64, context: &str) -> bool {
    if reference.margin < margin {
        return false;
    }
    let mut sum = 0.0;
    for (token, &expected) in reference.probabilities.iter().enumerate() {
        let p = got.probability(token as u32);
        sum += p;
        // Exponents down to -87 are rounded to f32.
        assert!((p - expected).abs() <= 3e-5 * expected + 1e-30, "{context}: {token}: {p}, not {expected}");
    }
    assert!((sum - 1.0).abs() < 1e-6, "{context}: {sum}");
    let kept: Vec<u32> = got.iter().map(|(token, _)| token).collect();
    assert!(kept.is_sorted() && got.iter().all(|(token, p)| (got.probability(token) - p).abs() < 1e-15));
    true
}

/// Frequencies of `draws` are within 4.5 standard deviations of `probabilities`, and nothing of
/// probability 0 is drawn.
fn check_frequencies(counts: &[usize], probabilities: &[f64], context: &str) {
    let draws = counts.iter().sum::<usize>() as f64;
    for (token, (&count, &p)) in counts.iter().zip(probabilities).enumerate() {
        let deviation = (p * (1.0 - p) / draws).sqrt();
        let frequency = count as f64 / draws;
        assert!(p > 0.0 || count == 0, "{context}: {token} was drawn");
        // Two counts more, as rare tokens are not normally distributed.
        let tolerance = 4.5 * deviation + 2.0 / draws;
        assert!((frequency - p).abs() <= tolerance, "{context}: {token}: {frequency}, not {p}");
    }
}
