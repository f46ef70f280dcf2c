//! Steps of training on the device against the host's: SFT, DPO, and PPO with its engine there.

use std::sync::Arc;
use std::time::Instant;

use aligner_algos::rewards::RewardParts;
use aligner_algos::{
    Critic, Dpo, DpoConfig, KlConfig, Learner, LearnerConfig, Online, OnlineParts, Ppo, PpoConfig, Reference,
    RolloutConfig, Sft, SftConfig, ValueLoss, ValueLossConfig,
};
use aligner_core::model::CausalLm;
use aligner_core::optim::Schedule;
use aligner_core::rng::Rng;
use aligner_core::{Detokenize, Device, Error, Group, Metrics, Policy as _, Result, Sample, Score};
use aligner_infer::EngineDevice;
use serde_json::{Map, Value, json};

use crate::engine;
use crate::gradients::moved;
use crate::roofline::Roofline;

/// How far a metric of a step may be off: of its magnitude, or of 1 where that is smaller.
const BOUND: f64 = 1e-3;

/// How much there is to learn from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Amount {
    /// Texts of a step.
    pub(crate) texts: u64,
    /// Tokens of a text.
    pub(crate) tokens: u64,
}

/// Where a model is trained and where its engine computes.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub(crate) device: Device,
    pub(crate) engine: EngineDevice,
}

impl Place {
    /// What matrices can be multiplied in: `CubeCL`'s runtime for processors has no bf16.
    pub(crate) fn products(&self) -> &'static [&'static str] {
        if self.engine == EngineDevice::CubeCpu { &["f32"] } else { &["f32", "bf16"] }
    }

    /// Whether products of few rows or columns fail there: `CubeCL`'s runtime for processors has 32 KiB of shared memory.
    pub(crate) fn has_small_memory(&self) -> bool {
        self.engine == EngineDevice::CubeCpu
    }
}

struct NoText;

impl Detokenize for NoText {
    fn text(&self, _: &[u32]) -> String {
        String::new()
    }
}

fn text(id: u64, tokens: u64, vocab: usize) -> Vec<u32> {
    let rng = Rng::new(&[11, id]);
    (0..tokens).map(|at| rng.below(at, vocab as u64) as u32).collect()
}

/// How the steps learn.
pub(crate) fn settings() -> LearnerConfig {
    LearnerConfig {
        learning_rate: 1e-4,
        schedule: Schedule::Constant,
        micro_batch_tokens: 8192,
        ..LearnerConfig::default()
    }
}

fn learner(model: CausalLm) -> Result<Learner> {
    Learner::new(Box::new(model), settings(), 100, Arc::new(aligner_parallel::Solo))
}

/// Random texts.
pub(crate) fn texts(amount: Amount, model: &CausalLm) -> Vec<Group> {
    let vocab = model.config().vocab_size;
    let text = |id| {
        let tokens = text(id, amount.tokens, vocab);
        let mask = vec![true; tokens.len()];
        Group::single(id.to_string(), Sample::new(tokens, mask))
    };
    (0..amount.texts).map(text).collect()
}

/// Whether a metric agrees.
pub(crate) fn is_close(got: f64, expected: f64) -> bool {
    (got - expected).abs() <= BOUND * expected.abs().max(1.0)
}

/// Steps of an algorithm: metrics of each, and the least seconds of one.
pub(crate) type Steps = (Vec<Metrics>, f64);

fn timed(count: usize, mut step: impl FnMut() -> Result<Metrics>) -> Result<Steps> {
    let (mut all, mut least) = (Vec::new(), f64::INFINITY);
    for _ in 0..count {
        let start = Instant::now();
        all.push(step()?);
        least = least.min(start.elapsed().as_secs_f64());
    }
    Ok((all, least))
}

/// Steps of SFT on the same texts.
pub(crate) fn sft(model: &CausalLm, amount: Amount, count: usize) -> Result<Steps> {
    let sft = Sft::new(SftConfig::default());
    let mut learner = learner(model.clone())?;
    timed(count, || learner.step(&sft, texts(amount, model)))
}

fn dpo(model: &CausalLm, amount: Amount, count: usize) -> Result<Steps> {
    let vocab = model.config().vocab_size;
    let dpo = Dpo::new(DpoConfig::default())?;
    let half = amount.tokens / 2;
    let pair = |id: u64| {
        let answer = |which: u64| text(1000 + 2 * id + which, half, vocab);
        let prompt = text(id, half, vocab);
        let answers = [0, 1].map(|which| Sample::response(&prompt, &answer(which)));
        let [chosen, rejected] = answers;
        Group::pair(id.to_string(), chosen, rejected)
    };
    let mut groups: Vec<Group> = (0..amount.texts / 2).map(pair).collect();
    Reference::live(Box::new(model.clone()), 8192).fill(&mut groups)?;
    let mut learner = learner(model.clone())?;
    timed(count, || learner.step(&dpo, groups.clone()))
}

/// Counts the response's tokens that seven divides.
fn reward(sample: &Sample) -> Score {
    let response = sample.tokens.iter().zip(&sample.mask).filter(|(_, own)| **own);
    Score::Sample(response.filter(|(token, _)| **token % 7 == 0).count() as f32)
}

