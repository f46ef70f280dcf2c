//! How far an engine's log-probabilities are from the trainer's.

use aligner_core::ops::host::to_vec;
use aligner_core::ops::logits::softmax_sum;
use aligner_core::ops::rows::PAGE;
use aligner_core::{Batch, Error, Group, Needs, Policy as _, Result, Sample};

use crate::adapters::Adapters;
use crate::engine::PagedEngine;
use crate::host;
use crate::logits::forward;
use crate::pages::Page;

/// Differences between log-probabilities of the same tokens, in nats.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogpGap {
    /// Mean of the absolute differences.
    pub mean: f64,
    /// The largest.
    pub largest: f32,
    /// How many tokens were compared.
    pub tokens: usize,
}

impl PagedEngine {
    /// Compares the log-probability that generation gives to each token of a text, the first excepted,
    /// with that of the trainer's forward pass on the newest weights. Smaller copies of the weights
    /// ([`crate::EngineConfig::packed`]) open a gap; without them it is rounding.
    ///
    /// Takes a cache of its own for these tokens; what runs is not disturbed.
    ///
    /// # Errors
    /// Fewer than two tokens, more than the model's context, or one outside of its vocabulary.
    pub fn logp_gap(&self, tokens: &[u32]) -> Result<LogpGap> {
        let Some(weights) = self.weights.first() else {
            return Err(Error::Invalid("the engine has no weights".into()));
        };
        let config = weights.model.config();
        if !(2..=config.max_positions).contains(&tokens.len()) {
            let (got, most) = (tokens.len(), config.max_positions);
            return Err(Error::Invalid(format!("a gap of {got} tokens: expected from 2 to {most}")));
        }
        let pages = tokens.len().div_ceil(PAGE);
        let mut store = host::Store::new(weights, pages);
        let table: Vec<Page> = (0..pages as Page).collect();
        let mut batch = host::Batch::default();
        batch.push(tokens.iter().copied(), 0, &table, tokens.len(), None);
        let mut buffers = host::Buffers::default();
        let logits = forward(weights, &Adapters::default(), &mut store, &batch, &mut buffers)?.into_host()?;
        let rows = logits.chunks_exact(config.vocab_size).zip(&tokens[1..]);
        let own = rows.map(|(row, &token)| row[token as usize] - log_sum_exp(row));

        let group = Group::single("gap", Sample::response(&tokens[..1], &tokens[1..]));
        let trainer = weights.model.forward(&Batch::collate([&group])?, Needs::NOTHING)?;
        let trainer = to_vec(trainer.logps()?);
        let gaps: Vec<f32> = own.zip(trainer).map(|(own, trainer)| (own - trainer).abs()).collect();
        Ok(LogpGap {
            mean: gaps.iter().map(|&gap| f64::from(gap)).sum::<f64>() / gaps.len() as f64,
            largest: gaps.iter().copied().fold(0.0, f32::max),
            tokens: gaps.len(),
        })
    }
}

fn log_sum_exp(logits: &[f32]) -> f32 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    largest + softmax_sum(logits, largest, 1.0).ln() as f32
}
