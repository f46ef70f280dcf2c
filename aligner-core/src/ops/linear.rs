//! A linear map, with its bias and the residual stream it adds to in the same pass.

use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor, TensorData};
use rayon::prelude::*;

use super::gemm::{Mat, Output, Side, gemm};
use super::kernel::{Grad, INPUTS, Kernel, NO_GRADS, on_host, run, unfilled};
use super::rows::PackedWeight;
use super::simd::add;
use crate::{Error, Result};

/// A weight as an operation takes it, of `D` axes.
#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "a handle that is moved once into an operation")]
pub enum WeightOperand<const D: usize> {
    /// Its values, tracked or not.
    Values(Tensor<D>),
    /// A packed matrix, which stays as it is: blocks of it are unpacked within the product, and it has no gradient.
    Packed(Arc<PackedWeight>),
}

impl<const D: usize> From<Tensor<D>> for WeightOperand<D> {
    fn from(values: Tensor<D>) -> Self {
        Self::Values(values)
    }
}

impl<const D: usize> WeightOperand<D> {
    /// How many elements it has.
    pub fn elements(&self) -> usize {
        match self {
            Self::Values(values) => values.dims().iter().product(),
            Self::Packed(packed) => packed.shape().iter().product(),
        }
    }

    /// The same values in another type; a packed matrix stays as it is.
    #[must_use]
    pub fn cast(self, dtype: DType) -> Self {
        match self {
            Self::Values(values) => Self::Values(values.cast(dtype)),
            packed @ Self::Packed(_) => packed,
        }
    }

    /// Whether its products are our kernels' for the CPU: it is packed, or in f32 there.
    pub(super) fn on_host(&self) -> bool {
        match self {
            Self::Values(values) => on_host(values),
            Self::Packed(_) => true,
        }
    }

    /// All values on a device.
    pub(super) fn values(self, shape: [usize; D], device: &Device) -> Tensor<D> {
        match self {
            Self::Values(values) => values,
            Self::Packed(packed) => Tensor::from_data(TensorData::new(packed.unpacked(), shape), device),
        }
    }
}

impl WeightOperand<2> {
    /// `[out, in]`.
    pub fn shape(&self) -> [usize; 2] {
        match self {
            Self::Values(values) => values.dims(),
            Self::Packed(packed) => packed.shape(),
        }
    }

    /// What a kernel holds, and its operand: nothing's, where the weight is packed.
    pub(super) fn split(self) -> (Option<Arc<PackedWeight>>, Tensor<2>) {
        match self {
            Self::Values(values) => (None, values),
            Self::Packed(packed) => (Some(packed), Tensor::zeros([1, 1], &Device::flex())),
        }
    }
}

/// The weight of a product: the packed one where there is one, else `values`.
pub(super) fn side<'a>(
    packed: Option<&'a Arc<PackedWeight>>,
    values: &'a [f32],
    [outputs, inputs]: [usize; 2],
) -> Side<'a> {
    match packed {
        Some(packed) => Side::packed(packed.view()),
        None => Mat::new(values, outputs, inputs).into(),
    }
}

/// What the product is added to.
pub type Residual = Option<Tensor<2>>;

/// `a b`, multiplied in the type of `b` where that has fewer bits than f32; the result is of the type of `a`.
pub(super) fn product<const D: usize>(a: Tensor<D>, b: Tensor<D>) -> Tensor<D> {
    let (outer, inner) = (a.dtype(), b.dtype());
    if outer == inner {
        return a.matmul(b);
    }
    a.cast(inner).matmul(b).cast(outer)
}

/// `x weight^T + bias + residual`: x `[tokens, in]`, weight `[out, in]` as checkpoints have it, bias
/// `[out]`, residual `[tokens, out]`; the result is `[tokens, out]`. With a weight in bf16 the product is one in bf16,
/// and everything else stays in the type of x.
///
/// # Errors
/// [`Error::Shape`] where the operands do not fit.
pub fn linear(
    x: Tensor<2>,
    weight: impl Into<WeightOperand<2>>,
    bias: Option<Tensor<1>>,
    residual: Residual,
) -> Result<Tensor<2>> {
    let weight = weight.into();
    check(&x, weight.shape(), bias.as_ref(), residual.as_ref())?;
    let ([tokens, inputs], [outputs, _]) = (x.dims(), weight.shape());
    if !on_host(&x) || !weight.on_host() {
        let weight = weight.values([outputs, inputs], &x.device());
        return Ok(reference(x, weight, bias, residual));
    }
    let (packed, weight) = weight.split();
    let (with_bias, with_residual) = (bias.is_some(), residual.is_some());
    let kernel = Linear { tokens, inputs, outputs, packed, bias: with_bias, residual: with_residual };
    let mut operands = vec![x.into_dispatch(), weight.into_dispatch()];
    operands.extend(bias.map(Tensor::into_dispatch));
    operands.extend(residual.map(Tensor::into_dispatch));
    Ok(run(kernel, operands))
}

/// Whether the operands fit each other.
pub(super) fn check(
    x: &Tensor<2>,
    [outputs, columns]: [usize; 2],
    bias: Option<&Tensor<1>>,
    residual: Option<&Tensor<2>>,
) -> Result<()> {
    let [tokens, inputs] = x.dims();
    if columns != inputs {
        return Err(Error::shape("weight of a linear", format!("[out, {inputs}]"), &[outputs, columns]));
    }
    if let Some(bias) = bias.filter(|bias| bias.dims() != [outputs]) {
        return Err(Error::shape("bias of a linear", format!("[{outputs}]"), &bias.dims()));
    }
    if let Some(residual) = residual.filter(|residual| residual.dims() != [tokens, outputs]) {
        return Err(Error::shape("residual of a linear", format!("[{tokens}, {outputs}]"), &residual.dims()));
    }
    Ok(())
}

