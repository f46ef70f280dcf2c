//! Elementwise operations of an MLP: its activation and gate, and what opens a shared expert.

use cubecl::prelude::*;

use super::{Accelerator, Buffer};
use crate::ops::Activation;
use crate::{Error, Result};

/// Twice `sqrt(2 / pi)`, and that times 0.044715: see [`crate::ops::gated`].
const GELU: f32 = 1.595_769_2;
const GELU_CUBE: f32 = 0.071_354_816;

/// `activation(gate) * up`, both of any equal shape.
///
/// # Errors
/// [`Error::Shape`] where the two differ.
pub fn gate_rows(
    device: &Accelerator,
    gate: &Buffer<f32>,
    up: &Buffer<f32>,
    activation: Activation,
) -> Result<Buffer<f32>> {
    if gate.len() != up.len() {
        return Err(Error::shape("a gate's up projection", format!("[{}]", gate.len()), &[up.len()]));
    }
    Ok(activated(device, gate, Some(up), activation))
}

/// `activation(x)`.
pub fn activate_rows(device: &Accelerator, x: &Buffer<f32>, activation: Activation) -> Buffer<f32> {
    activated(device, x, None, activation)
}

fn activated(
    device: &Accelerator,
    gate: &Buffer<f32>,
    up: Option<&Buffer<f32>>,
    activation: Activation,
) -> Buffer<f32> {
    let out = device.empty(gate.len());
    if !gate.is_empty() {
        let (count, dim) = device.flat(gate.len());
        let gelu = activation == Activation::GeluTanh;
        // An absent operand is never read; something has to stand in its place.
        let (other, gated) = (up.unwrap_or(gate), up.is_some());
        activate::launch(device.client(), count, dim, gate.arg(), other.arg(), out.arg(), gelu, gated);
    }
    out
}

#[cube(launch)]
fn activate(gate: &[f32], up: &[f32], out: &mut [f32], #[comptime] gelu: bool, #[comptime] gated: bool) {
    let at = ABSOLUTE_POS;
    if at < out.len() {
        let value = gate[at];
        let mut inner = value;
        if comptime!(gelu) {
            inner = value * (GELU + GELU_CUBE * value * value);
        }
        let mut result = value / (1.0 + (-inner).exp());
        if comptime!(gated) {
            result *= up[at];
        }
        out[at] = result;
    }
}

/// Rows of `x` `[rows, columns]` times the sigmoid of `opening` `[rows]`.
///
/// # Errors
/// [`Error::Shape`] where `x` is not as many rows.
pub fn open_rows(device: &Accelerator, x: &Buffer<f32>, opening: &Buffer<f32>) -> Result<Buffer<f32>> {
    if opening.is_empty() || !x.len().is_multiple_of(opening.len()) {
        let expected = format!("a multiple of {} rows", opening.len());
        return Err(Error::shape("rows of a shared expert", expected, &[x.len()]));
    }
    let out = device.empty(x.len());
    if !x.is_empty() {
        let (count, dim) = device.flat(x.len());
        let columns = x.len() / opening.len();
        open::launch(device.client(), count, dim, x.arg(), opening.arg(), out.arg(), columns);
    }
    Ok(out)
}

#[cube(launch)]
fn open(x: &[f32], opening: &[f32], out: &mut [f32], #[comptime] columns: usize) {
    let at = ABSOLUTE_POS;
    if at < out.len() {
        out[at] = x[at] / (1.0 + (-opening[at / columns]).exp());
    }
}
