//! The language-model head fused with log-softmax: log-probabilities, entropies and their gradients
//! without a `[tokens, vocab]` matrix.

mod kernel;
mod part;

use burn::tensor::{Tensor, activation};

use super::host::HostTensor;
use super::index::index;
use super::kernel::{on_host, run};
use super::linear::product;
use crate::{Error, Result};
use kernel::{LinearCrossEntropy, Moments};

/// What the head says of each (row, target) pair.
#[derive(Debug, Clone)]
pub struct TargetScores {
    /// `log softmax(hidden[row] weight^T)[target]`, `[targets]`, in nats.
    pub logps: Tensor<1>,
    /// Entropy of the row's distribution, `[targets]`, in nats.
    pub entropy: Tensor<1>,
    /// 1 where the target has the row's largest logit, else 0, `[targets]`; no gradient.
    pub correct: Tensor<1>,
}

impl TargetScores {
    /// Its rows, `[3, targets]`.
    fn of(rows: &Tensor<2>) -> Self {
        let [_, targets] = rows.dims();
        let row = |at: usize| rows.clone().narrow(0, at, 1).reshape([targets]);
        Self { logps: row(0), entropy: row(1), correct: row(2).detach() }
    }
}

/// Scores of `targets` `[targets]`, each predicted by the row of `hidden` `[tokens, hidden]` that
/// `rows` `[targets]` names, under the head `weight` `[vocab, hidden]`.
///
/// Logits exist for a chunk of rows at a time, in the forward pass and again in the backward pass.
///
/// # Errors
/// [`Error::Shape`] where the operands do not fit, [`Error::Invalid`] for a row or a target out of
/// range, or without any target.
pub fn linear_cross_entropy(
    hidden: Tensor<2>,
    weight: Tensor<2>,
    rows: &[u32],
    targets: &[u32],
) -> Result<TargetScores> {
    capped_linear_cross_entropy(hidden, weight, rows, targets, None)
}

/// A cap on logits: `outer tanh(logit / inner)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitCap {
    /// Where the tanh begins to bend.
    pub inner: f32,
    /// What bounds the result: `inner` over the temperature of the distribution.
    pub outer: f32,
}

/// As [`linear_cross_entropy`], of logits that are capped.
///
/// # Errors
/// Those of [`linear_cross_entropy`].
pub fn capped_linear_cross_entropy(
    hidden: Tensor<2>,
    weight: Tensor<2>,
    rows: &[u32],
    targets: &[u32],
    cap: Option<LogitCap>,
) -> Result<TargetScores> {
    let [vocab, _] = weight.dims();
    check(&hidden, &weight, vocab, rows, targets)?;
    if !on_host(&hidden) || !on_host(&weight) {
        return Ok(reference(hidden, weight, rows, targets, cap));
    }
    let kernel = LinearCrossEntropy::new(rows, targets, 0..vocab, hidden.dims()[1]).capped(cap);
    Ok(scores(kernel, hidden, weight))
}

/// The part of a vocabulary that a rank has, and the way to what the other ranks have of it.
pub struct Vocabulary<'a> {
    /// Tokens of the whole vocabulary.
    pub size: usize,
    /// The first token of this rank's part.
    pub first: usize,
    /// Gives the numbers of each rank, equally many, this one's among them, in the order of the parts.
    pub exchange: &'a dyn Fn(Vec<f32>) -> Result<Vec<Vec<f32>>>,
}

/// As [`linear_cross_entropy`], where `weight` `[part, hidden]` is a part of the head and other ranks have
/// the rest of it. All of them get the whole vocabulary's scores; the gradients of `hidden` are this
/// part's share.
///
/// The log-sum-exp is put together as in Megatron-LM's `vocab_parallel_cross_entropy` (Shoeybi et al. 2019,
/// arXiv:1909.08053, section 3), the entropy from the same exchange: three numbers a row, one a target.
///
/// # Errors
/// As [`linear_cross_entropy`]; a failed exchange.
pub fn linear_cross_entropy_part(
    hidden: Tensor<2>,
    weight: Tensor<2>,
    vocabulary: &Vocabulary<'_>,
    rows: &[u32],
    targets: &[u32],
    cap: Option<LogitCap>,
) -> Result<TargetScores> {
    check(&hidden, &weight, vocabulary.size, rows, targets)?;
    if !on_host(&hidden) || !on_host(&weight) {
        return part::composed(hidden, weight, vocabulary, rows, targets, cap);
    }
    let part = vocabulary.first..vocabulary.first + weight.dims()[0];
    let kernel = LinearCrossEntropy::new(rows, targets, part, hidden.dims()[1]).capped(cap);
    let inputs = (HostTensor::without_graph(&hidden), HostTensor::without_graph(&weight));
    let own = kernel.moments(&[inputs.0.as_slice(), inputs.1.as_slice()]);
    let whole = Moments::combine(&(vocabulary.exchange)(own.to_vec())?, kernel.rows());
    Ok(scores(kernel.with(whole), hidden, weight))
}

