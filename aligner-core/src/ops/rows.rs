//! Operations on host slices of few rows, for generation.
//!
//! They have no backward pass and allocate nothing. A row's result has a fixed order of summation: it
//! depends neither on the other rows nor on how they were cut into chunks, bitwise.

mod attention;
mod nf4;
mod product;
mod vector;
mod weight;

use rayon::prelude::*;

use super::gate::{self, Activation};
use super::{layer_norm, rms_norm, rotary, simd};

pub use super::dispatch::add_scaled;
pub use attention::{PAGE, PagedKv, Span, page_elements, paged_attention, write_kv};
pub use nf4::Nf4;
pub use product::{Product, products};
pub use weight::{Bf16, F32, GROUP, Int4, Int8, PackedKind, PackedWeight, Weight};

/// Elements below which an elementwise operation stays on the calling thread.
const SERIAL_BELOW: usize = 1 << 15;

/// A norm of rows.
#[derive(Debug, Clone, Copy)]
pub enum RowNorm<'a> {
    /// `RMSNorm`, scaled by the weight `[hidden]` plus an offset.
    Rms(&'a [f32], f32),
    /// `LayerNorm`, with weight and bias, both `[hidden]`.
    Layer(&'a [f32], &'a [f32]),
}

/// The norm of each row: x and out are `[rows, hidden]`.
pub fn norm_rows(x: &[f32], norm: RowNorm<'_>, epsilon: f32, out: &mut [f32]) {
    let (RowNorm::Rms(weight, _) | RowNorm::Layer(weight, _)) = norm;
    let run = |x: &[f32], out: &mut [f32]| match norm {
        RowNorm::Rms(weight, offset) => rms_norm::normalize(x, weight, offset, epsilon, out),
        RowNorm::Layer(weight, bias) => layer_norm::normalize(x, weight, bias, epsilon, out),
    };
    if x.len() < SERIAL_BELOW {
        return run(x, out);
    }
    let task = 8 * weight.len().max(1);
    out.par_chunks_mut(task).zip(x.par_chunks(task)).for_each(|(out, x)| run(x, out));
}

/// Rotates each head of x `[rows, heads * head_dim]` in place; cosines and sines are `[rows, head_dim / 2]`.
pub fn rotate_rows(x: &mut [f32], columns: usize, cos: &[f32], sin: &[f32]) {
    let half = if x.is_empty() { return } else { cos.len() / (x.len() / columns) };
    for (x, (cos, sin)) in x.chunks_exact_mut(columns).zip(cos.chunks_exact(half).zip(sin.chunks_exact(half)))
    {
        rotary::rotate_in_place(x, cos, sin);
    }
}

/// `activation(gate) * up`, in place of the gate.
pub fn gate_rows(gate: &mut [f32], up: &[f32], activation: Activation) {
    if gate.len() < SERIAL_BELOW {
        return gate::forward_in_place(gate, up, activation);
    }
    (gate.par_chunks_mut(1 << 13).zip(up.par_chunks(1 << 13)))
        .for_each(|(gate, up)| gate::forward_in_place(gate, up, activation));
}

/// `activation(x)`, in place.
pub fn activate_rows(x: &mut [f32], activation: Activation) {
    if x.len() < SERIAL_BELOW {
        return gate::activate_in_place(x, activation);
    }
    x.par_chunks_mut(1 << 13).for_each(|x| gate::activate_in_place(x, activation));
}

/// Rows of x `[rows, columns]` times the sigmoid of `opening` `[rows]`, in place.
pub fn open_rows(x: &mut [f32], opening: &[f32]) {
    let columns = x.len().checked_div(opening.len()).unwrap_or(0).max(1);
    for (row, opening) in x.chunks_exact_mut(columns).zip(opening) {
        let factor = 1.0 / (1.0 + (-opening).exp());
        for x in row {
            *x *= factor;
        }
    }
}

/// `cap tanh(x / cap)`, in place.
pub fn softcap_rows(x: &mut [f32], cap: f32) {
    x.par_chunks_mut(1 << 13).for_each(|x| simd::softcap(x, cap));
}
