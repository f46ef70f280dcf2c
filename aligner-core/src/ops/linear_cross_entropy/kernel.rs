//! The CPU kernel: chunks of rows, the vocabulary or a part of it, logits computed again in the backward
//! pass.

use std::ops::Range;
use std::sync::OnceLock;

use rayon::prelude::*;

use super::LogitCap;
use crate::ops::gemm::{Mat, Output, gemm};
use crate::ops::kernel::{Grad, INPUTS, Kernel, NO_GRADS, unfilled};
use crate::ops::simd::{exp, exp_moments, max, tanh, vectorized};

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
    /// Tokens of the vocabulary that `weight` has a row for.
    part: Range<usize>,
    hidden: usize,
    cap: Option<LogitCap>,
    /// What the whole vocabulary's logits come to; set before the backward pass.
    whole: OnceLock<Moments>,
}

/// What the logits of distinct rows come to, over a part of the vocabulary or the whole.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Moments {
    /// Of each distinct row: the largest logit m, the sum of e^(z - m), and that of e^(z - m) (z - m).
    rows: Vec<[f32; 3]>,
    /// Each target's logit; minus infinity where it is in another part.
    logits: Vec<f32>,
}

impl Moments {
    /// Three numbers a row, then one a target.
    pub(super) fn to_vec(&self) -> Vec<f32> {
        [self.rows.as_flattened(), &self.logits].concat()
    }

    /// Moments over several parts of the vocabulary, in their order, each as [`Moments::to_vec`] gives it.
    pub(super) fn combine(parts: &[Vec<f32>], rows: usize) -> Self {
        let mut whole = Self { rows: Vec::with_capacity(rows), logits: Vec::new() };
        for at in 0..rows {
            let of_part = |part: &Vec<f32>| [part[3 * at], part[3 * at + 1], part[3 * at + 2]];
            let largest = parts.iter().map(|part| part[3 * at]).fold(f32::NEG_INFINITY, f32::max);
            let (mut sum, mut weighted) = (0.0, 0.0);
            for [own_largest, own_sum, own_weighted] in parts.iter().map(of_part) {
                let shift = own_largest - largest;
                sum += own_sum * shift.exp();
                // A part without a token has no largest logit.
                weighted += if own_sum > 0.0 { (own_weighted + shift * own_sum) * shift.exp() } else { 0.0 };
            }
            whole.rows.push([largest, sum, weighted]);
        }
        let targets = parts.first().map_or(0, |part| part.len() - 3 * rows);
        for at in 3 * rows..3 * rows + targets {
            whole.logits.push(parts.iter().map(|part| part[at]).fold(f32::NEG_INFINITY, f32::max));
        }
        whole
    }

    /// A target's log-probability, its distribution's entropy, and 1 where it has the largest logit, else 0.
    pub(super) fn scores(&self, row: usize, target: usize) -> [f32; 3] {
        let (logit, (log_sum, entropy)) = (self.logits[target], self.log_sum_and_entropy(row));
        [logit - log_sum, entropy, f32::from(u8::from(logit >= self.rows[row][0]))]
    }

    /// Log-sum-exp and entropy of a row.
    pub(super) fn log_sum_and_entropy(&self, row: usize) -> (f32, f32) {
        let [largest, sum, weighted] = self.rows[row];
        (largest + sum.ln(), sum.ln() - weighted / sum)
    }
}

