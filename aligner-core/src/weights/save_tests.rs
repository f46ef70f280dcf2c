use super::*;
use crate::Device;
use crate::weights::Checkpoint;

/// A configuration of the right sizes for [`tiny_params`].
fn tiny_config(tied: bool) -> ModelConfig {
    let value = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 3, "hidden_size": 4,
        "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2,
        "tie_word_embeddings": tied
    });
    ModelConfig::from_json(Path::new("config.json"), &value).unwrap()
}

fn tiny_params(first: f32) -> ParamSet {
    let mut params = ParamSet::default();
    let embedding = (0..12).map(|at| first + at as f32 / 7.0).collect();
    params.insert_data("model.embed_tokens.weight", &[3, 4], embedding, &Device::flex()).unwrap();
    params.insert_data("model.norm.weight", &[4], vec![1.0, -0.0, 1e-30, 3.0], &Device::flex()).unwrap();
    params.insert_data("lm_head.weight", &[3, 4], vec![0.25; 12], &Device::flex()).unwrap();
    params
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn values_of(params: &ParamSet, name: &str) -> Vec<f32> {
    params.by_name(name).unwrap().value.to_data().try_to_vec().unwrap()
}

#[test]
fn model_in_full_precision_comes_back_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    let params = tiny_params(0.1);
    save_model(dir.path(), &tiny_config(false), &params, SaveDtype::F32).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.names().count(), 3);
    for param in params.iter() {
        let (shape, values) = checkpoint.read(&param.name).unwrap();
        assert_eq!((shape, bits(&values)), (param.shape.clone(), bits(&values_of(&params, &param.name))));
    }
    let metadata = read_metadata(&dir.path().join("model.safetensors")).unwrap();
    assert_eq!(metadata["format"], "pt");
    assert_eq!(checkpoint.config().extra["torch_dtype"], "float32");
}

#[test]
fn reference_implementation_reads_what_is_written() {
    let dir = tempfile::tempdir().unwrap();
    save_model(dir.path(), &tiny_config(false), &tiny_params(0.1), SaveDtype::Bf16).unwrap();
    let bytes = std::fs::read(dir.path().join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let norm = file.tensor("model.norm.weight").unwrap();
    assert_eq!((norm.dtype(), norm.shape()), (Dtype::BF16, [4].as_slice()));
    let expected = [1.0, -0.0, 1e-30, 3.0].map(|value| bf16::from_f32(value).to_le_bytes());
    assert_eq!(norm.data(), expected.concat());
}

#[test]
fn half_precision_rounds_to_the_nearest() {
    let dir = tempfile::tempdir().unwrap();
    for (dtype, round) in [
        (SaveDtype::Bf16, (|x| bf16::from_f32(x).to_f32()) as fn(f32) -> f32),
        (SaveDtype::F16, |x| f16::from_f32(x).to_f32()),
    ] {
        let params = tiny_params(0.1);
        save_model(dir.path(), &tiny_config(false), &params, dtype).unwrap();
        let name = "model.embed_tokens.weight";
        let (_, values) = Checkpoint::open(dir.path()).unwrap().read(name).unwrap();
        let expected: Vec<f32> = values_of(&params, name).into_iter().map(round).collect();
        assert_eq!(bits(&values), bits(&expected), "{dtype:?}");
    }
}

#[test]
fn tied_head_is_not_written_twice() {
    let dir = tempfile::tempdir().unwrap();
    save_model(dir.path(), &tiny_config(true), &tiny_params(0.1), SaveDtype::F32).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.shape("lm_head.weight"), None);
    assert!(checkpoint.config().tie_embeddings);
}

