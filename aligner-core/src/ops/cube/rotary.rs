//! Rotary positions, and keys and values to their pages, in one pass.

use cubecl::prelude::*;

use super::{Accelerator, Buffer};
use crate::ops::AttentionShape;
use crate::ops::rows::{PAGE, page_elements};
use crate::{Error, Result};

/// One layer's keys and values on an accelerator, in the layout of [`crate::ops::rows::PagedKv`].
#[derive(Debug, Clone)]
pub struct KvPages {
    /// `[pages, kv_heads, head_dim, PAGE]`.
    pub keys: Buffer<f32>,
    /// `[pages, kv_heads, PAGE, head_dim]`.
    pub values: Buffer<f32>,
}

impl KvPages {
    /// Room for `pages` pages, filled with zeros.
    pub fn new(device: &Accelerator, pages: usize, shape: AttentionShape) -> Self {
        let zeros = || {
            let data = device.empty::<f32>(pages * page_elements(shape));
            if !data.is_empty() {
                let (count, dim) = device.flat(data.len());
                zero::launch(device.client(), count, dim, data.arg());
            }
            data
        };
        Self { keys: zeros(), values: zeros() }
    }

    /// How many pages there are.
    pub(super) fn pages(&self, shape: AttentionShape) -> usize {
        self.keys.len().min(self.values.len()) / page_elements(shape)
    }
}

#[cube(launch)]
fn zero(data: &mut [f32]) {
    if ABSOLUTE_POS < data.len() {
        data[ABSOLUTE_POS] = 0.0;
    }
}

/// Queries `[rows, heads * head_dim]`, keys and values `[rows, kv_heads * head_dim]` of one layer.
#[derive(Debug, Clone, Copy)]
pub struct Qkv<'a> {
    /// Before rotation.
    pub q: &'a Buffer<f32>,
    /// Before rotation.
    pub k: &'a Buffer<f32>,
    /// As they are.
    pub v: &'a Buffer<f32>,
}

/// Rotates queries and keys by their rows' angles, writes keys and values to the pages, and returns the
/// rotated queries, `[rows, heads * head_dim]`.
///
/// `angles` is the cosines and then the sines, each `[rows, head_dim / 2]`. `slots` `[rows]` says where a
/// row's keys and values go: page times [`PAGE`] plus the place in it; one past the last page is the caller's
/// mistake, and writes to any place.
///
/// # Errors
/// [`Error::Shape`] where the sizes do not fit.
pub fn rotate_and_write(
    device: &Accelerator,
    qkv: Qkv<'_>,
    angles: &Buffer<f32>,
    slots: &Buffer<u32>,
    pages: &KvPages,
    shape: AttentionShape,
) -> Result<Buffer<f32>> {
    let AttentionShape { heads, kv_heads, head_dim, .. } = shape;
    let rows = slots.len();
    for (what, got, columns) in [
        ("queries", qkv.q.len(), heads * head_dim),
        ("keys", qkv.k.len(), kv_heads * head_dim),
        ("values", qkv.v.len(), kv_heads * head_dim),
        ("rotary angles", angles.len(), head_dim),
    ] {
        if got != rows * columns {
            return Err(Error::shape(what, format!("[{rows}, {columns}]"), &[got]));
        }
    }
    let out = device.empty(qkv.q.len());
    if rows == 0 {
        return Ok(out);
    }
    // A unit for each pair of q and k, and for each pair of values.
    let (count, dim) = device.flat(rows * (heads + 2 * kv_heads) * (head_dim / 2));
    write::launch(
        device.client(),
        count,
        dim,
        qkv.q.arg(),
        qkv.k.arg(),
        qkv.v.arg(),
        angles.arg(),
        slots.arg(),
        out.arg(),
        pages.keys.arg(),
        pages.values.arg(),
        heads,
        kv_heads,
        head_dim,
    );
    Ok(out)
}

#[cube(launch)]
#[expect(clippy::too_many_arguments, reason = "a kernel's arguments")]
fn write(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    angles: &[f32],
    slots: &[u32],
    out: &mut [f32],
    keys: &mut [f32],
    values: &mut [f32],
    #[comptime] heads: usize,
    #[comptime] kv_heads: usize,
    #[comptime] head_dim: usize,
) {
    let half = comptime!(head_dim / 2);
    let all = comptime!(heads + 2 * kv_heads);
    let rows = slots.len();
    let row = ABSOLUTE_POS / (all * half);
    if row < rows {
        let head = ABSOLUTE_POS % (all * half) / half;
        let i = ABSOLUTE_POS % half;
        let cos = angles[row * half + i];
        let sin = angles[(rows + row) * half + i];
        if head < heads {
            let at = (row * heads + head) * head_dim + i;
            let low = q[at];
            let high = q[at + half];
            out[at] = low * cos - high * sin;
            out[at + half] = high * cos + low * sin;
        } else {
            let slot = slots[row] as usize;
            let page = slot / PAGE;
            let offset = slot % PAGE;
            if head < heads + kv_heads {
                let kv_head = head - heads;
                let at = (row * kv_heads + kv_head) * head_dim + i;
                let low = k[at];
                let high = k[at + half];
                let to = ((page * kv_heads + kv_head) * head_dim + i) * PAGE + offset;
                keys[to] = low * cos - high * sin;
                keys[to + half * PAGE] = high * cos + low * sin;
            } else {
                let kv_head = head - heads - kv_heads;
                let at = (row * kv_heads + kv_head) * head_dim + i;
                let to = ((page * kv_heads + kv_head) * PAGE + offset) * head_dim + i;
                values[to] = v[at];
                values[to + half] = v[at + half];
            }
        }
    }
}
