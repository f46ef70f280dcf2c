//! Which experts a token has, and with which weights: the largest of a softmax over all experts (Shazeer et al.
//! 2017, arXiv:1701.06538, without its noise).

use burn::tensor::{Int, Tensor, TensorData, activation};
use rayon::prelude::*;

use super::kernel::{Grad, INPUTS, Kernel, NO_GRADS, on_host, run, unfilled};
use crate::{Error, Result};

/// The experts of each row, and where each row stands among those of its experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Routes {
    /// The experts of each row, the likeliest first, `[rows, per_row]`.
    pub chosen: Vec<u32>,
    /// Experts of a row.
    pub per_row: usize,
    /// How many rows each expert has, `[experts]`.
    pub counts: Vec<usize>,
    /// The row in each slot, `[rows * per_row]`: slots are sorted by expert, then by row.
    pub rows: Vec<u32>,
    /// The slot of each row's choices, `[rows, per_row]`.
    pub slots: Vec<u32>,
}

impl Routes {
    /// The `per_row` largest of each row of logits `[rows, experts]`; of equal ones, the first.
    ///
    /// # Errors
    /// [`Error::Shape`] where the logits are not whole rows; [`Error::Invalid`] for more experts of a row than
    /// there are.
    pub fn new(logits: &[f32], experts: usize, per_row: usize) -> Result<Self> {
        if experts == 0 || !logits.len().is_multiple_of(experts) {
            return Err(Error::shape("logits of a router", format!("[rows, {experts}]"), &[logits.len()]));
        }
        if per_row == 0 || per_row > experts {
            return Err(Error::Invalid(format!("{per_row} experts for each row of {experts}")));
        }
        let mut chosen = Vec::with_capacity(logits.len() / experts * per_row);
        for row in logits.chunks_exact(experts) {
            let first = chosen.len();
            for _ in 0..per_row {
                let free = (0..experts as u32).filter(|expert| !chosen[first..].contains(expert));
                let best = free.reduce(
                    |best, next| {
                        if row[next as usize] > row[best as usize] { next } else { best }
                    },
                );
                chosen.extend(best);
            }
        }
        Ok(Self::of(chosen, experts, per_row))
    }

    fn of(chosen: Vec<u32>, experts: usize, per_row: usize) -> Self {
        let mut counts = vec![0; experts];
        for &expert in &chosen {
            counts[expert as usize] += 1;
        }
        let mut next: Vec<usize> =
            (counts.iter()).scan(0, |start, &count| Some(std::mem::replace(start, *start + count))).collect();
        let (mut rows, mut slots) = (vec![0; chosen.len()], Vec::with_capacity(chosen.len()));
        for (at, &expert) in chosen.iter().enumerate() {
            let slot = &mut next[expert as usize];
            rows[*slot] = (at / per_row) as u32;
            slots.push(*slot as u32);
            *slot += 1;
        }
        Self { chosen, per_row, counts, rows, slots }
    }

    /// How many rows were routed.
    pub fn routed(&self) -> usize {
        self.chosen.len() / self.per_row
    }

    /// The weights of each row's experts, `[rows, per_row]`, from the logits that they were chosen by: their
    /// probabilities, made to sum to 1 where `normalized`.
    pub fn weights(&self, logits: &[f32], normalized: bool, out: &mut [f32]) {
        let experts = self.counts.len();
        let rows = logits.chunks_exact(experts).zip(self.chosen.chunks_exact(self.per_row));
        for ((logits, chosen), out) in rows.zip(out.chunks_exact_mut(self.per_row)) {
            // The first choice is the largest of all.
            let largest = logits[chosen[0] as usize];
            for (out, &expert) in out.iter_mut().zip(chosen) {
                *out = (logits[expert as usize] - largest).exp();
            }
            let sum: f32 = if normalized {
                out.iter().sum()
            } else {
                logits.iter().map(|logit| (logit - largest).exp()).sum()
            };
            for out in out {
                *out /= sum;
            }
        }
    }
}

/// As [`Routes::weights`], with gradients: `logits` is `[rows, experts]`.
///
/// # Errors
/// [`Error::Shape`] where the logits are not those of the routes.
pub fn routing_weights(logits: Tensor<2>, routes: &Routes, normalized: bool) -> Result<Tensor<2>> {
    let expected = [routes.routed(), routes.counts.len()];
    if logits.dims() != expected {
        return Err(Error::shape("logits of a router", format!("{expected:?}"), &logits.dims()));
    }
    if !on_host(&logits) {
        return Ok(reference(logits, routes, normalized));
    }
    let kernel = Weights { routes: routes.clone(), normalized };
    Ok(run(kernel, vec![logits.into_dispatch()]))
}

