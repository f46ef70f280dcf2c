//! Iterations of reinforcement learning as `xtask/bench/torch_rl.py` times them: prints one JSON line.
//!
//! `bench_rl MODEL grpo|rloo|ppo [repeats] [short|long]`: `short` is 8 prompts of 64 tokens with 4 answers of 128 each;
//! `long` 4 prompts of 512 with 8 answers of log-normal lengths.

use std::io::Write as _;
use std::sync::Arc;
use std::time::Instant;

use aligner_algos::rewards::RewardParts;
use aligner_algos::{
    Critic, Grpo, GrpoConfig, KlConfig, Learner, LearnerConfig, Online, OnlineParts, Ppo, PpoConfig,
    Reference, Rloo, RlooConfig, RolloutConfig, ValueLoss, ValueLossConfig,
};
use aligner_core::model::CausalLm;
use aligner_core::optim::Schedule;
use aligner_core::rng::Rng;
use aligner_core::weights::Checkpoint;
use aligner_core::{
    Algorithm, Detokenize, Device, Engine, EngineStats, Error, Event, Needs, ParamSet, Prompt, Request,
    RequestId, Result, Sample, Score,
};
use aligner_infer::{CacheSize, EngineConfig, PagedEngine};

/// Lengths of 32 answers, log-normal and cut at 8 and 256: the ones of the benchmark scripts in Python.
const LENGTHS: [usize; 32] = [
    64, 81, 51, 31, 44, 29, 67, 187, 43, 39, 95, 85, 70, 30, 63, 112, 22, 44, 14, 23, 15, 53, 23, 80, 73, 55,
    9, 42, 62, 70, 19, 44,
];

struct NoText;

impl Detokenize for NoText {
    fn text(&self, _: &[u32]) -> String {
        String::new()
    }
}

/// An engine whose answers have lengths that are set from outside.
struct Forced {
    engine: PagedEngine,
    lengths: &'static [usize],
    asked: usize,
}

impl Engine for Forced {
    fn submit(&mut self, mut request: Request) -> Result<RequestId> {
        if !self.lengths.is_empty() {
            let length = self.lengths[self.asked % self.lengths.len()];
            (request.sampling.min_tokens, request.sampling.max_tokens) = (length, length);
            self.asked += 1;
        }
        self.engine.submit(request)
    }

    fn poll(&mut self) -> Result<Vec<Event>> {
        self.engine.poll()
    }

    fn cancel(&mut self, request: RequestId) -> bool {
        self.engine.cancel(request)
    }

    fn stats(&self) -> EngineStats {
        self.engine.stats()
    }

    fn refit(&mut self, params: &ParamSet, version: u64) -> Result<()> {
        self.engine.refit(params, version)
    }
}

/// Counts the response's tokens that seven divides.
fn reward(sample: &Sample) -> Score {
    let response = sample.tokens.iter().zip(&sample.mask).filter(|(_, own)| **own);
    Score::Sample(response.filter(|(token, _)| **token % 7 == 0).count() as f32)
}

fn learner(policy: CausalLm) -> Result<Learner> {
    let config =
        LearnerConfig { learning_rate: 1e-6, schedule: Schedule::Constant, ..LearnerConfig::default() };
    Learner::new(Box::new(policy), config, 1000, Arc::new(aligner_parallel::Solo))
}

fn algorithm(name: &str) -> Result<Box<dyn Algorithm>> {
    Ok(match name {
        "grpo" => Box::new(Grpo::new(GrpoConfig { beta: 0.04, ..GrpoConfig::default() })?),
        "rloo" => Box::new(Rloo::new(RlooConfig { beta: 0.04, ..RlooConfig::default() })?),
        "ppo" => {
            let kl = KlConfig { coef: 0.05, ..KlConfig::default() };
            Box::new(Ppo::new(PpoConfig { kl, ..PpoConfig::default() })?)
        }
        other => return Err(Error::Invalid(format!("{other}: expected grpo, rloo or ppo"))),
    })
}

/// One of the two cases: prompts, answers to each, tokens of a prompt.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    prompts: usize,
    generations: usize,
    prompt_len: usize,
    lengths: &'static [usize],
}

