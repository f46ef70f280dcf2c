//! A linear with a low-rank addition: `x W^T + s (x A^T) B^T` (Hu et al. 2021, arXiv:2106.09685, equation 3),
//! where W stays as it is and A and B are trained.

use std::sync::{Arc, OnceLock};

use burn::tensor::{Tensor, TensorData};
use rayon::prelude::*;

use super::dropout::Dropout;
use super::gemm::{Mat, Output, Side, gemm};
use super::kernel::{Grad, INPUTS, Kernel, NO_GRADS, on_host, run, unfilled};
use super::linear::{self, Residual, WeightOperand, start};
use super::rows::PackedWeight;
use super::simd::add;
use crate::{Error, Result};

/// Rows that one task drops elements of.
const TASK_ROWS: usize = 16;

/// The low-rank part of a linear.
#[derive(Debug, Clone)]
pub struct LowRank {
    /// `[rank, in]`.
    pub a: Tensor<2>,
    /// `[out, rank]`.
    pub b: Tensor<2>,
    /// The factor s.
    pub scale: f32,
    /// Drops elements of what A sees, in training.
    pub dropout: Option<Dropout>,
}

/// `x weight^T + scale (dropout(x) a^T) b^T + bias + residual`, with the shapes of [`super::linear`]. No
/// gradient is computed for an operand that is not tracked, above all a frozen weight, which may be packed (Dettmers et
/// al. 2023, arXiv:2305.14314, equation 5).
///
/// # Errors
/// [`Error::Shape`] where the operands do not fit.
pub fn lora_linear(
    x: Tensor<2>,
    weight: impl Into<WeightOperand<2>>,
    low: LowRank,
    bias: Option<Tensor<1>>,
    residual: Residual,
) -> Result<Tensor<2>> {
    let weight = weight.into();
    linear::check(&x, weight.shape(), bias.as_ref(), residual.as_ref())?;
    let ([tokens, inputs], [outputs, _]) = (x.dims(), weight.shape());
    let [rank, columns] = low.a.dims();
    if columns != inputs {
        return Err(Error::shape("A of an adapter", format!("[rank, {inputs}]"), &low.a.dims()));
    }
    if low.b.dims() != [outputs, rank] {
        return Err(Error::shape("B of an adapter", format!("[{outputs}, {rank}]"), &low.b.dims()));
    }
    if let Some(dropout) = low.dropout.as_ref().filter(|dropout| dropout.rows() != tokens) {
        return Err(Error::shape("rows of a dropout", format!("[{tokens}]"), &[dropout.rows()]));
    }
    if !on_host(&x) || !weight.on_host() {
        let weight = weight.values([outputs, inputs], &x.device());
        return Ok(reference(x, weight, low, bias, residual));
    }
    let (packed, weight) = weight.split();
    let kernel = LoraLinear {
        tokens,
        inputs,
        outputs,
        packed,
        rank,
        scale: low.scale,
        dropout: low.dropout,
        bias: bias.is_some(),
        residual: residual.is_some(),
        narrow: OnceLock::new(),
    };
    let mut operands =
        vec![x, weight, low.a, low.b].into_iter().map(Tensor::into_dispatch).collect::<Vec<_>>();
    operands.extend(bias.map(Tensor::into_dispatch));
    operands.extend(residual.map(Tensor::into_dispatch));
    Ok(run(kernel, operands))
}

/// The composition of Burn operations.
pub fn reference(
    x: Tensor<2>,
    weight: Tensor<2>,
    low: LowRank,
    bias: Option<Tensor<1>>,
    residual: Residual,
) -> Tensor<2> {
    let seen = match &low.dropout {
        Some(dropout) => {
            let [tokens, inputs] = x.dims();
            let factors = TensorData::new(dropout.all_factors(inputs), [tokens, inputs]);
            x.clone() * Tensor::from_data(factors, &x.device())
        }
        None => x.clone(),
    };
    let added = (seen.matmul(low.a.transpose()) * low.scale).matmul(low.b.transpose());
    linear::reference(x, weight, bias, residual) + added
}

#[derive(Debug)]
struct LoraLinear {
    tokens: usize,
    inputs: usize,
    outputs: usize,
    packed: Option<Arc<PackedWeight>>,
    rank: usize,
    scale: f32,
    dropout: Option<Dropout>,
    bias: bool,
    residual: bool,
    /// `scale dropout(x) A^T`, `[tokens, rank]`; written by the forward pass.
    narrow: OnceLock<Vec<f32>>,
}

