//! The engine on the device against the engine on the host, and tokens a second.

use std::time::Instant;

use aligner_core::model::CausalLm;
use aligner_core::rng::Rng;
use aligner_core::{Device, Engine, Policy as _, Prompt, Result, Sampling};
use aligner_infer::{CacheSize, EngineConfig, EngineDevice, PackedKind, PagedEngine};
use serde_json::json;

use crate::roofline::Roofline;
use crate::shapes::random_model;

pub(crate) fn prompt(id: u64, tokens: usize, vocab: usize) -> Prompt {
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

pub(crate) fn engine(
    model: &CausalLm,
    device: EngineDevice,
    packed: Option<PackedKind>,
) -> Result<PagedEngine> {
    let cache = CacheSize::Tokens(128 * 512);
    PagedEngine::new(model.clone(), EngineConfig { device, packed, cache, ..EngineConfig::default() })
}

/// How far log-probabilities are off, and whether the answers are the same, before and after a refit.
///
/// # Errors
/// A failure of the device.
pub(crate) fn check(device: EngineDevice) -> Result<bool> {
    let model = random_model("tiny", &Device::flex())?;
    let (mut there, mut here) = (engine(&model, device, None)?, engine(&model, EngineDevice::Host, None)?);
    let vocab = model.config().vocab_size;
    let (tokens, least) = if device == EngineDevice::CubeCpu { (8, 8) } else { (64, 7) };
    let text = prompt(99, 200, vocab).tokens;
    let gap = there.logp_gap(&text)?;
    let got = answers(&mut there, vocab, 8, [40, tokens])?;
    let expected = answers(&mut here, vocab, 8, [40, tokens])?;
    // Where two tokens are likely to within rounding the two may part, and differ from there on.
    let same = got.iter().zip(&expected).filter(|(a, b)| a == b).count();
    let alone = answers(&mut engine(&model, device, None)?, vocab, 1, [40, tokens])?;
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
///
/// # Errors
/// A failure of the device.
pub(crate) fn time(
    model: &CausalLm,
    device: EngineDevice,
    packed: Option<PackedKind>,
    roofline: Roofline,
) -> Result<()> {
    let start = Instant::now();
    let mut engine = engine(model, device, packed)?;
    let vocab = model.config().vocab_size;
    answers(&mut engine, vocab, 1, [8, 2])?;
    println!("{}", json!({"bench": "start", "seconds": start.elapsed().as_secs_f64()}));
    let (weights, size) = if packed.is_some() { ("bf16", 2) } else { ("f32", 4) };
    // A step reads every weight once, whatever the batch: the time that this takes is the least there is.
    let least = (model.params().elements(false) * size) as f64 / roofline.bytes_per_second;
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
                "bench": "decode", "weights": weights, "batch": batch, "ms_per_step": step * 1e3,
                "out_tok_s": batch as f64 / step, "of_bandwidth": least / step,
            })
        );
    }
    Ok(())
}
