//! `SwiGLU`'s gate.

use cubecl::prelude::*;

use super::{Accelerator, Buffer};
use crate::{Error, Result};

/// `silu(gate) * up`, both of any equal shape.
///
/// # Errors
/// [`Error::Shape`] where the two differ.
pub fn gate_rows(device: &Accelerator, gate: &Buffer<f32>, up: &Buffer<f32>) -> Result<Buffer<f32>> {
    if gate.len() != up.len() {
        return Err(Error::shape("SwiGLU's up projection", format!("[{}]", gate.len()), &[up.len()]));
    }
    let out = device.empty(gate.len());
    if !gate.is_empty() {
        let (count, dim) = device.flat(gate.len());
        gated::launch(device.client(), count, dim, gate.arg(), up.arg(), out.arg());
    }
    Ok(out)
}

#[cube(launch)]
fn gated(gate: &[f32], up: &[f32], out: &mut [f32]) {
    let at = ABSOLUTE_POS;
    if at < out.len() {
        let value = gate[at];
        out[at] = value / (1.0 + (-value).exp()) * up[at];
    }
}
