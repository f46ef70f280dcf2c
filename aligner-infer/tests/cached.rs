//! The cached engine against the full forward pass and the golden greedy continuations.

use std::path::PathBuf;

use aligner_core::model::CausalLm;
use aligner_core::ops::host::to_vec;
use aligner_core::weights::Checkpoint;
use aligner_core::{Batch, Device, Engine, Group, Needs, Policy, Prompt, Sampling};
use aligner_infer::CachedEngine;

fn model(name: &str) -> CausalLm {
    let bundled = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden");
    let golden = std::env::var_os("ALIGNER_GOLDEN").map_or_else(|| bundled.into(), PathBuf::from);
    CausalLm::load(&Checkpoint::open(&golden.join("models").join(name)).unwrap(), &Device::flex()).unwrap()
}

fn prompt(id: &str, tokens: &[u32]) -> Prompt {
    Prompt { id: id.into(), tokens: tokens.to_vec(), metadata: serde_json::Value::Null }
}

#[test]
fn logps_of_drawn_tokens_are_those_of_the_trainer_s_forward() {
    for name in ["llama_gqa_untied", "llama_gqa_tied", "llama3_rope", "llama_bias_mha"] {
        let model = model(name);
        let mut engine = CachedEngine::new(model.clone());
        let sampling = Sampling { max_tokens: 20, seed: 3, ..Sampling::default() };
        let prompts = [prompt("a", &[5, 6, 7]), prompt("b", &[9])];
        for sample in engine.generate(&prompts, &sampling).unwrap() {
            let group = Group::single("drawn", sample.clone());
            let out = model.forward(&Batch::collate([&group]).unwrap(), Needs::NOTHING).unwrap();
            let drawn = &sample.logps[sample.prompt_len()..];
            assert_eq!(drawn.len(), 20);
            for (a, b) in drawn.iter().zip(to_vec(out.logps().unwrap())) {
                assert!((a - b).abs() < 1e-4, "{name}: {a} {b}");
            }
        }
    }
}

#[test]
fn draws_depend_on_seed_and_prompt_alone() {
    let model = model("llama_gqa_untied");
    let run = |seed| {
        let mut engine = CachedEngine::new(model.clone());
        let sampling = Sampling { max_tokens: 8, seed, ..Sampling::default() };
        engine.generate(&[prompt("a", &[5, 6])], &sampling).unwrap().remove(0).tokens
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
}

#[test]
fn a_stop_token_ends_a_response_and_belongs_to_it() {
    let model = model("llama_gqa_untied");
    let greedy = Sampling { temperature: 0.0, max_tokens: 8, ..Sampling::default() };
    let all = CachedEngine::new(model.clone()).generate(&[prompt("a", &[5, 6])], &greedy).unwrap().remove(0);
    let stop = all.tokens[4];
    let sampling = Sampling { stop_tokens: vec![stop], ..greedy };
    let stopped = CachedEngine::new(model).generate(&[prompt("a", &[5, 6])], &sampling).unwrap().remove(0);
    let first = all.tokens[2..].iter().position(|&token| token == stop).unwrap() + 3;
    assert_eq!(stopped.tokens, all.tokens[..first]);
}

#[test]
fn refit_swaps_handles_and_marks_versions() {
    let (model, other) = (model("llama_gqa_untied"), model("llama_bias_mha"));
    let mut engine = CachedEngine::new(model.clone());
    engine.refit(model.params(), 7).unwrap();
    let sampling = Sampling { max_tokens: 2, ..Sampling::default() };
    let sample = engine.generate(&[prompt("a", &[5])], &sampling).unwrap().remove(0);
    assert_eq!(sample.versions, [7, 7, 7]);
    assert!(CachedEngine::new(model).refit(other.params(), 8).is_err());
}

#[test]
fn prompts_that_cannot_run_are_refused() {
    let mut engine = CachedEngine::new(model("llama_gqa_untied"));
    assert!(engine.generate(&[prompt("a", &[])], &Sampling::default()).is_err());
    let hot = Sampling { temperature: f32::NAN, ..Sampling::default() };
    assert!(engine.generate(&[prompt("a", &[1])], &hot).is_err());
    let message = engine.generate(&[prompt("a", &[9999])], &Sampling::default()).unwrap_err().to_string();
    assert!(message.contains("9999"), "{message}");
}