/// What a product `[tokens, outputs]` is added to, or room for it.
pub(super) fn start(
    bias: Option<&[f32]>,
    residual: Option<&[f32]>,
    [tokens, outputs]: [usize; 2],
) -> (Vec<f32>, Output) {
    let mut out = unfilled(tokens * outputs);
    let row = outputs.max(1);
    match (bias, residual) {
        (None, None) => return (out, Output::Overwrite),
        (Some(bias), None) => out.par_chunks_mut(row).for_each(|out| out.copy_from_slice(bias)),
        (bias, Some(residual)) => {
            out.par_chunks_mut(row).zip(residual.par_chunks(row)).for_each(|(out, residual)| {
                out.copy_from_slice(residual);
                if let Some(bias) = bias {
                    add(out, bias);
                }
            });
        }
    }
    (out, Output::Add)
}

/// The composition of Burn operations.
pub fn reference(x: Tensor<2>, weight: Tensor<2>, bias: Option<Tensor<1>>, residual: Residual) -> Tensor<2> {
    let mut out = product(x, weight.transpose());
    if let Some(bias) = bias {
        out = out + bias.unsqueeze::<2>();
    }
    if let Some(residual) = residual {
        out = out + residual;
    }
    out
}

#[derive(Debug)]
struct Linear {
    tokens: usize,
    inputs: usize,
    outputs: usize,
    packed: Option<Arc<PackedWeight>>,
    bias: bool,
    residual: bool,
}

impl Linear {
    fn weight<'a>(&'a self, inputs: &[&'a [f32]]) -> Side<'a> {
        side(self.packed.as_ref(), inputs[1], [self.outputs, self.inputs])
    }
}

impl Kernel for Linear {
    fn shape(&self) -> Vec<usize> {
        vec![self.tokens, self.outputs]
    }

    fn forward(&self, inputs: &[&[f32]]) -> Vec<f32> {
        let x = Mat::new(inputs[0], self.tokens, self.inputs);
        let weight = self.weight(inputs);
        let bias = self.bias.then(|| inputs[2]);
        let residual = self.residual.then(|| inputs[2 + usize::from(self.bias)]);
        let (mut out, output) = start(bias, residual, [self.tokens, self.outputs]);
        gemm(x, weight.t(), &mut out, output);
        out
    }

    fn backward(&self, inputs: &[&[f32]], _: &[f32], grad: &[f32], wanted: [bool; INPUTS]) -> [Grad; INPUTS] {
        let grad_matrix = Mat::new(grad, self.tokens, self.outputs);
        let mut grads = NO_GRADS;
        if wanted[0] {
            let mut of_x = unfilled(self.tokens * self.inputs);
            gemm(grad_matrix, self.weight(inputs), &mut of_x, Output::Overwrite);
            grads[0] = Grad::Data(of_x);
        }
        if wanted[1] {
            let mut of_weight = unfilled(self.outputs * self.inputs);
            let x = Mat::new(inputs[0], self.tokens, self.inputs);
            gemm(grad_matrix.t(), x, &mut of_weight, Output::Overwrite);
            grads[1] = Grad::Data(of_weight);
        }
        if self.bias && wanted[2] {
            let mut of_bias = vec![0.0; self.outputs];
            grad.chunks_exact(self.outputs).for_each(|row| add(&mut of_bias, row));
            grads[2] = Grad::Data(of_bias);
        }
        let residual = 2 + usize::from(self.bias);
        if self.residual && wanted[residual] {
            grads[residual] = Grad::Same;
        }
        grads
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{leaf, relative_error, weighted_sum};

    #[test]
    fn values_and_gradients_match_the_composition() {
        for (tokens, with_bias, with_residual) in
            [(1, false, false), (3, true, true), (90, true, false), (200, false, true)]
        {
            let (x, weight, bias, residual) =
                (leaf([tokens, 70], 1), leaf([40, 70], 2), leaf([40], 3), leaf([tokens, 40], 4));
            let call = |op: &dyn Fn(_, _, _, _) -> Tensor<2>| {
                let bias = with_bias.then(|| bias.clone());
                op(x.clone(), weight.clone(), bias, with_residual.then(|| residual.clone()))
            };
            let fused = call(&|x, w, b, r| linear(x, w, b, r).unwrap());
            let plain = call(&reference);
            assert!(relative_error(&fused, &plain) < 2e-6);
            let of_fused = weighted_sum(fused, 5).backward();
            let of_plain = weighted_sum(plain, 5).backward();
            for input in [&x, &weight, &residual] {
                let (got, expected) = (input.grad(&of_fused), input.grad(&of_plain));
                assert_eq!(got.is_some(), expected.is_some());
                if let (Some(got), Some(expected)) = (got, expected) {
                    assert!(relative_error(&got, &expected) < 5e-6);
                }
            }
            if with_bias {
                let (got, expected) = (bias.grad(&of_fused).unwrap(), bias.grad(&of_plain).unwrap());
                assert!(relative_error(&got, &expected) < 5e-6);
            }
        }
    }

    #[test]
    fn operands_that_do_not_fit_are_refused() {
        let message = linear(leaf([2, 3], 1), leaf([4, 5], 2), None, None).unwrap_err().to_string();
        assert!(message.contains("[out, 3]") && message.contains("[4, 5]"), "{message}");
    }
}
