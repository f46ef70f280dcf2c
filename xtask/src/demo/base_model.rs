//! The demo's tiny Llama model: its shape, its random start, and its rounding to bf16.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use half::bf16;
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize};
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
    let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect();
    write_tensors(&directory.join("model.safetensors"), &weights, Dtype::F32, bytes)
}

/// Copies a trained model from `source`, and its tokenizer from `start`, to `target` as bf16.
pub(super) fn round_to_bf16(source: &Path, start: &Path, target: &Path) -> Result<()> {
    let weights = read_f32(&source.join("model.safetensors"))?;
    let bytes =
        |values: &[f32]| values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect();
    write_tensors(&target.join("model.safetensors"), &weights, Dtype::BF16, bytes)?;
    for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(start.join(name), target.join(name)).with_context(|| format!("cannot copy {name}"))?;
    }
    Ok(())
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

fn write_tensors(
    path: &Path,
    weights: &[Named],
    dtype: Dtype,
    bytes: impl Fn(&[f32]) -> Vec<u8>,
) -> Result<()> {
    let data: Vec<Vec<u8>> = weights.iter().map(|(_, _, values)| bytes(values)).collect();
    let views = weights
        .iter()
        .zip(&data)
        .map(|((name, shape, _), data)| Ok((name.as_str(), TensorView::new(dtype, shape.clone(), data)?)));
    let views = views.collect::<Result<Vec<_>>>()?;
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let file = serialize(views, Some(metadata)).context("cannot serialise the weights")?;
    fs::write(path, file).with_context(|| format!("cannot write {}", path.display()))
}

fn read_f32(path: &Path) -> Result<Vec<Named>> {
    let file = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let tensors = SafeTensors::deserialize(&file).with_context(|| path.display().to_string())?;
    let mut weights = Vec::new();
    for (name, view) in tensors.iter() {
        ensure!(view.dtype() == Dtype::F32, "{}: {name} is {:?}, not F32", path.display(), view.dtype());
        let (values, _) = view.data().as_chunks::<4>();
        let values = values.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        weights.push((name.to_owned(), view.shape().to_vec(), values));
    }
    weights.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(weights)
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    let text = serde_json::to_string_pretty(value)?;
    fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_has_about_a_million_parameters_and_fits_the_repository() {
        let weights = random_weights(1536, &mut Random::new(0));
        let elements: usize = weights.iter().map(|(_, _, values)| values.len()).sum();
        assert!((900_000..1_200_000).contains(&elements), "{elements}");
        assert!(elements * size_of::<bf16>() < 3_000_000);
    }

    #[test]
    fn rounding_keeps_names_shapes_and_values_to_bf16() {
        let directory = tempfile::tempdir().unwrap();
        let (source, target) = (directory.path().join("a"), directory.path().join("b"));
        fs::create_dir_all(&source).unwrap();
        fs::create_dir_all(&target).unwrap();
        write_untrained(&source, 8).unwrap();
        for name in ["tokenizer.json", "tokenizer_config.json"] {
            fs::write(source.join(name), "{}").unwrap();
        }
        round_to_bf16(&source, &source, &target).unwrap();
        let file = fs::read(target.join("model.safetensors")).unwrap();
        let rounded = SafeTensors::deserialize(&file).unwrap();
        let view = rounded.tensor("model.layers.3.mlp.down_proj.weight").unwrap();
        assert_eq!((view.dtype(), view.shape()), (Dtype::BF16, &[HIDDEN, INTERMEDIATE][..]));
        let exact = read_f32(&source.join("model.safetensors")).unwrap();
        let (_, _, values) = exact.iter().find(|w| w.0 == "model.layers.3.mlp.down_proj.weight").unwrap();
        assert_eq!(view.data()[..2], bf16::from_f32(values[0]).to_le_bytes());
    }
}
