//! `config.json`: the hub's spelling (`rope_theta`, `rope_scaling`, `torch_dtype`) and the one of
//! transformers 5 (`rope_parameters`, `dtype`).

use std::path::Path;

use serde_json::{Map, Value, json};

use super::fields::Fields;
use super::{Llama3Scaling, MODEL_TYPES, ModelConfig, RopeConfig};
use crate::{Error, Result};

/// Keys that change the mathematics, with the value that leaves it alone. Anything else is refused.
fn neutral_values() -> [(&'static str, Value); 14] {
    [
        ("hidden_act", json!("silu")),
        ("pretraining_tp", json!(1)),
        ("attention_dropout", json!(0.0)),
        ("hidden_dropout", json!(0.0)),
        ("partial_rotary_factor", json!(1.0)),
        ("attention_multiplier", json!(1.0)),
        ("embedding_multiplier", json!(1.0)),
        ("residual_multiplier", json!(1.0)),
        ("logits_scaling", json!(1.0)),
        ("logit_scale", json!(1.0)),
        ("final_logit_softcapping", Value::Null),
        ("attn_logit_softcapping", Value::Null),
        ("clip_qkv", Value::Null),
        ("quantization_config", Value::Null),
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
        let Some(model_type) = known_model_type(&mut fields) else {
            return Err(Error::format(path, fields.problems.join("; ")));
        };
        refuse_changed_mathematics(&mut fields);
        let config = read(model_type, &mut fields, value);
        let mut problems = fields.problems;
        problems.extend(config.problems());
        if problems.is_empty() { Ok(config) } else { Err(Error::format(path, problems.join("; "))) }
    }

    /// The configuration as a `config.json` that every version of transformers reads: the keys
    /// that it was read from, with this configuration's values over them.
    pub fn to_json(&self) -> Value {
        let mut object = self.extra.as_object().cloned().unwrap_or_default();
        let architecture =
            if self.num_labels.is_some() { "LlamaForSequenceClassification" } else { "LlamaForCausalLM" };
        let keys = [
            ("architectures", json!([architecture])),
            ("model_type", json!(self.model_type)),
            ("vocab_size", json!(self.vocab_size)),
            ("hidden_size", json!(self.hidden_size)),
            ("intermediate_size", json!(self.intermediate_size)),
            ("num_hidden_layers", json!(self.num_layers)),
            ("num_attention_heads", json!(self.num_heads)),
            ("num_key_value_heads", json!(self.num_kv_heads)),
            ("head_dim", json!(self.head_dim)),
            ("hidden_act", json!("silu")),
            ("max_position_embeddings", json!(self.max_positions)),
            ("rms_norm_eps", number(self.rms_norm_eps)),
            ("tie_word_embeddings", json!(self.tie_embeddings)),
            ("attention_bias", json!(self.attention_bias)),
            ("mlp_bias", json!(self.mlp_bias)),
            ("bos_token_id", json!(self.bos_token_id)),
            ("eos_token_id", one_or_many(&self.eos_token_ids)),
            ("pad_token_id", json!(self.pad_token_id)),
        ];
        object.extend(keys.map(|(key, value)| (key.to_string(), value)));
        self.write_rope(&mut object);
        self.write_labels(&mut object);
        Value::Object(object)
    }

    /// Both spellings, which agree: transformers 4 and the engines read the first, transformers 5
    /// the second.
    fn write_rope(&self, object: &mut Map<String, Value>) {
        let mut parameters = Map::new();
        if let Some(scaling) = self.rope.scaling {
            parameters.insert("rope_type".into(), json!("llama3"));
            parameters.insert("factor".into(), number(scaling.factor));
            parameters.insert("low_freq_factor".into(), number(scaling.low_freq_factor));
            parameters.insert("high_freq_factor".into(), number(scaling.high_freq_factor));
            let original = json!(scaling.original_max_positions);
            parameters.insert("original_max_position_embeddings".into(), original);
        }
        let scaling = if parameters.is_empty() { Value::Null } else { Value::Object(parameters.clone()) };
        object.insert("rope_scaling".into(), scaling);
        object.insert("rope_theta".into(), number(self.rope.theta));
        parameters.entry("rope_type").or_insert_with(|| json!("default"));
        parameters.insert("rope_theta".into(), number(self.rope.theta));
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

/// An f32 with its own shortest decimal digits: 1e-5 stays 1e-5, not 9.999999747378752e-6.
fn number(value: f32) -> Value {
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

fn known_model_type(fields: &mut Fields<'_>) -> Option<String> {
    let known = MODEL_TYPES.join(", ");
    let Some(model_type) = fields.text("model_type") else {
        fields.problems.push(format!("model_type is missing; known model types: {known}"));
        return None;
    };
    if !MODEL_TYPES.contains(&model_type) {
        fields
            .problems
            .push(format!("model_type {model_type:?} is not supported; known model types: {known}"));
        return None;
    }
    Some(model_type.to_string())
}

fn refuse_changed_mathematics(fields: &mut Fields<'_>) {
    for (key, neutral) in neutral_values() {
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
}

fn read(model_type: String, fields: &mut Fields<'_>, value: &Value) -> ModelConfig {
    let hidden_size = fields.size("hidden_size");
    let num_heads = fields.size("num_attention_heads");
    let head_dim = fields.optional_size("head_dim");
    if head_dim.is_none() && num_heads != 0 && !hidden_size.is_multiple_of(num_heads) {
        let sizes = format!("hidden_size {hidden_size} by num_attention_heads {num_heads}");
        fields.problems.push(format!("head_dim is missing, and cannot be {sizes}"));
    }
    ModelConfig {
        model_type,
        vocab_size: fields.size("vocab_size"),
        hidden_size,
        intermediate_size: fields.size("intermediate_size"),
        num_layers: fields.size("num_hidden_layers"),
        num_heads,
        num_kv_heads: fields.optional_size("num_key_value_heads").unwrap_or(num_heads),
        head_dim: head_dim.unwrap_or(hidden_size / num_heads.max(1)),
        max_positions: fields.optional_size("max_position_embeddings").unwrap_or(2048),
        rms_norm_eps: fields.optional_number("rms_norm_eps").unwrap_or(1e-6),
        rope: read_rope(fields),
        tie_embeddings: fields.flag("tie_word_embeddings"),
        attention_bias: fields.flag("attention_bias"),
        mlp_bias: fields.flag("mlp_bias"),
        bos_token_id: fields.token("bos_token_id"),
        eos_token_ids: fields.tokens("eos_token_id"),
        pad_token_id: fields.token("pad_token_id"),
        num_labels: read_labels(fields),
        adapter: None,
        extra: value.clone(),
    }
}

/// Outputs of the scalar head, where `architectures` names one.
fn read_labels(fields: &mut Fields<'_>) -> Option<usize> {
    let architecture = match fields.get("architectures") {
        Some(Value::Array(list)) => list.first().and_then(Value::as_str).unwrap_or("LlamaForCausalLM"),
        _ => "LlamaForCausalLM",
    };
    match architecture {
        "LlamaForCausalLM" => None,
        // transformers leaves `id2label` out where it holds the default two labels.
        "LlamaForSequenceClassification" => {
            let labels = fields.object("id2label").map(Map::len);
            Some(labels.or(fields.optional_size("num_labels")).unwrap_or(2))
        }
        other => {
            fields.problems.push(format!(
                "architectures: {other:?} is not supported; known are LlamaForCausalLM and \
                 LlamaForSequenceClassification"
            ));
            None
        }
    }
}

/// Rotary settings from either spelling; where both are present they must agree.
fn read_rope(fields: &mut Fields<'_>) -> RopeConfig {
    let theta = fields.optional_number("rope_theta");
    let hub = fields.object("rope_scaling").map(|object| read_scaling(fields, object, "rope_scaling."));
    let new = fields.object("rope_parameters").map(|object| read_scaling(fields, object, "rope_parameters."));
    let new_theta = new.and_then(|(theta, _)| theta);
    if let (Some(one), Some(other)) = (theta, new_theta)
        && one.to_bits() != other.to_bits()
    {
        fields.problems.push(format!("rope_theta is {one}, but rope_parameters.rope_theta is {other}"));
    }
    let (hub, new) = (hub.map(|(_, scaling)| scaling), new.map(|(_, scaling)| scaling));
    if let (Some(one), Some(other)) = (hub, new)
        && one != other
    {
        fields.problems.push("rope_scaling and rope_parameters disagree".into());
    }
    RopeConfig { theta: theta.or(new_theta).unwrap_or(10_000.0), scaling: new.or(hub).flatten() }
}

/// The base, where it is in the object, and the scaling, where there is one.
fn read_scaling(
    fields: &mut Fields<'_>,
    object: &Map<String, Value>,
    prefix: &'static str,
) -> (Option<f32>, Option<Llama3Scaling>) {
    let mut inner = Fields::new(object, prefix);
    let theta = inner.optional_number("rope_theta");
    if inner.optional_number("partial_rotary_factor").is_some_and(|factor| factor < 1.0) {
        inner.problems.push(format!("{prefix}partial_rotary_factor below 1 is not supported"));
    }
    let kind = inner.text("rope_type").or_else(|| inner.text("type")).unwrap_or("default");
    let scaling = match kind {
        "llama3" => Some(Llama3Scaling {
            factor: inner.number("factor").unwrap_or(1.0),
            low_freq_factor: inner.number("low_freq_factor").unwrap_or(1.0),
            high_freq_factor: inner.number("high_freq_factor").unwrap_or(4.0),
            original_max_positions: inner.size("original_max_position_embeddings"),
        }),
        "default" => None,
        other => {
            let message =
                format!("{prefix}rope_type {other:?} is not supported; known are default and llama3");
            inner.problems.push(message);
            None
        }
    };
    fields.problems.append(&mut inner.problems);
    (theta, scaling)
}

#[cfg(test)]
#[path = "json_tests.rs"]
mod tests;
