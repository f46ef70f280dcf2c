//! The weights that the engine runs on: the trainer's own, by handle, or smaller copies of the matrices.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aligner_core::model::{CausalLm, Linear, Lora};
use aligner_core::ops::AdaptedRows;
use aligner_core::ops::host::HostTensor;
use aligner_core::ops::rows::{F32, PackedKind, PackedWeight, Weight};
use aligner_core::{Error, Param, ParamId, ParamSet, Policy as _, Result};

use crate::accelerator::{Accelerator, DeviceWeights};
use crate::config::copied;

/// Copies of a model's parameters, in their order. Versions that share a parameter share its copy.
type Copies = Vec<Option<Arc<PackedWeight>>>;

/// One version of a model's weights where the engine computes.
#[derive(Debug)]
pub(crate) struct Weights {
    pub(crate) model: CausalLm,
    pub(crate) version: u64,
    /// In host memory; empty where the engine computes on an accelerator.
    tensors: Vec<HostTensor>,
    accelerator: Option<Accelerator>,
    /// In the accelerator's memory; absent while the engine is unloaded.
    on_device: Option<DeviceWeights>,
    /// A copy of each matrix of the base, where copies are asked for; vectors and adapters have none.
    packed: Copies,
    /// What each row of an adapted linear is multiplied by, by module; empty where that is nothing.
    gains: Vec<Vec<f32>>,
    /// How long packing took.
    pub(crate) packing: Duration,
    head: ParamId,
}

impl Weights {
    /// Holds the model's parameters, on `accelerator` where there is one. By handle where they lie there,
    /// else converted; no byte is copied on their own device, unless `packed` asks for it.
    ///
    /// # Errors
    /// A model with a scalar head; copies of a kind, or an adapter, that the accelerator does not know.
    pub(crate) fn new(
        model: CausalLm,
        version: u64,
        packed: Option<PackedKind>,
        accelerator: Option<Accelerator>,
    ) -> Result<Self> {
        let mut weights = Self::unpacked(model, version, accelerator)?;
        weights.pack(packed)?;
        Ok(weights)
    }

    fn unpacked(model: CausalLm, version: u64, accelerator: Option<Accelerator>) -> Result<Self> {
        if accelerator.is_some() && model.config().adapter.is_some() {
            return Err(Error::Invalid(
                "the engine runs no adapter on an accelerator yet: merge it first (`aligner merge`)".into(),
            ));
        }
        if let (Some(_), Some(param)) = (&accelerator, model.params().first_packed()) {
            let message = format!("{}: weights in few bits run on the CPU alone", param.name);
            return Err(Error::Invalid(message));
        }
        if let Some(param) = model.params().first_unread() {
            return Err(Error::Invalid(format!("{} has not been read from its file", param.name)));
        }
        let head = model.language_head()?;
        let host = model.params().iter().filter(|_| accelerator.is_none());
        let tensors: Vec<HostTensor> = host.map(|param| HostTensor::new(&param.value)).collect();
        let mut weights = Self {
            model,
            version,
            tensors,
            accelerator,
            on_device: None,
            packed: Vec::new(),
            gains: Vec::new(),
            packing: Duration::ZERO,
            head,
        };
        weights.gains = weights.row_gains()?;
        Ok(weights)
    }

    /// Makes the copies, and takes the parameters to the accelerator.
    ///
    /// # Errors
    /// Copies of a kind that the accelerator does not know.
    pub(crate) fn pack(&mut self, kind: Option<PackedKind>) -> Result<()> {
        self.pack_beside(kind, &Vec::new())
    }

    /// Makes the copies that are not there in `made`.
    fn pack_beside(&mut self, kind: Option<PackedKind>, made: &Copies) -> Result<()> {
        let start = Instant::now();
        if let Some(accelerator) = &self.accelerator {
            self.on_device = Some(DeviceWeights::new(accelerator, &self.model, kind)?);
            self.packing = start.elapsed();
            return Ok(());
        }
        let Some(kind) = kind else { return Ok(()) };
        let copied: HashSet<String> = copied(self.model.config()).map(|spec| spec.name).collect();
        let copy = |(at, (param, tensor)): (usize, (&Param, &HostTensor))| {
            if let Some(Some(made)) = made.get(at) {
                return Some(Arc::clone(made));
            }
            // What the trainer holds in few bits, the engine reads as it is.
            if param.packed.is_some() {
                return None;
            }
            let kind = if at == self.head.index() { kind.of_head() } else { kind };
            match param.shape[..] {
                [outputs, inputs] if copied.contains(&param.name) => {
                    Some(Arc::new(PackedWeight::pack(tensor.as_slice(), [outputs, inputs], kind)))
                }
                _ => None,
            }
        };
        self.packed = self.model.params().iter().zip(&self.tensors).enumerate().map(copy).collect();
        self.packing = start.elapsed();
        Ok(())
    }

    pub(crate) fn is_packed(&self) -> bool {
        !self.packed.is_empty() || self.on_device.is_some()
    }

    /// Frees the copies, on an accelerator all that is not the trainer's own memory.
    pub(crate) fn unpack(&mut self) {
        self.packed = Vec::new();
        self.on_device = None;
    }

    /// The weights on the accelerator that the engine computes on.
    pub(crate) fn on_device(&self) -> Option<&DeviceWeights> {
        self.on_device.as_ref()
    }