/// The composition of Burn operations.
pub fn reference(logits: Tensor<2>, routes: &Routes, normalized: bool) -> Tensor<2> {
    let chosen: Vec<i64> = routes.chosen.iter().map(|&expert| i64::from(expert)).collect();
    let shape = [routes.routed(), routes.per_row];
    let chosen = Tensor::<2, Int>::from_data(TensorData::new(chosen, shape), &logits.device());
    let weights = activation::softmax(logits, 1).gather(1, chosen);
    if normalized { weights.clone() / weights.sum_dim(1) } else { weights }
}

#[derive(Debug)]
struct Weights {
    routes: Routes,
    normalized: bool,
}

impl Kernel for Weights {
    fn shape(&self) -> Vec<usize> {
        vec![self.routes.routed(), self.routes.per_row]
    }

    fn forward(&self, inputs: &[&[f32]]) -> Vec<f32> {
        let mut out = unfilled(self.routes.chosen.len());
        self.routes.weights(inputs[0], self.normalized, &mut out);
        out
    }

    fn backward(&self, inputs: &[&[f32]], output: &[f32], grad: &[f32], _: [bool; INPUTS]) -> [Grad; INPUTS] {
        let (each, experts) = (self.routes.per_row, self.routes.counts.len());
        let mut of_logits = vec![0.0; inputs[0].len()];
        let rows = output.par_chunks_exact(each).zip(grad.par_chunks_exact(each));
        (of_logits.par_chunks_exact_mut(experts).zip(rows))
            .zip(self.routes.chosen.par_chunks_exact(each).zip(inputs[0].par_chunks_exact(experts)))
            .for_each(|((of_logits, (weights, grad)), (chosen, logits))| {
                let along: f32 = weights.iter().zip(grad).map(|(weight, grad)| weight * grad).sum();
                if !self.normalized {
                    // Every expert's logit is in the sum that the probabilities are over.
                    let first = logits[chosen[0] as usize];
                    let scale = along * weights[0];
                    for (of_logit, logit) in of_logits.iter_mut().zip(logits) {
                        *of_logit = -scale * (logit - first).exp();
                    }
                }
                for ((weight, grad), &expert) in weights.iter().zip(grad).zip(chosen) {
                    let of_sum = if self.normalized { along } else { 0.0 };
                    of_logits[expert as usize] += weight * (grad - of_sum);
                }
            });
        let mut grads = NO_GRADS;
        grads[0] = Grad::Data(of_logits);
        grads
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::host::to_vec;
    use crate::ops::testing::{leaf, relative_error, weighted_sum};

    #[test]
    fn rows_go_to_their_largest_logits_and_are_sorted_by_expert() {
        let routes = Routes::new(&[1.0, 3.0, 2.0, 5.0, 5.0, 4.0], 3, 2).unwrap();
        assert_eq!(routes.chosen, [1, 2, 0, 1], "of equal logits the first");
        assert_eq!(routes.counts, [1, 2, 1]);
        assert_eq!(routes.rows, [1, 0, 1, 0]);
        assert_eq!(routes.slots, [1, 3, 0, 2]);
    }

    #[test]
    fn weights_and_gradients_match_the_composition() {
        for (experts, per_row) in [(4, 2), (7, 1), (5, 5)] {
            for normalized in [false, true] {
                let logits = leaf([33, experts], 1);
                let wide = || logits.clone() * 4.0;
                let routes = Routes::new(&to_vec(&wide().inner()), experts, per_row).unwrap();
                let fused = routing_weights(wide(), &routes, normalized).unwrap();
                let plain = reference(wide(), &routes, normalized);
                assert!(relative_error(&fused, &plain) < 1e-6);
                let of_fused = logits.grad(&weighted_sum(fused, 2).backward()).unwrap();
                let of_plain = logits.grad(&weighted_sum(plain, 2).backward()).unwrap();
                let gap = to_vec(&(of_fused - of_plain)).iter().fold(0f32, |most, gap| most.max(gap.abs()));
                assert!(gap < 2e-6, "{experts} {per_row} {normalized}: {gap}");
            }
        }
    }

    #[test]
    fn more_experts_than_there_are_and_broken_rows_are_refused() {
        assert!(Routes::new(&[0.0; 4], 2, 3).unwrap_err().to_string().contains('3'));
        assert!(Routes::new(&[0.0; 5], 2, 1).unwrap_err().to_string().contains("router"));
    }
}
