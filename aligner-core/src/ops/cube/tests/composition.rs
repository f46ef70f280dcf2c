//! The kernels against the compositions of Burn operations.

use burn::tensor::{Device, Tensor, TensorData};

use super::{device, error, values};
use crate::Segment;
use crate::ops::cube::{
    KvPages, Matrix, Product, Qkv, RowNorm, Tiles, gate_rows, norm_rows, paged_attention, products,
    rotate_and_write,
};
use crate::ops::host::to_vec;
use crate::ops::rows::{PAGE, Span};
use crate::ops::{Activation, AttentionShape, RotaryTable, reference};

fn tensor<const D: usize>(data: &[f32], shape: [usize; D]) -> Tensor<D> {
    Tensor::from_data(TensorData::new(data.to_vec(), shape), &Device::flex())
}

#[test]
fn a_layer_s_kernels_match_burn_s_operations() {
    let device = device();
    let (rows, hidden, inner) = (6, 40, 56);
    let [x, base] = [1, 2].map(|seed| values(rows * hidden, seed));
    let (scale, weight, bias) = (values(hidden, 3), values(inner * hidden, 4), values(inner, 5));
    let x_there = device.upload(&x);
    let x = tensor(&x, [rows, hidden]);

    let got = norm_rows(&device, &x_there, RowNorm::Rms(&device.upload(&scale), 0.0), 1e-5).unwrap();
    let expected = reference::rms_norm(x.clone(), tensor(&scale, [hidden]), 1e-5);
    assert!(error(&device.read(&got).unwrap(), &to_vec(&expected)) < 1e-6);

    let matrix = Matrix::F32(device.upload(&weight), [inner, hidden]);
    let bias_there = device.upload(&bias);
    let product = Product { weight: &matrix, bias: Some(&bias_there), add_to: None };
    let up = products(&device, &x_there, &[product]).unwrap().remove(0);
    let weight = tensor(&weight, [inner, hidden]);
    let expected = reference::linear(x.clone(), weight, Some(tensor(&bias, [inner])), None);
    assert!(error(&device.read(&up).unwrap(), &to_vec(&expected)) < 1e-6);

    let got = gate_rows(&device, &up, &up, Activation::Silu).unwrap();
    let expected = reference::gated(expected.clone(), Some(expected), Activation::Silu);
    assert!(error(&device.read(&got).unwrap(), &to_vec(&expected)) < 1e-6);

    let back = Matrix::F32(device.upload(&base[..hidden * 3]), [3, hidden]);
    let residual = device.upload(&base[..rows * 3]);
    let product = Product { weight: &back, bias: None, add_to: Some(&residual) };
    let got = products(&device, &x_there, &[product]).unwrap().remove(0);
    let (back, residual) = (tensor(&base[..hidden * 3], [3, hidden]), tensor(&base[..rows * 3], [rows, 3]));
    let expected = reference::linear(x, back, None, Some(residual));
    assert!(error(&device.read(&got).unwrap(), &to_vec(&expected)) < 1e-6);
}

#[test]
fn rotation_and_paged_attention_match_burn_s_operations() {
    let device = device();
    let shape = AttentionShape::new(6, 2, 16, 0.25);
    let len = 150;
    let (columns, width) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let [q, k, v] = [(columns, 1), (width, 2), (width, 3)].map(|(n, seed)| values(len * n, seed));
    let positions: Vec<u32> = (0..len as u32).collect();
    let frequencies: Vec<f32> = (0..8).map(|i| 10f32.powf(-0.5 * i as f32)).collect();
    let angles = || positions.iter().flat_map(|&p| frequencies.iter().map(move |f| p as f32 * f));
    let angles: Vec<f32> = angles().map(f32::cos).chain(angles().map(f32::sin)).collect();

    let table = RotaryTable::new(&positions, &frequencies, 1.0);
    let rotated = reference::rotary(tensor(&q, [len, columns]), &table);
    let k_rotated = reference::rotary(tensor(&k, [len, width]), &table);
    let segment = Segment { start: 0, len, position: 0, parent: None };
    let expected = reference::attention(rotated, k_rotated, tensor(&v, [len, width]), &[segment], shape);

    let pages: Vec<u32> = vec![3, 0, 4, 1, 2];
    let slot = |at: usize| pages[at / PAGE] * PAGE as u32 + (at % PAGE) as u32;
    let slots: Vec<u32> = (0..len).map(slot).collect();
    let kv = KvPages::new(&device, pages.len(), shape);
    let [q, k, v] = [q, k, v].map(|rows| device.upload(&rows));
    let qkv = Qkv { q: &q, k: &k, v: &v };
    let q =
        rotate_and_write(&device, qkv, &device.upload(&angles), &device.upload(&slots), &kv, shape).unwrap();
    let spans = [Span { rows: 0..len, position: 0, pages: 0..pages.len() }];
    let tiles = Tiles::new(&device, (&spans, &pages), shape).unwrap();
    let got = paged_attention(&device, &q, &kv, &tiles, shape).unwrap();
    assert!(error(&device.read(&got).unwrap(), &to_vec(&expected)) < 3e-6);
}
