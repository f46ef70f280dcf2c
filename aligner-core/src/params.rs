//! A model's parameters: names, shapes and tensor handles. One set serves trainer and engine.

use std::collections::HashMap;
use std::sync::Arc;

use burn::tensor::{Device, Tensor, TensorData};

use crate::ops::WeightOperand;
use crate::ops::rows::PackedWeight;
use crate::weights::Unread;
use crate::{Error, Result};

/// One parameter.
#[derive(Debug, Clone)]
pub struct Param {
    /// Its name in a Hugging Face checkpoint.
    pub name: String,
    /// Its shape there: `[out, in]` for a linear's weight.
    pub shape: Vec<usize>,
    /// Its elements in row-major order, `[elements]`.
    pub value: Tensor<1>,
    /// Whether it is trained.
    pub trainable: bool,
    /// A packed copy in place of the elements, of a matrix that is not trained; `value` is empty then.
    pub packed: Option<Arc<PackedWeight>>,
    /// Its elements in a file, of which nothing has been read yet; `value` is empty then.
    pub unread: Option<Unread>,
}

impl Param {
    /// How many elements it has.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Its elements, unpacked where it is packed: a copy then, on the device of `value`.
    fn values(&self) -> Tensor<1> {
        let Some(packed) = &self.packed else { return self.value.clone() };
        Tensor::from_data(TensorData::new(packed.unpacked(), [self.elements()]), &self.value.device())
    }
}

/// Index of a parameter in its set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ParamId(pub(crate) usize);

impl ParamId {
    /// Its place in [`ParamSet::iter`].
    pub fn index(self) -> usize {
        self.0
    }
}

/// Named parameters in a fixed order. A clone shares the tensors.
#[derive(Debug, Clone, Default)]
pub struct ParamSet {
    params: Vec<Param>,
    index: HashMap<String, usize>,
}

impl ParamSet {
    /// Adds a parameter.
    ///
    /// # Errors
    /// A name that is taken, or a value that is not `shape`'s size.
    pub fn insert(&mut self, name: impl Into<String>, shape: &[usize], value: Tensor<1>) -> Result<ParamId> {
        let name = name.into();
        let elements: usize = shape.iter().product();
        if value.dims() != [elements] {
            return Err(Error::shape(name, format!("{shape:?} ({elements} elements)"), &value.dims()));
        }
        self.push(Param { name, shape: shape.to_vec(), value, trainable: true, packed: None, unread: None })
    }

    fn push(&mut self, param: Param) -> Result<ParamId> {
        if self.index.insert(param.name.clone(), self.params.len()).is_some() {
            return Err(Error::Invalid(format!("parameter {} is defined twice", param.name)));
        }
        self.params.push(param);
        Ok(ParamId(self.params.len() - 1))
    }

    /// Adds a packed matrix, which is not trained.
    ///
    /// # Errors
    /// A name that is taken.
    pub fn insert_packed(
        &mut self,
        name: impl Into<String>,
        packed: Arc<PackedWeight>,
        device: &Device,
    ) -> Result<ParamId> {
        let (shape, value) = (packed.shape().to_vec(), Tensor::zeros([0], device));
        let packed = Some(packed);
        self.push(Param { name: name.into(), shape, value, trainable: false, packed, unread: None })
    }

    /// Adds a parameter of which nothing has been read yet.
    ///
    /// # Errors
    /// A name that is taken, or elements that are not `shape`'s.
    pub fn insert_unread(
        &mut self,
        name: impl Into<String>,
        shape: &[usize],
        unread: Unread,
        device: &Device,
    ) -> Result<ParamId> {
        let (name, elements) = (name.into(), shape.iter().product::<usize>());
        if unread.len() != elements {
            return Err(Error::shape(name, format!("{shape:?} ({elements} elements)"), &[unread.len()]));
        }
        let (value, unread) = (Tensor::zeros([0], device), Some(unread));
        self.push(Param { name, shape: shape.to_vec(), value, trainable: true, packed: None, unread })
    }

    /// Reads what is still in a file.
    ///
    /// # Errors
    /// Those of [`Unread::read`].
    pub fn read_in(&mut self) -> Result<()> {
        for param in &mut self.params {
            if let Some(unread) = &param.unread {
                let values = unread.read()?;
                let len = values.len();
                param.value = Tensor::from_data(TensorData::new(values, [len]), &param.value.device());
                param.unread = None;
            }
        }
        Ok(())
    }

    /// Adds a parameter of another set, by handle; it is trained unless it is packed.
    ///
    /// # Errors
    /// A name that is taken.
    pub fn share(&mut self, param: &Param) -> Result<ParamId> {
        self.push(Param { trainable: param.packed.is_none(), ..param.clone() })
    }

