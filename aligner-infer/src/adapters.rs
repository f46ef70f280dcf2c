//! Low-rank adapters that requests name: each adds to the products of its own rows, beside the weights that all share.

use std::collections::HashMap;

use aligner_core::ops::AdaptedRows;
use aligner_core::ops::rows::{F32, Weight};
use aligner_core::weights::AdapterCheckpoint;
use aligner_core::{Error, Policy as _, Result};

use crate::weights::Weights;

/// The adapters of an engine, in the order in which they were added.
#[derive(Debug, Default)]
pub(crate) struct Adapters {
    all: Vec<Named>,
}

#[derive(Debug)]
struct Named {
    name: String,
    /// What it adds, by the place of the linear's weight among the parameters.
    additions: HashMap<usize, Addition>,
}

/// What an adapter adds to a linear.
#[derive(Debug)]
pub(crate) struct Addition {
    /// `[rank, in]`.
    a: Vec<f32>,
    /// `[out, rank]`.
    b: Vec<f32>,
    /// `[out, in]` of the linear.
    shape: [usize; 2],
    pub(crate) rank: usize,
    pub(crate) scale: f32,
    /// What each output is multiplied by, `[out]`, where the adapter trains the lengths of rows apart.
    pub(crate) gains: Option<Vec<f32>>,
}

impl Addition {
    /// A, `[rank, in]`.
    pub(crate) fn a(&self) -> Weight<'_> {
        Weight::F32(F32::new(&self.a, self.rank, self.shape[1]))
    }

    /// B, `[out, rank]`.
    pub(crate) fn b(&self) -> Weight<'_> {
        Weight::F32(F32::new(&self.b, self.shape[0], self.rank))
    }
}

impl Adapters {
    /// Reads one for the model of these weights.
    ///
    /// # Errors
    /// A name that is taken; an adapter of another model, or with modules of its own in place of the base's; a file
    /// that cannot be read.
    pub(crate) fn add(&mut self, name: &str, file: &AdapterCheckpoint, weights: &Weights) -> Result<()> {
        if self.find(name).is_some() {
            return Err(Error::Invalid(format!("there is an adapter called `{name}` already")));
        }
        let model = &weights.model;
        let adapter = file.adapter(model.config())?;
        let own = adapter.saved.first().map(|(name, _)| name.clone());
        if let Some(saved) = own.or_else(|| file.score().map(|_| "a score head".into())) {
            let message =
                format!("has {saved} of its own, which the adapters of one engine share: merge it first");
            return Err(Error::format(file.path(), message));
        }
        let mut additions = HashMap::new();
        for module in adapter.modules {
            let weight = format!("{}.weight", module.name);
            let id = model.params().id(&weight);
            let id = id.ok_or_else(|| Error::Invalid(format!("the parameters lack {weight}")))?;
            let read = |end: &str| file.read(&format!("{}{end}", module.name));
            let (a, b) = (read(".lora_A.weight")?, read(".lora_B.weight")?);
            let magnitudes = adapter.config.dora.then(|| read(".lora_magnitude_vector")).transpose()?;
            if let Some(end) = [&a, &b].iter().find(|values| values.iter().any(|value| !value.is_finite())) {
                let end = if end.len() == a.len() { "lora_A or lora_B" } else { "lora_B" };
                return Err(Error::format(
                    file.path(),
                    format!("{end} of {} holds NaN or infinity", module.name),
                ));
            }
            let gains = magnitudes.map(|magnitudes| {
                let (scale, shape) = (module.scale, module.shape);
                let rows = AdaptedRows { weight: weights.own_matrix(id), a: &a, b: &b, scale, shape };
                magnitudes.iter().zip(rows.lengths()).map(|(magnitude, length)| magnitude / length).collect()
            });
            let (shape, rank, scale) = (module.shape, module.rank, module.scale);
            additions.insert(id.index(), Addition { a, b, shape, rank, scale, gains });
        }
        self.all.push(Named { name: name.into(), additions });
        Ok(())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// The place of an adapter.
    pub(crate) fn find(&self, name: &str) -> Option<usize> {
        self.all.iter().position(|own| own.name == name)
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.all.iter().map(|own| own.name.as_str())
    }

    /// What the adapter at a place adds to the linear of a weight.
    pub(crate) fn addition(&self, adapter: usize, weight: usize) -> Option<&Addition> {
        self.all.get(adapter)?.additions.get(&weight)
    }

    /// The adapters that add to the linear of a weight.
    pub(crate) fn of_weight(&self, weight: usize) -> impl Iterator<Item = (usize, &Addition)> {
        let addition = move |(at, own): (usize, &'_ Named)| own.additions.get(&weight).map(|_| at);
        let places = self.all.iter().enumerate().filter_map(addition);
        places.filter_map(move |at| Some((at, self.addition(at, weight)?)))
    }

    /// Whether any adapter multiplies the outputs of a linear: its rows are then put together apart from the residual
    /// stream, whichever adapters a batch has.
    pub(crate) fn has_gains(&self, weight: usize) -> bool {
        self.of_weight(weight).any(|(_, addition)| addition.gains.is_some())
    }
}
