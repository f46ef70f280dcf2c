//! Operations on host slices of few rows, for generation.
//!
//! They have no backward pass and allocate nothing. A row's result has a fixed order of summation: it
//! depends neither on the other rows nor on how they were cut into chunks, bitwise.

mod attention;
mod product;
mod vector;
mod weight;

use rayon::prelude::*;

use super::{rms_norm, rotary, swiglu};

pub use attention::{PAGE, PagedKv, Span, page_elements, paged_attention, write_kv};
pub use product::{Product, products};
pub use weight::{Bf16, F32, GROUP, Int4, Int8, PackedKind, PackedWeight, Weight};

/// Elements below which an elementwise operation stays on the calling thread.
const SERIAL_BELOW: usize = 1 << 15;

/// `RMSNorm` of each row: x and out are `[rows, hidden]`, the weight `[hidden]`.
pub fn norm_rows(x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    let hidden = weight.len().max(1);
    if x.len() < SERIAL_BELOW {
        return rms_norm::normalize(x, weight, epsilon, out);
    }
    (out.par_chunks_mut(8 * hidden).zip(x.par_chunks(8 * hidden)))
        .for_each(|(out, x)| rms_norm::normalize(x, weight, epsilon, out));
}

/// Rotates each head of x `[rows, heads * head_dim]` in place; cosines and sines are `[rows, head_dim / 2]`.
pub fn rotate_rows(x: &mut [f32], columns: usize, cos: &[f32], sin: &[f32]) {
    let half = if x.is_empty() { return } else { cos.len() / (x.len() / columns) };
    for (x, (cos, sin)) in x.chunks_exact_mut(columns).zip(cos.chunks_exact(half).zip(sin.chunks_exact(half)))
    {
        rotary::rotate_in_place(x, cos, sin);
    }
}

/// `silu(gate) * up`, in place of the gate.
pub fn gate_rows(gate: &mut [f32], up: &[f32]) {
    if gate.len() < SERIAL_BELOW {
        return swiglu::forward_in_place(gate, up);
    }
    (gate.par_chunks_mut(1 << 13).zip(up.par_chunks(1 << 13)))
        .for_each(|(gate, up)| swiglu::forward_in_place(gate, up));
}