    /// Adds a parameter from host memory.
    ///
    /// # Errors
    /// As [`ParamSet::insert`].
    pub fn insert_data(
        &mut self,
        name: impl Into<String>,
        shape: &[usize],
        data: Vec<f32>,
        device: &Device,
    ) -> Result<ParamId> {
        let len = data.len();
        self.insert(name, shape, Tensor::from_data(TensorData::new(data, [len]), device))
    }

    /// Where the parameters lie: that of the first, outside of any graph; the CPU device where there are none.
    pub fn device(&self) -> Device {
        self.params.first().map_or_else(Device::flex, |param| param.value.device().inner())
    }

    /// The id of `name`.
    pub fn id(&self, name: &str) -> Option<ParamId> {
        self.index.get(name).copied().map(ParamId)
    }

    /// The parameter behind an id of this set or of one with the same model.
    pub fn get(&self, id: ParamId) -> &Param {
        &self.params[id.0]
    }

    /// The parameter called `name`.
    pub fn by_name(&self, name: &str) -> Option<&Param> {
        self.id(name).map(|id| self.get(id))
    }

    /// A parameter as a matrix `[rows, columns]`; a vector is one row. Of a packed one, all elements are unpacked.
    pub fn matrix(&self, id: ParamId) -> Tensor<2> {
        let param = self.get(id);
        let columns = param.shape.last().copied().unwrap_or(1);
        param.values().reshape([param.elements() / columns.max(1), columns])
    }

    /// A parameter as a vector `[elements]`. Of a packed one, all elements are unpacked.
    pub fn vector(&self, id: ParamId) -> Tensor<1> {
        self.get(id).values()
    }

    /// A linear's weight `[out, in]` for a product; a packed one stays packed.
    pub fn weight(&self, id: ParamId) -> WeightOperand<2> {
        self.get(id).packed.clone().map_or_else(|| self.matrix(id).into(), WeightOperand::Packed)
    }

    /// The same, flat.
    pub fn flat_weight(&self, id: ParamId) -> WeightOperand<1> {
        self.get(id).packed.clone().map_or_else(|| self.vector(id).into(), WeightOperand::Packed)
    }

    /// The first parameter that is packed.
    pub fn first_packed(&self) -> Option<&Param> {
        self.params.iter().find(|param| param.packed.is_some())
    }

    /// The first parameter of which nothing has been read yet.
    pub fn first_unread(&self) -> Option<&Param> {
        self.params.iter().find(|param| param.unread.is_some())
    }

    /// All parameters, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Param> {
        self.params.iter()
    }

    /// All parameters, in order.
    pub fn iter_mut(&mut self) -> impl ExactSizeIterator<Item = &mut Param> {
        self.params.iter_mut()
    }

    /// How many parameters there are.
    pub fn len(&self) -> usize {
        self.params.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.params.is_empty()
    }

    /// Elements of all parameters, or of the trainable ones.
    pub fn elements(&self, trainable_only: bool) -> usize {
        self.params.iter().filter(|p| p.trainable || !trainable_only).map(Param::elements).sum()
    }

    /// The same values as autodiff leaves; the ones that are not trained stay constants.
    #[must_use]
    pub fn tracked(&self) -> Self {
        let params = self.params.iter().map(|param| {
            let value = Tensor::from_inner(param.value.clone());
            Param { value: if param.trainable { value.require_grad() } else { value }, ..param.clone() }
        });
        Self { params: params.collect(), index: self.index.clone() }
    }

    /// The first parameter with a NaN or an infinity.
    pub fn first_not_finite(&self) -> Option<&str> {
        self.params.iter().find(|p| !is_finite(&p.value)).map(|p| p.name.as_str())
    }
}

/// Whether every element is finite.
pub fn is_finite(values: &Tensor<1>) -> bool {
    // A sum of magnitudes is NaN or infinite as soon as one element is; overflow of finite
    // elements is impossible below 1e38 / len, far above any weight.
    let sum: f32 = values.clone().abs().sum().into_scalar();
    sum.is_finite()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_shapes_checked() {
        let device = Device::flex();
        let mut params = ParamSet::default();
        params.insert_data("w", &[2, 2], vec![0.0; 4], &device).unwrap();
        assert!(params.insert_data("w", &[1], vec![0.0], &device).is_err());
        let message = params.insert_data("b", &[3], vec![0.0; 2], &device).unwrap_err().to_string();
        assert!(message.contains("[3]") && message.contains("[2]"), "{message}");
    }

    #[test]
    fn nan_is_found_by_name() {
        let mut params = ParamSet::default();
        params.insert_data("good", &[1], vec![1.0], &Device::flex()).unwrap();
        params.insert_data("bad", &[2], vec![1.0, f32::NAN], &Device::flex()).unwrap();
        assert_eq!(params.first_not_finite(), Some("bad"));
    }
}
