//! The weights that the engine runs on: the trainer's own, by handle, or smaller copies of the matrices.

use std::time::{Duration, Instant};

use aligner_core::model::{CausalLm, Linear};
use aligner_core::ops::host::HostTensor;
use aligner_core::ops::rows::{F32, PackedKind, PackedWeight, Weight};
use aligner_core::{Error, Param, ParamId, ParamSet, Policy as _, Result};

/// One version of a model's weights in host memory.
#[derive(Debug)]
pub(crate) struct Weights {
    pub(crate) model: CausalLm,
    pub(crate) version: u64,
    tensors: Vec<HostTensor>,
    /// A copy of each matrix, where copies are asked for; vectors have none.
    packed: Vec<Option<PackedWeight>>,
    /// How long packing took.
    pub(crate) packing: Duration,
    head: ParamId,
}

impl Weights {
    /// Holds the model's parameters: on the CPU device no byte is copied, unless `packed` asks for it.
    ///
    /// # Errors
    /// A model with a scalar head.
    pub(crate) fn new(model: CausalLm, version: u64, packed: Option<PackedKind>) -> Result<Self> {
        let head = model.language_head()?;
        let tensors: Vec<HostTensor> =
            model.params().iter().map(|param| HostTensor::new(&param.value)).collect();
        let mut weights = Self { model, version, tensors, packed: Vec::new(), packing: Duration::ZERO, head };
        weights.pack(packed);
        Ok(weights)
    }

    /// Makes the copies.
    pub(crate) fn pack(&mut self, kind: Option<PackedKind>) {
        let Some(kind) = kind else { return };
        let start = Instant::now();
        let embedding = self.model.body().embedding_id();
        let copy = |(at, (param, tensor)): (usize, (&Param, &HostTensor))| {
            // Rows of the embedding are read where they are; a head's rounding is in every logit.
            let (is_embedding, is_head) = (at == embedding.index(), at == self.head.index());
            let kind = if is_head && kind == PackedKind::Int4 { PackedKind::Int8 } else { kind };
            match param.shape[..] {
                [outputs, inputs] if is_head || !is_embedding => {
                    Some(PackedWeight::pack(tensor.as_slice(), [outputs, inputs], kind))
                }
                _ => None,
            }
        };
        self.packed = self.model.params().iter().zip(&self.tensors).enumerate().map(copy).collect();
        self.packing = start.elapsed();
    }

    pub(crate) fn is_packed(&self) -> bool {
        !self.packed.is_empty()
    }

    /// Frees the copies.
    pub(crate) fn unpack(&mut self) {
        self.packed = Vec::new();
    }

    /// Another version of the same model. Where nothing runs on this one any more (`is_last`), its copies
    /// are freed before the new ones are made: their memory is there once.
    pub(crate) fn refit(
        &mut self,
        params: &ParamSet,
        version: u64,
        packed: Option<PackedKind>,
        is_last: bool,
    ) -> Result<Self> {
        let fits = |(own, new): (&Param, &Param)| own.name == new.name && own.shape == new.shape;
        let own = self.model.params();
        if own.len() != params.len() || !own.iter().zip(params.iter()).all(fits) {
            return Err(Error::Invalid("the new parameters are not this model's".into()));
        }
        let device = self.model.device().clone();
        let model = CausalLm::new(self.model.config().clone(), params.clone(), &device)?;
        if is_last {
            self.unpack();
        }
        Self::new(model, version, packed)
    }

    /// A parameter's elements.
    pub(crate) fn vector(&self, id: ParamId) -> &[f32] {
        self.tensors[id.index()].as_slice()
    }

    /// A linear's weight.
    pub(crate) fn matrix(&self, id: ParamId) -> Weight<'_> {
        if let Some(Some(packed)) = self.packed.get(id.index()) {
            return packed.view();
        }
        let inputs = self.model.params().get(id).shape.last().copied().unwrap_or(1).max(1);
        let data = self.vector(id);
        Weight::F32(F32::new(data, data.len() / inputs, inputs))
    }

    /// The language-model head's weight, `[vocab, hidden]`.
    pub(crate) fn head(&self) -> Weight<'_> {
        self.matrix(self.head)
    }

    pub(crate) fn bias(&self, layer: Linear) -> Option<&[f32]> {
        layer.bias.map(|bias| self.vector(bias))
    }

    /// Bytes of the copies.
    pub(crate) fn packed_bytes(&self) -> usize {
        self.packed.iter().flatten().map(PackedWeight::bytes).sum()
    }
}