impl LinearCrossEntropy {
    pub(super) fn new(rows: &[u32], targets: &[u32], part: Range<usize>, hidden: usize) -> Self {
        let mut order: Vec<usize> = (0..targets.len()).collect();
        order.sort_by_key(|&target| rows[target]);
        let mut kernel = Self {
            rows: Vec::new(),
            starts: Vec::new(),
            order,
            targets: targets.to_vec(),
            part,
            hidden,
            cap: None,
            whole: OnceLock::new(),
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

    /// The same with capped logits.
    pub(super) fn capped(self, cap: Option<LogitCap>) -> Self {
        Self { cap, ..self }
    }

    /// Distinct rows.
    pub(super) fn rows(&self) -> usize {
        self.rows.len()
    }

    /// The same with the whole vocabulary's moments: what its passes then need.
    pub(super) fn with(self, whole: Moments) -> Self {
        Self { whole: OnceLock::from(whole), ..self }
    }

    fn chunk(&self) -> usize {
        (CHUNK_LOGITS / self.part.len().max(1)).clamp(16, 1024).min(self.rows.len())
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
        let weight = Mat::new(inputs[1], self.part.len(), self.hidden);
        let hidden = Mat::new(gathered, rows.len(), self.hidden);
        gemm(hidden, weight.t(), logits, Output::Overwrite);
        if let Some(cap) = self.cap {
            logits.par_chunks_mut(self.part.len().max(1)).for_each(|logits| squash(logits, cap));
        }
    }

    /// Where a target's logit is among the part's; none where it is in another part.
    fn place(&self, target: usize) -> Option<usize> {
        let token = self.targets[target] as usize;
        self.part.contains(&token).then(|| token - self.part.start)
    }

    /// What the part's logits come to.
    pub(super) fn moments(&self, inputs: &[&[f32]]) -> Moments {
        let mut moments = Moments {
            rows: Vec::with_capacity(self.rows.len()),
            logits: vec![f32::NEG_INFINITY; self.targets.len()],
        };
        if self.part.is_empty() {
            moments.rows.resize(self.rows.len(), [f32::NEG_INFINITY, 0.0, 0.0]);
            return moments;
        }
        self.chunks(inputs, |first, rows, _, logits| {
            let of_rows = logits.par_chunks_exact(self.part.len()).map(|logits| {
                let largest = max(logits);
                let (sum, weighted) = exp_moments(logits, largest);
                [largest, sum, weighted]
            });
            moments.rows.extend(of_rows.collect::<Vec<_>>());
            for row in 0..rows.len() {
                for &target in self.targets_of(first + row) {
                    if let Some(place) = self.place(target) {
                        moments.logits[target] = logits[row * self.part.len() + place];
                    }
                }
            }
        });
        moments
    }

    /// Calls `visit(first distinct row, their rows, gathered hidden, logits)` chunk by chunk.
    fn chunks(&self, inputs: &[&[f32]], mut visit: impl FnMut(usize, &[usize], &[f32], &mut [f32])) {
        let chunk = self.chunk();
        let mut gathered = unfilled(chunk * self.hidden);
        let mut logits = unfilled(chunk * self.part.len());
        for (index, rows) in self.rows.chunks(chunk).enumerate() {
            let gathered = &mut gathered[..rows.len() * self.hidden];
            let logits = &mut logits[..rows.len() * self.part.len()];
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

vectorized! {
    fn squash(logits: &mut [f32], cap: LogitCap) {
        for logit in logits {
            *logit = cap.outer * tanh(*logit / cap.inner);
        }
    }
}

vectorized! {
    /// Multiplies gradients of capped logits by the cap's slope at each.
    fn unsquash(of_logits: &mut [f32], slopes: &[f32]) {
        for (of_logit, slope) in of_logits.iter_mut().zip(slopes) {
            *of_logit *= slope;
        }
    }
}

impl Kernel for LinearCrossEntropy {
    fn shape(&self) -> Vec<usize> {
        vec![3, self.targets.len()]
    }

    fn forward(&self, inputs: &[&[f32]]) -> Vec<f32> {
        let whole = self.whole.get_or_init(|| self.moments(inputs));
        let count = self.targets.len();
        let mut out = unfilled(3 * count);
        for row in 0..self.rows.len() {
            for &target in self.targets_of(row) {
                for (at, score) in whole.scores(row, target).into_iter().enumerate() {
                    out[at * count + target] = score;
                }
            }
        }
        out
    }

    fn backward(&self, inputs: &[&[f32]], _: &[f32], grad: &[f32], wanted: [bool; INPUTS]) -> [Grad; INPUTS] {
        let whole = self.whole.get().expect("the forward pass ran first");
        let vocab = self.part.len();
        let (of_logps, of_entropies) = grad[..2 * self.targets.len()].split_at(self.targets.len());
        let mut of_hidden = vec![0.0; if wanted[0] { inputs[0].len() } else { 0 }];
        let mut of_weight = unfilled(if wanted[1] { inputs[1].len() } else { 0 });
        let mut of_gathered = unfilled(self.chunk() * self.hidden);
        self.chunks(inputs, |first, rows, gathered, logits| {
            logits.par_chunks_exact_mut(vocab).enumerate().for_each(|(row, logits)| {
                let targets = self.targets_of(first + row);
                let sum = |of: &[f32]| targets.iter().map(|&target| of[target]).sum::<f32>();
                let (log_sum, entropy) = whole.log_sum_and_entropy(first + row);
                let slope = |cap: LogitCap| {
                    let slope = |&logit: &f32| {
                        let tanh = logit / cap.outer;
                        (1.0 - tanh * tanh) * cap.outer / cap.inner
                    };
                    logits.iter().map(slope).collect::<Vec<f32>>()
                };
                let slopes = self.cap.map(slope);
                softmax_backward(logits, log_sum, entropy, sum(of_logps), sum(of_entropies));
                for &target in targets {
                    if let Some(place) = self.place(target) {
                        logits[place] += of_logps[target];
                    }
                }
                if let Some(slopes) = slopes {
                    unsquash(logits, &slopes);
                }
            });
            let of_logits = Mat::new(logits, rows.len(), vocab);
            if wanted[0] {
                let weight = Mat::new(inputs[1], vocab, self.hidden);
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
