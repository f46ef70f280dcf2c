//! A trained reward model as a reward.

use std::path::PathBuf;

use aligner_algos::rewards::{ModelReward, ModelRewardConfig};
use aligner_core::model::CausalLm;
use aligner_core::ops::host::to_vec;
use aligner_core::weights::Checkpoint;
use aligner_core::{Batch, Device, Group, Needs, Policy, Reward, Sample, Score};
use aligner_data::Tokenizer;

fn path(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/models")).join(name)
}

fn model(name: &str) -> CausalLm {
    CausalLm::load(&Checkpoint::open(&path(name)).unwrap(), &Device::flex()).unwrap()
}

/// Answers of many lengths, four to each prompt.
fn samples() -> Vec<Sample> {
    let tokens =
        |seed: u32, len: u32| (0..len).map(|at| 3 + (seed * 31 + at * at * 7) % 200).collect::<Vec<_>>();
    let sample = |at: u32| Sample::response(&tokens(at / 4, 3 + at / 4), &tokens(50 + at, 1 + at * 5 % 9));
    (0..12).map(sample).collect()
}

fn score(reward: &ModelReward, samples: &[Sample]) -> Vec<f32> {
    let value = |score: Score| match score {
        Score::Sample(value) => value,
        other => panic!("{other:?}"),
    };
    reward.score(samples).unwrap().into_iter().map(value).collect()
}

/// The head's output at each sample's last token, one sample at a time.
fn alone(model: &CausalLm, output: usize) -> Vec<f32> {
    let score = |sample: Sample| {
        let batch = Batch::collate([&Group::single("one", sample)]).unwrap();
        to_vec(model.forward(&batch, Needs::SCORES).unwrap().scores().unwrap())[output]
    };
    samples().into_iter().map(score).collect()
}

#[test]
fn scores_are_the_models_own_whatever_the_packing() {
    for (name, output) in [("llama_rm", 0), ("llama_rm_multi", 1)] {
        let expected = alone(&model(name), output);
        for micro_batch_tokens in [1, 20, 1000] {
            let config = ModelRewardConfig { output, micro_batch_tokens };
            let got = score(&ModelReward::of_model(model(name), config).unwrap(), &samples());
            let gap = got.iter().zip(&expected).fold(0.0_f32, |most, (a, b)| most.max((a - b).abs()));
            assert!(gap < 1e-5, "{name}, {micro_batch_tokens} tokens a pass: off by {gap:e}");
        }
    }
}

#[test]
fn a_model_without_the_head_or_the_output_is_refused() {
    let message = ModelReward::of_model(model("llama_gqa_untied"), ModelRewardConfig::default());
    assert!(message.err().unwrap().to_string().contains("scalar head"));
    let config = ModelRewardConfig { output: 1, ..ModelRewardConfig::default() };
    let message = ModelReward::of_model(model("llama_rm"), config).err().unwrap().to_string();
    assert!(message.starts_with("output: "), "{message}");
    let config = ModelRewardConfig { micro_batch_tokens: 0, ..ModelRewardConfig::default() };
    let message = ModelReward::of_model(model("llama_rm"), config).err().unwrap().to_string();
    assert!(message.starts_with("micro_batch_tokens: "), "{message}");
}

#[test]
fn tokens_past_the_vocabulary_name_their_sample() {
    let reward = ModelReward::of_model(model("llama_rm"), ModelRewardConfig::default()).unwrap();
    let mut samples = samples();
    samples[5].tokens[2] = 1_000_000;
    let message = reward.score(&samples).unwrap_err().to_string();
    assert!(message.contains("sample 5") && message.contains("1000000"), "{message}");
    samples[5] = Sample::default();
    assert!(reward.score(&samples).unwrap_err().to_string().contains("sample 5: no token"));
}

#[test]
fn vocabularies_that_differ_are_told_apart() {
    let one = Tokenizer::from_dir(&path("llama_rm")).unwrap();
    assert!(ModelReward::check_vocabulary(&one, &one).is_ok());
    let other = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/chat/tokenizer"));
    let other = Tokenizer::from_dir(&other).unwrap();
    let message = ModelReward::check_vocabulary(&one, &other).unwrap_err().to_string();
    assert!(message.contains("vocabularies differ"), "{message}");
}
