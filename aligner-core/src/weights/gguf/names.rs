//! GGUF's names of parameters, and what its files do to their elements: one map for all families, from what their
//! layers are made of.

use std::borrow::Cow;

use crate::model::ModelConfig;
use crate::model::exec::NormKind;
use crate::model::family::{MlpNames, Parts, Qkv};

/// A part of a layer under both its names, without `.weight` and `.bias`; of experts with `{}` for the number.
struct Part {
    hub: Cow<'static, str>,
    stored: &'static str,
    kind: Kind,
}

/// What a tensor is, as far as files treat it in a way of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Norm,
    Linear,
    /// A linear whose rows are rotated by position.
    Rotated,
    /// That of every expert, in one tensor.
    Expert,
    /// A linear of one output, which is stored as a vector.
    Opening,
    Table,
}

/// How stored elements become a model's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Plain,
    /// Rows that are rotated together are neighbours; of heads so wide.
    Interleaved(usize),
    /// A norm's weight with the one added that the norm adds.
    PlusOne,
}

/// Where a parameter is in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) stored: String,
    /// Which of the tensor's matrices.
    pub(crate) expert: Option<usize>,
    pub(crate) form: Form,
    /// Whether the stored tensor has one dimension where the parameter has two.
    pub(crate) is_row: bool,
    /// Whether Hugging Face's files have it the other way round than the model and GGUF.
    pub(crate) transposed: bool,
}

/// A stored tensor: what its name says.
pub(super) struct Stored {
    /// The parameter's name; of experts with `{}` for the number.
    pub(super) hub: String,
    pub(super) place: Place,
    /// Dimensions that it may have.
    pub(super) dimensions: &'static [usize],
}

/// Both names of everything that a family's files may have.
pub(crate) struct Names<'a> {
    config: &'a ModelConfig,
    outer: Vec<Part>,
    layer: Vec<Part>,
}

impl<'a> Names<'a> {
    pub(crate) fn of(config: &'a ModelConfig) -> Self {
        let parts = &config.family.parts;
        Self { config, outer: outer_parts(parts), layer: layer_parts(parts) }
    }

    /// What a stored tensor is; none where the family has no such.
    pub(super) fn stored(&self, name: &str) -> Option<Stored> {
        let parts = &self.config.family.parts;
        let (rest, end) = name.rsplit_once('.')?;
        if !["weight", "bias"].contains(&end) {
            return None;
        }
        let (part, hub) = if let Some(rest) = rest.strip_prefix("blk.") {
            let (layer, module) = rest.split_once('.')?;
            let layer: usize = layer.parse().ok()?;
            let part = self.layer.iter().find(|part| part.stored == module)?;
            (part, format!("{}.{}.{layer}.{}.{end}", parts.base, parts.layers, part.hub))
        } else if rest == "output" {
            (&HEAD, format!("{}.{end}", HEAD.hub))
        } else {
            let part = self.outer.iter().find(|part| part.stored == rest)?;
            (part, format!("{}.{}.{end}", parts.base, part.hub))
        };
        let dimensions: &[usize] = match (part.kind, end) {
            (Kind::Norm, _) | (Kind::Linear | Kind::Rotated, "bias") => &[1],
            (Kind::Linear | Kind::Rotated | Kind::Table, "weight") => &[2],
            (Kind::Expert, "weight") => &[3],
            (Kind::Opening, "weight") => &[1, 2],
            _ => return None,
        };
        Some(Stored { hub, place: self.place(part, name.into(), end), dimensions })
    }

    /// Where a parameter is stored.
    pub(crate) fn place_of(&self, parameter: &str) -> Option<Place> {
        let parts = &self.config.family.parts;
        let (rest, end) = parameter.rsplit_once('.')?;
        if rest == HEAD.hub {
            return Some(self.place(&HEAD, format!("output.{end}"), end));
        }
        let rest = rest.strip_prefix(parts.base)?.strip_prefix('.')?;
        if let Some(part) = self.outer.iter().find(|part| part.hub == rest) {
            return Some(self.place(part, format!("{}.{end}", part.stored), end));
        }
        let (layer, module) = rest.strip_prefix(parts.layers)?.strip_prefix('.')?.split_once('.')?;
        let (part, expert) = self.layer.iter().find_map(|part| match part.kind {
            Kind::Expert => expert_of(&part.hub, module).map(|expert| (part, Some(expert))),
            _ => (part.hub == module).then_some((part, None)),
        })?;
        let place = self.place(part, format!("blk.{layer}.{}.{end}", part.stored), end);
        Some(Place { expert, ..place })
    }

    fn place(&self, part: &Part, stored: String, end: &str) -> Place {
        let family = self.config.family;
        let form = match part.kind {
            Kind::Norm if family.parts.norm == NormKind::RmsPlusOne => Form::PlusOne,
            Kind::Rotated if family.gguf.interleaved => Form::Interleaved(self.config.head_dim),
            _ => Form::Plain,
        };
        let is_linear = matches!(part.kind, Kind::Linear | Kind::Rotated) && part.hub != HEAD.hub;
        Place {
            stored,
            expert: None,
            form,
            is_row: part.kind == Kind::Opening,
            transposed: family.parts.transposed && is_linear && end == "weight",
        }
    }
}

/// The number of an expert's linear, where `module` is one of `hub`, which has `{}` in its place.
fn expert_of(hub: &str, module: &str) -> Option<usize> {
    let (before, after) = hub.split_once("{}")?;
    module.strip_prefix(before)?.strip_suffix(after)?.parse().ok()
}