const SHORT: Case = Case { name: "short", prompts: 8, generations: 4, prompt_len: 64, lengths: &[] };
const LONG: Case = Case { name: "long", prompts: 4, generations: 8, prompt_len: 512, lengths: &LENGTHS };

fn online(policy: &CausalLm, algorithm: &dyn Algorithm, case: Case) -> Result<Online> {
    let cache = CacheSize::Tokens(case.prompts * case.generations * (case.prompt_len + 256 + 64));
    let engine = PagedEngine::new(policy.clone(), EngineConfig { cache, ..EngineConfig::default() })?;
    let critic = if algorithm.needs().contains(Needs::VALUES) {
        let values = policy.clone().with_score_head(1, 7)?;
        Some(Critic::new(learner(values)?, ValueLoss::new(ValueLossConfig::default())?))
    } else {
        None
    };
    let parts = OnlineParts {
        engine: Box::new(Forced { engine, lengths: case.lengths, asked: 0 }),
        rewards: RewardParts::default().with("sevens", 1.0, Box::new(reward))?,
        score_log: None,
        text: Arc::new(NoText),
        stop_tokens: Vec::new(),
        reference: Some(Reference::live(Box::new(policy.clone()), 2048)),
        critic,
        watch: Box::new(|_, _, _| {}),
        crew: None,
    };
    let config = RolloutConfig {
        num_generations: case.generations,
        max_completion_length: if case.lengths.is_empty() { 128 } else { 256 },
        min_completion_length: if case.lengths.is_empty() { 128 } else { 0 },
        ..RolloutConfig::default()
    };
    Online::new(config, parts, 1234)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Peak resident memory of this process in MiB.
fn peak_mib() -> f64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<f64>().ok());
    kib.map_or(f64::NAN, |kib| (kib / 1024.0).round())
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let text =
        |at: usize, default: &'static str| arguments.get(at).map_or(default, String::as_str).to_owned();
    let (path, name) = (text(0, "target/bench/model"), text(1, "grpo"));
    let repeats: usize = text(2, "3").parse().unwrap_or(3);
    let case = if text(3, "short") == "long" { LONG } else { SHORT };
    let algorithm = algorithm(&name)?;
    let policy = CausalLm::load(&Checkpoint::open(path.as_ref())?, &Device::flex())?;
    let vocab = policy.config().vocab_size as u64;
    let mut online = online(&policy, algorithm.as_ref(), case)?;
    let mut learner = learner(policy)?;
    let mut asked = 0;
    let mut next = |count: usize| -> Result<Vec<Prompt>> {
        let prompt = |id: u64| {
            let rng = Rng::new(&[5, id]);
            let tokens = (0..case.prompt_len as u64).map(|i| 3 + rng.below(i, vocab - 3) as u32).collect();
            Prompt { id: id.to_string(), tokens, metadata: serde_json::Value::Null }
        };
        asked += count as u64;
        Ok((asked - count as u64..asked).map(prompt).collect())
    };
    let mut seconds = Vec::new();
    let mut phases: Vec<Vec<f64>> = vec![Vec::new(); 4];
    for at in 0..=repeats {
        let began = Instant::now();
        let iteration = online.step(algorithm.as_ref(), &mut learner, case.prompts, &mut next)?;
        // The first one also checks the ratios, and makes the optimizer's moments.
        if at > 0 {
            seconds.push(began.elapsed().as_secs_f64());
            for (phase, name) in phases.iter_mut().zip(["generate", "logprobs", "learn", "refit"]) {
                phase.extend(iteration.metrics.get(&format!("timing_s/{name}")));
            }
        }
    }
    let phases: Vec<f64> = phases.into_iter().map(median).collect();
    let line = serde_json::json!({
        "algo": name, "case": case.name, "s_per_iter": median(seconds), "generate_s": phases[0],
        "logprob_s": phases[1], "learn_s": phases[2], "refit_s": phases[3], "peak_rss_mib": peak_mib(),
    });
    let _ = writeln!(std::io::stdout(), "{line}");
    Ok(())
}