impl LoraLinear {
    fn weight<'a>(&'a self, inputs: &[&'a [f32]]) -> Side<'a> {
        linear::side(self.packed.as_ref(), inputs[1], [self.outputs, self.inputs])
    }

    /// Multiplies each element by its dropout's factor.
    fn mask(&self, dropout: &Dropout, values: &mut [f32]) {
        let task = TASK_ROWS * self.inputs;
        values.par_chunks_mut(task.max(1)).enumerate().for_each(|(task, values)| {
            let mut factors = vec![0.0; self.inputs];
            for (row, values) in values.chunks_exact_mut(self.inputs).enumerate() {
                dropout.factors(task * TASK_ROWS + row, &mut factors);
                values.iter_mut().zip(&factors).for_each(|(value, factor)| *value *= factor);
            }
        });
    }

    /// Calls `read` with what A sees, `[tokens, in]`.
    fn seen<R>(&self, x: &[f32], read: impl FnOnce(&[f32]) -> R) -> R {
        let Some(dropout) = &self.dropout else { return read(x) };
        let mut seen = x.to_vec();
        self.mask(dropout, &mut seen);
        read(&seen)
    }
}

fn multiply(values: &mut [f32], factor: f32) {
    for value in values {
        *value *= factor;
    }
}

impl Kernel for LoraLinear {
    fn shape(&self) -> Vec<usize> {
        vec![self.tokens, self.outputs]
    }

    fn forward(&self, inputs: &[&[f32]]) -> Vec<f32> {
        let (x, weight) = (inputs[0], self.weight(inputs));
        let (a, b) =
            (Mat::new(inputs[2], self.rank, self.inputs), Mat::new(inputs[3], self.outputs, self.rank));
        let bias = self.bias.then(|| inputs[4]);
        let residual = self.residual.then(|| inputs[4 + usize::from(self.bias)]);
        let (mut out, output) = start(bias, residual, [self.tokens, self.outputs]);
        gemm(Mat::new(x, self.tokens, self.inputs), weight.t(), &mut out, output);
        let mut narrow = unfilled(self.tokens * self.rank);
        self.seen(x, |seen| {
            gemm(Mat::new(seen, self.tokens, self.inputs), a.t(), &mut narrow, Output::Overwrite);
        });
        multiply(&mut narrow, self.scale);
        gemm(Mat::new(&narrow, self.tokens, self.rank), b.t(), &mut out, Output::Add);
        // A kernel object serves one call, so the cell is empty.
        let _ = self.narrow.set(narrow);
        out
    }

