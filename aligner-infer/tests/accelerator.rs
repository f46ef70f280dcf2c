//! The engine on an accelerator against the engine on the host: `CubeCL`'s runtime for processors where the
//! build has it, else the first CUDA device.

mod tiny;

use aligner_core::model::CausalLm;
use aligner_core::weights::checksum;
use aligner_core::{Device, Engine, ParamSet, Policy as _, Prompt, Request, Sample, Sampling};
use aligner_infer::{CacheSize, EngineConfig, EngineDevice, InFlight, PackedKind, PagedEngine, Speculation};

const ACCELERATOR: EngineDevice =
    if cfg!(feature = "cube-cpu") { EngineDevice::CubeCpu } else { EngineDevice::Cuda(0) };

/// A tiny model whose distributions are far from flat.
fn model(seed: u64) -> CausalLm {
    let model = tiny::model(seed);
    let mut params: ParamSet = model.params().clone();
    params.iter_mut().for_each(|param| param.value = param.value.clone() * 4.0);
    CausalLm::new(model.config().clone(), params, &Device::flex()).unwrap()
}

fn engine(model: &CausalLm, config: EngineConfig) -> PagedEngine {
    PagedEngine::new(model.clone(), EngineConfig { cache: CacheSize::Bytes(40 * 4096), ..config }).unwrap()
}

fn there(config: EngineConfig) -> EngineConfig {
    EngineConfig { device: ACCELERATOR, ..config }
}

/// Prompts of several lengths, some of which begin alike.
fn prompts() -> Vec<Prompt> {
    let tokens = |id: u32, len: u32| (0..len).map(move |at| (at * 7 + id % 2 * 11 + 3) % tiny::VOCAB as u32);
    let lens = [3, 40, 37, 1];
    let prompt = |(id, len): (u32, u32)| Prompt {
        id: id.to_string(),
        tokens: tokens(id, len).collect(),
        metadata: serde_json::Value::Null,
    };
    (0..).zip(lens).map(prompt).collect()
}

/// Settings that the accelerator's sampler knows, and some that it leaves to the host.
fn samplings() -> Vec<Sampling> {
    let plain = Sampling { max_tokens: 8, seed: 5, ..Sampling::default() };
    vec![
        plain.clone(),
        Sampling { temperature: 0.0, ..plain.clone() },
        Sampling { temperature: 0.8, top_k: 20, top_p: 0.9, min_p: 0.01, ..plain.clone() },
        Sampling { repetition_penalty: 1.2, top_k: 9, ..plain.clone() },
        Sampling { top_logprobs: 2, ..plain },
    ]
}

/// One sample of each prompt with each setting, all at once.
fn samples(engine: &mut PagedEngine) -> Vec<Sample> {
    let mut ids = Vec::new();
    for sampling in samplings() {
        for prompt in prompts() {
            ids.push(engine.submit(Request::new(prompt, sampling.clone())).unwrap());
        }
    }
    let mut samples = vec![None; ids.len()];
    while samples.iter().any(Option::is_none) {
        for event in engine.poll().unwrap() {
            if let aligner_core::Event::Finished { request, sample, .. } = event {
                samples[ids.iter().position(|id| *id == request).unwrap()] = Some(sample);
            }
        }
    }
    samples.into_iter().flatten().collect()
}

fn assert_close(got: &[Sample], expected: &[Sample], limit: f32) {
    assert_eq!(got.len(), expected.len());
    for (got, expected) in got.iter().zip(expected) {
        assert_eq!(got.tokens, expected.tokens);
        let logps = got.logps.iter().chain(&got.raw_logps);
        for (a, b) in logps.zip(expected.logps.iter().chain(&expected.raw_logps)) {
            assert!((a - b).abs() < limit, "{a} {b}");
        }
    }
}

#[test]
fn samples_are_those_of_the_host() {
    let model = model(1);
    let expected = samples(&mut engine(&model, EngineConfig::default()));
    let got = samples(&mut engine(&model, there(EngineConfig::default())));
    assert_close(&got, &expected, 1e-4);
}

#[test]
fn samples_depend_neither_on_chunks_nor_company_nor_proposals() {
    let model = model(2);
    let expected = samples(&mut engine(&model, there(EngineConfig::default())));
    let draft = Speculation::Draft { model: Box::new(self::model(3)), tokens: 2 };
    let ngram = Speculation::Ngram { max_n: 2, tokens: 3 };
    for config in [
        EngineConfig { max_running: 2, prefix_cache: false, ..EngineConfig::default() },
        EngineConfig { max_batch_tokens: 23, speculation: Some(ngram), ..EngineConfig::default() },
        EngineConfig { speculation: Some(draft), ..EngineConfig::default() },
    ] {
        let mut engine = engine(&model, there(config));
        let got = samples(&mut engine);
        for (got, expected) in got.iter().zip(&expected) {
            assert_eq!((&got.tokens, &got.logps), (&expected.tokens, &expected.logps));
        }
    }
}

#[test]
fn an_unloaded_engine_goes_on_where_it_was() {
    let model = model(8);
    let run = |unload: bool| {
        let mut engine = engine(&model, there(EngineConfig::default()));
        let sampling = Sampling { max_tokens: 6, ..Sampling::default() };
        engine.submit(Request::new(prompts()[1].clone(), sampling)).unwrap();
        let mut tokens = Vec::new();
        while tokens.len() < 6 {
            for event in engine.poll().unwrap() {
                if let aligner_core::Event::Token { drawn, .. } = event {
                    tokens.push(drawn.token);
                }
            }
            if unload && tokens.len() == 3 {
                engine.unload();
                engine.load();
            }
        }
        tokens
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn a_refit_from_host_parameters_is_that_version() {
    let (old, new) = (model(4), model(5));
    for in_flight in [InFlight::Continue, InFlight::Finish] {
        let config = there(EngineConfig { in_flight, ..EngineConfig::default() });
        let mut refitted = engine(&old, config);
        samples(&mut refitted);
        refitted.refit(new.params(), 1).unwrap();
        assert_eq!(refitted.checksum(), checksum(new.params()));
        let expected = samples(&mut engine(&new, there(EngineConfig::default())));
        assert_close(&samples(&mut refitted), &expected, 1e-9);
    }
}

#[test]
fn bf16_copies_generate_and_others_are_refused() {
    let model = model(6);
    let packed = |kind| there(EngineConfig { packed: Some(kind), ..EngineConfig::default() });
    let engine = engine(&model, packed(PackedKind::Bf16));
    let gap = engine.logp_gap(&prompts()[1].tokens).unwrap();
    assert!(gap.mean > 0.0 && gap.largest < 0.2, "{gap:?}");
    assert!(engine.packed().0 > 0);
    let message = PagedEngine::new(model, packed(PackedKind::Int8)).unwrap_err().to_string();
    assert!(message.contains("packed") && message.contains("bf16"), "{message}");
}

#[test]
fn the_gap_to_the_trainer_is_rounding() {
    let engine = engine(&model(7), there(EngineConfig::default()));
    let gap = engine.logp_gap(&prompts()[1].tokens).unwrap();
    assert!(gap.largest < 1e-4, "{gap:?}");
}
