//! Tensors of the CPU device as slices.

use burn::backend::flex::FlexTensor;
use burn::backend::{BackendTensor, DispatchTensorKind};
use burn::tensor::{Tensor, TensorData};

pub use super::kernel::on_host;

/// A tensor's elements in host memory. On the CPU device they are the tensor's own, held by handle;
/// from any other device they are a copy.
#[derive(Debug, Clone)]
pub struct HostTensor(FlexTensor);

impl HostTensor {
    /// The elements of `tensor` in row-major order.
    pub fn new(tensor: &Tensor<1>) -> Self {
        if on_host(tensor)
            && !tensor.is_autodiff()
            && let DispatchTensorKind::Flex(BackendTensor::Float(flex)) = tensor.clone().into_dispatch().kind
        {
            return Self(flex.to_contiguous());
        }
        let data = to_vec(tensor);
        let shape = [data.len()];
        Self(FlexTensor::from_data(TensorData::new(data, shape)))
    }

    /// As [`HostTensor::new`], whether or not the tensor is part of a graph.
    pub fn without_graph<const D: usize>(tensor: &Tensor<D>) -> Self {
        Self::new(&without_graph(tensor))
    }

    /// The elements.
    pub fn as_slice(&self) -> &[f32] {
        self.0.as_slice::<f32>().expect("contiguous f32")
    }
}

/// A tensor's elements in row-major order, `[elements]`, on its device and without its graph.
pub fn without_graph<const D: usize>(tensor: &Tensor<D>) -> Tensor<1> {
    let plain = tensor.clone();
    let plain = if plain.is_autodiff() { plain.inner() } else { plain };
    plain.reshape([tensor.dims().iter().product::<usize>()])
}

/// Calls `read` with the tensor's elements in row-major order; without a copy on the CPU device.
pub fn with_slice<R>(tensor: &Tensor<1>, read: impl FnOnce(&[f32]) -> R) -> R {
    read(HostTensor::new(tensor).as_slice())
}

/// The tensor's elements in row-major order, copied to host memory.
pub fn to_vec<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    let data = tensor.clone().into_data().convert::<f32>();
    data.try_into_vec().expect("converted to f32")
}

/// Changes a tensor's elements in place where nobody else holds them; else changes a copy.
pub fn update_slice<R>(tensor: &mut Tensor<1>, update: impl FnOnce(&mut [f32]) -> R) -> R {
    let device = tensor.device();
    let len = tensor.dims()[0];
    if on_host(tensor) && !tensor.is_autodiff() {
        // The tensor must give up its handle, or the storage would count as shared.
        let taken = std::mem::replace(tensor, Tensor::empty([1], &device));
        let mut dispatch = taken.into_dispatch();
        let result = if let DispatchTensorKind::Flex(BackendTensor::Float(flex)) = &mut dispatch.kind {
            let whole = flex.as_slice::<f32>().is_some_and(|s| s.len() == flex.storage::<f32>().len());
            if !whole {
                *flex = flex.to_contiguous();
            }
            Some(update(&mut flex.storage_mut::<f32>()[..len]))
        } else {
            None
        };
        *tensor = Tensor::from_dispatch(dispatch);
        return result.expect("a float tensor on the CPU device");
    }
    let mut data = to_vec(tensor);
    let result = update(&mut data);
    *tensor = Tensor::from_data(TensorData::new(data, [len]), &device);
    result
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn a_shared_tensor_is_copied_before_it_changes() {
        let mut a = Tensor::<1>::from_floats([1.0, 2.0], &Device::flex());
        let held = a.clone();
        update_slice(&mut a, |values| values[0] = 5.0);
        assert_eq!((to_vec(&a), to_vec(&held)), (vec![5.0, 2.0], vec![1.0, 2.0]));
    }

    #[test]
    fn an_unshared_tensor_changes_in_place() {
        let mut a = Tensor::<1>::from_floats([1.0, 2.0], &Device::flex());
        let before = with_slice(&a, |values| values.as_ptr() as usize);
        update_slice(&mut a, |values| values[1] = 7.0);
        let after = with_slice(&a, |values| values.as_ptr() as usize);
        assert_eq!(before, after);
        assert_eq!(to_vec(&a), [1.0, 7.0]);
    }
}
