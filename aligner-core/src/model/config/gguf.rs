//! The configuration in a GGUF file's metadata.

use serde_json::Value;

use super::{Llama3Scaling, ModelConfig, RopeConfig};
use crate::model::Family;
use crate::weights::Gguf;
use crate::{Error, Result};

/// The architectures that are read from GGUF files.
const ARCHITECTURES: [&str; 1] = ["llama"];

/// Largest relative difference between a stored frequency divisor and the computed one.
const DIVISOR_TOLERANCE: f32 = 1e-4;

impl ModelConfig {
    /// Reads the configuration of a GGUF file.
    ///
    /// # Errors
    /// An architecture other than those known, missing keys, unusable sizes, and settings that
    /// change the model in a way that is not supported, all at once.
    pub fn from_gguf(file: &Gguf) -> Result<Self> {
        let architecture = file.text("general.architecture")?.unwrap_or("");
        let known = ARCHITECTURES.contains(&architecture).then(|| Family::of(architecture)).flatten();
        let Some(family) = known else {
            let known = ARCHITECTURES.join(", ");
            let message =
                format!("architecture {architecture:?} is not supported; known model types: {known}");
            return Err(Error::format(file.path(), message));
        };
        let mut keys = Keys { file, architecture, problems: Vec::new() };
        let config = read(family, &mut keys)?;
        let mut problems = keys.problems;
        problems.extend(config.problems());
        if problems.is_empty() { Ok(config) } else { Err(Error::format(file.path(), problems.join("; "))) }
    }
}

/// Reads of `<architecture>.<key>` that gather what is missing.
struct Keys<'a> {
    file: &'a Gguf,
    architecture: &'a str,
    problems: Vec<String>,
}

impl Keys<'_> {
    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    /// A required size; after a problem, a stand-in that validation accepts.
    fn size(&mut self, key: &str) -> Result<usize> {
        let full = self.full(key);
        let size = self.file.size(&full)?;
        if size.is_none() {
            self.problems.push(format!("key {full} is missing"));
        }
        Ok(size.unwrap_or(1))
    }

    fn refuse_unless(&mut self, key: &str, neutral: f32) -> Result<()> {
        let full = self.full(key);
        if let Some(value) = self.file.number(&full)?
            && value.to_bits() != neutral.to_bits()
        {
            self.problems.push(format!("key {full}: {value} changes the model; only {neutral} is supported"));
        }
        Ok(())
    }

    fn refuse_changed_mathematics(&mut self) -> Result<()> {
        for key in
            ["expert_count", "attention.sliding_window", "attention.clamp_kqv", "attention.max_alibi_bias"]
        {
            self.refuse_unless(key, 0.0)?;
        }
        for key in ["logit_scale", "embedding_scale", "residual_scale", "rope.scale_linear"] {
            self.refuse_unless(key, 1.0)?;
        }
        if let Some(parts) = self.file.size("split.count")?.filter(|&parts| parts > 1) {
            self.problems.push(format!("key split.count: one of {parts} parts; merge them into one file"));
        }
        let full = self.full("rope.scaling.type");
        if let Some(kind) = self.file.text(&full)?.filter(|&kind| kind != "none") {
            self.problems.push(format!("key {full}: {kind:?} is not supported; only \"none\" is"));
        }
        Ok(())
    }
}

