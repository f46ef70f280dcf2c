//! Thousands of random requests on a tiny cache: nothing leaks, nobody starves, and every sample is what
//! it would be alone.

mod tiny;

use std::collections::HashMap;

use aligner_core::rng::Rng;
use aligner_core::{Engine, Event, FinishReason, Prompt, Request, RequestId, Sample, Sampling};
use aligner_infer::{CacheSize, EngineConfig, PagedEngine, Speculation};

const REQUESTS: u64 = 10_000;

/// One of a few hundred different requests, so that many begin alike.
fn request(number: u64) -> Request {
    let kind = Rng::new(&[1, number]).below(0, 400);
    let rng = Rng::new(&[2, kind]);
    let shared = rng.below(0, 5);
    let prefix: Vec<u32> = (0..shared * 13).map(|i| (i * (shared + 3) % tiny::VOCAB) as u32).collect();
    let own = (0..=rng.below(1, 30)).map(|i| rng.below(10 + i, tiny::VOCAB) as u32);
    let tokens = prefix.into_iter().chain(own).collect();
    let sampling = Sampling {
        max_tokens: 1 + rng.below(2, 100) as usize,
        temperature: if rng.below(3, 4) == 0 { 0.0 } else { 1.0 },
        top_k: rng.below(4, 2) as usize * 5,
        repetition_penalty: if rng.below(5, 3) == 0 { 1.3 } else { 1.0 },
        stop_tokens: vec![rng.below(6, tiny::VOCAB) as u32],
        seed: kind,
        ..Sampling::default()
    };
    let prompt = Prompt { id: format!("kind {kind}"), tokens, metadata: serde_json::Value::Null };
    Request { priority: rng.below(7, 3) as i32 - 1, ..Request::new(prompt, sampling) }
}

#[test]
fn random_requests_on_a_tiny_cache() {
    let model = tiny::model(7);
    let mut alone: HashMap<String, Sample> = HashMap::new();
    let plain = EngineConfig { max_running: 1, prefix_cache: false, ..EngineConfig::default() };
    let mut reference =
        PagedEngine::new(model.clone(), EngineConfig { cache: CacheSize::Bytes(1 << 20), ..plain }).unwrap();
    // 2 layers of keys and values, 8 columns, 32 positions, 4 bytes: 4 KiB a page.
    let config = EngineConfig {
        cache: CacheSize::Bytes(10 * 4096),
        max_batch_tokens: 48,
        max_running: 12,
        speculation: Some(Speculation::Ngram { max_n: 2, tokens: 3 }),
        ..EngineConfig::default()
    };
    let mut engine = PagedEngine::new(model, config).unwrap();
    let (mut open, mut next): (HashMap<RequestId, (u64, u64)>, u64) = (HashMap::new(), 0);
    let (mut tokens, mut cancelled, mut round) = (HashMap::<RequestId, Vec<u32>>::new(), 0, 0);
    while next < REQUESTS || !open.is_empty() {
        let rng = Rng::new(&[3, round]);
        round += 1;
        for _ in 0..rng.below(0, 6) {
            if next < REQUESTS && open.len() < 60 {
                let id = engine.submit(request(next)).unwrap();
                open.insert(id, (next, round));
                next += 1;
            }
        }
        if rng.below(1, 20) == 0
            && let Some(&id) = open.keys().min_by_key(|id| Rng::new(&[4, round, id.0]).bits(0))
        {
            assert!(engine.cancel(id), "an open request can be cancelled");
            assert!(!engine.cancel(id), "but once");
        }
        for event in engine.poll().unwrap() {
            match event {
                Event::Token { request, drawn } => tokens.entry(request).or_default().push(drawn.token),
                Event::Finished { request: id, sample, reason } => {
                    let (number, born) = open.remove(&id).expect("reported once");
                    assert!(round - born < 3000, "request {number} waited {} rounds", round - born);
                    let request = request(number);
                    let streamed = tokens.remove(&id).unwrap_or_default();
                    let expected = alone.entry(request.prompt.id.clone()).or_insert_with(|| {
                        let prompt = std::slice::from_ref(&request.prompt);
                        reference.generate(prompt, &request.sampling).unwrap().remove(0)
                    });
                    let start = request.prompt.tokens.len();
                    assert_eq!(streamed, sample.tokens[start..], "events of request {number}");
                    if reason == FinishReason::Cancelled {
                        cancelled += 1;
                        assert!(expected.tokens.starts_with(&sample.tokens), "request {number}");
                    } else {
                        assert_eq!(&sample, expected, "request {number}");
                    }
                }
            }
        }
    }
    let stats = engine.stats();
    assert_eq!((stats.running, stats.waiting, stats.free_pages), (0, 0, stats.pages), "no page leaks");
    assert!(
        stats.preemptions > 100 && stats.reused_tokens > 10_000 && cancelled > 100,
        "{stats:?} {cancelled}"
    );
}
