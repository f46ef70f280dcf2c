//! Tensors as host memory.

use burn::tensor::Tensor;

/// A tensor's elements as `f32` on the host, bit for bit where it is stored so.
pub(crate) fn host_values(tensor: &Tensor<1>) -> Vec<f32> {
    let data = tensor.clone().into_data().convert::<f32>();
    data.try_into_vec::<f32>().expect("the data was converted to f32")
}
