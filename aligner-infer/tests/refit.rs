//! Refits at random moments: each token is drawn from one version of the weights, alone.

mod tiny;

use aligner_core::model::CausalLm;
use aligner_core::ops::host::to_vec;
use aligner_core::rng::Rng;
use aligner_core::{
    Batch, Device, Engine, Event, Group, Needs, ParamSet, Policy as _, Prompt, Request, Sample, Sampling,
};
use aligner_infer::{CacheSize, EngineConfig, InFlight, PagedEngine, Speculation};
use proptest::prelude::*;

/// Models of the same shape whose log-probabilities differ by far more than rounding.
fn versions(count: u64) -> Vec<CausalLm> {
    let scaled = |version| {
        let model = tiny::model(100 + version);
        let mut params: ParamSet = model.params().clone();
        params.iter_mut().for_each(|param| param.value = param.value.clone() * 4.0);
        CausalLm::new(model.config().clone(), params, &Device::flex()).unwrap()
    };
    (0..count).map(scaled).collect()
}

/// The response's log-probabilities under one version of the weights.
fn logps(model: &CausalLm, sample: &Sample) -> Vec<f32> {
    let group = Group::single("drawn", sample.clone());
    let out = model.forward(&Batch::collate([&group]).unwrap(), Needs::NOTHING).unwrap();
    to_vec(out.logps().unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_token_comes_from_a_mix_of_versions(
        seed in any::<u64>(),
        finish in any::<bool>(),
        prefix_cache in any::<bool>(),
        speculate in any::<bool>(),
        pages in 8usize..30,
        chunk in 5usize..40,
    ) {
        let models = versions(5);
        let config = EngineConfig {
            cache: CacheSize::Bytes(pages * 4096),
            max_batch_tokens: chunk,
            max_running: 4,
            prefix_cache,
            in_flight: if finish { InFlight::Finish } else { InFlight::Continue },
            speculation: speculate.then_some(Speculation::Ngram { max_n: 2, tokens: 3 }),
            ..EngineConfig::default()
        };
        let mut engine = PagedEngine::new(models[0].clone(), config).unwrap();
        let (mut submitted, mut newest, mut samples, mut round) = (0, 0, Vec::new(), 0);
        while samples.len() < 8 {
            let rng = Rng::new(&[seed, round]);
            round += 1;
            if submitted < 8 && rng.below(0, 3) == 0 {
                let length = 1 + rng.below(1, 50);
                // Half of the prompts begin alike.
                let alike = rng.below(2, 2) == 0;
                let token = |i| if alike { (i * 5 % tiny::VOCAB) as u32 } else { rng.below(10 + i, tiny::VOCAB) as u32 };
                let prompt = Prompt {
                    id: submitted.to_string(),
                    tokens: (0..length).map(token).collect(),
                    metadata: serde_json::Value::Null,
                };
                let max_tokens = 1 + rng.below(3, 40) as usize;
                engine.submit(Request::new(prompt, Sampling { max_tokens, seed, ..Sampling::default() })).unwrap();
                submitted += 1;
            }
            if newest + 1 < models.len() && rng.below(4, 9) == 0 {
                newest += 1;
                engine.refit(models[newest].params(), newest as u64).unwrap();
            }
            for event in engine.poll().unwrap() {
                if let Event::Finished { sample, .. } = event {
                    samples.push(sample);
                }
            }
        }
        for sample in samples {
            let prompt = sample.prompt_len();
            let of: Vec<Vec<f32>> = models.iter().map(|model| logps(model, &sample)).collect();
            let drawn = sample.versions[prompt..].iter().zip(&sample.logps[prompt..]);
            for (at, (&version, &logp)) in drawn.enumerate() {
                let expected = of[version as usize][at];
                prop_assert!((logp - expected).abs() < 1e-4, "token {at} of version {version}: {logp} {expected}");
            }
            let versions = &sample.versions[prompt..];
            prop_assert!(versions.is_sorted(), "versions go on: {versions:?}");
            prop_assert!(!finish || versions.iter().all(|version| version == &versions[0]), "{versions:?}");
        }
    }
}
