//! The parameters of a model, from its configuration: names, shapes, and what each is for.

use std::collections::{HashMap, HashSet};

use super::exec::NormKind;
use super::family::{ExpertNames, MlpNames, Qkv};
use super::{ModelConfig, lora};
use crate::shard::Split;

/// The ends of the names of a linear's parameters, after the linear's.
const WEIGHT: &str = ".weight";
const BIAS: &str = ".bias";

pub(super) const HEAD: &str = "lm_head.weight";
pub(super) const SCORE: &str = "score.weight";

/// A parameter that a model has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamSpec {
    /// Its name in a Hugging Face checkpoint.
    pub name: String,
    /// Its shape, `[out, in]` for a linear's weight.
    pub shape: Vec<usize>,
    /// How tensor-parallel ranks share it.
    pub split: Split,
    /// Outputs of each linear that is fused in this one, in order: each is split apart. Empty for a plain
    /// parameter.
    pub fused: Vec<usize>,
    /// What it is for.
    pub role: Role,
    /// Its layer; none for embeddings, the last norm and the heads.
    pub layer: Option<usize>,
    /// Whether files have it as `[in, out]`.
    pub transposed: bool,
}

/// What a parameter is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The token embedding, or learned positions.
    Embedding,
    /// A linear of an attention.
    Attention,
    /// A linear of an MLP, or of the expert that every token has.
    Mlp,
    /// The linear that chooses experts, or opens the one that every token has.
    Router,
    /// A linear of this one among a layer's experts.
    Expert(usize),
    /// A norm.
    Norm,
    /// A language-model head or a scalar head.
    Head,
}

impl ParamSpec {
    /// The linear that it is the weight of, where an adapter may add to that: a linear of an attention or of
    /// an MLP. As in PEFT on transformers, a mixture's experts and router have no adapter.
    pub fn adaptable(&self) -> Option<(&str, [usize; 2])> {
        let adaptable = matches!(self.role, Role::Attention | Role::Mlp);
        let shape: [usize; 2] = self.shape.as_slice().try_into().ok().filter(|_| adaptable)?;
        Some((self.name.strip_suffix(WEIGHT)?, shape))
    }

    /// Whether it belongs to a module whose name ends like this, as PEFT reads `modules_to_save`: `norm` is all norms of a
    /// Llama, `model.norm` the last one.
    pub fn is_of_module(&self, name: &str) -> bool {
        self.name.rsplit_once('.').map_or(self.name.as_str(), |(module, _)| module).ends_with(name)
    }

    /// Its `[out, in]` where it may be packed while an adapter is trained: that of a linear of the layers, an expert's
    /// too.
    pub fn packable(&self) -> Option<[usize; 2]> {
        let linear = matches!(self.role, Role::Attention | Role::Mlp | Role::Expert(_));
        self.shape.as_slice().try_into().ok().filter(|_| linear)
    }

    /// The value that it has in a fresh model: none for the matrices, which are random.
    pub(super) fn fresh(&self, config: &ModelConfig) -> Option<f32> {
        match (self.role, self.shape.len()) {
            (_, 2..) => None,
            (Role::Norm, _) if !self.name.ends_with(BIAS) => {
                Some(if config.family.parts.norm == NormKind::RmsPlusOne { 0.0 } else { 1.0 })
            }
            _ => Some(0.0),
        }
    }
}

/// Every parameter of a model, in the order of its `ParamSet`.
pub(super) fn all(config: &ModelConfig) -> Vec<ParamSpec> {
    let mut list = List { config, specs: Vec::new(), layer: None };
    list.embeddings();
    for layer in 0..config.num_layers {
        list.layer(layer, 0..config.experts.as_ref().map_or(0, |experts| experts.count));
    }
    list.ends();
    list.specs
}

/// Names of the layers' linears that an adapter may add to, and `[out, in]` of each, in the parameters' order.
pub(super) fn linears(config: &ModelConfig) -> Vec<(String, [usize; 2])> {
    let linear = |spec: &ParamSpec| spec.adaptable().map(|(name, shape)| (name.to_string(), shape));
    all(config).iter().filter_map(linear).collect()
}

/// How many there are; none where the number does not fit.
pub(super) fn count(config: &ModelConfig) -> Option<usize> {
    count_with(config, config.experts.as_ref().map_or(0, |experts| experts.count))
}