fn check(hidden: &Tensor<2>, weight: &Tensor<2>, vocab: usize, rows: &[u32], targets: &[u32]) -> Result<()> {
    let ([tokens, columns], width) = (hidden.dims(), weight.dims()[1]);
    if columns != width {
        return Err(Error::shape("weight of the head", format!("[vocab, {columns}]"), &weight.dims()));
    }
    if rows.len() != targets.len() {
        return Err(Error::shape("rows of the targets", format!("[{}]", targets.len()), &[rows.len()]));
    }
    if targets.is_empty() {
        return Err(Error::Invalid("the batch has no target token".into()));
    }
    for (what, values, limit) in [("row", rows, tokens), ("target", targets, vocab)] {
        if let Some(value) = values.iter().find(|&&value| value as usize >= limit) {
            return Err(Error::Invalid(format!("{what} {value} is out of range: there are {limit}")));
        }
    }
    Ok(())
}

fn scores(kernel: LinearCrossEntropy, hidden: Tensor<2>, weight: Tensor<2>) -> TargetScores {
    TargetScores::of(&run(kernel, vec![hidden.into_dispatch(), weight.into_dispatch()]))
}

/// The composition of Burn operations; holds all logits.
pub fn reference(
    hidden: Tensor<2>,
    weight: Tensor<2>,
    rows: &[u32],
    targets: &[u32],
    cap: Option<LogitCap>,
) -> TargetScores {
    let device = hidden.device();
    let logits = logits_of(hidden, weight, rows, cap);
    let logps = activation::log_softmax(logits.clone(), 1);
    let entropy = (logps.clone().exp() * logps.clone()).sum_dim(1).neg().reshape([targets.len()]);
    let picked = logps.clone().gather(1, index(targets, &device).unsqueeze_dim(1)).reshape([targets.len()]);
    let largest = logps.max_dim(1).reshape([targets.len()]);
    let correct = picked.clone().greater_equal(largest).float();
    TargetScores { logps: picked, entropy, correct }
}

