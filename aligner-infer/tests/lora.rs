//! The engine on a model with an adapter, which it never merges.

mod tiny;

use std::path::PathBuf;

use aligner_core::model::{CausalLm, LoraConfig, Targets};
use aligner_core::ops::host::{to_vec, with_slice};
use aligner_core::rng::Rng;
use aligner_core::weights::{AdapterCheckpoint, Checkpoint};
use aligner_core::{Batch, Device, Engine, Group, Needs, ParamSet, Policy, Prompt, Sample, Sampling, Tensor};
use aligner_infer::{CacheSize, EngineConfig, PackedKind, PagedEngine, Speculation};

/// Suppressed in the golden greedy continuations.
const EOS: u32 = 2;

fn golden() -> PathBuf {
    let bundled = || concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden").into();
    std::env::var_os("ALIGNER_GOLDEN").map_or_else(bundled, PathBuf::from)
}

/// The golden adapters on their bases, each with its greedy continuation and the prompt of that.
fn cases() -> Vec<(String, CausalLm, Vec<u32>, Vec<u32>)> {
    let entries = std::fs::read_dir(golden().join("lora")).unwrap().map(|entry| entry.unwrap().path());
    let open = |path: PathBuf| {
        let file = AdapterCheckpoint::open(&path).unwrap();
        let base = Checkpoint::open(&golden().join("lora").join(file.base().unwrap())).unwrap();
        let model = CausalLm::load(&base, &Device::flex()).unwrap().with_adapter_from(&file).unwrap();
        let bytes = std::fs::read(path.join("expected.safetensors")).unwrap();
        let row = |name: &str| {
            let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            let tensor = file.tensor(name).unwrap();
            let all = tensor.data().as_chunks().0.iter().map(|&bytes| i64::from_le_bytes(bytes) as u32);
            all.take(tensor.shape().last().copied().unwrap()).collect::<Vec<u32>>()
        };
        (path.display().to_string(), model, row("input_ids"), row("greedy"))
    };
    let cases: Vec<_> = entries.map(open).collect();
    assert!(!cases.is_empty());
    cases
}

/// A tiny model whose adapter has moved away from zero.
fn adapted(seed: u64, dora: bool) -> CausalLm {
    let config = LoraConfig { r: 3, alpha: 6.0, targets: Targets::AllLinear, dora, ..LoraConfig::default() };
    let mut model = tiny::model(7).with_adapter(config, 1).unwrap();
    move_adapter(model.params_mut(), seed);
    model
}

fn move_adapter(params: &mut ParamSet, seed: u64) {
    for (at, param) in
        params.iter_mut().enumerate().filter(|(_, param)| param.name.ends_with("lora_B.weight"))
    {
        let rng = Rng::new(&[seed, at as u64]);
        let values: Vec<f32> = (0..param.elements() as u64).map(|i| (rng.normal(i) * 0.3) as f32).collect();
        param.value = Tensor::from_floats(values.as_slice(), &Device::flex());
    }
}

fn engine(model: &CausalLm, config: EngineConfig) -> PagedEngine {
    PagedEngine::new(model.clone(), EngineConfig { cache: CacheSize::Bytes(1 << 22), ..config }).unwrap()
}

fn prompt(id: &str, tokens: &[u32]) -> Prompt {
    Prompt { id: id.into(), tokens: tokens.to_vec(), metadata: serde_json::Value::Null }
}

/// The response's log-probabilities under the trainer's forward pass.
fn logps(model: &CausalLm, sample: &Sample) -> Vec<f32> {
    let group = Group::single("drawn", sample.clone());
    let out = model.forward(&Batch::collate([&group]).unwrap(), Needs::NOTHING).unwrap();
    to_vec(out.logps().unwrap())
}

fn address(param: &aligner_core::Param) -> usize {
    with_slice(&param.value, |values| values.as_ptr() as usize)
}

#[test]
fn greedy_continuations_are_those_of_peft() {
    for (name, model, tokens, expected) in cases() {
        let sampling = Sampling {
            temperature: 0.0,
            max_tokens: expected.len(),
            logit_bias: vec![(EOS, -100.0)],
            ..Sampling::default()
        };
        let mut engine = engine(&model, EngineConfig::default());
        let samples = engine.generate(&[prompt("golden", &tokens)], &sampling).unwrap();
        assert_eq!(samples[0].tokens[tokens.len()..], expected, "{name}");
    }
}

