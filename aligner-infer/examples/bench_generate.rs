//! Generation as the peers' benchmark scripts time it: prints one JSON line for each case.
//!
//! `bench_generate MODEL [repeats] [f32|bf16|int8|int4] [refits]`: with the last word, refits alone.

use std::time::Instant;

use aligner_core::model::CausalLm;
use aligner_core::rng::Rng;
use aligner_core::weights::Checkpoint;
use aligner_core::{Device, Engine, Policy as _, Prompt, Request, Result, Sampling};
use aligner_infer::{CacheSize, EngineConfig, PackedKind, PagedEngine};

/// Lengths of 32 answers, log-normal and cut at 8 and 256: the ones of the benchmark scripts in Python.
const LENGTHS: [usize; 32] = [
    64, 81, 51, 31, 44, 29, 67, 187, 43, 39, 95, 85, 70, 30, 63, 112, 22, 44, 14, 23, 15, 53, 23, 80, 73, 55,
    9, 42, 62, 70, 19, 44,
];

fn prompt(id: u64, tokens: usize, vocab: usize) -> Prompt {
    let rng = Rng::new(&[5, id]);
    let tokens = (0..tokens as u64).map(|i| 3 + rng.below(i, vocab as u64 - 3) as u32).collect();
    Prompt { id: id.to_string(), tokens, metadata: serde_json::Value::Null }
}

/// Seconds until all requests, each with its own length, are done.
fn run(engine: &mut PagedEngine, prompts: &[Prompt], lengths: &[usize]) -> Result<f64> {
    let start = Instant::now();
    for (at, (prompt, &max_tokens)) in prompts.iter().zip(lengths).enumerate() {
        let sampling = Sampling { max_tokens, ..Sampling::default() };
        engine.submit(Request { sample: at as u64, ..Request::new(prompt.clone(), sampling) })?;
    }
    while !engine.poll()?.is_empty() {}
    Ok(start.elapsed().as_secs_f64())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let path = arguments.first().map_or("target/bench/model", String::as_str);
    let repeats: usize = arguments.get(1).and_then(|text| text.parse().ok()).unwrap_or(3);
    let packed = match arguments.get(2).map(String::as_str) {
        Some("bf16") => Some(PackedKind::Bf16),
        Some("int8") => Some(PackedKind::Int8),
        Some("int4") => Some(PackedKind::Int4),
        _ => None,
    };
    let model = CausalLm::load(&Checkpoint::open(path.as_ref())?, &Device::flex())?;
    let vocab = model.config().vocab_size;
    let config = EngineConfig {
        cache: CacheSize::Bytes(2 << 30),
        prefix_cache: false,
        packed,
        ..EngineConfig::default()
    };
    let mut engine = PagedEngine::new(model.clone(), config.clone())?;
    if arguments.get(3).is_some_and(|word| word == "refits") {
        return refits(&model, &mut engine);
    }
    let mut cases: Vec<(String, Vec<Prompt>, Vec<usize>)> = Vec::new();
    for batch in [1, 8, 32] {
        let prompts = (0..batch).map(|id| prompt(id, 64, vocab)).collect();
        cases.push((format!("batch {batch}"), prompts, vec![128; batch as usize]));
    }
    cases.push(("log-normal".into(), (0..32).map(|id| prompt(id, 64, vocab)).collect(), LENGTHS.to_vec()));
    for (name, prompts, lengths) in &cases {
        run(&mut engine, prompts, &vec![4; prompts.len()])?;
        let times: Vec<f64> =
            (0..repeats).map(|_| run(&mut engine, prompts, lengths)).collect::<Result<_>>()?;
        report(name, lengths.iter().sum(), median(times), engine.packed());
    }
    for (name, shared) in
        [("8 samples of a 512-token prompt, shared", true), ("the same, each its own", false)]
    {
        let times = (0..repeats).map(|_| {
            let mut engine =
                PagedEngine::new(model.clone(), EngineConfig { prefix_cache: shared, ..config.clone() })?;
            run(&mut engine, &vec![prompt(0, 512, vocab); 8], &[16; 8])
        });
        report(name, 8 * 16, median(times.collect::<Result<_>>()?), engine.packed());
    }
    refits(&model, &mut engine)
}

/// 200 refits to parameters of another set of tensors in turn, a request after each tenth.
fn refits(model: &CausalLm, engine: &mut PagedEngine) -> Result<()> {
    let mut other = model.params().clone();
    other.iter_mut().for_each(|param| param.value = param.value.clone() * 1.0);
    let prompts = [prompt(0, 64, model.config().vocab_size)];
    let (mut times, mut before) = (Vec::new(), 0.0);
    for version in 1..=200 {
        let params = if version % 2 == 0 { model.params() } else { &other };
        let start = Instant::now();
        engine.refit(params, version)?;
        times.push(start.elapsed().as_secs_f64());
        if version % 10 == 0 {
            run(engine, &prompts, &[4])?;
        }
        if version == 10 {
            before = resident_mib();
        }
    }
    report_refits(median(times.clone()), times.into_iter().fold(0.0, f64::max), resident_mib() - before);
    Ok(())
}

/// Memory of this process; 0 where the system does not say.
fn resident_mib() -> f64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text.split_whitespace().nth(1).and_then(|pages| pages.parse::<f64>().ok());
    pages.unwrap_or(0.0) * 4096.0 / f64::from(1 << 20)
}

#[expect(clippy::print_stdout, reason = "the result")]
fn report_refits(median_s: f64, longest_s: f64, growth_mib: f64) {
    let line = serde_json::json!({
        "bench": "aligner refit", "refits": 200, "median_ms": median_s * 1e3, "longest_ms": longest_s * 1e3,
        "growth_mib": growth_mib,
    });
    println!("{line}");
}

#[expect(clippy::print_stdout, reason = "the result")]
fn report(case: &str, tokens: usize, seconds: f64, (packed, packing): (usize, std::time::Duration)) {
    let line = serde_json::json!({
        "bench": "aligner generate", "case": case, "tokens": tokens, "median_s": seconds,
        "out_tok_s": tokens as f64 / seconds,
        "packed_mib": packed as f64 / f64::from(1 << 20), "packing_s": packing.as_secs_f64(),
    });
    println!("{line}");
}
