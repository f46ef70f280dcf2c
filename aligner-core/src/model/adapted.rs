//! A model with a low-rank adapter: the base stays as it is, the adapter is trained.

use std::sync::Arc;

use burn::tensor::{Device, Tensor, TensorData};
use rayon::prelude::*;

use super::exec::with_weight;
use super::lora::{A, B, MAGNITUDE};
use super::parameters::SCORE;
use super::{Adapter, CausalLm, LoraConfig};
use crate::ops::AdaptedRows;
use crate::ops::host::HostTensor;
use crate::ops::rows::{F32, Weight};
use crate::rng::{Rng, key_of};
use crate::weights::AdapterCheckpoint;
use crate::{Error, Param, ParamSet, Policy as _, Result, is_finite};

impl CausalLm {
    /// The model with a fresh adapter: A uniform in ±1/√in (Kaiming's with a = √5), B zero, as in PEFT, so
    /// that it changes nothing yet. The base is frozen, but for a score head and the modules that
    /// `modules_to_save` names.
    ///
    /// # Errors
    /// [`Error::Setting`] as [`Adapter::new`]; a model that has an adapter.
    pub fn with_adapter(self, config: LoraConfig, seed: u64) -> Result<Self> {
        let adapter = Adapter::new(config, self.config())?;
        let lengths = if adapter.config.dora { self.row_lengths(&adapter) } else { Vec::new() };
        let mut lengths = lengths.into_iter();
        self.adapted(
            adapter,
            |_| Ok(None),
            |name, shape| {
                Ok(match shape {
                    [_] => lengths.next().unwrap_or_default(),
                    _ if name.ends_with(B) => vec![0.0; shape.iter().product()],
                    _ => uniform(shape, &[seed, key_of(name)]),
                })
            },
        )
    }

    /// The model with an adapter of a file, and with what the file has of the base's own modules.
    ///
    /// # Errors
    /// An adapter of another model, with the linear at fault; a file that cannot be read.
    pub fn with_adapter_from(self, file: &AdapterCheckpoint) -> Result<Self> {
        if file.score().is_some() && self.params().id(SCORE).is_none() {
            let message = "the adapter comes with a score head, but the model has none";
            return Err(Error::format(file.path(), message));
        }
        let adapter = file.adapter(self.config())?;
        let adapted = self.adapted(adapter, |name| file.saved(name), |name, _| file.read(name))?;
        let mut read = adapted.params().iter().filter(|param| param.trainable);
        if let Some(Param { name, .. }) = read.find(|param| !is_finite(&param.value)) {
            return Err(Error::format(file.path(), format!("tensor {name} holds NaN or infinity")));
        }
        drop(read);
        Ok(adapted)
    }

    /// Appends the adapter's parameters and freezes the base, but for what is trained in full; `saved` has its values
    /// where they are not the base's.
    fn adapted(
        self,
        adapter: Adapter,
        saved: impl Fn(&str) -> Result<Option<Vec<f32>>>,
        mut values: impl FnMut(&str, &[usize]) -> Result<Vec<f32>>,
    ) -> Result<Self> {
        if self.config().adapter.is_some() {
            return Err(Error::Invalid("the model has an adapter already; merge it first".into()));
        }
        let (mut params, mut originals) = (self.params().clone(), Vec::new());
        for param in params.iter_mut() {
            param.trainable = adapter.saves(&param.name);
            if !param.trainable {
                continue;
            }
            if param.packed.is_some() {
                let message = format!("{} is held in few bits and cannot be trained in full", param.name);
                return Err(Error::setting("modules_to_save", message));
            }
            if param.name != SCORE {
                originals.push(param.clone());
            }
            if let Some(values) = saved(&param.name)? {
                param.value = tensor(values, &param.value.device());
            }
        }
        for (name, shape) in adapter.parameters() {
            let values = values(&name, &shape)?;
            params.insert_data(name, &shape, values, self.device())?;
        }
        self.rebuilt(Some(Arc::new(adapter)), params, originals.into())
    }

    /// The same with another dropout in training.
    ///
    /// # Errors
    /// [`Error::Setting`] for a rate out of range; a model without an adapter.
    pub fn with_dropout(self, rate: f64) -> Result<Self> {
        let Some(adapter) = self.config().adapter.as_deref().cloned() else {
            return Err(Error::Invalid("the model has no adapter, so nothing is dropped".into()));
        };
        let config = LoraConfig { dropout: rate, ..adapter.config };
        if let Some(error) = config.errors().into_iter().next() {
            return Err(error);
        }
        let adapter = Arc::new(Adapter { config, ..adapter });
        self.rebuilt(Some(adapter), self.params().clone(), self.originals().clone())
    }