#[test]
fn logps_are_those_of_the_trainer_and_of_no_company() {
    for model in [adapted(3, false), adapted(3, true)] {
        let sampling = Sampling { max_tokens: 20, seed: 3, ..Sampling::default() };
        let prompts = [prompt("a", &[5, 6, 7]), prompt("b", &[9]), prompt("c", &[5, 6, 7, 8, 9, 10, 11])];
        let together = engine(&model, EngineConfig::default()).generate(&prompts, &sampling).unwrap();
        for (prompt, sample) in prompts.iter().zip(&together) {
            let drawn = &sample.logps[sample.prompt_len()..];
            for (a, b) in drawn.iter().zip(logps(&model, sample)) {
                assert!((a - b).abs() < 1e-4, "{a} {b}");
            }
            let chunked = EngineConfig {
                max_batch_tokens: 2,
                speculation: Some(Speculation::Ngram { max_n: 2, tokens: 3 }),
                ..EngineConfig::default()
            };
            let alone = engine(&model, chunked).generate(std::slice::from_ref(prompt), &sampling).unwrap();
            assert_eq!((&alone[0].tokens, &alone[0].logps), (&sample.tokens, &sample.logps), "bitwise");
        }
        let base = model.without_adapter().unwrap();
        let plain = engine(&base, EngineConfig::default()).generate(&prompts, &sampling).unwrap();
        assert_ne!(plain[0].logps, together[0].logps, "the adapter counts");
    }
}

#[test]
fn a_refit_of_the_adapter_moves_no_byte_of_the_base_and_makes_no_copy_of_it() {
    for dora in [false, true] {
        let first = adapted(3, dora);
        let second = adapted(4, dora);
        let mut moved = first.params().clone();
        for (own, new) in moved.iter_mut().zip(second.params().iter()).filter(|(own, _)| own.trainable) {
            own.value = new.value.clone();
        }
        let mut frozen = moved.iter().zip(first.params().iter()).filter(|(param, _)| !param.trainable);
        assert!(frozen.all(|(new, old)| address(new) == address(old)));
        for packed in [None, Some(PackedKind::Bf16), Some(PackedKind::Int8), Some(PackedKind::Int4)] {
            let config = EngineConfig { packed, ..EngineConfig::default() };
            let mut engine = engine(&first, config.clone());
            let bytes = engine.packed().0;
            engine.refit(&moved, 1).unwrap();
            assert_eq!(engine.packed().0, bytes);
            let sampling = Sampling { max_tokens: 12, seed: 5, ..Sampling::default() };
            let prompts = [prompt("a", &[5, 6, 7])];
            let refitted = engine.generate(&prompts, &sampling).unwrap();
            let model = CausalLm::new(first.config().clone(), moved.clone(), &Device::flex()).unwrap();
            let fresh = self::engine(&model, config).generate(&prompts, &sampling).unwrap();
            assert_eq!((&refitted[0].tokens, &refitted[0].logps), (&fresh[0].tokens, &fresh[0].logps));
        }
    }
}

#[test]
fn smaller_weights_of_the_base_leave_the_adapter_whole() {
    let model = adapted(3, false);
    let gap = |packed| {
        let engine = engine(&model, EngineConfig { packed, ..EngineConfig::default() });
        let tokens: Vec<u32> = (0..40).map(|at| at * 13 % tiny::VOCAB as u32).collect();
        engine.logp_gap(&tokens).unwrap().mean
    };
    assert!(gap(None) < 1e-5);
    assert!(gap(Some(PackedKind::Bf16)) < 5e-2);
    // The base without its adapter is as far from the base's small copy: the adapter adds nothing.
    let base = model.without_adapter().unwrap();
    let of_base = engine(&base, EngineConfig { packed: Some(PackedKind::Bf16), ..EngineConfig::default() });
    let of_adapted =
        engine(&model, EngineConfig { packed: Some(PackedKind::Bf16), ..EngineConfig::default() });
    assert_eq!(of_base.packed().0, of_adapted.packed().0, "no copy of an adapter's matrices");
}
