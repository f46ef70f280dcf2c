//! `config.json`: the hub's spelling (`rope_theta`, `rope_scaling`, `torch_dtype`) and the one of
//! transformers 5 (`rope_parameters`, `dtype`).

use std::path::Path;

use serde_json::{Map, Value, json};

use super::fields::{Fields, spelled};
use super::{ModelConfig, RopeConfig, grids};
use crate::model::{Family, MODEL_TYPES};
use crate::ops::Activation;
use crate::{Error, Result};

/// Those of the common keys that change the mathematics: a family reads them, or says that it lacks them.
const COMMON: [&str; 2] = ["attention_bias", "mlp_bias"];

/// Keys that change the mathematics, with the value that leaves it alone. A family reads some of them; of the
/// others, anything else is refused.
fn neutral_values() -> [(&'static str, Value); 35] {
    [
        ("pretraining_tp", json!(1)),
        ("attention_bias", json!(false)),
        ("mlp_bias", json!(false)),
        ("qkv_bias", json!(false)),
        ("attention_dropout", json!(0.0)),
        ("hidden_dropout", json!(0.0)),
        ("attn_pdrop", json!(0.0)),
        ("resid_pdrop", json!(0.0)),
        ("embd_pdrop", json!(0.0)),
        ("partial_rotary_factor", json!(1.0)),
        ("rope_local_base_freq", Value::Null),
        ("use_mrope", json!(false)),
        ("attention_multiplier", json!(1.0)),
        ("embedding_multiplier", json!(1.0)),
        ("residual_multiplier", json!(1.0)),
        ("logits_scaling", json!(1.0)),
        ("logit_scale", json!(1.0)),
        ("query_pre_attn_scalar", Value::Null),
        ("scale_attn_weights", json!(true)),
        ("scale_attn_by_inverse_layer_idx", json!(false)),
        ("final_logit_softcapping", Value::Null),
        ("attn_logit_softcapping", Value::Null),
        ("clip_qkv", Value::Null),
        ("qk_layernorm", json!(false)),
        ("sliding_window", Value::Null),
        ("use_sliding_window", json!(false)),
        ("use_bidirectional_attention", json!(false)),
        ("add_cross_attention", json!(false)),
        ("num_experts", Value::Null),
        ("num_local_experts", Value::Null),
        ("num_experts_per_tok", Value::Null),
        ("shared_expert_intermediate_size", Value::Null),
        ("router_jitter_noise", json!(0.0)),
        ("text_config", Value::Null),
        ("compression_config", Value::Null),
    ]
}

impl ModelConfig {
    /// Reads the content of a `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// [`Error::Format`] lists every missing key, wrong type, unusable size and unsupported
    /// setting at once.
    pub fn from_json(path: &Path, value: &Value) -> Result<Self> {
        let Some(object) = value.as_object() else {
            return Err(Error::format(path, "expected a JSON object"));
        };
        let mut fields = Fields::new(object, "");
        let Some(family) = known_family(&mut fields) else {
            return Err(Error::format(path, fields.problems.join("; ")));
        };
        let mut fields = fields.spelled(family.keys.spelling);
        refuse_changed_mathematics(family, &mut fields);
        fields.problems.extend(grids(object).err());
        let mut config = read(family, &mut fields, value);
        (family.keys.read)(&mut fields, &mut config);
        let mut problems = fields.problems;
        problems.extend(config.problems());
        if problems.is_empty() { Ok(config) } else { Err(Error::format(path, problems.join("; "))) }
    }

    /// The configuration as a `config.json` that every version of transformers reads: the keys
    /// that it was read from, with this configuration's values over them.
    pub fn to_json(&self) -> Value {
        let mut object = self.extra.as_object().cloned().unwrap_or_default();
        let keys = &self.family.keys;
        // Two names of one function: the file's own stays.
        let known = object.get(spelled(keys.spelling, "hidden_act")).cloned();
        let activation = known.unwrap_or_else(|| json!(activation_names(self.family)[0]));
        let values = [
            ("architectures", json!([architecture(self.family, self.num_labels.is_some())])),
            ("model_type", json!(self.model_type())),
            ("vocab_size", json!(self.vocab_size)),
            ("hidden_size", json!(self.hidden_size)),
            ("intermediate_size", json!(self.intermediate_size)),
            ("num_hidden_layers", json!(self.num_layers)),
            ("num_attention_heads", json!(self.num_heads)),
            ("num_key_value_heads", json!(self.num_kv_heads)),
            ("head_dim", json!(self.head_dim)),
            ("hidden_act", activation),
            ("max_position_embeddings", json!(self.max_positions)),
            ("rms_norm_eps", number(self.rms_norm_eps)),
            ("tie_word_embeddings", json!(self.tie_embeddings)),
            ("attention_bias", json!(self.attention_bias)),
            ("mlp_bias", json!(self.mlp_bias)),
            ("bos_token_id", json!(self.bos_token_id)),
            ("eos_token_id", one_or_many(&self.eos_token_ids)),
            ("pad_token_id", json!(self.pad_token_id)),
        ];
        let has = |(key, _): &(&str, Value)| !keys.absent.contains(key);
        let own = |(key, value): (&str, Value)| (spelled(keys.spelling, key).to_string(), value);
        object.extend(values.into_iter().filter(has).map(own));
        if self.family.parts.rotary {
            self.write_rope(&mut object);
        }
        self.write_labels(&mut object);
        Value::Object(object)
    }

    /// Both spellings, which agree: transformers 4 and the engines read the first, transformers 5
    /// the second.
    fn write_rope(&self, object: &mut Map<String, Value>) {
        let mut parameters = rope_parameters(&self.rope);
        let scaling = self.rope.scaling.map_or(Value::Null, |_| {
            let mut scaling = parameters.clone();
            scaling.shift_remove("rope_theta");
            Value::Object(scaling)
        });
        object.insert("rope_scaling".into(), scaling);
        object.insert("rope_theta".into(), number(self.rope.theta));
        if let Some(local) = &self.local_rope {
            object.insert("rope_local_base_freq".into(), number(local.theta));
            let both = [("full_attention", parameters), ("sliding_attention", rope_parameters(local))];
            parameters = both.map(|(kind, own)| (kind.to_string(), Value::Object(own))).into_iter().collect();
        }
        object.insert("rope_parameters".into(), Value::Object(parameters));
    }

    fn write_labels(&self, object: &mut Map<String, Value>) {
        let labels = self.num_labels.unwrap_or(0);
        let known = object.get("id2label").and_then(Value::as_object).map_or(0, Map::len);
        if known == labels {
            return;
        }
        for key in ["id2label", "label2id", "num_labels"] {
            object.shift_remove(key);
        }
        if labels > 0 {
            let ids = (0..labels).map(|at| (at.to_string(), json!(format!("LABEL_{at}"))));
            object.insert("id2label".into(), Value::Object(ids.collect()));
            let names = (0..labels).map(|at| (format!("LABEL_{at}"), json!(at)));
            object.insert("label2id".into(), Value::Object(names.collect()));
        }
    }
}

/// Rotary settings as transformers 5 spells them.
fn rope_parameters(rope: &RopeConfig) -> Map<String, Value> {
    let mut parameters = Map::new();
    let kind = if rope.scaling.is_some() { "llama3" } else { "default" };
    parameters.insert("rope_type".into(), json!(kind));
    if let Some(scaling) = rope.scaling {
        parameters.insert("factor".into(), number(scaling.factor));
        parameters.insert("low_freq_factor".into(), number(scaling.low_freq_factor));
        parameters.insert("high_freq_factor".into(), number(scaling.high_freq_factor));
        let original = json!(scaling.original_max_positions);
        parameters.insert("original_max_position_embeddings".into(), original);
    }
    parameters.insert("rope_theta".into(), number(rope.theta));
    parameters
}

/// The class of transformers that a model is.
fn architecture(family: &Family, scores: bool) -> String {
    let end = if scores { family.keys.score_class } else { family.keys.language_class };
    format!("{}{end}", family.class)
}

/// An f32 with its own shortest decimal digits: 1e-5 stays 1e-5, not 9.999999747378752e-6.
pub(super) fn number(value: f32) -> Value {
    let shortest: f64 = value.to_string().parse().unwrap_or(f64::from(value));
    json!(shortest)
}

fn one_or_many(ids: &[u32]) -> Value {
    match ids {
        [] => Value::Null,
        [id] => json!(id),
        ids => json!(ids),
    }
}

/// What `hidden_act` may say of a family.
fn activation_names(family: &Family) -> [&'static str; 2] {
    match family.parts.activation {
        Activation::Silu => ["silu", "swish"],
        Activation::GeluTanh => ["gelu_pytorch_tanh", "gelu_new"],
    }
}

fn known_family(fields: &mut Fields<'_>) -> Option<&'static Family> {
    let known = MODEL_TYPES.join(", ");
    let Some(model_type) = fields.text("model_type") else {
        fields.problems.push(format!("model_type is missing; known model types: {known}"));
        return None;
    };
    let family = Family::of(model_type);
    if family.is_none() {
        fields
            .problems
            .push(format!("model_type {model_type:?} is not supported; known model types: {known}"));
    }
    family
}

fn refuse_changed_mathematics(family: &Family, fields: &mut Fields<'_>) {
    let keys = &family.keys;
    let read = |key: &str| (COMMON.contains(&key) && !keys.absent.contains(&key)) || keys.own.contains(&key);
    for (key, neutral) in neutral_values().into_iter().filter(|(key, _)| !read(key)) {
        let Some(value) = fields.get(key) else { continue };
        let same = value == &neutral || neutral.as_f64().is_some_and(|x| value.as_f64() == Some(x));
        if same {
            continue;
        }
        // A quantisation table can be long; its name says enough.
        let value = if value.is_object() { "an object".to_string() } else { value.to_string() };
        let only = if neutral.is_null() { "its absence".to_string() } else { neutral.to_string() };
        fields.problems.push(format!("{key}: {value} changes the model; only {only} is supported"));
    }
    let names = activation_names(family);
    let other = |value: &&Value| !value.as_str().is_some_and(|name| names.contains(&name));
    if let Some(value) = fields.get("hidden_act").filter(other) {
        let (key, only) = (spelled(keys.spelling, "hidden_act"), names[0]);
        fields.problems.push(format!("{key}: {value} changes the model; only \"{only}\" is supported"));
    }
    if !keys.own.contains(&"layer_types")
        && let Some(types) = fields.texts("layer_types")
        && let Some(kind) = types.into_iter().find(|kind| *kind != "full_attention")
    {
        let model_type = family.model_type;
        fields.problems.push(format!("layer_types: {kind:?} is not supported in a {model_type}"));
    }
}

fn read(family: &'static Family, fields: &mut Fields<'_>, value: &Value) -> ModelConfig {
    let (defaults, absent) = (family.keys.defaults, family.keys.absent);
    let hidden_size = fields.size("hidden_size");
    let num_heads = fields.size("num_attention_heads");
    let head_dim = fields.optional_size("head_dim").or(defaults.head_dim);
    if head_dim.is_none() && num_heads != 0 && !hidden_size.is_multiple_of(num_heads) {
        let own = |key| spelled(family.keys.spelling, key);
        let [width, heads] = [own("hidden_size"), own("num_attention_heads")];
        let sizes = format!("{width} {hidden_size} by {heads} {num_heads}");
        fields.problems.push(format!("head_dim is missing, and cannot be {sizes}"));
    }
    let has_bias = |fields: &mut Fields<'_>, key: &str| !absent.contains(&key) && fields.flag(key);
    let attention_bias = has_bias(fields, "attention_bias");
    let width = fields.optional_size("intermediate_size");
    if width.is_none() && fields.get("intermediate_size").is_none() && !absent.contains(&"intermediate_size")
    {
        fields.missing("intermediate_size");
    }
    ModelConfig {
        family,
        vocab_size: fields.size("vocab_size"),
        hidden_size,
        intermediate_size: width.unwrap_or(1),
        num_layers: fields.size("num_hidden_layers"),
        num_heads,
        num_kv_heads: fields.optional_size("num_key_value_heads").unwrap_or(num_heads),
        head_dim: head_dim.unwrap_or(hidden_size / num_heads.max(1)),
        max_positions: fields.optional_size("max_position_embeddings").unwrap_or(defaults.max_positions),
        rms_norm_eps: fields.optional_number("rms_norm_eps").unwrap_or(defaults.norm_epsilon),
        rope: fields.rope(defaults.rope_theta),
        local_rope: None,
        window: None,
        local_layers: Vec::new(),
        attention_scale: None,
        attention_softcap: None,
        logit_softcap: None,
        experts: None,
        tie_embeddings: match fields.get("tie_word_embeddings") {
            Some(_) => fields.flag("tie_word_embeddings"),
            None => defaults.tie_embeddings,
        },
        attention_bias,
        output_bias: attention_bias,
        mlp_bias: has_bias(fields, "mlp_bias"),
        bos_token_id: fields.token("bos_token_id"),
        eos_token_ids: fields.tokens("eos_token_id"),
        pad_token_id: fields.token("pad_token_id"),
        num_labels: read_labels(family, fields),
        adapter: None,
        extra: unquantized(value),
    }
}

/// What is kept for writing: weights are decoded as they are read, and what is written of them is plain numbers.
fn unquantized(value: &Value) -> Value {
    let mut value = value.clone();
    if let Some(object) = value.as_object_mut() {
        object.shift_remove("quantization_config");
    }
    value
}

/// Outputs of the scalar head, where `architectures` names one.
fn read_labels(family: &Family, fields: &mut Fields<'_>) -> Option<usize> {
    let [language, classifier] = [false, true].map(|scores| architecture(family, scores));
    let named = match fields.get("architectures") {
        Some(Value::Array(list)) => list.first().and_then(Value::as_str).unwrap_or(&language),
        _ => &language,
    };
    if named == language {
        return None;
    }
    if named == classifier {
        // transformers leaves `id2label` out where it holds the default two labels.
        let labels = fields.object("id2label").map(Map::len);
        return Some(labels.or(fields.optional_size("num_labels")).unwrap_or(2));
    }
    let known = format!("known are {language} and {classifier}");
    fields.problems.push(format!("architectures: {named:?} is not supported; {known}"));
    None
}

#[cfg(test)]
#[path = "json_tests.rs"]
mod tests;
