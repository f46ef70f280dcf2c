//! The engine on a base in few bits: it reads the trainer's own bits, so it draws from the trainer's distribution.

use aligner_core::model::{CausalLm, LoraConfig, ModelConfig, Targets};
use aligner_core::ops::host::to_vec;
use aligner_core::weights::{Checkpoint, SaveDtype, save_model};
use aligner_core::{Batch, Device, Engine, Group, Needs, Policy, Prompt, Sampling};
use aligner_infer::{CacheSize, EngineConfig, PackedKind, PagedEngine};
use serde_json::json;

/// Rows of whole groups and blocks.
fn checkpoint(dir: &std::path::Path) -> Checkpoint {
    let json = json!({
        "model_type": "llama", "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": true,
    });
    let config = ModelConfig::from_json("tiny".as_ref(), &json).unwrap();
    let model = CausalLm::init(config, 5, &Device::flex()).unwrap();
    save_model(dir, model.config(), model.params(), SaveDtype::F32).unwrap();
    Checkpoint::open(dir).unwrap()
}

#[test]
fn drawn_log_probabilities_are_the_trainers_on_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = checkpoint(dir.path());
    let plain = CausalLm::load(&checkpoint, &Device::flex()).unwrap();
    for (kind, dora) in [(PackedKind::Int8, false), (PackedKind::Nf4, false), (PackedKind::Nf4, true)] {
        let base = CausalLm::load_packed(&checkpoint, &Device::flex(), Some(kind)).unwrap();
        let packed: Vec<&str> = (base.params().iter())
            .filter(|param| param.packed.is_some())
            .map(|param| param.name.as_str())
            .collect();
        assert_eq!(packed.len(), 14, "the linears of two layers, and no embedding: {packed:?}");
        let settings = LoraConfig { r: 3, targets: Targets::AllLinear, dora, ..LoraConfig::default() };
        let mut model = base.with_adapter(settings, 1).unwrap();
        for param in model.params_mut().iter_mut().filter(|param| param.name.contains("lora_B")) {
            param.value = param.value.clone() + 0.03;
        }
        let cache = CacheSize::Bytes(1 << 22);
        let mut engine =
            PagedEngine::new(model.clone(), EngineConfig { cache, ..EngineConfig::default() }).unwrap();
        let prompt = Prompt { id: "a".into(), tokens: vec![5, 6, 7], metadata: serde_json::Value::Null };
        let sampling = Sampling { max_tokens: 30, seed: 3, ..Sampling::default() };
        let sample = engine.generate(&[prompt], &sampling).unwrap().remove(0);
        let drawn = sample.logps[sample.prompt_len()..].to_vec();
        let logps = |model: &CausalLm| {
            let group = Group::single("drawn", sample.clone());
            to_vec(
                model.forward(&Batch::collate([&group]).unwrap(), Needs::NOTHING).unwrap().logps().unwrap(),
            )
        };
        let far = |other: &[f32]| drawn.iter().zip(other).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        let own = far(&logps(&model));
        assert!(own < 1e-5, "{kind:?}: {own}");
        // The base in f32 with the same adapter is measurably another model.
        let mut other = plain
            .clone()
            .with_adapter(LoraConfig { r: 3, targets: Targets::AllLinear, dora, ..LoraConfig::default() }, 1)
            .unwrap();
        for (param, own) in other.params_mut().iter_mut().zip(model.params().iter()) {
            if param.trainable {
                param.value = own.value.clone();
            }
        }
        assert!(far(&logps(&other)) > 10.0 * own.max(1e-6), "{kind:?}: {}", far(&logps(&other)));
    }
}

#[test]
fn a_packed_base_is_neither_saved_nor_merged_and_its_sum_is_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = checkpoint(dir.path());
    let load = |kind| CausalLm::load_packed(&checkpoint, &Device::flex(), kind).unwrap();
    let sums: Vec<String> = [None, Some(PackedKind::Int8), Some(PackedKind::Nf4)]
        .map(|kind| aligner_core::weights::checksum(load(kind).params()))
        .to_vec();
    assert!(sums[0] != sums[1] && sums[1] != sums[2]);
    assert_eq!(sums[2], aligner_core::weights::checksum(load(Some(PackedKind::Nf4)).params()));
    let packed = load(Some(PackedKind::Nf4));
    let message = save_model(&dir.path().join("no"), packed.config(), packed.params(), SaveDtype::F32);
    assert!(message.unwrap_err().to_string().contains("held in few bits"));
    let adapted = packed.with_adapter(LoraConfig::default(), 1).unwrap();
    assert!(adapted.merged().unwrap_err().to_string().contains("held in few bits"));
    let settings = LoraConfig { modules_to_save: vec!["down_proj".into()], ..LoraConfig::default() };
    let refused = load(Some(PackedKind::Int8)).with_adapter(settings, 1).unwrap_err().to_string();
    assert!(refused.contains("cannot be trained in full"), "{refused}");
}
