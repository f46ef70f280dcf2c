//! Keys and values of one sequence, and attention over them.

use std::cell::RefCell;
use std::sync::Arc;

use aligner_core::ops::{AttentionShape, attention, host::to_vec};
use aligner_core::shard::Shard;
use aligner_core::{Error, Result, Segment, Tensor};

/// The cache of one sequence, put under a model through its `attend` seam.
///
/// Keys and values live in host memory, `[positions, kv_heads * head_dim]` a layer.
#[derive(Debug)]
pub(crate) struct Cache {
    layers: RefCell<Vec<Layer>>,
}

#[derive(Debug, Default, Clone)]
struct Layer {
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Cache {
    pub(crate) fn new(layers: usize) -> Self {
        Self { layers: RefCell::new(vec![Layer::default(); layers]) }
    }
}

impl Shard for Cache {
    fn attend(
        &self,
        layer: usize,
        [q, k, v]: [Tensor<2>; 3],
        segments: &Arc<[Segment]>,
        shape: AttentionShape,
    ) -> Result<Tensor<2>> {
        let mut layers = self.layers.borrow_mut();
        let cache = &mut layers[layer];
        let prefill = cache.keys.is_empty();
        cache.keys.extend(to_vec(&k));
        cache.values.extend(to_vec(&v));
        if prefill {
            return attention(q, k, v, segments, shape);
        }
        if q.dims()[0] != 1 {
            return Err(Error::shape("query of a cached step", "[1, heads * head_dim]", &q.dims()));
        }
        let out = attend_one(&to_vec(&q), cache, shape);
        Ok(Tensor::from_data(burn_data(out), &q.device()))
    }
}

fn burn_data(row: Vec<f32>) -> burn::tensor::TensorData {
    let columns = row.len();
    burn::tensor::TensorData::new(row, [1, columns])
}

/// Attention of one query row over the whole cache.
fn attend_one(q: &[f32], cache: &Layer, shape: AttentionShape) -> Vec<f32> {
    let AttentionShape { heads, kv_heads, head_dim, scale } = shape;
    let width = kv_heads * head_dim;
    let mut out = vec![0.0; q.len()];
    for (head, (q, out)) in q.chunks_exact(head_dim).zip(out.chunks_exact_mut(head_dim)).enumerate() {
        let offset = head / (heads / kv_heads) * head_dim;
        let of_position = |row: &[f32]| -> f32 {
            let key = &row[offset..offset + head_dim];
            q.iter().zip(key).map(|(a, b)| a * b).sum::<f32>() * scale
        };
        let mut weights: Vec<f32> = cache.keys.chunks_exact(width).map(of_position).collect();
        let largest = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        for weight in &mut weights {
            *weight = (*weight - largest).exp();
        }
        let sum: f32 = weights.iter().sum();
        for (weight, row) in weights.iter().zip(cache.values.chunks_exact(width)) {
            let value = &row[offset..offset + head_dim];
            for (out, value) in out.iter_mut().zip(value) {
                *out += weight / sum * value;
            }
        }
    }
    out
}