    /// Another version of the same model. Parameters that have not moved keep their copies: an adapter's
    /// refit makes none. Where nothing runs on this one any more (`is_last`), the other copies are freed
    /// before the new ones are made: their memory is there once.
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
        let mut next = Self::unpacked(model, version, self.accelerator.clone())?;
        let same =
            |(own, new): (&HostTensor, &HostTensor)| own.as_slice().as_ptr() == new.as_slice().as_ptr();
        // Both versions hold their tensors, so one address is one content.
        let unmoved = self.tensors.iter().zip(&next.tensors).map(same);
        let made: Copies =
            self.packed.iter().zip(unmoved).map(|(copy, same)| copy.clone().filter(|_| same)).collect();
        if is_last {
            self.unpack();
        }
        next.pack_beside(packed, &made)?;
        Ok(next)
    }

    /// The gains of an adapter that trains the rows' lengths apart.
    fn row_gains(&self) -> Result<Vec<Vec<f32>>> {
        let Some(adapter) = self.model.config().adapter.as_ref().filter(|adapter| adapter.config.dora) else {
            return Ok(Vec::new());
        };
        let of_module = |module: &aligner_core::model::AdapterModule| {
            let find = |end: &str| {
                let name = format!("{}{end}", module.name);
                let id = self.model.params().id(&name);
                id.ok_or_else(|| Error::Invalid(format!("the parameters lack {name}")))
            };
            let weight = self.own_matrix(find(".weight")?);
            let [a, b] = [find(".lora_A.weight")?, find(".lora_B.weight")?].map(|id| self.vector(id));
            let rows = AdaptedRows { weight, a, b, scale: module.scale, shape: module.shape };
            let magnitudes = self.vector(find(".lora_magnitude_vector")?);
            Ok(magnitudes.iter().zip(rows.lengths()).map(|(magnitude, length)| magnitude / length).collect())
        };
        adapter.modules.iter().map(of_module).collect()
    }

    /// What each row of a linear with such an adapter is multiplied by, `[out]`.
    pub(crate) fn gain(&self, lora: Lora) -> Option<&[f32]> {
        self.gains.get(lora.module).map(Vec::as_slice)
    }

    /// A parameter's elements.
    pub(crate) fn vector(&self, id: ParamId) -> &[f32] {
        self.tensors[id.index()].as_slice()
    }

    /// A linear's weight, or the copy of it.
    pub(crate) fn matrix(&self, id: ParamId) -> Weight<'_> {
        match self.packed.get(id.index()) {
            Some(Some(packed)) => packed.view(),
            _ => self.own_matrix(id),
        }
    }

    /// A linear's weight as the trainer has it.
    pub(crate) fn own_matrix(&self, id: ParamId) -> Weight<'_> {
        let param = self.model.params().get(id);
        if let Some(packed) = &param.packed {
            return packed.view();
        }
        let inputs = param.shape.last().copied().unwrap_or(1).max(1);
        let data = self.vector(id);
        Weight::F32(F32::new(data, data.len() / inputs, inputs))
    }

    /// The language-model head's parameter.
    pub(crate) fn head_id(&self) -> ParamId {
        self.head
    }

    /// The language-model head's weight, `[vocab, hidden]`.
    pub(crate) fn head(&self) -> Weight<'_> {
        self.matrix(self.head)
    }

    pub(crate) fn bias(&self, layer: Linear) -> Option<&[f32]> {
        layer.bias.map(|bias| self.vector(bias))
    }

    /// The copies.
    pub(crate) fn copies(&self) -> impl Iterator<Item = &Arc<PackedWeight>> {
        self.packed.iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use aligner_core::model::{LoraConfig, ModelConfig};
    use aligner_core::{Device, Tensor};
    use serde_json::json;

    use super::*;
    use crate::EngineConfig;

    #[test]
    fn a_refit_of_an_adapter_shares_every_copy_and_one_of_a_matrix_all_others() {
        let json = json!({
            "model_type": "llama", "vocab_size": 10, "hidden_size": 32, "intermediate_size": 32,
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
            "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
        });
        let config = ModelConfig::from_json("tiny".as_ref(), &json).unwrap();
        let model = CausalLm::init(config, 1, &Device::flex()).unwrap();
        let model = model.with_adapter(LoraConfig::default(), 1).unwrap();
        let kind = Some(PackedKind::Int8);
        let shared = |name: &str| {
            let mut first = Weights::new(model.clone(), 0, kind, None).unwrap();
            let mut params = model.params().clone();
            let param = params.iter_mut().find(|param| param.name == name).unwrap();
            param.value = Tensor::ones([param.elements()], &Device::flex());
            let second = first.refit(&params, 1, kind, false).unwrap();
            let same = first.copies().zip(second.copies()).filter(|(own, new)| Arc::ptr_eq(own, new)).count();
            (same, second.copies().count())
        };
        assert_eq!(shared("model.layers.0.self_attn.q_proj.lora_B.weight"), (8, 8));
        assert_eq!(shared("model.layers.0.self_attn.q_proj.weight"), (7, 8));
    }

    #[test]
    fn a_mixture_has_copies_of_its_experts_and_none_of_its_routers() {
        let json = json!({
            "model_type": "qwen2_moe", "vocab_size": 10, "hidden_size": 32, "intermediate_size": 32,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 3,
            "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32,
        });
        let config = ModelConfig::from_json("tiny".as_ref(), &json).unwrap();
        let model = CausalLm::init(config.clone(), 1, &Device::flex()).unwrap();
        let weights = Weights::new(model, 0, Some(PackedKind::Int8), None).unwrap();
        // Four of the attention, nine of the experts, three of the shared one; and the head.
        assert_eq!(weights.copies().count(), 2 * (4 + 9 + 3) + 1);
        let settings = EngineConfig { packed: Some(PackedKind::Int8), ..EngineConfig::default() };
        let bytes: usize = weights.copies().map(|copy| copy.bytes()).sum();
        // Rows of 16 are no whole groups: they are bf16, which the estimate leaves out.
        assert!(bytes >= settings.packed_bytes(&config), "{bytes} {}", settings.packed_bytes(&config));
    }
}
