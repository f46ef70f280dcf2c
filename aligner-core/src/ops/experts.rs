//! The products of a layer's experts: each gated MLP over its own rows, all in one operation.

mod kernel;

use burn::tensor::{Device, Tensor};

use super::kernel::{on_host, run};
use super::linear::product;
use super::tie::{Left, tie};
use super::{Activation, WeightOperand, gate};
use crate::{Error, Result};
use kernel::Experts;

/// The weights of a gated expert.
#[derive(Debug, Clone)]
pub struct ExpertWeights {
    /// `[width, hidden]`, flat.
    pub gate: WeightOperand<1>,
    /// `[width, hidden]`, flat.
    pub up: WeightOperand<1>,
    /// `[hidden, width]`, flat.
    pub down: WeightOperand<1>,
}

impl ExpertWeights {
    fn all(&self) -> [&WeightOperand<1>; 3] {
        [&self.gate, &self.up, &self.down]
    }
}

/// `down(activation(gate x) * up x)` of each row of `x` `[slots, hidden]` by its own expert: the first
/// `counts[0]` rows are the first expert's, and so on. The result is `[slots, hidden]`.
///
/// A row's result does not depend on the other rows, nor on how many an expert has.
///
/// # Errors
/// [`Error::Shape`] where rows, counts and weights do not fit each other.
pub fn experts(
    x: Tensor<2>,
    counts: &[usize],
    weights: &[ExpertWeights],
    activation: Activation,
) -> Result<Tensor<2>> {
    let [slots, hidden] = x.dims();
    let rows: usize = counts.iter().sum();
    if rows != slots || counts.len() != weights.len() {
        let expected = format!("[{rows}, hidden] for {} experts", counts.len());
        return Err(Error::shape(format!("rows of {} experts", weights.len()), expected, &x.dims()));
    }
    let elements = weights.first().map_or(0, |first| first.gate.elements());
    let fits = |weight: &WeightOperand<1>| weight.elements() == elements;
    if hidden == 0
        || !elements.is_multiple_of(hidden)
        || !weights.iter().all(|own| own.all().into_iter().all(fits))
    {
        let expected = format!("width times {hidden}, the same in all experts");
        return Err(Error::shape("weights of experts", expected, &[elements]));
    }
    if !on_host(&x) || !weights.iter().all(|own| own.all().into_iter().all(WeightOperand::on_host)) {
        return Ok(reference(&x, counts, weights, activation));
    }
    let flat: Vec<WeightOperand<1>> = weights.iter().flat_map(|own| own.all().map(Clone::clone)).collect();
    let left = Left::default();
    // A packed weight has no gradient: nothing is tied in its place.
    let handles = flat.iter().map(|weight| match weight {
        WeightOperand::Values(values) => values.clone(),
        WeightOperand::Packed(_) => Tensor::zeros([1], &Device::flex()),
    });
    let tied = tie(&handles.collect::<Vec<_>>(), &left);
    let kernel = Experts::new([hidden, elements / hidden], counts, &flat, activation, left);
    Ok(run(kernel, vec![x.into_dispatch(), tied.into_dispatch()]))
}

