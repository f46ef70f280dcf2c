//! Several adapters by name on one engine.

mod tiny;

use std::path::Path;

use aligner_core::model::{CausalLm, LoraConfig, Targets};
use aligner_core::ops::host::to_vec;
use aligner_core::rng::Rng;
use aligner_core::weights::{AdapterCheckpoint, Checkpoint, SaveDtype, save_adapter};
use aligner_core::{Device, Engine, Event, Policy, Prompt, Request, Sample, Sampling, Tensor};
use aligner_infer::{CacheSize, EngineConfig, PackedKind, PagedEngine, Speculation};

const NAMES: [&str; 5] = ["all", "narrow", "lengths", "head", "ends"];

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(ToString::to_string).collect()
}

/// An adapter that has moved away from zero, of each name its own kind.
fn adapted(base: &CausalLm, name: &str) -> CausalLm {
    let few = Targets::Names(names(&["q_proj", "down_proj"]));
    let config = match name {
        "all" => LoraConfig { r: 3, alpha: 6.0, targets: Targets::AllLinear, ..LoraConfig::default() },
        "narrow" => LoraConfig { r: 1, alpha: 4.0, targets: few, rslora: true, ..LoraConfig::default() },
        "head" => LoraConfig { modules_to_save: names(&["lm_head"]), ..LoraConfig::default() },
        "ends" => {
            let saved = names(&["embed_tokens", "lm_head", "model.norm", "input_layernorm"]);
            LoraConfig { targets: few, modules_to_save: saved, ..LoraConfig::default() }
        }
        _ => LoraConfig { r: 2, alpha: 4.0, targets: few, dora: true, ..LoraConfig::default() },
    };
    moved(base, config, name.len() as u64)
}

/// An adapter whose additions, and modules in full, are not those that it begins with.
fn moved(base: &CausalLm, config: LoraConfig, seed: u64) -> CausalLm {
    let mut model = base.clone().with_adapter(config, 1).unwrap();
    for (at, param) in model.params_mut().iter_mut().enumerate() {
        if param.trainable && !param.name.ends_with("lora_A.weight") && !param.name.ends_with("vector") {
            let rng = Rng::new(&[at as u64, seed]);
            let values =
                (0..).zip(to_vec(&param.value)).map(|(i, value)| value + (rng.normal(i) * 0.3) as f32);
            let values: Vec<f32> = values.collect();
            param.value = Tensor::from_floats(values.as_slice(), &Device::flex());
        }
    }
    model
}

fn engine(model: &CausalLm, config: EngineConfig) -> PagedEngine {
    PagedEngine::new(model.clone(), EngineConfig { cache: CacheSize::Bytes(1 << 22), ..config }).unwrap()
}

fn with_adapters(base: &CausalLm, dir: &Path, config: EngineConfig) -> PagedEngine {
    let mut engine = engine(base, config);
    for name in NAMES {
        let (model, place) = (adapted(base, name), dir.join(name));
        save_adapter(&place, model.config(), model.params(), "base", SaveDtype::F32).unwrap();
        engine.add_adapter(name, &AdapterCheckpoint::open(&place).unwrap()).unwrap();
    }
    engine
}

/// Requests of the base and of each adapter, in turns; prompts begin alike.
fn requests() -> Vec<Request> {
    let sampling = Sampling { max_tokens: 14, seed: 3, ..Sampling::default() };
    let request = |at: usize| {
        let tokens: Vec<u32> = (0..40 + at as u32 % 5).map(|token| 3 + token * 7 % 50).collect();
        let prompt = Prompt { id: format!("p{at}"), tokens, metadata: serde_json::Value::Null };
        let adapter = (at % (1 + NAMES.len())).checked_sub(1).map(|name| NAMES[name].to_string());
        Request { adapter, ..Request::new(prompt, sampling.clone()) }
    };
    (0..18).map(request).collect()
}

fn run(engine: &mut PagedEngine, requests: &[Request]) -> Vec<Sample> {
    let ids: Vec<_> = requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
    let mut done = vec![None; ids.len()];
    while done.iter().any(Option::is_none) {
        for event in engine.poll().unwrap() {
            if let Event::Finished { request, sample, .. } = event {
                done[ids.iter().position(|id| *id == request).unwrap()] = Some(sample);
            }
        }
    }
    done.into_iter().flatten().collect()
}

fn same(a: &Sample, b: &Sample) -> bool {
    a.tokens == b.tokens && a.logps == b.logps
}

fn close(a: &Sample, b: &Sample) -> bool {
    a.tokens == b.tokens && a.logps.iter().zip(&b.logps).all(|(a, b)| (a - b).abs() < 1e-4)
}

#[test]
fn a_mixed_batch_gives_each_adapter_what_it_gives_alone_bit_for_bit() {
    let (dir, base) = (tempfile::tempdir().unwrap(), tiny::model(7));
    let speculation = Some(Speculation::Ngram { max_n: 2, tokens: 3 });
    for config in [
        EngineConfig::default(),
        EngineConfig { max_batch_tokens: 5, speculation, ..EngineConfig::default() },
        EngineConfig { packed: Some(PackedKind::Bf16), ..EngineConfig::default() },
    ] {
        let requests = requests();
        let mut engine = with_adapters(&base, dir.path(), config.clone());
        let together = run(&mut engine, &requests);
        assert!(engine.stats().reused_tokens > 0, "prompts of one adapter share their beginning");
        for (request, sample) in requests.iter().zip(&together) {
            let mut alone = with_adapters(&base, dir.path(), config.clone());
            let own = run(&mut alone, std::slice::from_ref(request)).remove(0);
            assert!(same(&own, sample), "{:?} of {:?}", request.prompt.id, request.adapter);
        }
        // The same prompt under another adapter is another text.
        assert!(!same(&together[0], &together[1]) && !same(&together[1], &together[5]));
    }
}

