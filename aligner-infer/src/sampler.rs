//! From logits to tokens: the distribution that the settings ask for, and draws from it.

mod adjust;
mod distribution;
mod ngram;
mod seen;
#[cfg(test)]
mod tests;
mod truncate;

use aligner_core::ops::logits::{BLOCK, block_maxima, softmax_sum};
use aligner_core::rng::Rng;
use aligner_core::{Drawn, Error, Result, Sampling};

pub use distribution::Distribution;
pub use ngram::NgramProposer;
pub use seen::Seen;

use truncate::{Tempered, Truncation, truncates};

/// What the next token of one request depends on.
#[derive(Debug, Clone, Copy)]
pub struct Row<'a> {
    /// The model's logits, `[vocab]`.
    pub logits: &'a [f32],
    /// The request's settings; [`Sampling::check`] holds for them.
    pub sampling: &'a Sampling,
    /// The tokens that the request holds.
    pub seen: &'a Seen,
    /// Names the request in errors.
    pub id: &'a str,
}

/// Draws tokens; holds nothing of a request, only buffers. One for each thread that samples.
///
/// Whatever it drew before, the same row gives the same token.
#[derive(Debug, Default)]
pub struct Sampler {
    adjusted: Vec<f32>,
    maxima: Vec<f32>,
    truncation: Truncation,
    distribution: Distribution,
}

impl Sampler {
    /// A sampler with empty buffers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Fills `into` with the distribution that the row's next token is drawn from: all probability on
    /// the likeliest token (the first of equals) at temperature 0.
    ///
    /// # Errors
    /// [`Error::NotFinite`] names the request where a logit is NaN or positive infinity, or all are
    /// negative infinity; [`Error::Invalid`] where bias and masks leave no token.
    pub fn distribution(&mut self, row: &Row<'_>, into: &mut Distribution) -> Result<()> {
        let Self { adjusted, maxima, truncation, .. } = self;
        let what = || Error::NotFinite { what: "a row of logits".into(), samples: vec![row.id.into()] };
        let mut largest = largest(row.logits, maxima).ok_or_else(what)?;
        let (mut logits, sampling) = (row.logits, row.sampling);
        if sampling.is_plain() {
            into.set_whole(Tempered { logits, maxima, largest, scale: 1.0 });
            into.raw_log_sum = f64::from(largest) + into.log_total();
            return Ok(());
        }
        let mut sum = softmax_sum(logits, largest, 1.0);
        into.raw_log_sum = f64::from(largest) + sum.ln();
        let greedy = sampling.temperature == 0.0;
        if adjust::adjust(row, adjusted) {
            logits = adjusted;
            largest = self::largest(logits, maxima).ok_or_else(|| nothing_left(row))?;
            if greedy {
                sum = softmax_sum(logits, largest, 1.0);
            }
        }
        if greedy {
            into.set_greedy(first_at(logits, maxima, largest), -sum.ln());
            return Ok(());
        }
        let scale = sampling.temperature.recip().min(f32::MAX);
        let tempered = Tempered { logits, maxima, largest, scale };
        if truncates(sampling) {
            into.set_kept(truncation.keep(tempered, sampling));
        } else {
            into.set_whole(tempered);
        }
        Ok(())
    }

    /// What is reported of `token`, drawn from `from`, which [`Self::distribution`] filled for these raw
    /// `logits`, `[vocab]`.
    pub fn describe(
        &mut self,
        logits: &[f32],
        from: &Distribution,
        token: u32,
        top_logprobs: usize,
    ) -> Drawn {
        let raw = |logit: f32| (f64::from(logit) - from.raw_log_sum) as f32;
        let raw_logp = logits.get(token as usize).map_or(f32::NEG_INFINITY, |&logit| raw(logit));
        let mut top = Vec::new();
        if top_logprobs > 0 {
            block_maxima(logits, &mut self.maxima);
            let likeliest = self.truncation.top(logits, &self.maxima, top_logprobs);
            top.extend(likeliest.iter().map(|candidate| (candidate.token, raw(candidate.rank))));
        }
        Drawn { token, logp: from.logp(token) as f32, raw_logp, top }
    }

    /// Draws the row's next token, with the draw of `rng` whose counter is the token's index in the
    /// response.
    ///
    /// # Errors
    /// Those of [`Self::distribution`].
    pub fn sample(&mut self, row: &Row<'_>, rng: Rng) -> Result<Drawn> {
        let mut from = std::mem::take(&mut self.distribution);
        let drawn = self.distribution(row, &mut from).map(|()| {
            let token = from.draw(rng.uniform(row.seen.len() as u64));
            self.describe(row.logits, &from, token, row.sampling.top_logprobs)
        });
        self.distribution = from;
        drawn
    }
}

/// The largest logit; none where one is NaN or positive infinity, or all are negative infinity. Fills
/// `maxima` with those of the blocks.
fn largest(logits: &[f32], maxima: &mut Vec<f32>) -> Option<f32> {
    let usable = block_maxima(logits, maxima);
    let largest = maxima.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    (usable && largest > f32::NEG_INFINITY).then_some(largest)
}

/// The first token whose logit is `largest`.
fn first_at(logits: &[f32], maxima: &[f32], largest: f32) -> u32 {
    let start = maxima.iter().position(|&most| most >= largest).unwrap_or(0) * BLOCK;
    let token = logits.iter().skip(start).position(|&logit| logit >= largest);
    (start + token.unwrap_or(0)) as u32
}

fn nothing_left(row: &Row<'_>) -> Error {
    Error::Invalid(format!(
        "request {}: penalties, bias and masks leave no token with a finite logit to draw",
        row.id
    ))
}