/// The composition of Burn operations, one expert after the other.
pub fn reference(
    x: &Tensor<2>,
    counts: &[usize],
    weights: &[ExpertWeights],
    activation: Activation,
) -> Tensor<2> {
    let [_, hidden] = x.dims();
    let mut outs = Vec::new();
    let mut first = 0;
    for (&count, own) in counts.iter().zip(weights) {
        if count == 0 {
            continue;
        }
        let rows = x.clone().narrow(0, first, count);
        first += count;
        let elements = own.gate.elements();
        let width = elements / hidden;
        let values = |weight: &WeightOperand<1>| weight.clone().values([elements], &x.device());
        let [gate, up] = [&own.gate, &own.up].map(|weight| values(weight).reshape([width, hidden]));
        let down = values(&own.down).reshape([hidden, width]);
        let [gate, up] = [gate, up].map(|weight| product(rows.clone(), weight.transpose()));
        outs.push(product(gate::reference(gate, Some(up), activation), down.transpose()));
    }
    // Without a row it is as it came: in the graph, so that other ranks' gradients find their way back too.
    if outs.is_empty() { x.clone() } else { Tensor::cat(outs, 0) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    use crate::ops::host::to_vec;
    use crate::ops::rows::{PackedKind, PackedWeight};
    use crate::ops::testing::{leaf, relative_error, values, weighted_sum};

    fn weights(experts: usize, hidden: usize, width: usize) -> Vec<ExpertWeights> {
        let matrix = |seed| WeightOperand::Values(leaf([width * hidden], seed));
        let own = |at: u64| ExpertWeights { gate: matrix(at), up: matrix(at + 1), down: matrix(at + 2) };
        (0..experts as u64).map(|at| own(10 + 3 * at)).collect()
    }

    fn tensor(weight: &WeightOperand<1>) -> Tensor<1> {
        weight.clone().values([weight.elements()], &Device::flex())
    }

    #[test]
    fn experts_without_a_row_stay_in_the_graph() {
        let (x, weights) = (leaf([0, 4], 1), weights(2, 4, 3));
        for out in [
            experts(x.clone(), &[0, 0], &weights, Activation::Silu).unwrap(),
            reference(&x, &[0, 0], &weights, Activation::Silu),
        ] {
            assert_eq!(out.dims(), [0, 4]);
            assert!(x.grad(&out.sum().backward()).is_some());
        }
    }

    fn compare(counts: &[usize], hidden: usize, width: usize) {
        let slots = counts.iter().sum();
        let (x, weights) = (leaf([slots, hidden], 1), weights(counts.len(), hidden, width));
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let fused = experts(x.clone(), counts, &weights, activation).unwrap();
            let plain = reference(&x, counts, &weights, activation);
            assert!(relative_error(&fused, &plain) < 2e-6);
            let of_fused = weighted_sum(fused, 2).backward();
            let of_plain = weighted_sum(plain, 2).backward();
            let error = relative_error(&x.grad(&of_fused).unwrap(), &x.grad(&of_plain).unwrap());
            assert!(error < 5e-6, "gradient of x: {error}");
            for (expert, (own, count)) in weights.iter().zip(counts).enumerate() {
                for weight in own.all().map(tensor) {
                    let got = weight.grad(&of_fused).unwrap();
                    let Some(expected) = weight.grad(&of_plain).filter(|_| *count > 0) else {
                        assert!(to_vec(&got).iter().all(|grad| *grad == 0.0), "expert {expert} has no row");
                        continue;
                    };
                    assert!(relative_error(&got, &expected) < 5e-6, "expert {expert}");
                }
            }
        }
    }

    #[test]
    fn values_and_gradients_match_the_composition() {
        compare(&[3, 0, 5, 1], 20, 12);
        compare(&[150, 70, 0], 33, 64);
        compare(&[0, 2], 4, 3);
    }

    #[test]
    fn a_row_is_bitwise_the_same_in_any_company() {
        let weights = weights(2, 40, 24);
        let x = leaf([9, 40], 1).inner();
        let plain = |own: &ExpertWeights| ExpertWeights {
            gate: tensor(&own.gate).inner().into(),
            up: tensor(&own.up).inner().into(),
            down: tensor(&own.down).inner().into(),
        };
        let weights: Vec<_> = weights.iter().map(plain).collect();
        let run =
            |x: Tensor<2>, counts: &[usize]| to_vec(&experts(x, counts, &weights, Activation::Silu).unwrap());
        let all = run(x.clone(), &[4, 5]);
        assert_eq!(run(x.clone().narrow(0, 2, 1), &[1, 0]), all[80..120]);
        assert_eq!(run(x.narrow(0, 6, 2), &[0, 2]), all[240..320]);
    }

    #[test]
    fn packed_experts_give_what_their_values_do() {
        let (counts, hidden, width) = ([30, 0, 7], 64, 32);
        let packed = |seed, shape| {
            let data = values(width * hidden, seed);
            WeightOperand::Packed(Arc::new(PackedWeight::pack(&data, shape, PackedKind::Nf4)))
        };
        let own = |at: u64| ExpertWeights {
            gate: packed(at, [width, hidden]),
            up: packed(at + 1, [width, hidden]),
            down: packed(at + 2, [hidden, width]),
        };
        let packed: Vec<_> = (0..3).map(|at| own(10 + 3 * at)).collect();
        let x = leaf([37, hidden], 1);
        let fused = experts(x.clone(), &counts, &packed, Activation::Silu).unwrap();
        let plain = reference(&x, &counts, &packed, Activation::Silu);
        assert!(relative_error(&fused, &plain) < 2e-6);
        let (of_fused, of_plain) = (weighted_sum(fused, 2).backward(), weighted_sum(plain, 2).backward());
        assert!(relative_error(&x.grad(&of_fused).unwrap(), &x.grad(&of_plain).unwrap()) < 5e-6);
    }

    #[test]
    fn rows_that_nobody_counts_and_unequal_weights_are_refused() {
        let call = |slots, counts: &[usize], weights: &[ExpertWeights]| {
            experts(leaf([slots, 4], 1), counts, weights, Activation::Silu).unwrap_err().to_string()
        };
        assert!(call(3, &[1, 1], &weights(2, 4, 3)).contains("[2, hidden]"));
        let mut other = weights(2, 4, 3);
        other[1].down = leaf([5], 1).into();
        assert!(call(2, &[1, 1], &other).contains("the same in all experts"));
    }
}