fn ppo(model: &CausalLm, place: &Place, amount: Amount, count: usize) -> Result<Steps> {
    let vocab = model.config().vocab_size;
    let kl = KlConfig { coef: 0.05, ..KlConfig::default() };
    let ppo = Ppo::new(PpoConfig { kl, ..PpoConfig::default() })?;
    let values = model.clone().with_score_head(1, 7)?;
    let parts = OnlineParts {
        engine: Box::new(engine::engine(model, place.engine, None)?),
        rewards: RewardParts::default().with("sevens", 1.0, Box::new(reward))?,
        score_log: None,
        text: Arc::new(NoText),
        stop_tokens: Vec::new(),
        reference: Some(Reference::live(Box::new(model.clone()), 8192)),
        critic: Some(Critic::new(learner(values)?, ValueLoss::new(ValueLossConfig::default())?)),
        watch: Box::new(|_, _, _| {}),
        crew: None,
    };
    let length = (amount.tokens / 2) as usize;
    let config = RolloutConfig {
        num_generations: 2,
        max_completion_length: length,
        min_completion_length: length,
        ..RolloutConfig::default()
    };
    let mut online = Online::new(config, parts, 1234)?;
    let mut learner = learner(model.clone())?;
    let mut asked = 0;
    let mut next = |count: usize| {
        asked += count as u64;
        Ok((asked - count as u64..asked).map(|id| engine::prompt(id, length, vocab)).collect())
    };
    let prompts = (amount.texts / 2).max(1) as usize;
    timed(count, || Ok(online.step(&ppo, &mut learner, prompts, &mut next)?.metrics))
}

/// What of a step's metrics does not depend on the clock, and has to agree.
const COMPARED: [(&str, &[&str]); 3] = [
    ("sft", &["loss", "grad_norm"]),
    ("dpo", &["loss", "grad_norm", "rewards/margins"]),
    ("ppo", &["loss", "grad_norm", "reward"]),
];

/// Why something does not run where [`Place::has_small_memory`] says so.
pub(crate) const SMALL_MEMORY: &str =
    "some of its products ask for more shared memory than this device has (a finding of Burn's at run time)";

/// A step of SFT, DPO and PPO there and on the host, from the same weights: losses and norms agree.
///
/// # Errors
/// A failure of the device.
pub(crate) fn check(model: &CausalLm, place: &Place, amount: Amount) -> Result<bool> {
    let there = moved(model, &place.device)?;
    let home = Place { device: Device::flex(), engine: EngineDevice::Host };
    let mut all = true;
    for (name, metrics) in COMPARED {
        if name == "ppo" && place.has_small_memory() {
            println!("{}", json!({"check": name, "not_run": SMALL_MEMORY}));
            continue;
        }
        let run = |model: &CausalLm, place: &Place| match name {
            "sft" => sft(model, amount, 2),
            "dpo" => dpo(model, amount, 2),
            _ => ppo(model, place, amount, 1),
        };
        let ((got, _), (expected, _)) = (run(&there, place)?, run(model, &home)?);
        let mut ok = true;
        let mut line = Map::from_iter([("check".into(), Value::from(name))]);
        for (step, (got, expected)) in got.iter().zip(&expected).enumerate() {
            for metric in metrics {
                let missing = || Error::Invalid(format!("a step of {name} has no {metric}"));
                let got = got.get(metric).ok_or_else(missing)?;
                let expected = expected.get(metric).ok_or_else(missing)?;
                ok &= is_close(got, expected);
                line.insert(format!("{metric}/{}", step + 1), json!([got, expected]));
            }
        }
        line.insert("ok".into(), ok.into());
        println!("{}", Value::Object(line));
        all &= ok;
    }
    Ok(all)
}

/// Seconds of a step and its share of what the device can do, in f32 and with products in bf16.
///
/// # Errors
/// A failure of the device.
pub(crate) fn time(model: &CausalLm, place: &Place, amount: Amount, roofline: Roofline) -> Result<()> {
    let tokens = (amount.texts * amount.tokens) as f64;
    // Two operations for each weight and token forward, four backward; the embedding is the head's matrix too.
    let operations = 6.0 * model.params().elements(false) as f64 * tokens;
    for (products, most) in place.products().iter().zip([roofline.flops_f32, roofline.flops_bf16]) {
        let mut model = model.clone();
        model.set_bf16_products(*products == "bf16");
        for (name, (_, seconds)) in
            [("sft", sft(&model, amount, 4)?), ("dpo", dpo(&model, amount, 4)?)].into_iter().chain(
                if place.has_small_memory() { None } else { Some(("ppo", ppo(&model, place, amount, 3)?)) },
            )
        {
            let mut line = json!({
                "bench": name, "products": products, "s_per_step": seconds, "tok_s": tokens / seconds,
            });
            if name == "sft" {
                line["of_flops"] = json!(operations / seconds / most);
            }
            println!("{line}");
        }
    }
    Ok(())
}