    /// The base alone, on the same parameter handles: it takes no memory of its own. It is the base as it was: modules
    /// that are trained in full have their first values, but for a score head.
    ///
    /// # Errors
    /// None in practice: the base's parameters are there.
    pub fn without_adapter(&self) -> Result<Self> {
        let mut params = ParamSet::default();
        for param in self.base() {
            let original = self.originals().iter().find(|original| original.name == param.name);
            params.share(original.unwrap_or(param))?;
        }
        self.rebuilt(None, params, Arc::default())
    }

    /// The base with the adapter added to its weights: the same function of a text, to rounding, as a plain
    /// model.
    ///
    /// # Errors
    /// A model without an adapter, or one whose base is packed.
    pub fn merged(&self) -> Result<Self> {
        let Some(adapter) = self.config().adapter.clone() else {
            return Err(Error::Invalid("the model has no adapter to merge".into()));
        };
        if let Some(Param { name, .. }) = self.params().first_packed() {
            let message =
                format!("not merged: {name} is held in few bits; merge into the base that is not packed");
            return Err(Error::Invalid(message));
        }
        let mut params = ParamSet::default();
        for param in self.base() {
            let linear = param.name.strip_suffix(".weight");
            let module = adapter.modules.iter().find(|module| Some(module.name.as_str()) == linear);
            match module {
                Some(module) => {
                    let rows = self.merged_rows(module)?;
                    params.insert_data(param.name.as_str(), &param.shape, rows, self.device())?
                }
                None => params.share(param)?,
            };
        }
        self.rebuilt(None, params, Arc::default())
    }

    /// Parameters that are not the adapter's.
    fn base(&self) -> impl Iterator<Item = &Param> {
        self.params().iter().filter(|param| !Adapter::owns(&param.name))
    }

    fn merged_rows(&self, module: &super::AdapterModule) -> Result<Vec<f32>> {
        let values = |end: &str| self.host(&format!("{}{end}", module.name));
        let (weight, a, b) = (values(".weight")?, values(A)?, values(B)?);
        let [outputs, inputs] = module.shape;
        let weight = Weight::F32(F32::new(weight.as_slice(), outputs, inputs));
        let (a, b) = (a.as_slice(), b.as_slice());
        let rows = AdaptedRows { weight, a, b, scale: module.scale, shape: module.shape };
        if self.params().id(&format!("{}{MAGNITUDE}", module.name)).is_none() {
            return Ok(rows.merged(None));
        }
        let magnitudes = values(MAGNITUDE)?;
        let gains =
            magnitudes.as_slice().iter().zip(rows.lengths()).map(|(magnitude, length)| magnitude / length);
        Ok(rows.merged(Some(&gains.collect::<Vec<_>>())))
    }

    fn host(&self, name: &str) -> Result<HostTensor> {
        let param = self.params().by_name(name);
        let param = param.ok_or_else(|| Error::Invalid(format!("the parameters lack {name}")))?;
        Ok(HostTensor::new(&param.value))
    }

    /// The lengths of the rows of each adapted weight.
    fn row_lengths(&self, adapter: &Adapter) -> Vec<Vec<f32>> {
        let of_module = |module: &super::AdapterModule| {
            let Some(param) = self.params().by_name(&format!("{}.weight", module.name)) else {
                return Vec::new();
            };
            with_weight(param, module.shape, |weight| {
                AdaptedRows { weight, a: &[], b: &[], scale: 0.0, shape: module.shape }.lengths()
            })
        };
        adapter.modules.iter().map(of_module).collect()
    }
}

fn tensor(values: Vec<f32>, device: &Device) -> Tensor<1> {
    let len = values.len();
    Tensor::from_data(TensorData::new(values, [len]), device)
}

/// Uniform in ±1/√in (He et al. 2015 with a leaky slope of √5), a pure function of the key.
fn uniform(shape: &[usize], key: &[u64]) -> Vec<f32> {
    let bound = 1.0 / (shape.last().copied().unwrap_or(1).max(1) as f64).sqrt();
    let rng = Rng::new(key);
    let len = shape.iter().product::<usize>() as u64;
    (0..len).into_par_iter().map(|at| ((2.0 * rng.uniform(at) - 1.0) * bound) as f32).collect()
}
