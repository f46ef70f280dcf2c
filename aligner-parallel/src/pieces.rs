//! Which part of each of a model's parameters a rank has, and the way back to the whole.

use aligner_core::model::Splits;
use aligner_core::ops::host::to_vec;
use aligner_core::shard::Split;
use aligner_core::{Communicator, Device, Error, Param, ParamSet, Phase, Reduce, Result, Tensor};

use crate::cut::join;
use crate::{Axis, MeshComms};

const JOIN: Phase = Phase::new("putting parameters together");

/// A model's parameters over the ranks of a mesh.
pub struct Pieces {
    /// Names and shapes of the whole model's parameters, an adapter's among them.
    whole: Vec<(String, Vec<usize>)>,
    splits: Splits,
    comms: MeshComms,
    /// Whether the first and the last pipeline rank both have the embedding.
    is_tied: bool,
}

impl Pieces {
    pub(crate) fn new(whole: &ParamSet, splits: Splits, comms: &MeshComms, is_tied: bool) -> Self {
        let whole = whole.iter().map(|param| (param.name.clone(), param.shape.clone())).collect();
        Self { whole, splits, comms: comms.clone(), is_tied }
    }

    /// How tensor-parallel ranks share parameters.
    pub(crate) fn splits(&self) -> &Splits {
        &self.splits
    }

    /// The mesh's communicators.
    pub fn comms(&self) -> &MeshComms {
        &self.comms
    }

    /// The shape of a parameter of the whole model.
    pub(crate) fn shape(&self, name: &str) -> Option<&[usize]> {
        self.whole.iter().find(|(own, _)| own == name).map(|(_, shape)| shape.as_slice())
    }

    /// Names and shapes of the whole model's parameters.
    pub(crate) fn names(&self) -> &[(String, Vec<usize>)] {
        &self.whole
    }

    /// The largest number that any rank has.
    pub(crate) fn agree(&self, own: Option<u64>) -> Result<Option<u64>> {
        let mut largest = [own.map_or(-1.0, |own| own as f64)];
        self.comms.all().all_reduce_host(&mut largest, Reduce::Max, JOIN)?;
        Ok((largest[0] >= 0.0).then_some(largest[0] as u64))
    }

    fn is_split(&self, name: &str) -> bool {
        matches!(self.splits.of(name), Split::Outputs | Split::Inputs)
            && self.comms.mesh().axis_size(Axis::Tensor) > 1
    }

    /// On how many ranks of the mesh the elements of one rank's `param` are.
    pub fn copies(&self, param: &Param) -> usize {
        let tensor = if self.is_split(&param.name) { 1 } else { self.comms.mesh().axis_size(Axis::Tensor) };
        let ends = if self.is_tied && param.name == self.splits.embedding() { 2 } else { 1 };
        let alike = if self.splits.is_expert(&param.name) {
            self.comms.expert_gradients()
        } else {
            self.comms.gradients()
        };
        tensor * ends * alike.size()
    }

    /// The whole model's parameters from every rank's, or values that are cut like them, on every rank. All ranks
    /// call it together.
    ///
    /// # Errors
    /// What the communicators report.
    pub(crate) fn join_all(&self, own: &ParamSet) -> Result<ParamSet> {
        let mut all = ParamSet::default();
        for (name, shape) in &self.whole {
            let own = own.by_name(name);
            // Whole on every rank.
            if let Some(param) = own.filter(|param| param.packed.is_some()) {
                all.share(param)?;
                continue;
            }
            let values = self.join(name, shape, own.map(|param| &param.value))?;
            all.insert_data(name.as_str(), shape, values, &Device::flex())?;
            if let Some(added) = all.iter_mut().last() {
                added.trainable = own.is_none_or(|param| param.trainable);
            }
        }
        Ok(all)
    }

    /// A tensor of `shape`, cut like the parameter `name`, from its parts; `own` where this rank has one of
    /// them. All ranks call it together.
    pub(crate) fn join(&self, name: &str, shape: &[usize], own: Option<&Tensor<1>>) -> Result<Vec<f32>> {
        let (depth, tensor) = (self.comms.along(Axis::Pipeline), self.comms.along(Axis::Tensor));
        let joined = match own {
            Some(own) if self.is_split(name) => {
                let parts = tensor.all_gather_uneven(own.clone(), JOIN)?;
                Some(join(name, shape, &self.splits, &parts.iter().map(to_vec).collect::<Vec<_>>()))
            }
            Some(own) => Some(to_vec(own)),
            None => None,
        };
        let elements = shape.iter().product();
        let of_experts = if self.splits.is_expert(name) {
            from_owner(self.comms.along(Axis::Expert).as_ref(), joined, elements)?
        } else {
            joined
        };
        let whole = from_owner(depth.as_ref(), of_experts, elements)?;
        whole.ok_or_else(|| Error::Invalid(format!("no rank has a part of {name}")))
    }
}

/// What the last rank that has something has, on all ranks; none where none has.
fn from_owner(comm: &dyn Communicator, own: Option<Vec<f32>>, elements: usize) -> Result<Option<Vec<f32>>> {
    if comm.size() == 1 {
        return Ok(own);
    }
    let mut owner = [if own.is_some() { comm.rank() as f64 } else { -1.0 }];
    comm.all_reduce_host(&mut owner, Reduce::Max, JOIN)?;
    if owner[0] < 0.0 {
        return Ok(None);
    }
    let values = own.unwrap_or_else(|| vec![0.0; elements]);
    let values = Tensor::from_floats(values.as_slice(), &Device::flex());
    Ok(Some(to_vec(&comm.broadcast(values, owner[0] as usize, JOIN)?)))
}