const HEAD: Part = Part { hub: Cow::Borrowed("lm_head"), stored: "output", kind: Kind::Linear };

fn outer_parts(parts: &Parts) -> Vec<Part> {
    let mut outer = vec![
        Part { hub: parts.embedding.into(), stored: "token_embd", kind: Kind::Table },
        Part { hub: parts.last_norm.into(), stored: "output_norm", kind: Kind::Norm },
    ];
    outer.extend(parts.positions.map(|hub| Part {
        hub: hub.into(),
        stored: "position_embd",
        kind: Kind::Table,
    }));
    outer
}

fn layer_parts(parts: &Parts) -> Vec<Part> {
    let mut layer = Vec::new();
    let mut push = |hub: &'static str, stored: &'static str, kind: Kind| {
        layer.push(Part { hub: hub.into(), stored, kind });
    };
    let norms = [
        (parts.attention_norms.before, "attn_norm"),
        (parts.attention_norms.after, "post_attention_norm"),
        (parts.mlp_norms.before, "ffn_norm"),
        (parts.mlp_norms.after, "post_ffw_norm"),
        (parts.head_norms.map(|norms| norms.query), "attn_q_norm"),
        (parts.head_norms.map(|norms| norms.key), "attn_k_norm"),
    ];
    for (hub, stored) in norms {
        if let Some(hub) = hub {
            push(hub, stored, Kind::Norm);
        }
    }
    match parts.qkv {
        Qkv::Apart([query, key, value]) => {
            push(query, "attn_q", Kind::Rotated);
            push(key, "attn_k", Kind::Rotated);
            push(value, "attn_v", Kind::Linear);
        }
        Qkv::Fused(all) => push(all, "attn_qkv", Kind::Linear),
    }
    push(parts.output, "attn_output", Kind::Linear);
    let names = match parts.mlp {
        MlpNames::Gated([gate, up, down]) => [Some(gate), Some(up), Some(down)],
        // The linear of both has the name of the second.
        MlpNames::Fused([up, down]) | MlpNames::Plain([up, down]) => [None, Some(up), Some(down)],
    };
    for (hub, stored) in names.into_iter().zip(["ffn_gate", "ffn_up", "ffn_down"]) {
        if let Some(hub) = hub {
            push(hub, stored, Kind::Linear);
        }
    }
    if let Some(experts) = &parts.experts {
        push(experts.router, "ffn_gate_inp", Kind::Linear);
        if let Some(shared) = &experts.shared {
            let stored = ["ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"];
            for (hub, stored) in shared.linears.into_iter().zip(stored) {
                push(hub, stored, Kind::Linear);
            }
            push(shared.opening, "ffn_gate_inp_shexp", Kind::Opening);
        }
        let stored = ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"];
        layer.extend(experts.linears.into_iter().zip(stored).map(|(linear, stored)| {
            let hub = format!("{}.{{}}.{linear}", experts.experts).into();
            Part { hub, stored, kind: Kind::Expert }
        }));
    }
    layer
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn config(model_type: &str, changes: &serde_json::Value) -> ModelConfig {
        let mut json = json!({
            "model_type": model_type, "vocab_size": 10, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            "max_position_embeddings": 32,
        });
        json.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        ModelConfig::from_json("tiny".as_ref(), &json).unwrap()
    }

    #[test]
    fn both_directions_agree_on_every_parameter_of_every_family() {
        // Each family refuses the keys of the others.
        let plain = json!({"n_embd": 16, "n_layer": 2, "n_head": 2, "head_dim": 8});
        let mixtral = json!({"num_local_experts": 3, "num_experts_per_tok": 2});
        let qwen3 = json!({"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8});
        let mut qwen2 = qwen3.clone();
        qwen2["shared_expert_intermediate_size"] = json!(8);
        for model_type in crate::model::MODEL_TYPES {
            let changes = match model_type {
                "mixtral" => &mixtral,
                "qwen2_moe" => &qwen2,
                "qwen3_moe" => &qwen3,
                _ => &plain,
            };
            let config = config(model_type, changes);
            let names = Names::of(&config);
            for spec in crate::model::CausalLm::parameters(&config) {
                let place = names.place_of(&spec.name).unwrap_or_else(|| panic!("{}", spec.name));
                let stored = names.stored(&place.stored).unwrap_or_else(|| panic!("{}", place.stored));
                let hub = stored.hub.replace("{}", &place.expert.unwrap_or(0).to_string());
                assert_eq!(hub, spec.name, "{}", place.stored);
                assert_eq!(stored.place, Place { expert: None, ..place.clone() });
                assert_eq!(place.transposed, spec.transposed, "{}", spec.name);
            }
        }
    }

    #[test]
    fn names_are_those_of_llama_cpp() {
        let llama = config("llama", &json!({}));
        let names = Names::of(&llama);
        for (hub, stored) in [
            ("model.embed_tokens.weight", "token_embd.weight"),
            ("lm_head.weight", "output.weight"),
            ("model.norm.weight", "output_norm.weight"),
            ("model.layers.12.self_attn.k_proj.bias", "blk.12.attn_k.bias"),
            ("model.layers.0.post_attention_layernorm.weight", "blk.0.ffn_norm.weight"),
        ] {
            assert_eq!(names.place_of(hub).unwrap().stored, stored);
            assert_eq!(names.stored(stored).unwrap().hub, hub);
        }
        for unknown in
            ["blk.0.ffn_gate_inp.weight", "blk.x.attn_q.weight", "blk.0.attn_q", "blk.0.attn_q.scale"]
        {
            assert!(names.stored(unknown).is_none(), "{unknown}");
        }
    }
}
