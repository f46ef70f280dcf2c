//! Checks an accelerator against the host, then times generation on it: `check_accelerator cuda|cpu [size]`, with a
//! size of `tiny`, `small` or `1b`. Prints one line for each finding; fails where one is out of bounds.
#![expect(clippy::print_stdout, reason = "the result")]

mod kernels;

use std::time::Instant;

use aligner_core::model::{CausalLm, ModelConfig};
use aligner_core::ops::cube::Accelerator;
use aligner_core::rng::Rng;
use aligner_core::{Device, Engine, Error, Policy as _, Prompt, Result, Sampling};
use aligner_infer::{CacheSize, EngineConfig, EngineDevice, PackedKind, PagedEngine};
use serde_json::json;

/// A random model of a known shape.
fn model(size: &str, device: &Device) -> Result<CausalLm> {
    let [hidden, intermediate, layers, heads, kv_heads, vocab] = match size {
        "tiny" => [64, 128, 2, 4, 2, 512],
        "small" => [512, 1408, 8, 8, 4, 4096],
        "1b" => [2048, 8192, 16, 32, 8, 128_256],
        _ => return Err(Error::setting("size", format!("expected `tiny`, `small` or `1b`, got `{size}`"))),
    };
    let config = json!({
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": intermediate,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "vocab_size": vocab, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": true,
    });
    CausalLm::init(ModelConfig::from_json("check".as_ref(), &config)?, 1, device)
}

fn prompt(id: u64, tokens: usize, vocab: usize) -> Prompt {
    let rng = Rng::new(&[5, id]);
    let tokens = (0..tokens as u64).map(|i| rng.below(i, vocab as u64) as u32).collect();
    Prompt { id: id.to_string(), tokens, metadata: serde_json::Value::Null }
}

/// Tokens of one answer to each prompt.
fn answers(
    engine: &mut PagedEngine,
    vocab: usize,
    batch: u64,
    [prompt_tokens, tokens]: [usize; 2],
) -> Result<Vec<Vec<u32>>> {
    let sampling = Sampling { max_tokens: tokens, temperature: 0.9, top_p: 0.95, ..Sampling::default() };
    let prompts: Vec<Prompt> = (0..batch).map(|id| prompt(id, prompt_tokens, vocab)).collect();
    let samples = engine.generate(&prompts, &sampling)?;
    Ok(samples.into_iter().map(|sample| sample.tokens).collect())
}

fn engine(model: &CausalLm, device: EngineDevice, packed: Option<PackedKind>) -> Result<PagedEngine> {
    let cache = CacheSize::Tokens(128 * 512);
    PagedEngine::new(model.clone(), EngineConfig { device, packed, cache, ..EngineConfig::default() })
}

/// The engine there and here: how far log-probabilities are off, and whether the answers are the same.
fn check_engine(model: &CausalLm, device: EngineDevice) -> Result<bool> {
    let (mut there, mut here) = (engine(model, device, None)?, engine(model, EngineDevice::Host, None)?);
    let vocab = model.config().vocab_size;
    let (tokens, least) = if device == EngineDevice::CubeCpu { (8, 8) } else { (64, 7) };
    let text = prompt(99, 200, vocab).tokens;
    let gap = there.logp_gap(&text)?;
    let got = answers(&mut there, vocab, 8, [40, tokens])?;
    let expected = answers(&mut here, vocab, 8, [40, tokens])?;
    // Where two tokens are likely to within rounding the two may part, and differ from there on.
    let same = got.iter().zip(&expected).filter(|(a, b)| a == b).count();
    let alone = answers(&mut engine(model, device, None)?, vocab, 1, [40, tokens])?;
    let invariant = alone[0] == got[0];
    let ok = gap.largest < 1e-3 && same >= least && invariant;
    println!(
        "{}",
        json!({
            "check": "engine", "largest_logp_gap": gap.largest, "mean_logp_gap": gap.mean,
            "same_answers": same, "of": got.len(), "alone_as_in_company": invariant, "ok": ok,
        })
    );
    let mut other = model.params().clone();
    other.iter_mut().for_each(|param| param.value = param.value.clone() * 1.5);
    there.refit(&other, 1)?;
    here.refit(&other, 1)?;
    let gap = there.logp_gap(&text)?;
    let refitted = gap.largest < 1e-3 && there.checksum() == here.checksum();
    println!("{}", json!({"check": "refit", "largest_logp_gap": gap.largest, "ok": refitted}));
    Ok(ok && refitted)
}

/// Tokens a second at several batch sizes, by a difference of lengths: prompts and start-up cancel.
fn time_decoding(model: &CausalLm, device: EngineDevice, packed: Option<PackedKind>) -> Result<()> {
    let start = Instant::now();
    let mut engine = engine(model, device, packed)?;
    let vocab = model.config().vocab_size;
    answers(&mut engine, vocab, 1, [8, 2])?;
    println!("{}", json!({"bench": "start", "seconds": start.elapsed().as_secs_f64()}));
    for batch in [1, 8, 32, 128] {
        let mut timed = |tokens| -> Result<f64> {
            let start = Instant::now();
            answers(&mut engine, vocab, batch, [64, tokens])?;
            Ok(start.elapsed().as_secs_f64())
        };
        timed(4)?;
        let (short, long) = (timed(16)?, timed(80)?);
        let step = (long - short) / 64.0;
        println!(
            "{}",
            json!({
                "bench": "decode", "weights": if packed.is_some() { "bf16" } else { "f32" }, "batch": batch,
                "ms_per_step": step * 1e3, "out_tok_s": batch as f64 / step,
            })
        );
    }
    Ok(())
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let name = arguments.first().map_or("cuda", String::as_str);
    let (device, accelerator) = match name {
        "cuda" => (EngineDevice::Cuda(0), Accelerator::cuda(0)?),
        "cpu" => (EngineDevice::CubeCpu, Accelerator::cpu()?),
        _ => return Err(Error::setting("device", format!("expected `cuda` or `cpu`, got `{name}`"))),
    };
    println!("{}", json!({"device": name, "memory_bytes": accelerator.memory_bytes()}));
    let kernels = kernels::check(&accelerator)?;
    let engine = check_engine(&model("tiny", &Device::flex())?, device)?;
    if let Some(size) = arguments.get(1) {
        let model = model(size, &home(device))?;
        // Parameters on the same device are taken by handle.
        time_decoding(&model, device, None)?;
        time_decoding(&model, device, Some(PackedKind::Bf16))?;
    }
    let failed = || Error::Invalid("the accelerator and the host differ, see above".into());
    (kernels && engine).then_some(()).ok_or_else(failed)
}

/// Where a trainer on this device would hold the parameters.
fn home(device: EngineDevice) -> Device {
    match device {
        #[cfg(feature = "cuda")]
        EngineDevice::Cuda(index) => Device::cuda(index),
        _ => Device::flex(),
    }
}