    fn backward(&self, inputs: &[&[f32]], _: &[f32], grad: &[f32], wanted: [bool; INPUTS]) -> [Grad; INPUTS] {
        let narrow = self.narrow.get().expect("the forward pass ran first");
        let grad_matrix = Mat::new(grad, self.tokens, self.outputs);
        let (a, b) =
            (Mat::new(inputs[2], self.rank, self.inputs), Mat::new(inputs[3], self.outputs, self.rank));
        let mut grads = NO_GRADS;
        let mut of_narrow = unfilled(self.tokens * self.rank);
        if wanted[0] || wanted[2] {
            gemm(grad_matrix, b, &mut of_narrow, Output::Overwrite);
            multiply(&mut of_narrow, self.scale);
        }
        let of_narrow = Mat::new(&of_narrow, self.tokens, self.rank);
        if wanted[0] {
            let mut of_x = unfilled(self.tokens * self.inputs);
            let weight = self.weight(inputs);
            if let Some(dropout) = &self.dropout {
                gemm(of_narrow, a, &mut of_x, Output::Overwrite);
                self.mask(dropout, &mut of_x);
                gemm(grad_matrix, weight, &mut of_x, Output::Add);
            } else {
                gemm(grad_matrix, weight, &mut of_x, Output::Overwrite);
                gemm(of_narrow, a, &mut of_x, Output::Add);
            }
            grads[0] = Grad::Data(of_x);
        }
        if wanted[1] {
            let mut of_weight = unfilled(self.outputs * self.inputs);
            let x = Mat::new(inputs[0], self.tokens, self.inputs);
            gemm(grad_matrix.t(), x, &mut of_weight, Output::Overwrite);
            grads[1] = Grad::Data(of_weight);
        }
        if wanted[2] {
            let mut of_a = unfilled(self.rank * self.inputs);
            self.seen(inputs[0], |seen| {
                let seen = Mat::new(seen, self.tokens, self.inputs);
                gemm(of_narrow.t(), seen, &mut of_a, Output::Overwrite);
            });
            grads[2] = Grad::Data(of_a);
        }
        if wanted[3] {
            let mut of_b = unfilled(self.outputs * self.rank);
            let narrow = Mat::new(narrow, self.tokens, self.rank);
            gemm(grad_matrix.t(), narrow, &mut of_b, Output::Overwrite);
            grads[3] = Grad::Data(of_b);
        }
        if self.bias && wanted[4] {
            let mut of_bias = vec![0.0; self.outputs];
            grad.chunks_exact(self.outputs).for_each(|row| add(&mut of_bias, row));
            grads[4] = Grad::Data(of_bias);
        }
        let residual = 4 + usize::from(self.bias);
        if self.residual && wanted[residual] {
            grads[residual] = Grad::Same;
        }
        grads
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::host::to_vec;
    use crate::ops::rows::PackedKind;
    use crate::ops::testing::{leaf, relative_error, values, weighted_sum};
    use burn::tensor::Device;

    const INPUTS: usize = 70;
    const OUTPUTS: usize = 40;

    fn compare(tokens: usize, rank: usize, dropout: Option<f64>, extras: bool) {
        let (x, weight) = (leaf([tokens, INPUTS], 1), leaf([OUTPUTS, INPUTS], 2));
        let (a, b) = (leaf([rank, INPUTS], 3), leaf([OUTPUTS, rank], 4));
        let (bias, residual) = (leaf([OUTPUTS], 5), leaf([tokens, OUTPUTS], 6));
        let dropout = dropout.map(|rate| Dropout::new(rate, (0..tokens as u64).collect()).unwrap());
        let low = LowRank { a: a.clone(), b: b.clone(), scale: 1.7, dropout };
        let (with_bias, with_residual) = (extras.then(|| bias.clone()), extras.then(|| residual.clone()));
        let fused =
            lora_linear(x.clone(), weight.clone(), low.clone(), with_bias.clone(), with_residual.clone())
                .unwrap();
        let plain = reference(x.clone(), weight.clone(), low, with_bias, with_residual);
        assert!(relative_error(&fused, &plain) < 2e-6);
        let (of_fused, of_plain) = (weighted_sum(fused, 7).backward(), weighted_sum(plain, 7).backward());
        let operands = [&x, &weight, &a, &b].into_iter().chain(extras.then_some(&residual));
        for (at, operand) in operands.enumerate() {
            let error = relative_error(&operand.grad(&of_fused).unwrap(), &operand.grad(&of_plain).unwrap());
            assert!(error < 5e-6, "operand {at} of {tokens} x {rank}: {error}");
        }
        if extras {
            assert!(relative_error(&bias.grad(&of_fused).unwrap(), &bias.grad(&of_plain).unwrap()) < 5e-6);
        }
    }

    #[test]
    fn values_and_gradients_match_the_composition() {
        for (tokens, rank, dropout, extras) in [
            (1, 1, None, false),
            (3, 8, None, true),
            (90, 4, Some(0.3), true),
            (200, 3, Some(0.1), false),
            (200, 16, None, true),
        ] {
            compare(tokens, rank, dropout, extras);
        }
    }

    #[test]
    fn a_frozen_weight_gets_no_gradient() {
        let frozen = Tensor::<2>::from_data(
            TensorData::new(values(OUTPUTS * INPUTS, 2), [OUTPUTS, INPUTS]),
            &Device::flex().autodiff(),
        );
        let (a, b) = (leaf([2, INPUTS], 3), leaf([OUTPUTS, 2], 4));
        let low = LowRank { a: a.clone(), b: b.clone(), scale: 2.0, dropout: None };
        let out = lora_linear(leaf([5, INPUTS], 1), frozen.clone(), low, None, None).unwrap();
        let grads = weighted_sum(out, 7).backward();
        assert!(frozen.grad(&grads).is_none() && a.grad(&grads).is_some() && b.grad(&grads).is_some());
    }

    #[test]
    fn on_a_packed_weight_values_and_gradients_are_those_on_its_values() {
        let shape = [48, 128];
        for kind in [PackedKind::Int8, PackedKind::Nf4] {
            let packed = Arc::new(PackedWeight::pack(&values(48 * 128, 2), shape, kind));
            let unpacked = TensorData::new(packed.unpacked(), shape);
            let unpacked = Tensor::<2>::from_data(unpacked, &Device::flex().autodiff());
            for (tokens, extras) in [(1, false), (90, true)] {
                let (x, a, b) = (leaf([tokens, 128], 1), leaf([4, 128], 3), leaf([48, 4], 4));
                let (bias, residual) = (leaf([48], 5), leaf([tokens, 48], 6));
                let low = |dropout| LowRank { a: a.clone(), b: b.clone(), scale: 1.7, dropout };
                let dropout = || Some(Dropout::new(0.2, (0..tokens as u64).collect()).unwrap());
                let extra = || (extras.then(|| bias.clone()), extras.then(|| residual.clone()));
                let weight = WeightOperand::Packed(packed.clone());
                let run = |weight: WeightOperand<2>| {
                    let (bias, residual) = extra();
                    lora_linear(x.clone(), weight, low(dropout()), bias, residual).unwrap()
                };
                let plain = |weight: Tensor<2>| {
                    let (bias, residual) = extra();
                    reference(x.clone(), weight, low(dropout()), bias, residual)
                };
                let (fused, expected) = (run(weight.clone()), plain(unpacked.clone()));
                assert_eq!(
                    to_vec(&fused),
                    to_vec(&run(unpacked.clone().into())),
                    "the same blocks, bit for bit"
                );
                assert!(relative_error(&fused, &expected) < 2e-6);
                let (of_fused, of_plain) =
                    (weighted_sum(fused, 7).backward(), weighted_sum(expected, 7).backward());
                for operand in [&x, &a, &b].into_iter().chain(extras.then_some(&residual)) {
                    let (got, expected) =
                        (operand.grad(&of_fused).unwrap(), operand.grad(&of_plain).unwrap());
                    assert!(relative_error(&got, &expected) < 5e-6);
                }
                let (bias, residual) = extra();
                let alone = crate::ops::linear(x.clone(), weight, bias.clone(), residual.clone()).unwrap();
                let expected = linear::reference(x.clone(), unpacked.clone(), bias, residual);
                assert!(relative_error(&alone, &expected) < 2e-6);
                let (of_alone, of_plain) =
                    (weighted_sum(alone, 8).backward(), weighted_sum(expected, 8).backward());
                assert!(relative_error(&x.grad(&of_alone).unwrap(), &x.grad(&of_plain).unwrap()) < 5e-6);
            }
        }
    }

    #[test]
    fn gradients_on_a_packed_weight_are_those_of_differences() {
        let packed = Arc::new(PackedWeight::pack(&values(16 * 64, 2), [16, 64], PackedKind::Nf4));
        let (a, b) = (leaf([2, 64], 3), leaf([16, 2], 4));
        let at = |x: Tensor<2>| {
            let low = LowRank { a: a.clone(), b: b.clone(), scale: 0.7, dropout: None };
            weighted_sum(lora_linear(x, WeightOperand::Packed(packed.clone()), low, None, None).unwrap(), 7)
        };
        let (x, along) = (leaf([5, 64], 1), leaf([5, 64], 9).inner());
        let grads = at(x.clone()).backward();
        let slope: f32 = (x.grad(&grads).unwrap() * along.clone()).sum().into_scalar();
        let moved =
            |by: f32| at(Tensor::from_inner(x.clone().inner() + along.clone() * by)).into_scalar::<f32>();
        // Linear in x: the difference has no error of its own.
        let difference = (moved(0.5) - moved(-0.5)) / 1.0;
        assert!((slope - difference).abs() < 1e-3 * slope.abs().max(1.0), "{slope} {difference}");
    }

    #[test]
    fn with_b_at_zero_the_result_is_the_plain_linear_s_bit_for_bit() {
        let (x, weight) = (leaf([50, INPUTS], 1), leaf([OUTPUTS, INPUTS], 2));
        let low = LowRank {
            a: leaf([8, INPUTS], 3),
            b: leaf([OUTPUTS, 8], 4) * 0.0,
            scale: 2.0,
            dropout: Some(Dropout::new(0.5, (0..50).collect()).unwrap()),
        };
        let adapted = lora_linear(x.clone(), weight.clone(), low, None, None).unwrap();
        let plain = crate::ops::linear(x, weight, None, None).unwrap();
        assert_eq!(to_vec(&adapted), to_vec(&plain));
    }

    #[test]
    fn operands_that_do_not_fit_are_refused() {
        let call = |a: [usize; 2], b: [usize; 2], rows: u64| {
            let dropout = Some(Dropout::new(0.5, (0..rows).collect()).unwrap());
            let low = LowRank { a: leaf(a, 3), b: leaf(b, 4), scale: 1.0, dropout };
            lora_linear(leaf([2, 3], 1), leaf([4, 3], 2), low, None, None)
                .map(|_| ())
                .unwrap_err()
                .to_string()
        };
        assert!(call([2, 5], [4, 2], 2).contains("A of an adapter: expected shape [rank, 3], got [2, 5]"));
        assert!(call([2, 3], [4, 1], 2).contains("B of an adapter: expected shape [4, 2], got [4, 1]"));
        assert!(call([2, 3], [4, 2], 3).contains("rows of a dropout"));
    }
}
