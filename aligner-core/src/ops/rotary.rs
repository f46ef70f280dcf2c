//! Rotary position embedding, Hugging Face's half-split form (Su et al. 2021, arXiv:2104.09864).

use std::sync::Arc;

use burn::tensor::{Tensor, TensorData};
use rayon::prelude::*;

use super::kernel::{Grad, INPUTS, Kernel, NO_GRADS, on_host, run, unfilled};
use super::simd::vectorized;
use crate::{Error, Result};

/// Rows of a parallel task.
const TASK_ROWS: usize = 64;

/// Cosines and sines of a batch's positions, computed once and used by every layer.
#[derive(Debug, Clone)]
pub struct RotaryTable {
    head_dim: usize,
    /// `[tokens, head_dim / 2]` cosines, then as many sines.
    table: Arc<[f32]>,
}

impl RotaryTable {
    /// The table for `positions` `[tokens]`; `frequencies` `[head_dim / 2]` are radians per position,
    /// and cosines and sines are multiplied by `attention_factor`.
    pub fn new(positions: &[u32], frequencies: &[f32], attention_factor: f32) -> Self {
        let angles = |position: u32| frequencies.iter().map(move |f| position as f32 * f);
        let cosines = positions.iter().flat_map(|&p| angles(p)).map(|angle| angle.cos() * attention_factor);
        let sines = positions.iter().flat_map(|&p| angles(p)).map(|angle| angle.sin() * attention_factor);
        Self { head_dim: frequencies.len() * 2, table: cosines.chain(sines).collect() }
    }

    fn tokens(&self) -> usize {
        self.table.len() / self.head_dim.max(1)
    }
}

/// Rotates each head of `x` `[tokens, heads * head_dim]` by its token's position.
///
/// # Errors
/// [`Error::Shape`] where `x` has other tokens than the table, or columns that are not whole heads.
pub fn rotary(x: Tensor<2>, table: &RotaryTable) -> Result<Tensor<2>> {
    let [tokens, columns] = x.dims();
    let head_dim = table.head_dim;
    if tokens != table.tokens() || head_dim == 0 || columns % head_dim != 0 {
        let expected = format!("[{}, a multiple of {head_dim}]", table.tokens());
        return Err(Error::shape("rotary embedding", expected, &[tokens, columns]));
    }
    if !on_host(&x) {
        return Ok(reference(x, table));
    }
    Ok(run(Rotary { table: table.clone(), columns }, vec![x.into_dispatch()]))
}

/// The composition of Burn operations.
pub fn reference(x: Tensor<2>, table: &RotaryTable) -> Tensor<2> {
    let [tokens, columns] = x.dims();
    let half = table.head_dim / 2;
    let device = x.device();
    let part = |range: std::ops::Range<usize>| {
        let data = TensorData::new(table.table[range].to_vec(), [tokens, 1, half]);
        Tensor::<3>::from_data(data, &device)
    };
    let (cos, sin) = (part(0..tokens * half), part(tokens * half..2 * tokens * half));
    let x = x.reshape([tokens, columns / table.head_dim, table.head_dim]);
    let (low, high) = (x.clone().narrow(2, 0, half), x.narrow(2, half, half));
    let rotated_low = low.clone() * cos.clone() - high.clone() * sin.clone();
    let rotated_high = high * cos + low * sin;
    Tensor::cat(vec![rotated_low, rotated_high], 2).reshape([tokens, columns])
}

#[derive(Debug)]
struct Rotary {
    table: RotaryTable,
    columns: usize,
}

vectorized! {
    fn rotate(x: &[f32], cos: &[f32], sin: &[f32], sign: f32, columns: usize, out: &mut [f32]) {
        let half = cos.len() / (x.len() / columns);
        let rows = x.chunks_exact(columns).zip(out.chunks_exact_mut(columns));
        for ((x, out), (cos, sin)) in rows.zip(cos.chunks_exact(half).zip(sin.chunks_exact(half))) {
            for (x, out) in x.chunks_exact(2 * half).zip(out.chunks_exact_mut(2 * half)) {
                let (x_low, x_high) = x.split_at(half);
                let (low, high) = out.split_at_mut(half);
                for i in 0..half {
                    low[i] = x_low[i] * cos[i] - sign * x_high[i] * sin[i];
                    high[i] = x_high[i] * cos[i] + sign * x_low[i] * sin[i];
                }
            }
        }
    }
}

vectorized! {
    /// One row's heads, in place; `cos` and `sin` are `[head_dim / 2]`.
    pub(super) fn rotate_in_place(x: &mut [f32], cos: &[f32], sin: &[f32]) {
        let half = cos.len();
        for head in x.chunks_exact_mut(2 * half) {
            let (low, high) = head.split_at_mut(half);
            for i in 0..half {
                let (a, b) = (low[i], high[i]);
                low[i] = a * cos[i] - b * sin[i];
                high[i] = b * cos[i] + a * sin[i];
            }
        }
    }
}

impl Rotary {
    fn rotate(&self, x: &[f32], sign: f32) -> Vec<f32> {
        let mut out = unfilled(x.len());
        let (cos, sin) = self.table.table.split_at(self.table.table.len() / 2);
        let (task, angles) = (TASK_ROWS * self.columns, TASK_ROWS * self.table.head_dim / 2);
        (out.par_chunks_mut(task).zip(x.par_chunks(task)))
            .zip(cos.par_chunks(angles).zip(sin.par_chunks(angles)))
            .for_each(|((out, x), (cos, sin))| rotate(x, cos, sin, sign, self.columns, out));
        out
    }
}

impl Kernel for Rotary {
    fn shape(&self) -> Vec<usize> {
        vec![self.table.tokens(), self.columns]
    }

    fn forward(&self, inputs: &[&[f32]]) -> Vec<f32> {
        self.rotate(inputs[0], 1.0)
    }

    fn backward(&self, _: &[&[f32]], _: &[f32], grad: &[f32], _: [bool; INPUTS]) -> [Grad; INPUTS] {
        // A rotation's transpose is the rotation back.
        let mut grads = NO_GRADS;
        grads[0] = Grad::Data(self.rotate(grad, -1.0));
        grads
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{leaf, relative_error, weighted_sum};

    #[test]
    fn values_and_gradients_match_the_composition() {
        let positions: Vec<u32> = (0..70).chain(3..30).collect();
        let frequencies: Vec<f32> = (0..4).map(|i| 10f32.powi(-i)).collect();
        let table = RotaryTable::new(&positions, &frequencies, 1.2);
        let x = leaf([positions.len(), 24], 1);
        let fused = rotary(x.clone(), &table).unwrap();
        let plain = reference(x.clone(), &table);
        assert!(relative_error(&fused, &plain) < 1e-6);
        let of_fused = x.grad(&weighted_sum(fused, 2).backward()).unwrap();
        let of_plain = x.grad(&weighted_sum(plain, 2).backward()).unwrap();
        assert!(relative_error(&of_fused, &of_plain) < 1e-6);
    }

    #[test]
    fn halves_of_a_head_are_rotated_against_each_other() {
        let table = RotaryTable::new(&[1], &[std::f32::consts::FRAC_PI_2, 0.0], 1.0);
        let x = Tensor::<2>::from_floats([[1.0, 2.0, 3.0, 4.0]], &burn::tensor::Device::flex());
        let out = super::super::host::to_vec(&rotary(x, &table).unwrap());
        for (got, expected) in out.iter().zip([-3.0, 2.0, 1.0, 4.0]) {
            assert!((got - expected).abs() < 1e-6, "{out:?}");
        }
    }
}