/// How many of them one token meets.
pub(super) fn count_active(config: &ModelConfig) -> Option<usize> {
    count_with(config, config.experts.as_ref().map_or(0, |experts| experts.per_token))
}

/// Without listing them all: the sizes of a file are not checked yet.
fn count_with(config: &ModelConfig, experts: usize) -> Option<usize> {
    let elements = |specs: &[ParamSpec], of_experts: bool| {
        let of = specs.iter().filter(|spec| matches!(spec.role, Role::Expert(_)) == of_experts);
        let size =
            |spec: &ParamSpec| spec.shape.iter().try_fold(1usize, |size, &axis| size.checked_mul(axis));
        of.map(size).try_fold(0usize, |sum, size| sum.checked_add(size?))
    };
    let of_layers = |layer: Option<usize>| {
        let mut list = List { config, specs: Vec::new(), layer: None };
        if let Some(layer) = layer {
            list.layer(layer, 0..1);
        } else {
            list.embeddings();
            list.ends();
        }
        let of_experts = elements(&list.specs, true)?.checked_mul(experts)?;
        elements(&list.specs, false)?.checked_add(of_experts)
    };
    let dense = |layer: &usize| config.experts.as_ref().is_none_or(|experts| experts.is_dense(*layer));
    let mut total = of_layers(None)?;
    for kind in [true, false] {
        let mut layers = (0..config.num_layers).filter(|layer| dense(layer) == kind);
        if let Some(first) = layers.next() {
            total = total.checked_add(of_layers(Some(first))?.checked_mul(1 + layers.count())?)?;
        }
    }
    Some(total)
}

/// How tensor-parallel ranks share each parameter of a model, those of an adapter too.
#[derive(Debug, Clone)]
pub struct Splits {
    params: HashMap<String, (Split, Vec<usize>)>,
    embedding: String,
    experts: HashSet<String>,
}

impl Splits {
    /// Those of a whole model.
    pub fn new(config: &ModelConfig) -> Self {
        let embedding = format!("{}{WEIGHT}", outer_name(config, config.family.parts.embedding));
        let all = all(config);
        let experts = all.iter().filter(|spec| matches!(spec.role, Role::Expert(_)));
        let experts = experts.map(|spec| spec.name.clone()).collect();
        let of = |spec: ParamSpec| (spec.name, (spec.split, spec.fused));
        Self { params: all.into_iter().map(of).collect(), embedding, experts }
    }

    /// The name of the token embedding, which a tied head shares.
    pub fn embedding(&self) -> &str {
        &self.embedding
    }

    /// Whether a parameter is one of a mixture's experts.
    pub fn is_expert(&self, name: &str) -> bool {
        self.experts.contains(name)
    }

    /// How ranks share a parameter; the stream's where nobody knows it.
    pub fn of(&self, name: &str) -> Split {
        let of = |name: &str| self.params.get(name).map_or(Split::Stream, |(split, _)| *split);
        for end in [lora::A, lora::B, lora::MAGNITUDE] {
            let Some(linear) = name.strip_suffix(end) else { continue };
            return match (of(&format!("{linear}{WEIGHT}")), end) {
                (Split::Outputs, lora::A) | (Split::Inputs, lora::B) => Split::Inside,
                (Split::Inputs, lora::MAGNITUDE) => Split::Stream,
                (split, _) => split,
            };
        }
        of(name)
    }

    /// Outputs of each linear that is fused in a parameter of the whole model; empty for a plain one.
    pub fn fused(&self, name: &str) -> &[usize] {
        let linear = [lora::A, lora::B, lora::MAGNITUDE].into_iter().find_map(|end| name.strip_suffix(end));
        let name = linear.map_or_else(|| name.to_string(), |linear| format!("{linear}{WEIGHT}"));
        self.params.get(&name).map_or(&[], |(_, fused)| fused)
    }
}

/// The name of a layer's part.
pub(super) fn layer_name(config: &ModelConfig, layer: usize, part: &str) -> String {
    let parts = &config.family.parts;
    format!("{}.{}.{layer}.{part}", parts.base, parts.layers)
}

/// The name of what stands outside of the layers.
pub(super) fn outer_name(config: &ModelConfig, part: &str) -> String {
    format!("{}.{part}", config.family.parts.base)
}

/// Parameters as they are listed.
struct List<'a> {
    config: &'a ModelConfig,
    specs: Vec<ParamSpec>,
    layer: Option<usize>,
}