#[test]
fn named_adapters_are_the_models_with_an_adapter_of_their_own_and_the_merged_ones() {
    let (dir, base) = (tempfile::tempdir().unwrap(), tiny::model(7));
    let mut mixed = with_adapters(&base, dir.path(), EngineConfig::default());
    let requests = requests();
    let together = run(&mut mixed, &requests);
    for (request, sample) in requests.iter().zip(&together) {
        let own = match &request.adapter {
            Some(name) => adapted(&base, name),
            None => base.clone(),
        };
        let plain = Request { adapter: None, ..request.clone() };
        let alone = run(&mut engine(&own, EngineConfig::default()), std::slice::from_ref(&plain)).remove(0);
        assert!(close(&alone, sample), "{:?}", request.adapter);
        if request.adapter.is_some() {
            let merged = own.merged().unwrap();
            let merged = run(&mut engine(&merged, EngineConfig::default()), &[plain]).remove(0);
            assert!(close(&merged, sample), "{:?} merged", request.adapter);
        }
    }
}

#[test]
fn what_an_engine_cannot_add_or_does_not_know_is_refused() {
    let (dir, base) = (tempfile::tempdir().unwrap(), tiny::model(7));
    let mut engine = with_adapters(&base, dir.path(), EngineConfig::default());
    let file = AdapterCheckpoint::open(&dir.path().join("all")).unwrap();
    let message = engine.add_adapter("all", &file).unwrap_err().to_string();
    assert!(message.contains("called `all` already"), "{message}");
    let unknown = Request { adapter: Some("other".into()), ..requests().remove(0) };
    let message = engine.submit(unknown).unwrap_err().to_string();
    assert!(message.contains("no adapter is called `other`") && message.contains("narrow"), "{message}");
    let settings = LoraConfig { modules_to_save: names(&["down_proj"]), ..LoraConfig::default() };
    let saved = base.clone().with_adapter(settings, 1).unwrap();
    let scores = base.clone().with_score_head(1, 1).unwrap().with_adapter(LoraConfig::default(), 1).unwrap();
    for (name, model, parts) in [
        ("saved", saved, ["model.layers.0.mlp.down_proj.weight in full", "merge it first"]),
        ("scores", scores, ["a score head", "draws text"]),
    ] {
        let place = dir.path().join(name);
        save_adapter(&place, model.config(), model.params(), "base", SaveDtype::F32).unwrap();
        let file = AdapterCheckpoint::open(&place).unwrap();
        let message = engine.add_adapter(name, &file).unwrap_err().to_string();
        let known = [&format!("adapter `{name}`"), parts[0], parts[1]];
        assert!(known.iter().all(|part| message.contains(*part)), "{message}");
    }
    let message = engine.refit(base.params(), 1).unwrap_err().to_string();
    assert!(message.contains("keeps its weights"), "{message}");
}

#[test]
fn embeddings_norms_and_heads_of_an_adapter_s_own_serve_its_own_rows() {
    let golden = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/models"));
    for (family, saved) in [
        // A head that is the embedding, learned positions, norms with a bias.
        ("gpt2", &["wte", "wpe", "ln_1", "ln_f"] as &[&str]),
        // A scaled embedding, norms after each block, and a cap on the logits.
        ("gemma2", &["embed_tokens", "layernorm"]),
        // Norms of each head, and routers among experts.
        ("qwen3_moe", &["q_norm", "k_norm", "lm_head"]),
    ] {
        let base = CausalLm::load(&Checkpoint::open(&golden.join(family)).unwrap(), &Device::flex()).unwrap();
        let settings = LoraConfig {
            targets: Targets::AllLinear,
            modules_to_save: names(saved),
            ..LoraConfig::default()
        };
        let dir = tempfile::tempdir().unwrap();
        let mut mixed = engine(&base, EngineConfig::default());
        let models: Vec<CausalLm> = (0..2).map(|seed| moved(&base, settings.clone(), seed)).collect();
        for (name, model) in ["one", "two"].iter().zip(&models) {
            let place = dir.path().join(name);
            save_adapter(&place, model.config(), model.params(), "base", SaveDtype::F32).unwrap();
            mixed.add_adapter(name, &AdapterCheckpoint::open(&place).unwrap()).unwrap();
        }
        let owners = [None, Some(("one", &models[0])), Some(("two", &models[1]))];
        let owners: Vec<_> = owners.iter().cycle().take(6).collect();
        let request = |(at, owner): (usize, &&Option<(&str, &CausalLm)>)| {
            let sampling = Sampling { max_tokens: 6, seed: 5, ..Sampling::default() };
            let tokens = (0..9).map(|token| 3 + token * 31 % 200).collect();
            let prompt = Prompt { id: format!("p{at}"), tokens, metadata: serde_json::Value::Null };
            Request { adapter: owner.map(|(name, _)| name.into()), ..Request::new(prompt, sampling) }
        };
        let requests: Vec<Request> = owners.iter().enumerate().map(request).collect();
        let together = run(&mut mixed, &requests);
        for ((request, owner), sample) in requests.iter().zip(owners).zip(&together) {
            let own = owner.map_or(&base, |(_, model)| model);
            let plain = Request { adapter: None, ..request.clone() };
            let alone = run(&mut engine(own, EngineConfig::default()), &[plain]).remove(0);
            assert!(close(&alone, sample), "{family}: {:?}", request.adapter);
        }
        assert!(!close(&together[0], &together[1]) && !close(&together[1], &together[2]), "{family}");
    }
}
