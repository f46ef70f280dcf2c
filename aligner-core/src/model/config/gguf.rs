//! The configuration in a GGUF file's metadata.
//!
//! The metadata becomes the `config.json` that the model's own repository would have, so that there is one reader
//! of configurations. What llama.cpp has in code rather than in files is in the families' data.

mod refuse;
mod rope;
mod write;

use serde_json::{Map, Value, json};

use super::fields::spelled;
use super::json::number;
use super::{MAX_LAYERS, ModelConfig};
use crate::model::Family;
use crate::model::families::FAMILIES;
use crate::weights::{Gguf, GgufValue};
use crate::{Error, Result};

/// Divisors of the rotary frequencies, `[head_dim / 2]`.
pub(crate) const ROPE_DIVISORS: &str = "rope_freqs.weight";

/// Sizes: a key behind the architecture's name, and the one of `config.json` in Llama's spelling.
const SIZES: [(&str, &str); 5] = [
    ("context_length", "max_position_embeddings"),
    ("embedding_length", "hidden_size"),
    ("block_count", "num_hidden_layers"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
];

/// Numbers that a file may leave out.
const NUMBERS: [(&str, &str); 3] = [
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
    ("rope.freq_base_swa", "rope_local_base_freq"),
];

/// Token ids.
const TOKENS: [(&str, &str); 2] =
    [("tokenizer.ggml.bos_token_id", "bos_token_id"), ("tokenizer.ggml.padding_token_id", "pad_token_id")];

impl ModelConfig {
    /// Reads the configuration of a GGUF file.
    ///
    /// # Errors
    /// An architecture other than those known, missing keys, unusable sizes, and settings that
    /// change the model in a way that is not supported, all at once.
    pub fn from_gguf(file: &Gguf) -> Result<Self> {
        let divisors = file.shape(ROPE_DIVISORS).map(|_| file.read(ROPE_DIVISORS)).transpose()?;
        Self::from_gguf_header(file, divisors.map(|(_, divisors)| divisors).as_deref())
    }

    /// As [`ModelConfig::from_gguf`], with the divisors of a file that may not be written yet.
    pub(crate) fn from_gguf_header(file: &Gguf, divisors: Option<&[f32]>) -> Result<Self> {
        let family = family_of(file)?;
        let object = Map::from_iter([("model_type".to_string(), json!(family.model_type()))]);
        let mut keys = Keys { file, family, object, problems: Vec::new() };
        keys.refuse_changed_mathematics()?;
        keys.read()?;
        if !keys.problems.is_empty() {
            return Err(Error::format(file.path(), keys.problems.join("; ")));
        }
        let mut config = Self::from_json(file.path(), &Value::Object(keys.object))?;
        if !family.keys.absent.contains(&"attention_bias") {
            config.output_bias = has(file, 0, "attn_output.bias");
        }
        if let Some(divisors) = divisors {
            config.rope = rope::scaled(file, family, &config, divisors)?;
        }
        let problems = config.problems();
        if problems.is_empty() { Ok(config) } else { Err(Error::format(file.path(), problems.join("; "))) }
    }
}

/// The family of a file. Of those that share an architecture it is the first that has experts where the file has
/// some, and a window where the file has one.
fn family_of(file: &Gguf) -> Result<&'static Family> {
    let architecture = file.text("general.architecture")?.unwrap_or("");
    let is_set = |key: &str| Ok::<_, Error>(file.size(&format!("{architecture}.{key}"))?.unwrap_or(0) > 0);
    let (experts, window) = (is_set("expert_count")?, is_set("attention.sliding_window")?);
    let of = FAMILIES.into_iter().filter(|family| family.gguf.architecture == architecture);
    let fits = |family: &&Family| {
        family.parts.experts.is_some() == experts && (!window || family.keys.own.contains(&"sliding_window"))
    };
    let found = of.clone().find(fits).or_else(|| of.clone().next());
    found.ok_or_else(|| {
        let mut known: Vec<&str> = FAMILIES.iter().map(|family| family.gguf.architecture).collect();
        known.dedup();
        known.sort_unstable();
        known.dedup();
        let known = known.join(", ");
        let message = format!("architecture {architecture:?} is not supported; known architectures: {known}");
        Error::format(file.path(), message)
    })
}

