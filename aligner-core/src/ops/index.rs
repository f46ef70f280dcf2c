//! Numbers of rows as tensors.

use burn::tensor::{Device, Int, Tensor, TensorData};

/// `values` on a device, `[values]`.
pub fn index(values: &[u32], device: &Device) -> Tensor<1, Int> {
    let values: Vec<i64> = values.iter().map(|&value| i64::from(value)).collect();
    Tensor::from_data(TensorData::from(values.as_slice()), device)
}
