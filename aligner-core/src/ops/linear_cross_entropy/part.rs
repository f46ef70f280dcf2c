//! A part of the head on devices without a kernel for it: Burn operations around the exchange of moments.

use burn::tensor::{IndexingUpdateOp, Tensor};

use super::kernel::Moments;
use super::{LogitCap, TargetScores, Vocabulary, logits_of};
use crate::ops::external::{Pullback, external};
use crate::ops::host::{to_vec, without_graph};
use crate::ops::index::index;
use crate::{Error, Result};

/// As [`super::linear_cross_entropy_part`], whose operands have been checked; holds all logits of the part.
pub(super) fn composed(
    hidden: Tensor<2>,
    weight: Tensor<2>,
    vocabulary: &Vocabulary<'_>,
    rows: &[u32],
    targets: &[u32],
    cap: Option<LogitCap>,
) -> Result<TargetScores> {
    let (count, part) = (targets.len(), weight.dims()[0]);
    if part == 0 {
        let size = vocabulary.size;
        let message =
            format!("a vocabulary of {size} tokens in more parts than it has runs on the CPU device alone");
        return Err(Error::Invalid(message));
    }
    let logits = logits_of(hidden, weight, rows, cap);
    let plain = without_graph(&logits).reshape([count, part]);
    let device = plain.device();
    let own = vocabulary.first..vocabulary.first + part;
    let is_own: Vec<bool> = targets.iter().map(|&target| own.contains(&(target as usize))).collect();
    let column =
        |values: Vec<f32>| Tensor::<1>::from_floats(values.as_slice(), &device).unsqueeze_dim::<2>(1);
    // A target of another part looks at the first token, and what comes of that does not count.
    let places: Vec<u32> = targets
        .iter()
        .zip(&is_own)
        .map(|(&t, &own)| if own { t - vocabulary.first as u32 } else { 0 })
        .collect();
    let places = index(&places, &device).unsqueeze_dim::<2>(1);
    let counts = column(is_own.iter().map(|&own| f32::from(u8::from(own))).collect());

    let own = moments(plain.clone(), plain.clone().gather(1, places.clone()), &is_own);
    let whole = Moments::combine(&(vocabulary.exchange)(own)?, count);
    let (log_sums, entropies) = (0..count).map(|row| whole.log_sum_and_entropy(row)).unzip();
    let (log_sums, entropies) = (column(log_sums), column(entropies));
    let scores: Vec<[f32; 3]> = (0..count).map(|target| whole.scores(target, target)).collect();
    let scores: Vec<f32> = (0..3).flat_map(|at| scores.iter().map(move |scores| scores[at])).collect();
    let pullback: Pullback = Box::new(move |grad| {
        let of = |at: usize| grad.clone().narrow(0, at * count, count).reshape([count, 1]);
        let logps = plain.clone() - log_sums.clone();
        let of_entropy = of(1) * (logps.clone() + entropies.clone());
        let of_logits = (logps.exp() * (of(0) + of_entropy)).neg();
        let of_targets = of(0) * counts.clone();
        let of_logits = of_logits.scatter(1, places.clone(), of_targets, IndexingUpdateOp::Add);
        Ok(vec![of_logits.reshape([count * part])])
    });
    let scores = Tensor::from_floats(scores.as_slice(), &device);
    Ok(TargetScores::of(&external(&[logits], &scores, [3, count], pullback)?))
}

/// What each target's `logits` `[targets, part]` come to, as [`Moments::to_vec`] has it, with one row for each
/// target; `picked` `[targets, 1]` are the targets' own.
fn moments(logits: Tensor<2>, picked: Tensor<2>, is_own: &[bool]) -> Vec<f32> {
    let largest = logits.clone().max_dim(1);
    let shifted = logits - largest.clone();
    let powers = shifted.clone().exp();
    let columns = vec![largest, powers.clone().sum_dim(1), (powers * shifted).sum_dim(1), picked];
    let all = to_vec(&Tensor::cat(columns, 1));
    let rows = all.chunks_exact(4).flat_map(|row| &row[..3]).copied();
    let picked = all.chunks_exact(4).zip(is_own);
    rows.chain(picked.map(|(row, &own)| if own { row[3] } else { f32::NEG_INFINITY })).collect()
}
