//! Top-k, top-p, min-p and typical sampling without sorting the vocabulary.

use std::cmp::Ordering;

use aligner_core::Sampling;
use aligner_core::ops::logits::{BLOCK, softmax_sum};

/// A row of logits and what turns it into weights `e^((logit - largest) * scale)`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tempered<'a> {
    /// `[vocab]`, after penalties, bias and masks.
    pub(super) logits: &'a [f32],
    /// Their maxima over blocks of [`BLOCK`].
    pub(super) maxima: &'a [f32],
    pub(super) largest: f32,
    /// One over the temperature.
    pub(super) scale: f32,
}

/// A token that may be kept.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate {
    pub(super) token: u32,
    /// Candidates are kept from the highest rank down, equal ones from the lowest id up.
    pub(super) rank: f32,
    pub(super) weight: f32,
}

/// Which candidate is kept first. Ranks are no NaN and no negative zero, so the order is total.
fn first(a: &Candidate, b: &Candidate) -> Ordering {
    b.rank.total_cmp(&a.rank).then(a.token.cmp(&b.token))
}

/// Below this many candidates sorting is as fast as partitioning further.
const FEW: usize = 32;

/// Picks the kept tokens; its buffers are used again for each row.
#[derive(Debug, Default)]
pub(super) struct Truncation {
    /// In the order of token ids.
    kept: Vec<Candidate>,
    /// Copy of `kept` in any order.
    order: Vec<Candidate>,
    bounds: Vec<f32>,
}

/// Whether a setting keeps less than the whole vocabulary.
pub(super) fn truncates(sampling: &Sampling) -> bool {
    sampling.top_k > 0 || sampling.top_p < 1.0 || sampling.min_p > 0.0 || sampling.typical_p < 1.0
}

impl Truncation {
    /// The kept tokens with their weights, in the order of ids; at least one. Each truncation sees what
    /// the one before it left, as if renormalised.
    pub(super) fn keep(&mut self, row: Tempered<'_>, sampling: &Sampling) -> &[Candidate] {
        let nucleus = sampling.top_p < 1.0;
        let mut total = 0.0;
        if sampling.top_k > 0 {
            let floor = self.floor_of_top(row.maxima, sampling.top_k);
            self.gather(row, floor);
            self.keep_count(sampling.top_k);
        } else {
            if nucleus {
                total = softmax_sum(row.logits, row.largest, row.scale);
            }
            self.gather(row, row.floor(sampling, total));
        }
        for candidate in &mut self.kept {
            candidate.weight = row.exponent(candidate.rank).exp();
        }
        if nucleus {
            if sampling.top_k > 0 {
                total = mass(&self.kept);
            }
            self.keep_mass(f64::from(sampling.top_p) * total);
        }
        if sampling.min_p > 0.0 {
            self.kept.retain(|candidate| candidate.weight >= sampling.min_p);
        }
        // What underflowed is never drawn.
        self.kept.retain(|candidate| candidate.weight >= f32::MIN_POSITIVE);
        if sampling.typical_p < 1.0 {
            self.rank_by_surprise(row);
            let total = mass(&self.kept);
            self.keep_mass(f64::from(sampling.typical_p) * total);
        }
        &self.kept
    }

    /// The `count` largest logits above negative infinity, largest first; `rank` is the logit.
    pub(super) fn top(&mut self, logits: &[f32], maxima: &[f32], count: usize) -> &[Candidate] {
        let floor = self.floor_of_top(maxima, count);
        self.gather(Tempered { logits, maxima, largest: 0.0, scale: 1.0 }, floor);
        self.keep_count(count);
        self.kept.sort_unstable_by(first);
        &self.kept
    }