/// The logits of `rows`, `[rows, vocab]`.
fn logits_of(hidden: Tensor<2>, weight: Tensor<2>, rows: &[u32], cap: Option<LogitCap>) -> Tensor<2> {
    let rows = index(rows, &hidden.device());
    let logits = product(hidden.select(0, rows), weight.transpose());
    match cap {
        Some(LogitCap { inner, outer }) => (logits / inner).tanh() * outer,
        None => logits,
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;

    use super::*;
    use crate::ops::host::to_vec;
    use crate::ops::testing::{leaf, relative_error, values, weighted_sum};

    fn compare(tokens: usize, vocab: usize, rows: &[u32], targets: &[u32]) {
        let (hidden, weight) = (leaf([tokens, 24], 1), leaf([vocab, 24], 2));
        let fused = linear_cross_entropy(hidden.clone() * 3.0, weight.clone(), rows, targets).unwrap();
        let plain = reference(hidden.clone() * 3.0, weight.clone(), rows, targets, None);
        assert!(relative_error(&fused.logps, &plain.logps) < 2e-6);
        let (entropy, grads) = exact(&hidden, &weight, rows, targets);
        let error = relative_error(&fused.entropy, &entropy);
        assert!(error < 2e-6, "entropy: {error}");
        assert!(relative_error(&fused.correct, &plain.correct) < 1e-6);
        let loss = |scores: TargetScores| weighted_sum(scores.logps, 3) + weighted_sum(scores.entropy, 4);
        let of_fused = loss(fused).backward();
        for (input, expected) in [&hidden, &weight].into_iter().zip(grads) {
            let error = relative_error(&input.grad(&of_fused).unwrap(), &expected);
            assert!(error < 5e-6, "gradient: {error}");
        }
    }

    /// The entropies, and the gradients of [`compare`]'s loss, in f64: over a large vocabulary the
    /// composition's own rounding is above the kernel's.
    fn exact(
        hidden: &Tensor<2>,
        weight: &Tensor<2>,
        rows: &[u32],
        targets: &[u32],
    ) -> (Tensor<1>, [Tensor<2>; 2]) {
        let wide = |values: &[f32]| values.iter().map(|&value| f64::from(value)).collect::<Vec<f64>>();
        let shapes = [hidden.dims(), weight.dims()];
        let (hidden, weight) = (wide(&to_vec(hidden)), wide(&to_vec(weight)));
        let (of_logps, of_entropies) = (values(rows.len(), 3), values(rows.len(), 4));
        let mut entropies = Vec::new();
        let (mut of_hidden, mut of_weight) = (vec![0.0; hidden.len()], vec![0.0; weight.len()]);
        for (at, &row) in rows.iter().enumerate() {
            let row = row as usize * 24..(row as usize + 1) * 24;
            let h = &hidden[row.clone()];
            let logit = |w: &[f64]| w.iter().zip(h).map(|(w, h)| w * h * 3.0).sum::<f64>();
            let logits: Vec<f64> = weight.chunks_exact(24).map(logit).collect();
            let log_sum = logits.iter().map(|l| l.exp()).sum::<f64>().ln();
            let entropy = logits.iter().map(|l| (l - log_sum).exp() * (log_sum - l)).sum::<f64>();
            entropies.push(entropy as f32);
            let (of_logp, of_entropy) = (f64::from(of_logps[at]), f64::from(of_entropies[at]));
            for (v, logit) in logits.iter().enumerate() {
                let (logp, is_target) = (logit - log_sum, f64::from(u8::from(v == targets[at] as usize)));
                let p = logp.exp();
                let of_logit = 3.0 * (of_logp * (is_target - p) - of_entropy * p * (logp + entropy));
                for i in 0..24 {
                    of_hidden[row.start + i] += of_logit * weight[v * 24 + i];
                    of_weight[v * 24 + i] += of_logit * h[i];
                }
            }
        }
        let device = burn::tensor::Device::flex();
        let narrow = |values: Vec<f64>, shape: [usize; 2]| {
            let values: Vec<f32> = values.into_iter().map(|value| value as f32).collect();
            Tensor::<2>::from_data(TensorData::new(values, shape), &device)
        };
        let grads = [narrow(of_hidden, shapes[0]), narrow(of_weight, shapes[1])];
        (Tensor::from_floats(entropies.as_slice(), &device), grads)
    }

    #[test]
    fn values_and_gradients_match_the_composition() {
        compare(5, 11, &[0, 1, 2, 4], &[3, 10, 0, 3]);
    }

    #[test]
    fn capped_logits_match_the_composition() {
        let (rows, targets) = ([0, 2, 2, 4], [3, 10, 0, 7]);
        let (hidden, weight) = (leaf([5, 24], 1), leaf([11, 24], 2));
        let cap = Some(LogitCap { inner: 2.0, outer: 1.3 });
        let wide = || hidden.clone() * 3.0;
        let fused = capped_linear_cross_entropy(wide(), weight.clone(), &rows, &targets, cap).unwrap();
        let plain = reference(wide(), weight.clone(), &rows, &targets, cap);
        assert!(relative_error(&fused.logps, &plain.logps) < 2e-6);
        assert!(relative_error(&fused.entropy, &plain.entropy) < 2e-6);
        let loss = |scores: TargetScores| weighted_sum(scores.logps, 3) + weighted_sum(scores.entropy, 4);
        let (of_fused, of_plain) = (loss(fused).backward(), loss(plain).backward());
        for input in [&hidden, &weight] {
            let error = relative_error(&input.grad(&of_fused).unwrap(), &input.grad(&of_plain).unwrap());
            assert!(error < 5e-6, "gradient: {error}");
        }
    }

    #[test]
    fn several_targets_may_share_a_row() {
        compare(4, 50, &[2, 0, 2, 2, 3], &[1, 2, 3, 1, 49]);
    }

    #[test]
    fn rows_may_span_several_chunks() {
        let rows: Vec<u32> = (0..300).map(|i| (i * 7) % 300).collect();
        let targets: Vec<u32> = (0..300).map(|i| (i * 31) % 20_000).collect();
        compare(300, 20_000, &rows, &targets);
    }

    /// Parts of a vocabulary that add up to the whole, computed one after the other.
    #[test]
    fn parts_of_the_vocabulary_add_up_to_the_whole() {
        let (tokens, vocab, rows, targets) = (5, 23, [2, 0, 2, 4], [0, 22, 9, 8]);
        let (hidden, weight) = (leaf([tokens, 24], 1), leaf([vocab, 24], 2));
        let loss = |scores: &TargetScores| {
            weighted_sum(scores.logps.clone(), 3) + weighted_sum(scores.entropy.clone(), 4)
        };
        let whole = linear_cross_entropy(hidden.clone(), weight.clone(), &rows, &targets).unwrap();
        let expected = loss(&whole).backward();
        let bounds = [(0, 9), (9, 1), (10, 13)];
        let part = |(first, len): (usize, usize)| {
            let leaf = |values: Tensor<2>| {
                Tensor::<2>::from_data(values.into_data(), &hidden.device()).require_grad()
            };
            (leaf(hidden.clone()), leaf(weight.clone().narrow(0, first, len)))
        };
        let moments = bounds.map(|(first, len)| {
            let (hidden, weight) = part((first, len));
            let kernel = LinearCrossEntropy::new(&rows, &targets, first..first + len, 24);
            let inputs = [&hidden, &weight].map(HostTensor::without_graph);
            kernel.moments(&inputs.each_ref().map(HostTensor::as_slice)).to_vec()
        });
        let mut of_hidden = Tensor::zeros([tokens, 24], &burn::tensor::Device::flex());
        for (first, len) in bounds {
            let (hidden, own) = part((first, len));
            let exchange = |own: Vec<f32>| {
                assert!(moments.contains(&own));
                Ok(moments.to_vec())
            };
            let vocabulary = Vocabulary { size: vocab, first, exchange: &exchange };
            let scores =
                linear_cross_entropy_part(hidden.clone(), own.clone(), &vocabulary, &rows, &targets, None)
                    .unwrap();
            assert!(relative_error(&scores.logps, &whole.logps) < 1e-6);
            assert!(relative_error(&scores.entropy, &whole.entropy) < 2e-6);
            assert_eq!(to_vec(&scores.correct), to_vec(&whole.correct));
            let grads = loss(&scores).backward();
            of_hidden = of_hidden + hidden.grad(&grads).unwrap();
            let of_part = weight.grad(&expected).unwrap().narrow(0, first, len);
            assert!(relative_error(&own.grad(&grads).unwrap(), &of_part) < 2e-6);
        }
        assert!(relative_error(&of_hidden, &hidden.grad(&expected).unwrap()) < 2e-6);
    }

    /// The composition for other devices, run on the CPU.
    #[test]
    fn composed_parts_of_the_vocabulary_add_up_to_the_whole() {
        let (tokens, vocab, rows, targets) = (5, 23, [2, 0, 2, 4], [0, 22, 9, 8]);
        let cap = Some(LogitCap { inner: 2.0, outer: 1.3 });
        let (hidden, weight) = (leaf([tokens, 24], 1), leaf([vocab, 24], 2));
        let loss = |scores: &TargetScores| {
            weighted_sum(scores.logps.clone(), 3) + weighted_sum(scores.entropy.clone(), 4)
        };
        let whole =
            capped_linear_cross_entropy(hidden.clone(), weight.clone(), &rows, &targets, cap).unwrap();
        let expected = loss(&whole).backward();
        let bounds = [(0, 9), (9, 1), (10, 13)];
        let leaf = |values: Tensor<2>| Tensor::from_data(values.into_data(), &hidden.device()).require_grad();
        let parts =
            bounds.map(|(first, len)| (leaf(hidden.clone()), leaf(weight.clone().narrow(0, first, len))));
        let run = |at: usize, exchange: &dyn Fn(Vec<f32>) -> Result<Vec<Vec<f32>>>| {
            let (hidden, weight) = parts[at].clone();
            let vocabulary = Vocabulary { size: vocab, first: bounds[at].0, exchange };
            part::composed(hidden, weight, &vocabulary, &rows, &targets, cap)
        };
        let all = std::cell::RefCell::new(Vec::new());
        for at in 0..bounds.len() {
            let listen = |own: Vec<f32>| {
                all.borrow_mut().push(own);
                Err(Error::Invalid("only listening".into()))
            };
            assert!(run(at, &listen).is_err());
        }
        let mut of_hidden = Tensor::zeros([tokens, 24], &burn::tensor::Device::flex());
        for (at, (first, len)) in bounds.into_iter().enumerate() {
            let scores = run(at, &|_| Ok(all.borrow().clone())).unwrap();
            assert!(relative_error(&scores.logps, &whole.logps) < 2e-6);
            assert!(relative_error(&scores.entropy, &whole.entropy) < 2e-6);
            assert_eq!(to_vec(&scores.correct), to_vec(&whole.correct));
            let grads = loss(&scores).backward();
            of_hidden = of_hidden + parts[at].0.grad(&grads).unwrap();
            let of_part = weight.grad(&expected).unwrap().narrow(0, first, len);
            assert!(relative_error(&parts[at].1.grad(&grads).unwrap(), &of_part) < 5e-6);
        }
        assert!(relative_error(&of_hidden, &hidden.grad(&expected).unwrap()) < 5e-6);
    }

    #[test]
    fn out_of_range_and_empty_are_refused() {
        let call = |rows: &[u32], targets: &[u32]| {
            linear_cross_entropy(leaf([2, 3], 1), leaf([5, 3], 2), rows, targets).unwrap_err().to_string()
        };
        assert!(call(&[2], &[0]).contains("row 2"));
        assert!(call(&[0], &[5]).contains("target 5"));
        assert!(call(&[], &[]).contains("no target"));
    }
}
