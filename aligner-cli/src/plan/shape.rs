//! Groups, micro-batches and tokens of a step.

use std::fmt::Write as _;

use aligner_data::packing::best_fit_decreasing;

use crate::wire::Data;
use crate::{Run, RunConfig};

/// Lengths of a run's groups, and how a step's groups are packed.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Shape {
    /// Rows that were measured.
    rows: usize,
    /// Those of them that are dropped.
    dropped: usize,
    mean_tokens: f64,
    max_tokens: usize,
    /// Tokens that the samples have in all, a common prompt counted for each.
    unshared_tokens: f64,
    /// Micro-batches of a step, on average.
    pub(super) micro_batches: f64,
    /// Tokens of the largest micro-batch.
    pub(super) largest_micro_batch: usize,
}

/// Rows that are tokenised for the estimate.
const MEASURED: usize = 2048;

impl Shape {
    pub(super) fn of(data: &Data, config: &RunConfig) -> anyhow::Result<Self> {
        let rows = data.train_rows().min(MEASURED);
        let (mut lengths, mut unshared) = (Vec::new(), 0);
        for group in (0..rows).map(|row| data.train_group(row)) {
            if let Some(group) = group? {
                lengths.push(group.packed_tokens());
                unshared += group.samples.iter().map(|sample| sample.tokens.len()).sum::<usize>();
            }
        }
        let count = lengths.len().max(1) as f64;
        let budget = config.learner.micro_batch_tokens;
        let mut bins = 0;
        let mut largest = 0;
        let steps: Vec<&[usize]> = lengths.chunks(config.run.batch_size).collect();
        for step in &steps {
            let packed = best_fit_decreasing(step, budget);
            bins += packed.len();
            let tokens = |bin: &Vec<usize>| bin.iter().map(|&at| step[at]).sum::<usize>();
            largest = packed.iter().map(tokens).max().unwrap_or(0).max(largest);
        }
        Ok(Self {
            rows,
            dropped: rows - lengths.len(),
            mean_tokens: lengths.iter().sum::<usize>() as f64 / count,
            max_tokens: lengths.iter().copied().max().unwrap_or(0),
            unshared_tokens: unshared as f64 / count,
            micro_batches: bins as f64 / steps.len().max(1) as f64,
            largest_micro_batch: largest,
        })
    }

    /// Tokens of an average group.
    pub(super) fn mean_tokens(&self) -> f64 {
        self.mean_tokens
    }

    /// Tokens of the largest group.
    pub(super) fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    pub(super) fn describe(&self, run: &Run, data: &Data, steps: u64) -> String {
        let (section, learner) = (&run.config.run, &run.config.learner);
        let (rows, batch) = (data.train_rows(), section.batch_size);
        let epochs = steps as f64 * batch as f64 / rows as f64;
        let saved = 100.0 * (1.0 - self.mean_tokens / self.unshared_tokens.max(1.0));
        let tokens = self.mean_tokens * batch as f64;
        let mut out = String::new();
        let _ = writeln!(out, "algorithm   {}", run.name);
        let _ = writeln!(out, "data        {rows} rows to train on, {} held out", data.held_out.len());
        let _ = writeln!(
            out,
            "group       {:.0} tokens on average, {} at most; {saved:.0} % saved by storing prompts once ({} rows measured, {} left out)",
            self.mean_tokens, self.max_tokens, self.rows, self.dropped
        );
        let _ = writeln!(
            out,
            "step        {batch} groups = {tokens:.0} tokens in {:.1} micro-batches of at most {} tokens",
            self.micro_batches, learner.micro_batch_tokens
        );
        let _ = writeln!(
            out,
            "run         {steps} steps = {epochs:.2} epochs = {:.0} groups = {:.0} tokens",
            steps as f64 * batch as f64,
            tokens * steps as f64
        );
        out
    }
}
