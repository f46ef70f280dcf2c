//! Low-rank adapters that requests name: each adds to the products of its own rows, beside the weights that all share, and may
//! have embeddings, norms and a head in place of the base's.

use std::collections::HashMap;

use aligner_core::model::{Adapter, AdapterModule, CausalLm, Role, SavedParameter};
use aligner_core::ops::AdaptedRows;
use aligner_core::ops::rows::{F32, Weight};
use aligner_core::weights::AdapterCheckpoint;
use aligner_core::{Error, ParamId, Policy as _, Result};

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
    /// The parameters that it has in full, by the places of the base's own.
    saved: HashMap<usize, Vec<f32>>,
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
    /// A name that is taken; an adapter of another model, or with a module in full that is no embedding, norm or head; a file
    /// that cannot be read.
    pub(crate) fn add(&mut self, name: &str, file: &AdapterCheckpoint, weights: &Weights) -> Result<()> {
        if self.find(name).is_some() {
            return Err(Error::Invalid(format!("there is an adapter called `{name}` already")));
        }
        if file.score().is_some() {
            let message = format!("adapter `{name}` has a score head, and the engine draws text");
            return Err(Error::format(file.path(), message));
        }
        let adapter = file.adapter(weights.model.config())?;
        let saved = read_saved(name, &adapter, file, &weights.model)?;
        let additions = read_additions(adapter, file, weights)?;
        self.all.push(Named { name: name.into(), additions, saved });
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

    /// A parameter of the base that an adapter has in full.
    pub(crate) fn saved(&self, adapter: usize, param: ParamId) -> Option<&[f32]> {
        self.all.get(adapter)?.saved.get(&param.index()).map(Vec::as_slice)
    }

    /// The adapters that have one of these parameters in full.
    pub(crate) fn saving(&self, params: &[ParamId]) -> Vec<usize> {
        let has = |own: &Named| params.iter().any(|param| own.saved.contains_key(&param.index()));
        let places = self.all.iter().enumerate();
        places.filter(|(_, own)| has(own)).map(|(at, _)| at).collect()
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

/// What an adapter has in full.
fn read_saved(
    name: &str,
    adapter: &Adapter,
    file: &AdapterCheckpoint,
    model: &CausalLm,
) -> Result<HashMap<usize, Vec<f32>>> {
    let specs = CausalLm::parameters(model.config());
    let of_parameter = |(parameter, _): &SavedParameter| {
        let role = specs.iter().find(|spec| spec.name == *parameter).map(|spec| spec.role);
        if !matches!(role, Some(Role::Embedding | Role::Norm | Role::Head)) {
            let message = format!(
                "adapter `{name}` has {parameter} in full; those of one engine may have embeddings, norms and the head, \
                 and share the base's linears: merge it first (`aligner merge`)"
            );
            return Err(Error::format(file.path(), message));
        }
        let values = finite(file, parameter)?;
        Ok((place(model, parameter)?.index(), values))
    };
    adapter.saved.iter().map(of_parameter).collect()
}

/// What it adds to linears.
fn read_additions(
    adapter: Adapter,
    file: &AdapterCheckpoint,
    weights: &Weights,
) -> Result<HashMap<usize, Addition>> {
    let dora = adapter.config.dora;
    let of_module = |AdapterModule { name, rank, scale, shape }: AdapterModule| {
        let id = place(&weights.model, &format!("{name}.weight"))?;
        let read = |end: &str| finite(file, &format!("{name}{end}"));
        let (a, b) = (read(".lora_A.weight")?, read(".lora_B.weight")?);
        let magnitudes = dora.then(|| read(".lora_magnitude_vector")).transpose()?;
        let gains = magnitudes.map(|magnitudes| {
            let rows = AdaptedRows { weight: weights.own_matrix(id), a: &a, b: &b, scale, shape };
            magnitudes.iter().zip(rows.lengths()).map(|(magnitude, length)| magnitude / length).collect()
        });
        Ok((id.index(), Addition { a, b, shape, rank, scale, gains }))
    };
    adapter.modules.into_iter().map(of_module).collect()
}

fn place(model: &CausalLm, parameter: &str) -> Result<ParamId> {
    model.params().id(parameter).ok_or_else(|| Error::Invalid(format!("the parameters lack {parameter}")))
}

/// A parameter's elements.
fn finite(file: &AdapterCheckpoint, parameter: &str) -> Result<Vec<f32>> {
    let values = file.read(parameter)?;
    if values.iter().all(|value| value.is_finite()) {
        return Ok(values);
    }
    Err(Error::format(file.path(), format!("tensor {parameter} holds NaN or infinity")))
}