impl List<'_> {
    fn push(&mut self, name: String, shape: &[usize], split: Split, role: Role) {
        let (layer, shape) = (self.layer, shape.to_vec());
        self.specs.push(ParamSpec { name, shape, split, fused: Vec::new(), role, layer, transposed: false });
    }

    fn name(&self, part: &str) -> String {
        match self.layer {
            Some(layer) => layer_name(self.config, layer, part),
            None => outer_name(self.config, part),
        }
    }

    fn norm(&mut self, name: Option<&str>, width: usize, split: Split) {
        let Some(name) = name else { return };
        let name = self.name(name);
        self.push(format!("{name}{WEIGHT}"), &[width], split, Role::Norm);
        if self.config.family.parts.norm == NormKind::Layer {
            self.push(format!("{name}{BIAS}"), &[width], split, Role::Norm);
        }
    }

    fn linear(&mut self, name: &str, shape: [usize; 2], bias: bool, split: Split, role: Role) {
        let name = self.name(name);
        self.push(format!("{name}{WEIGHT}"), &shape, split, role);
        if let Some(spec) = self.specs.last_mut() {
            spec.transposed = self.config.family.parts.transposed;
        }
        if bias {
            // What is added to a sum over ranks is added once.
            let split = if split == Split::Inputs { Split::Stream } else { split };
            self.push(format!("{name}{BIAS}"), &shape[..1], split, role);
        }
    }

    /// A linear whose outputs are those of several, one after the other.
    fn fused(&mut self, name: &str, outputs: &[usize], inputs: usize, bias: bool, role: Role) {
        let first = self.specs.len();
        // A sum of sizes that nobody has checked yet.
        let all = outputs.iter().fold(0usize, |sum, &size| sum.saturating_add(size));
        self.linear(name, [all, inputs], bias, Split::Outputs, role);
        self.specs[first..].iter_mut().for_each(|spec| spec.fused = outputs.to_vec());
    }

    fn embeddings(&mut self) {
        let (parts, config) = (&self.config.family.parts, self.config);
        let (name, hidden) = (self.name(parts.embedding), config.hidden_size);
        self.push(format!("{name}{WEIGHT}"), &[config.vocab_size, hidden], Split::Outputs, Role::Embedding);
        if let Some(positions) = parts.positions {
            let name = self.name(positions);
            let shape = [config.max_positions, hidden];
            self.push(format!("{name}{WEIGHT}"), &shape, Split::Stream, Role::Embedding);
        }
    }

    /// The last norm and the head.
    fn ends(&mut self) {
        self.layer = None;
        let (config, hidden) = (self.config, self.config.hidden_size);
        self.norm(Some(config.family.parts.last_norm), hidden, Split::Stream);
        if let Some(labels) = config.num_labels {
            self.push(SCORE.into(), &[labels, hidden], Split::Whole, Role::Head);
        } else if !config.tie_embeddings {
            self.push(HEAD.into(), &[config.vocab_size, hidden], Split::Outputs, Role::Head);
        }
    }

    /// A layer, with the experts of a range.
    fn layer(&mut self, layer: usize, experts: std::ops::Range<usize>) {
        self.layer = Some(layer);
        let (config, parts) = (self.config, &self.config.family.parts);
        let hidden = config.hidden_size;
        self.norm(parts.attention_norms.before, hidden, Split::Stream);
        self.attention();
        match (&config.experts, &parts.experts) {
            (Some(sizes), Some(names)) if !sizes.is_dense(layer) => self.mixture(names, experts),
            _ => self.mlp(parts.mlp, config.intermediate_size),
        }
        self.norm(parts.attention_norms.after, hidden, Split::Stream);
        self.norm(parts.mlp_norms.before, hidden, Split::Stream);
        self.norm(parts.mlp_norms.after, hidden, Split::Stream);
    }

    fn attention(&mut self) {
        let (config, parts) = (self.config, &self.config.family.parts);
        let hidden = config.hidden_size;
        let [q, kv] =
            [config.num_heads, config.num_kv_heads].map(|heads| heads.saturating_mul(config.head_dim));
        match parts.qkv {
            Qkv::Apart(names) => {
                for (name, rows) in names.into_iter().zip([q, kv, kv]) {
                    self.linear(name, [rows, hidden], config.attention_bias, Split::Outputs, Role::Attention);
                }
            }
            Qkv::Fused(name) => {
                self.fused(name, &[q, kv, kv], hidden, config.attention_bias, Role::Attention);
            }
        }
        self.linear(parts.output, [hidden, q], config.output_bias, Split::Inputs, Role::Attention);
        if let Some(norms) = parts.head_norms {
            let [q, kv] = if norms.whole_width { [q, kv] } else { [config.head_dim; 2] };
            let split = if norms.whole_width { Split::Outputs } else { Split::Inside };
            self.norm(Some(norms.query), q, split);
            self.norm(Some(norms.key), kv, split);
        }
    }

    fn mlp(&mut self, names: MlpNames, width: usize) {
        let (hidden, bias) = (self.config.hidden_size, self.config.mlp_bias);
        match names {
            MlpNames::Gated(names) => self.gated(names, width, bias, Role::Mlp),
            MlpNames::Fused([both, down]) => {
                self.fused(both, &[width, width], hidden, bias, Role::Mlp);
                self.linear(down, [hidden, width], bias, Split::Inputs, Role::Mlp);
            }
            MlpNames::Plain([up, down]) => {
                self.linear(up, [width, hidden], bias, Split::Outputs, Role::Mlp);
                self.linear(down, [hidden, width], bias, Split::Inputs, Role::Mlp);
            }
        }
    }

    fn gated(&mut self, [gate, up, down]: [&str; 3], width: usize, bias: bool, role: Role) {
        let hidden = self.config.hidden_size;
        self.linear(gate, [width, hidden], bias, Split::Outputs, role);
        self.linear(up, [width, hidden], bias, Split::Outputs, role);
        self.linear(down, [hidden, width], bias, Split::Inputs, role);
    }

    fn mixture(&mut self, names: &ExpertNames, experts: std::ops::Range<usize>) {
        let (hidden, Some(sizes)) = (self.config.hidden_size, &self.config.experts) else { return };
        self.linear(names.router, [sizes.count, hidden], false, Split::Inside, Role::Router);
        for expert in experts {
            let own = names.linears.map(|linear| format!("{}.{expert}.{linear}", names.experts));
            let own = own.each_ref().map(String::as_str);
            self.gated(own, sizes.intermediate_size, false, Role::Expert(expert));
        }
        if let (Some(shared), Some(width)) = (&names.shared, sizes.shared_intermediate_size) {
            self.gated(shared.linears, width, false, Role::Mlp);
            self.linear(shared.opening, [1, hidden], false, Split::Inside, Role::Router);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn config(changes: &serde_json::Value) -> ModelConfig {
        let mut json = json!({
            "vocab_size": 10, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32,
        });
        json.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        ModelConfig::from_json("tiny".as_ref(), &json).unwrap()
    }

    fn spec<'a>(specs: &'a [ParamSpec], end: &str) -> &'a ParamSpec {
        specs.iter().find(|spec| spec.name.ends_with(end)).unwrap()
    }

    #[test]
    fn ranks_share_outputs_then_inputs_and_a_bias_after_the_sum_is_whole() {
        let specs = all(&config(&json!({"model_type": "llama", "attention_bias": true})));
        for (end, split) in [
            ("embed_tokens.weight", Split::Outputs),
            ("q_proj.weight", Split::Outputs),
            ("q_proj.bias", Split::Outputs),
            ("o_proj.weight", Split::Inputs),
            ("o_proj.bias", Split::Stream),
            ("down_proj.weight", Split::Inputs),
            ("input_layernorm.weight", Split::Stream),
            ("lm_head.weight", Split::Outputs),
        ] {
            assert_eq!(spec(&specs, end).split, split, "{end}");
        }
        assert_eq!(spec(&specs, "1.mlp.up_proj.weight").layer, Some(1));
        assert_eq!(spec(&specs, "model.norm.weight").layer, None);
    }

    #[test]
    fn what_is_counted_is_what_is_listed() {
        for changes in [
            json!({"model_type": "llama", "mlp_bias": true}),
            json!({"model_type": "qwen2", "tie_word_embeddings": true}),
            json!({"model_type": "qwen3"}),
        ] {
            let config = config(&changes);
            let listed: usize = all(&config).iter().map(|spec| spec.shape.iter().product::<usize>()).sum();
            assert_eq!((config.num_params(), config.num_active_params()), (listed, listed), "{changes}");
        }
    }
}
