//! The Llama family's names and row order in GGUF, and how they become Hugging Face's.

use std::collections::BTreeMap;

use super::Gguf;
use crate::model::ModelConfig;
use crate::{Error, Result};

/// Hugging Face names of a GGUF file's tensors, with what its rows need.
#[derive(Debug)]
pub(crate) struct LlamaNames {
    /// Hugging Face name to stored name.
    stored: BTreeMap<String, String>,
    head_dim: usize,
}

impl LlamaNames {
    /// Maps every tensor of the file.
    ///
    /// # Errors
    /// A tensor that the Llama family does not have: leaving it out would change the model. A
    /// tensor with another number of dimensions than the family's. A query or key projection whose
    /// rows are not whole heads.
    pub(crate) fn new(file: &Gguf, config: &ModelConfig) -> Result<Self> {
        let mut stored = BTreeMap::new();
        for name in file.tensor_names().filter(|&name| name != "rope_freqs.weight") {
            let hub = hub_name(name).ok_or_else(|| {
                Error::format(file.path(), format!("tensor {name} is not known in the llama family"))
            })?;
            let shape = file.shape(name).unwrap_or_default();
            let dimensions = dimensions(name);
            if shape.len() != dimensions {
                let message = format!("tensor {name}: expected {dimensions} dimensions, got {shape:?}");
                return Err(Error::format(file.path(), message));
            }
            let rows = shape[0];
            if is_rotated(name) && !rows.is_multiple_of(config.head_dim) {
                let message =
                    format!("tensor {name}: {rows} rows are not whole heads of {}", config.head_dim);
                return Err(Error::format(file.path(), message));
            }
            stored.insert(hub, name.to_string());
        }
        Ok(Self { stored, head_dim: config.head_dim })
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &str> {
        self.stored.keys().map(String::as_str)
    }

    /// The name in the file.
    pub(crate) fn stored(&self, hub: &str) -> Option<&str> {
        self.stored.get(hub).map(String::as_str)
    }

    /// Brings a tensor's rows into Hugging Face's order, where they are in another.
    pub(crate) fn to_half_split(&self, stored: &str, shape: &[usize], elements: Vec<f32>) -> Vec<f32> {
        if !is_rotated(stored) {
            return elements;
        }
        half_split_rows(&elements, shape.first().copied().unwrap_or(0), self.head_dim)
    }
}

/// Dimensions of a tensor of the family: norms and biases are vectors, the rest matrices.
fn dimensions(stored: &str) -> usize {
    let is_vector = stored.ends_with("norm.weight") || stored.rsplit('.').next() == Some("bias");
    if is_vector { 1 } else { 2 }
}

/// Whether rotary embedding acts on the tensor's rows.
fn is_rotated(stored: &str) -> bool {
    ["attn_q.weight", "attn_q.bias", "attn_k.weight", "attn_k.bias"].iter().any(|name| stored.ends_with(name))
}

/// Within each head, moves row `2 i + half` to row `half (head_dim / 2) + i`.
///
/// GGUF's llama files keep the pair that is rotated together in neighbouring rows, Hugging Face in
/// the two halves of a head.
fn half_split_rows(elements: &[f32], rows: usize, head_dim: usize) -> Vec<f32> {
    let columns = elements.len() / rows.max(1);
    let mut out = Vec::with_capacity(elements.len());
    for head in elements.chunks(head_dim * columns.max(1)) {
        for half in 0..2 {
            for pair in 0..head_dim / 2 {
                let row = 2 * pair + half;
                out.extend_from_slice(&head[row * columns..][..columns]);
            }
        }
    }
    out
}

/// `blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`.
fn hub_name(stored: &str) -> Option<String> {
    let outside = match stored {
        "token_embd.weight" => Some("model.embed_tokens.weight"),
        "output_norm.weight" => Some("model.norm.weight"),
        "output.weight" => Some("lm_head.weight"),
        _ => None,
    };
    if let Some(name) = outside {
        return Some(name.to_string());
    }
    let mut parts = stored.strip_prefix("blk.")?.split('.');
    let (layer, module, kind, None) = (parts.next()?, parts.next()?, parts.next()?, parts.next()) else {
        return None;
    };
    let layer: usize = layer.parse().ok()?;
    let (module, may_have_bias) = match module {
        "attn_norm" => ("input_layernorm", false),
        "ffn_norm" => ("post_attention_layernorm", false),
        "attn_q" => ("self_attn.q_proj", true),
        "attn_k" => ("self_attn.k_proj", true),
        "attn_v" => ("self_attn.v_proj", true),
        "attn_output" => ("self_attn.o_proj", true),
        "ffn_gate" => ("mlp.gate_proj", true),
        "ffn_up" => ("mlp.up_proj", true),
        "ffn_down" => ("mlp.down_proj", true),
        _ => return None,
    };
    let known = kind == "weight" || (kind == "bias" && may_have_bias);
    known.then(|| format!("model.layers.{layer}.{module}.{kind}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_hugging_face() {
        for (stored, hub) in [
            ("token_embd.weight", "model.embed_tokens.weight"),
            ("output.weight", "lm_head.weight"),
            ("blk.12.attn_k.bias", "model.layers.12.self_attn.k_proj.bias"),
            ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
        ] {
            assert_eq!(hub_name(stored).as_deref(), Some(hub));
        }
        for unknown in
            ["blk.0.ffn_gate_inp.weight", "blk.x.attn_q.weight", "blk.0.attn_norm.bias", "blk.0.attn_q"]
        {
            assert_eq!(hub_name(unknown), None);
        }
    }

    #[test]
    fn neighbouring_pairs_move_to_the_halves_of_their_head() {
        // Two heads of 4 rows with one column each.
        let rows = [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0];
        assert_eq!(half_split_rows(&rows, 8, 4), [0.0, 2.0, 1.0, 3.0, 10.0, 12.0, 11.0, 13.0]);
        // One head with two columns.
        let rows = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5];
        assert_eq!(half_split_rows(&rows, 4, 4), [0.0, 0.5, 2.0, 2.5, 1.0, 1.5, 3.0, 3.5]);
    }
}