/// Whether a file has a tensor of a layer.
fn has(file: &Gguf, layer: usize, part: &str) -> bool {
    file.shape(&format!("blk.{layer}.{part}")).is_some()
}

/// Sizes of a family's mixtures, as in [`SIZES`].
fn expert_sizes(family: &Family) -> Vec<(&'static str, &'static str)> {
    let Some(names) = family.parts.experts else { return Vec::new() };
    let apart = family.keys.own.contains(&"num_experts");
    let count = if apart { "num_experts" } else { "num_local_experts" };
    let mut sizes = vec![("expert_count", count), ("expert_used_count", "num_experts_per_tok")];
    if apart {
        sizes.push(("expert_feed_forward_length", "moe_intermediate_size"));
    }
    if names.shared.is_some() {
        sizes.push(("expert_shared_feed_forward_length", "shared_expert_intermediate_size"));
    }
    sizes
}

/// Reads of `<architecture>.<key>` that gather what is missing, and the `config.json` that they make.
struct Keys<'a> {
    file: &'a Gguf,
    family: &'static Family,
    object: Map<String, Value>,
    problems: Vec<String>,
}

impl Keys<'_> {
    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.family.gguf.architecture)
    }

    fn owns(&self, key: &str) -> bool {
        self.family.keys.own.contains(&key)
    }

    /// Sets a key of `config.json`, under the family's own name, unless the family has none such.
    fn put(&mut self, key: &str, value: Value) {
        let own = spelled(self.family.keys.spelling, key);
        if own != key || !self.family.keys.absent.contains(&key) {
            self.object.insert(own.into(), value);
        }
    }

    /// A required size; after a problem, a stand-in.
    fn size(&mut self, key: &str) -> Result<usize> {
        let full = self.full(key);
        let size = self.file.size(&full)?;
        if size.is_none() {
            self.problems.push(format!("key {full} is missing"));
        }
        Ok(size.unwrap_or(1))
    }

    fn read(&mut self) -> Result<()> {
        let file = self.file;
        for (key, common) in SIZES.into_iter().chain(expert_sizes(self.family)) {
            let size = self.size(key)?;
            self.put(common, json!(size));
        }
        self.read_heads()?;
        let epsilon = file.number(&self.full(self.epsilon()))?.unwrap_or(1e-5);
        self.put("rms_norm_eps", number(epsilon));
        if self.family.parts.rotary {
            let theta = file.number(&self.full("rope.freq_base"))?.unwrap_or(10_000.0);
            self.put("rope_theta", number(theta));
        }
        for (key, own) in NUMBERS {
            if let Some(value) = file.number(&self.full(key))?.filter(|_| self.owns(own)) {
                self.put(own, number(value));
            }
        }
        self.read_tensors();
        self.read_experts();
        self.read_scores()?;
        self.read_window()?;
        for (key, own) in TOKENS {
            self.put(own, json!(file.token(key)?));
        }
        let ends = end_tokens(file)?;
        self.put("eos_token_id", json!(ends));
        Ok(())
    }

    fn read_heads(&mut self) -> Result<()> {
        let file = self.file;
        let (hidden, heads) = (self.size_of("embedding_length")?, self.size_of("attention.head_count")?);
        let kv = file.size(&self.full("attention.head_count_kv"))?.unwrap_or(heads);
        let head_dim = file.size(&self.full("attention.key_length"))?.unwrap_or(hidden / heads.max(1));
        for key in ["rope.dimension_count", "attention.value_length"] {
            let full = self.full(key);
            if let Some(size) = file.size(&full)?.filter(|&size| size != head_dim) {
                self.problems.push(format!("key {full}: {size} differs from the head's {head_dim}"));
            }
        }
        self.put("num_key_value_heads", json!(kv));
        self.put("head_dim", json!(head_dim));
        Ok(())
    }

    /// A size whose absence was noted before.
    fn size_of(&self, key: &str) -> Result<usize> {
        Ok(self.file.size(&self.full(key))?.unwrap_or(1))
    }

    /// The key of the number that is added in norms.
    fn epsilon(&self) -> &'static str {
        self.family.gguf_epsilon()
    }

    /// What follows from the tensors that there are.
    fn read_tensors(&mut self) {
        let file = self.file;
        let rows = file.shape("token_embd.weight").and_then(|shape| shape.first().copied());
        if rows.is_none() {
            self.problems.push("tensor token_embd.weight is missing".into());
        }
        self.put("vocab_size", json!(rows.unwrap_or(1)));
        self.put("tie_word_embeddings", json!(file.shape("output.weight").is_none()));
        let of_attention = has(file, 0, "attn_q.bias") || has(file, 0, "attn_qkv.bias");
        self.put("attention_bias", json!(of_attention));
        self.put("mlp_bias", json!(has(file, 0, "ffn_up.bias")));
        if self.owns("qkv_bias") {
            self.put("qkv_bias", json!(of_attention));
        }
    }

    fn read_experts(&mut self) {
        for (key, flag) in self.family.gguf.flags {
            self.put(key, json!(flag));
        }
        if self.owns("num_experts") {
            let layers = self.layers();
            let dense = (0..layers).filter(|&layer| !has(self.file, layer, "ffn_gate_inp.weight"));
            let dense: Vec<usize> = dense.collect();
            self.put("mlp_only_layers", json!(dense));
        }
    }

    /// Layers; no more than a file may have, which is not checked yet.
    fn layers(&self) -> usize {
        self.size_of("block_count").unwrap_or(1).min(MAX_LAYERS)
    }

    /// What scores are divided by the root of.
    fn read_scores(&mut self) -> Result<()> {
        if !self.owns("query_pre_attn_scalar") {
            return Ok(());
        }
        let [width, heads, layers] =
            ["embedding_length", "attention.head_count", "block_count"].map(|key| self.size_of(key));
        let (width, heads, layers) = (width?, heads?, layers?);
        let scalar = match self.file.number(&self.full("attention.scale"))?.filter(|&scale| scale != 0.0) {
            Some(scale) => number(1.0 / (scale * scale)),
            None if self.family.gguf.wide_scores == Some(layers) => json!(width / heads.max(1)),
            None => self.object.get("head_dim").cloned().unwrap_or_default(),
        };
        self.put("query_pre_attn_scalar", scalar);
        Ok(())
    }

    /// The window, and the layers that have it: where a file does not say, the family knows.
    fn read_window(&mut self) -> Result<()> {
        let Some(window) = self.file.size(&self.full("attention.sliding_window"))? else { return Ok(()) };
        if !self.owns("sliding_window") || self.owns("use_sliding_window") {
            return Ok(());
        }
        self.put("sliding_window", if window == 0 { Value::Null } else { json!(window) });
        let full = self.full("attention.sliding_window_pattern");
        let layers = self.layers();
        let local: Vec<bool> = match self.file.value(&full) {
            None => return Ok(()),
            // Every so many layers one sees all tokens.
            Some(&GgufValue::Integer(period)) if period >= 0 => {
                let period = usize::try_from(period).unwrap_or(usize::MAX);
                (0..layers).map(|layer| period == 0 || layer % period < period - 1).collect()
            }
            Some(GgufValue::Flags(flags)) => flags.clone(),
            Some(GgufValue::Integers(flags)) => flags.iter().map(|&flag| flag != 0).collect(),
            Some(other) => {
                let got = other.describe();
                self.problems.push(format!("key {full}: expected a number or a list of flags, got {got}"));
                return Ok(());
            }
        };
        if self.owns("layer_types") {
            let kind = |&local: &bool| if local { "sliding_attention" } else { "full_attention" };
            let types: Vec<&str> = local.iter().map(kind).collect();
            self.put("layer_types", json!(types));
        } else if !local.iter().all(|&local| local) {
            let architecture = self.family.gguf.architecture;
            self.problems.push(format!("key {full}: in a {architecture}, all layers have the window"));
        }
        Ok(())
    }
}

/// The end of a text, then the end of a turn where it is another token.
fn end_tokens(file: &Gguf) -> Result<Vec<u32>> {
    let mut ids = Vec::new();
    for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"] {
        ids.extend(file.token(key)?.filter(|id| !ids.contains(id)));
    }
    Ok(ids)
}
