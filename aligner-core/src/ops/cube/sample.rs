//! Tokens drawn from rows of logits: temperature, top-k, top-p and min-p without sorting the vocabulary.
//!
//! What is kept is a beginning of the tokens in the order of falling logits, equal ones in the order of ids: so
//! it is a least logit and a last id of those that have it. The least logit is found in the bits of its
//! order-preserving integer, four at a time, from counts or from sums of weights in f64. The draw is the host
//! sampler's: the token at `uniform` of the cumulative distribution in the order of ids.

mod kernel;

use cubecl::prelude::{CubeCount, CubeDim};

use super::{Accelerator, Buffer};
use crate::{Error, Result};

/// How one token is drawn; the truncations apply in the order of the fields, each to what is left.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DrawSettings {
    /// 0 is greedy; else logits are divided by it.
    pub temperature: f32,
    /// Most tokens that are kept; 0 keeps all.
    pub top_k: usize,
    /// The smallest set of likeliest tokens with this probability is kept; 1 keeps all.
    pub top_p: f32,
    /// Tokens with less than this part of the largest probability are not kept; 0 keeps all.
    pub min_p: f32,
    /// The draw, in [0, 1).
    pub uniform: f64,
}

/// A drawn token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Draw {
    /// Its id.
    pub token: u32,
    /// Its log-probability in nats under the distribution that it was drawn from; of a greedy one, under the
    /// model's own.
    pub logp: f32,
    /// Its log-probability in nats under the model's own distribution.
    pub raw_logp: f32,
}

/// Draws a token from each row of `logits` `[rows, vocab]`. None where the row has a NaN or positive infinity, or
/// only negative infinity.
///
/// # Errors
/// [`Error::Shape`] where there are not as many rows as settings; a failure of the device.
pub fn draw_rows(
    device: &Accelerator,
    logits: &Buffer<f32>,
    settings: &[DrawSettings],
) -> Result<Vec<Option<Draw>>> {
    let rows = settings.len();
    if rows == 0 || logits.is_empty() || !logits.len().is_multiple_of(rows) {
        return Err(Error::shape("rows of logits", format!("[{rows}, vocab]"), &[logits.len()]));
    }
    let vocab = logits.len() / rows;
    let units = device.units(256);
    let numbers = settings.iter().flat_map(|one| {
        let greedy = one.temperature == 0.0;
        let scale = if greedy { 1.0 } else { one.temperature.recip().min(f32::MAX) };
        let top_k = if greedy { 1 } else { one.top_k };
        let top_k = if top_k >= vocab { 0.0 } else { top_k as f64 };
        let least = f64::from(one.min_p.max(f32::MIN_POSITIVE));
        let top_p = if greedy { 1.0 } else { f64::from(one.top_p) };
        [f64::from(scale), top_k, top_p, least, one.uniform]
    });
    let numbers = device.upload(&numbers.collect::<Vec<f64>>());
    let results = device.empty::<f64>(rows * kernel::RESULTS);
    kernel::draw::launch(
        device.client(),
        CubeCount::Static(rows as u32, 1, 1),
        CubeDim::new_1d(units as u32),
        logits.arg(),
        numbers.arg(),
        results.arg(),
        vocab,
        units,
    );
    let draw = |(results, settings): (&[f64], &DrawSettings)| {
        let &[token, weight, total, logit, largest, raw_total] = results else { return None };
        let raw = logit - largest - raw_total.ln();
        let logp = if settings.temperature == 0.0 { raw } else { weight.ln() - total.ln() };
        let draw = Draw { token: token as u32, logp: logp as f32, raw_logp: raw as f32 };
        (token >= 0.0).then_some(draw)
    };
    let results = device.read(&results)?;
    Ok(results.chunks_exact(kernel::RESULTS).zip(settings).map(draw).collect())
}