fn read(family: &'static Family, keys: &mut Keys<'_>) -> Result<ModelConfig> {
    keys.refuse_changed_mathematics()?;
    let file = keys.file;
    let hidden_size = keys.size("embedding_length")?;
    let num_heads = keys.size("attention.head_count")?;
    let head_dim = file.size(&keys.full("attention.key_length"))?.unwrap_or(hidden_size / num_heads.max(1));
    for key in ["rope.dimension_count", "attention.value_length"] {
        let full = keys.full(key);
        if let Some(size) = file.size(&full)?.filter(|&size| size != head_dim) {
            keys.problems.push(format!("key {full}: {size} differs from the head's {head_dim}"));
        }
    }
    let embedding = file.shape("token_embd.weight");
    if embedding.is_none() {
        keys.problems.push("tensor token_embd.weight is missing".into());
    }
    let has = |name: &str| file.shape(name).is_some();
    Ok(ModelConfig {
        family,
        vocab_size: embedding.and_then(|shape| shape.first().copied()).unwrap_or(1),
        hidden_size,
        intermediate_size: keys.size("feed_forward_length")?,
        num_layers: keys.size("block_count")?,
        num_heads,
        num_kv_heads: file.size(&keys.full("attention.head_count_kv"))?.unwrap_or(num_heads),
        head_dim,
        max_positions: keys.size("context_length")?,
        rms_norm_eps: file.number(&keys.full("attention.layer_norm_rms_epsilon"))?.unwrap_or(1e-5),
        rope: read_rope(keys, head_dim)?,
        local_rope: None,
        window: None,
        local_layers: Vec::new(),
        attention_scale: None,
        attention_softcap: None,
        logit_softcap: None,
        experts: None,
        tie_embeddings: !has("output.weight"),
        attention_bias: has("blk.0.attn_q.bias"),
        output_bias: has("blk.0.attn_output.bias"),
        mlp_bias: has("blk.0.ffn_gate.bias"),
        bos_token_id: file.token("tokenizer.ggml.bos_token_id")?,
        eos_token_ids: end_tokens(file)?,
        pad_token_id: file.token("tokenizer.ggml.padding_token_id")?,
        num_labels: None,
        adapter: None,
        extra: Value::Null,
    })
}

/// The end of a text, then the end of a turn where it is another token.
fn end_tokens(file: &Gguf) -> Result<Vec<u32>> {
    let mut ids = Vec::new();
    for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"] {
        ids.extend(file.token(key)?.filter(|id| !ids.contains(id)));
    }
    Ok(ids)
}

fn read_rope(keys: &mut Keys<'_>, head_dim: usize) -> Result<RopeConfig> {
    let file = keys.file;
    let theta = file.number(&keys.full("rope.freq_base"))?.unwrap_or(10_000.0);
    let plain = RopeConfig { theta, scaling: None };
    if file.shape("rope_freqs.weight").is_none() {
        return Ok(plain);
    }
    let original = file.size(&keys.full("rope.scaling.original_context_length"))?.unwrap_or(8192);
    let stored = file.read("rope_freqs.weight")?.1;
    let scaled = llama3_scaling(plain, &stored, head_dim, original);
    if scaled.is_none() {
        let message = "tensor rope_freqs.weight does not hold the frequency divisors of Llama 3, the only \
                       ones supported";
        keys.problems.push(message.into());
    }
    Ok(scaled.unwrap_or(plain))
}

/// The scaling whose divisors are `stored`, `[head_dim / 2]`.
///
/// GGUF keeps the divisors and not what they were computed from. The lowest frequency's is the
/// factor; the other settings are the same in all of Llama 3. Whatever does not then agree with
/// every stored divisor is another scaling.
fn llama3_scaling(plain: RopeConfig, stored: &[f32], head_dim: usize, original: usize) -> Option<RopeConfig> {
    // The sizes of the file are not checked yet: no table is made that a false one asks for.
    if stored.len() != head_dim / 2 {
        return None;
    }
    let scaling = Llama3Scaling {
        factor: *stored.last()?,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_positions: original,
    };
    let rope = RopeConfig { scaling: Some(scaling), ..plain };
    let computed = rope.frequency_divisors(head_dim);
    let close = |(a, b): (&f32, &f32)| (a - b).abs() <= DIVISOR_TOLERANCE * b.abs();
    stored.iter().zip(&computed).all(close).then_some(rope)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_false_head_dimension_costs_no_memory() {
        let plain = RopeConfig { theta: 500_000.0, scaling: None };
        assert!(llama3_scaling(plain, &[1.0, 8.0], usize::MAX, 8192).is_none());
    }

    #[test]
    fn scaling_is_found_from_its_divisors_and_no_other_is_taken_for_it() {
        let plain = RopeConfig { theta: 500_000.0, scaling: None };
        let scaling = Llama3Scaling {
            factor: 32.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_positions: 8192,
        };
        let expected = RopeConfig { scaling: Some(scaling), ..plain };
        let mut divisors = expected.frequency_divisors(64);
        assert_eq!(llama3_scaling(plain, &divisors, 64, 8192), Some(expected));
        assert_eq!(llama3_scaling(plain, &divisors[1..], 64, 8192), None);
        divisors[20] *= 1.01;
        assert_eq!(llama3_scaling(plain, &divisors, 64, 8192), None);
    }
}
