//! Tensors as parts, and back.

use aligner_core::ops::host::HostTensor;
use aligner_core::{Device, Tensor};
use burn::tensor::{DType, TensorData};
use bytemuck::Pod;

use crate::call::Element;
use crate::part::Part;

/// How many elements of which type a tensor has, and where they lie.
#[derive(Debug, Clone)]
pub(crate) struct Form {
    device: Device,
    dtype: DType,
    /// What they travel as.
    pub(crate) element: Element,
    pub(crate) elements: usize,
}

impl Form {
    pub(crate) fn of(tensor: &Tensor<1>) -> Self {
        let dtype = tensor.dtype();
        let element = if dtype == DType::F64 { Element::F64 } else { Element::F32 };
        Self { device: tensor.device(), dtype, element, elements: tensor.dims()[0] }
    }

    /// That of `elements` in `f32` on this device.
    pub(crate) fn on(device: &Device, elements: usize) -> Self {
        Self { device: device.clone(), dtype: DType::F32, element: Element::F32, elements }
    }

    /// The elements of a tensor of this form.
    pub(crate) fn part(&self, tensor: Tensor<1>) -> Part {
        match self.element {
            Element::F32 | Element::F16 | Element::Bf16 => Part::of_tensor(HostTensor::new(&tensor)),
            Element::F64 => Part::new(tensor.into_data().iter::<f64>().collect()),
        }
    }

    /// A tensor of this device and type: the parts, one after the other.
    pub(crate) fn tensor(&self, parts: &[Part]) -> Tensor<1> {
        let data = match self.element {
            Element::F32 | Element::F16 | Element::Bf16 => data(concat::<f32>(parts)),
            Element::F64 => data(concat::<f64>(parts)),
        };
        Tensor::from_data(data, (&self.device, self.dtype))
    }
}

fn data<E: burn::tensor::Element>(elements: Vec<E>) -> TensorData {
    let shape = [elements.len()];
    TensorData::new(elements, shape)
}

/// The elements of all parts in order.
pub(crate) fn concat<E: Pod>(parts: &[Part]) -> Vec<E> {
    let slices: Vec<&[E]> = parts.iter().map(Part::elements).collect();
    slices.concat()
}
