//! Passes of the engine on a random model of 27.4 M parameters: decoding by batch size, a prompt, a refit.

use std::hint::black_box;

use aligner_core::model::{CausalLm, ModelConfig};
use aligner_core::{Device, Engine as _, Policy as _, Prompt, Request, Sampling};
use aligner_infer::{CacheSize, EngineConfig, PagedEngine};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use serde_json::json;

fn model() -> CausalLm {
    let config = json!({
        "model_type": "llama", "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1376,
        "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    });
    let config = ModelConfig::from_json("small".as_ref(), &config).expect("a valid configuration");
    CausalLm::init(config, 1, &Device::flex()).expect("a valid configuration")
}

fn engine(model: &CausalLm) -> PagedEngine {
    let cache = CacheSize::Tokens(1 << 16);
    let config = EngineConfig { cache, prefix_cache: false, ..EngineConfig::default() };
    PagedEngine::new(model.clone(), config).expect("room for the cache")
}

fn request(id: u64, prompt: usize, max_tokens: usize) -> Request {
    let tokens = (0..prompt as u32).map(|at| 3 + (at * 7 + id as u32) % 4000).collect();
    let prompt = Prompt { id: id.to_string(), tokens, metadata: serde_json::Value::Null };
    Request::new(prompt, Sampling { max_tokens, ..Sampling::default() })
}

/// One token of each of so many answers.
fn decode(criterion: &mut Criterion) {
    let model = model();
    let mut group = criterion.benchmark_group("decode");
    for batch in [1_u64, 8, 32] {
        let mut engine = engine(&model);
        group.throughput(Throughput::Elements(batch));
        group.bench_function(BenchmarkId::from_parameter(batch), |bencher| {
            let mut next = 0;
            bencher.iter(|| {
                while engine.stats().running + engine.stats().waiting < batch as usize {
                    engine.submit(request(next, 64, 512)).expect("a valid request");
                    next += 1;
                }
                black_box(engine.poll().expect("a pass"));
            });
        });
    }
    group.finish();
}

/// A prompt of 512 tokens up to its first answer token.
fn prompt(criterion: &mut Criterion) {
    let mut engine = engine(&model());
    let mut group = criterion.benchmark_group("prompt");
    group.throughput(Throughput::Elements(512));
    group.bench_function("512", |bencher| {
        bencher.iter(|| {
            engine.submit(request(1, 512, 1)).expect("a valid request");
            while !engine.poll().expect("a pass").is_empty() {}
        });
    });
    group.finish();
}

fn refit(criterion: &mut Criterion) {
    let model = model();
    let mut engine = engine(&model);
    criterion.bench_function("refit by handle", |bencher| {
        let mut version = 0;
        bencher.iter(|| {
            version += 1;
            engine.refit(model.params(), version).expect("the same model");
        });
    });
}

criterion_group!(benches, decode, prompt, refit);
criterion_main!(benches);
