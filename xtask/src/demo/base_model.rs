//! The demo's tiny Llama model: its shape and its random start.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use safetensors::serialize;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

use super::random::Random;
use super::vocabulary::{END_ID, PAD_ID};

const HIDDEN: usize = 128;
const INTERMEDIATE: usize = 384;
const LAYERS: usize = 4;
const HEADS: usize = 4;
const KEY_VALUE_HEADS: usize = 2;
const HEAD_DIM: usize = HIDDEN / HEADS;
/// Longest conversation in tokens.
pub(super) const MAX_POSITIONS: usize = 256;

/// A tensor on the host: name, shape, elements.
type Named = (String, Vec<usize>, Vec<f32>);

/// Writes config.json and random weights.
pub(super) fn write_untrained(directory: &Path, vocab_tokens: usize) -> Result<()> {
    write_json(&directory.join("config.json"), &config(vocab_tokens))?;
    write_json(
        &directory.join("generation_config.json"),
        &json!({"eos_token_id": END_ID, "pad_token_id": PAD_ID}),
    )?;
    let weights = random_weights(vocab_tokens, &mut Random::new(1234));
    write_tensors(&directory.join("model.safetensors"), &weights)
}

fn config(vocab_tokens: usize) -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_tokens,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": false,
        "mlp_bias": false,
        "tie_word_embeddings": true,
        "initializer_range": 0.02,
        "bos_token_id": null,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": "bfloat16",
    })
}

fn random_weights(vocab_tokens: usize, random: &mut Random) -> Vec<Named> {
    // Linears start at 1/sqrt(inputs); what writes to the residual stream is smaller by the square
    // root of the number of its writers, so that the stream keeps its size (GPT-2).
    let linear = (HIDDEN as f32).powf(-0.5);
    let residual = linear / ((2 * LAYERS) as f32).sqrt();
    let (queries, keys) = (HEADS * HEAD_DIM, KEY_VALUE_HEADS * HEAD_DIM);
    let mut weights = vec![matrix("model.embed_tokens", vocab_tokens, HIDDEN, 0.02, random)];
    for layer in 0..LAYERS {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        weights.push(norm(&name("input_layernorm")));
        weights.push(matrix(&name("self_attn.q_proj"), queries, HIDDEN, linear, random));
        weights.push(matrix(&name("self_attn.k_proj"), keys, HIDDEN, linear, random));
        weights.push(matrix(&name("self_attn.v_proj"), keys, HIDDEN, linear, random));
        weights.push(matrix(&name("self_attn.o_proj"), HIDDEN, queries, residual, random));
        weights.push(norm(&name("post_attention_layernorm")));
        weights.push(matrix(&name("mlp.gate_proj"), INTERMEDIATE, HIDDEN, linear, random));
        weights.push(matrix(&name("mlp.up_proj"), INTERMEDIATE, HIDDEN, linear, random));
        weights.push(matrix(&name("mlp.down_proj"), HIDDEN, INTERMEDIATE, residual, random));
    }
    weights.push(norm("model.norm"));
    weights
}

fn matrix(name: &str, rows: usize, columns: usize, deviation: f32, random: &mut Random) -> Named {
    let values = (0..rows * columns).map(|_| random.normal() * deviation).collect();
    (format!("{name}.weight"), vec![rows, columns], values)
}

fn norm(name: &str) -> Named {
    (format!("{name}.weight"), vec![HIDDEN], vec![1.0; HIDDEN])
}

fn write_tensors(path: &Path, weights: &[Named]) -> Result<()> {
    let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let data: Vec<Vec<u8>> = weights.iter().map(|(_, _, values)| bytes(values)).collect();
    let views = weights.iter().zip(&data).map(|((name, shape, _), data)| {
        Ok((name.as_str(), TensorView::new(Dtype::F32, shape.clone(), data)?))
    });
    let views = views.collect::<Result<Vec<_>>>()?;
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let file = serialize(views, Some(metadata)).context("cannot serialise the weights")?;
    fs::write(path, file).with_context(|| format!("cannot write {}", path.display()))
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    let text = serde_json::to_string_pretty(value)?;
    fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::SafeTensors;

    /// bf16.
    const BYTES_OF_AN_ELEMENT: usize = 2;

    #[test]
    fn the_model_has_about_a_million_parameters_and_fits_the_repository() {
        let weights = random_weights(1536, &mut Random::new(0));
        let elements: usize = weights.iter().map(|(_, _, values)| values.len()).sum();
        assert!((900_000..1_200_000).contains(&elements), "{elements}");
        assert!(elements * BYTES_OF_AN_ELEMENT < 3_000_000);
    }

    #[test]
    fn the_untrained_model_is_written_whole() {
        let directory = tempfile::tempdir().unwrap();
        write_untrained(directory.path(), 8).unwrap();
        let file = fs::read(directory.path().join("model.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&file).unwrap();
        assert_eq!(tensors.len(), 2 + 9 * LAYERS);
        let view = tensors.tensor("model.layers.3.mlp.down_proj.weight").unwrap();
        assert_eq!((view.dtype(), view.shape()), (Dtype::F32, &[HIDDEN, INTERMEDIATE][..]));
        assert_eq!(config(8)["vocab_size"], 8);
    }
}