#[test]
fn large_model_is_sharded_and_the_other_layout_does_not_stay_behind() {
    let dir = tempfile::tempdir().unwrap();
    let (single, index) =
        (dir.path().join("model.safetensors"), dir.path().join("model.safetensors.index.json"));
    let save = |first: f32, shard_bytes: usize| {
        let (config, params) = (tiny_config(false), tiny_params(first));
        save_sharded(dir.path(), &config, &params, SaveDtype::F32, shard_bytes).unwrap();
    };
    let first = || {
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        assert_eq!(checkpoint.names().count(), 3);
        checkpoint.read("model.embed_tokens.weight").unwrap().1[0]
    };
    save(0.5, SHARD_BYTES);
    assert!(single.exists() && !index.exists());
    // 48 and 16 bytes fit one shard, the 48 of the head the next.
    save(0.75, 64);
    assert!(!single.exists() && index.exists());
    assert!(dir.path().join("model-00002-of-00002.safetensors").exists());
    assert_eq!(first().to_bits(), 0.75f32.to_bits());
    save(0.25, SHARD_BYTES);
    assert!(single.exists() && !index.exists());
    assert_eq!(first().to_bits(), 0.25f32.to_bits());
}

#[test]
fn value_that_would_be_lost_is_refused_and_the_old_model_kept() {
    let dir = tempfile::tempdir().unwrap();
    save_model(dir.path(), &tiny_config(false), &tiny_params(0.5), SaveDtype::F32).unwrap();
    for (value, dtype) in
        [(f32::NAN, SaveDtype::F32), (f32::MAX, SaveDtype::Bf16), (65_520.0, SaveDtype::F16)]
    {
        let error = save_model(dir.path(), &tiny_config(false), &tiny_params(value), dtype).unwrap_err();
        assert!(error.to_string().contains("model.embed_tokens.weight"), "{error}");
    }
    let kept = Checkpoint::open(dir.path()).unwrap().read("model.embed_tokens.weight").unwrap().1[0];
    assert_eq!(kept.to_bits(), 0.5f32.to_bits());
    // The largest values that do fit.
    assert!(SaveDtype::F16.holds(&[65_519.0]) && SaveDtype::F32.holds(&[f32::MAX]));
    assert!(f16::from_f32(65_519.0).is_finite() && !f16::from_f32(65_520.0).is_finite());
    let limit = f32::from_bits(0x7F7F_8000);
    assert!(!bf16::from_f32(limit).is_finite() && bf16::from_f32(limit.next_down()).is_finite());
}

#[test]
fn plain_tensors_keep_every_bit_and_their_metadata() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("moments.safetensors");
    let values = [f32::from_bits(0x7FC0_1234), -0.0, f32::MIN_POSITIVE / 2.0, f32::INFINITY];
    let tensor = |values: &[f32]| Tensor::<1>::from_floats(values, &Device::flex());
    let tensors =
        vec![("m.b".to_string(), vec![2, 2], tensor(&values)), ("m.a".to_string(), vec![1], tensor(&[7.0]))];
    let metadata: BTreeMap<_, _> =
        [("step", "12"), ("a", "x")].map(|(key, value)| (key.to_string(), value.to_string())).into();
    save_tensors(&path, &tensors, &metadata).unwrap();
    let read = read_tensors(&path).unwrap();
    assert_eq!(read["m.b"].0, [2, 2]);
    assert_eq!(bits(&read["m.b"].1), bits(&values));
    assert_eq!(read_metadata(&path).unwrap(), metadata);
    let bytes = std::fs::read(&path).unwrap();
    save_tensors(&path, &tensors, &metadata).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), bytes, "the same tensors gave other bytes");
}

#[test]
fn wrong_shape_and_doubled_name_are_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let tensor = || Tensor::<1>::from_floats([1.0, 2.0], &Device::flex());
    let wrong = save_tensors(&path, &[("w".into(), vec![3], tensor())], &BTreeMap::new()).unwrap_err();
    assert!(wrong.to_string().contains("[3]") && wrong.to_string().contains("[2]"), "{wrong}");
    let twice = [("w".into(), vec![2], tensor()), ("w".into(), vec![2], tensor())];
    assert!(save_tensors(&path, &twice, &BTreeMap::new()).unwrap_err().to_string().contains("twice"));
    assert!(!path.exists());
}