    /// A logit that at least `count` logits reach: the `count`-th largest of the blocks' maxima.
    fn floor_of_top(&mut self, maxima: &[f32], count: usize) -> f32 {
        if count == 0 || count > maxima.len() {
            return f32::NEG_INFINITY;
        }
        self.bounds.clear();
        self.bounds.extend_from_slice(maxima);
        *self.bounds.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a)).1
    }

    /// Collects the tokens whose logit is at least `floor`.
    fn gather(&mut self, row: Tempered<'_>, floor: f32) {
        self.kept.clear();
        for (block, (logits, &most)) in row.logits.chunks(BLOCK).zip(row.maxima).enumerate() {
            if most < floor {
                continue;
            }
            for (at, &logit) in logits.iter().enumerate() {
                if logit >= floor && logit > f32::NEG_INFINITY {
                    let token = (block * BLOCK + at) as u32;
                    // Adding 0 makes a negative zero equal to zero.
                    self.kept.push(Candidate { token, rank: logit + 0.0, weight: 0.0 });
                }
            }
        }
    }

    /// Keeps the first `count`.
    fn keep_count(&mut self, count: usize) {
        if count == 0 || self.kept.len() <= count {
            return;
        }
        self.order.clone_from(&self.kept);
        let last = *self.order.select_nth_unstable_by(count - 1, first).1;
        self.kept.retain(|candidate| first(candidate, &last).is_le());
    }

    /// Keeps the first ones until their weights reach `target`, which is above 0.
    ///
    /// Halves the part in which the sum crosses the target, so that the work is linear.
    fn keep_mass(&mut self, target: f64) {
        self.order.clone_from(&self.kept);
        let mut part = self.order.as_mut_slice();
        let mut before = 0.0;
        while part.len() > FEW {
            let middle = part.len() / 2;
            part.select_nth_unstable_by(middle, first);
            let (head, tail) = part.split_at_mut(middle);
            let with_head = before + mass(head);
            if with_head >= target {
                part = head;
            } else {
                (part, before) = (tail, with_head);
            }
        }
        part.sort_unstable_by(first);
        let mut last = None;
        for candidate in part.iter() {
            if before >= target {
                break;
            }
            before += f64::from(candidate.weight);
            last = Some(*candidate);
        }
        if let Some(last) = last {
            self.kept.retain(|candidate| first(candidate, &last).is_le());
        }
    }

    /// Ranks by how close the surprise is to the entropy. With x = ln(weight), the surprise is
    /// ln(sum) - x and the entropy ln(sum) - mean(x), so their distance is |x - mean(x)|.
    fn rank_by_surprise(&mut self, row: Tempered<'_>) {
        let moment = |c: &Candidate| f64::from(c.weight) * f64::from(row.exponent(c.rank));
        let mean = self.kept.iter().map(moment).sum::<f64>() / mass(&self.kept);
        for candidate in &mut self.kept {
            // 0 - |…| has no negative zero.
            candidate.rank = 0.0 - (f64::from(row.exponent(candidate.rank)) - mean).abs() as f32;
        }
    }
}

impl Tempered<'_> {
    fn exponent(&self, logit: f32) -> f32 {
        (logit - self.largest) * self.scale
    }

    /// A logit below which nothing is kept by `top_p` and `min_p`. `total` is the sum of all weights.
    ///
    /// Tokens of weight (1 - `top_p`) total / vocab or less have 1 - `top_p` of the mass at most, so those
    /// above hold a nucleus. Half of that, and nine tenths of `min_p`, leave room for rounding.
    fn floor(&self, sampling: &Sampling, total: f64) -> f32 {
        let rest = 1.0 - f64::from(sampling.top_p);
        let nucleus = 0.5 * rest * total / self.logits.len() as f64;
        let least = nucleus.max(0.9 * f64::from(sampling.min_p)).min(1.0);
        (f64::from(self.largest) + least.ln() / f64::from(self.scale)) as f32
    }
}

fn mass(candidates: &[Candidate]) -> f64 {
    candidates.iter().map(|candidate| f64::from(candidate.weight)).sum()
}
