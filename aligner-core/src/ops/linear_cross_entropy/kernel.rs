//! The CPU kernel: chunks of rows, whole vocabulary, logits computed again in the backward pass.

use std::sync::OnceLock;

use rayon::prelude::*;

use crate::ops::gemm::{Mat, Output, gemm};
use crate::ops::kernel::{Grad, INPUTS, Kernel, NO_GRADS, unfilled};
use crate::ops::simd::{exp, exp_moments, max, vectorized};

/// Logits that are held at a time: 8 MiB.
const CHUNK_LOGITS: usize = 1 << 21;

#[derive(Debug)]
pub(super) struct LinearCrossEntropy {
    /// The distinct rows, ascending.
    rows: Vec<usize>,
    /// For each distinct row, where its targets begin in `order`; one more at the end.
    starts: Vec<usize>,
    /// Indices of the targets, by row.
    order: Vec<usize>,
    targets: Vec<u32>,
    vocab: usize,
    hidden: usize,
    /// Log-sum-exp and entropy of each distinct row; written by the forward pass.
    moments: OnceLock<Vec<(f32, f32)>>,
}

impl LinearCrossEntropy {
    pub(super) fn new(rows: &[u32], targets: &[u32], vocab: usize, hidden: usize) -> Self {
        let mut order: Vec<usize> = (0..targets.len()).collect();
        order.sort_by_key(|&target| rows[target]);
        let mut kernel = Self {
            rows: Vec::new(),
            starts: Vec::new(),
            order,
            targets: targets.to_vec(),
            vocab,
            hidden,
            moments: OnceLock::new(),
        };
        for (at, &target) in kernel.order.iter().enumerate() {
            let row = rows[target] as usize;
            if kernel.rows.last() != Some(&row) {
                kernel.rows.push(row);
                kernel.starts.push(at);
            }
        }
        kernel.starts.push(targets.len());
        kernel
    }

    fn chunk(&self) -> usize {
        (CHUNK_LOGITS / self.vocab).clamp(16, 1024).min(self.rows.len())
    }

    /// Indices of the targets of a distinct row.
    fn targets_of(&self, row: usize) -> &[usize] {
        &self.order[self.starts[row]..self.starts[row + 1]]
    }

    /// The chunk's rows of `hidden`, and their logits.
    fn logits(
        &self,
        first: usize,
        rows: &[usize],
        inputs: &[&[f32]],
        gathered: &mut [f32],
        logits: &mut [f32],
    ) {
        debug_assert!(first + rows.len() <= self.rows.len(), "a chunk of the distinct rows");
        for (to, &row) in gathered.chunks_exact_mut(self.hidden).zip(rows) {
            to.copy_from_slice(&inputs[0][row * self.hidden..][..self.hidden]);
        }
        let weight = Mat::new(inputs[1], self.vocab, self.hidden);
        let hidden = Mat::new(gathered, rows.len(), self.hidden);
        gemm(hidden, weight.t(), logits, Output::Overwrite);
    }

    /// Calls `visit(first distinct row, their rows, gathered hidden, logits)` chunk by chunk.
    fn chunks(&self, inputs: &[&[f32]], mut visit: impl FnMut(usize, &[usize], &[f32], &mut [f32])) {
        let chunk = self.chunk();
        let mut gathered = unfilled(chunk * self.hidden);
        let mut logits = unfilled(chunk * self.vocab);
        for (index, rows) in self.rows.chunks(chunk).enumerate() {
            let gathered = &mut gathered[..rows.len() * self.hidden];
            let logits = &mut logits[..rows.len() * self.vocab];
            self.logits(index * chunk, rows, inputs, gathered, logits);
            visit(index * chunk, rows, gathered, logits);
        }
    }
}

vectorized! {
    /// Turns a row's logits into their gradients, but for the targets' own terms:
    /// `-p (of_logps + of_entropy (log p + entropy))`.
    fn softmax_backward(logits: &mut [f32], log_sum: f32, entropy: f32, of_logps: f32, of_entropy: f32) {
        for logit in logits {
            let logp = *logit - log_sum;
            *logit = -exp(logp) * (of_logps + of_entropy * (logp + entropy));
        }
    }
}

impl Kernel for LinearCrossEntropy {
    fn shape(&self) -> Vec<usize> {
        vec![3, self.targets.len()]
    }

    fn forward(&self, inputs: &[&[f32]]) -> Vec<f32> {
        let count = self.targets.len();
        let mut out = unfilled(3 * count);
        let mut moments = Vec::with_capacity(self.rows.len());
        self.chunks(inputs, |first, _, _, logits| {
            let of_rows = logits.par_chunks_exact(self.vocab).map(|logits| {
                let largest = max(logits);
                let (sum, weighted) = exp_moments(logits, largest);
                (largest, largest + sum.ln(), sum.ln() - weighted / sum)
            });
            for (row, (largest, log_sum, entropy)) in of_rows.collect::<Vec<_>>().into_iter().enumerate() {
                for &target in self.targets_of(first + row) {
                    let logit = logits[row * self.vocab + self.targets[target] as usize];
                    out[target] = logit - log_sum;
                    out[count + target] = entropy;
                    out[2 * count + target] = f32::from(u8::from(logit >= largest));
                }
                moments.push((log_sum, entropy));
            }
        });
        // A kernel object serves one call, so the cell is empty.
        let _ = self.moments.set(moments);
        out
    }

    fn backward(&self, inputs: &[&[f32]], _: &[f32], grad: &[f32], wanted: [bool; INPUTS]) -> [Grad; INPUTS] {
        let moments = self.moments.get().expect("the forward pass ran first");
        let (of_logps, of_entropies) = grad[..2 * self.targets.len()].split_at(self.targets.len());
        let mut of_hidden = vec![0.0; if wanted[0] { inputs[0].len() } else { 0 }];
        let mut of_weight = unfilled(if wanted[1] { inputs[1].len() } else { 0 });
        let mut of_gathered = unfilled(self.chunk() * self.hidden);
        self.chunks(inputs, |first, rows, gathered, logits| {
            logits.par_chunks_exact_mut(self.vocab).enumerate().for_each(|(row, logits)| {
                let targets = self.targets_of(first + row);
                let sum = |of: &[f32]| targets.iter().map(|&target| of[target]).sum::<f32>();
                let (log_sum, entropy) = moments[first + row];
                softmax_backward(logits, log_sum, entropy, sum(of_logps), sum(of_entropies));
                for &target in targets {
                    logits[self.targets[target] as usize] += of_logps[target];
                }
            });
            let of_logits = Mat::new(logits, rows.len(), self.vocab);
            if wanted[0] {
                let weight = Mat::new(inputs[1], self.vocab, self.hidden);
                let of_gathered = &mut of_gathered[..gathered.len()];
                gemm(of_logits, weight, of_gathered, Output::Overwrite);
                for (from, &row) in of_gathered.chunks_exact(self.hidden).zip(rows) {
                    of_hidden[row * self.hidden..][..self.hidden].copy_from_slice(from);
                }
            }
            if wanted[1] {
                let hidden = Mat::new(gathered, rows.len(), self.hidden);
                let output = if first == 0 { Output::Overwrite } else { Output::Add };
                gemm(of_logits.t(), hidden, &mut of_weight, output);
            }
        });
        let mut grads = NO_GRADS;
        if wanted[0] {
            grads[0] = Grad::Data(of_hidden);
        }
        if wanted[1] {
            grads[1] = Grad::Data(of_weight);
        }
        grads
    }
}
