//! A mixture of experts beside a dense model with as many parameters for a token: what a token takes in training and in
//! generation, in alternating rounds; prints a table and one JSON line.
//!
//! `bench_moe [rounds]`: hidden 512, four layers; eight experts 512 wide, two for each token, beside one MLP of 1024.

use std::io::Write as _;
use std::sync::Arc;
use std::time::Instant;

use aligner_algos::{Learner, LearnerConfig, Sft, SftConfig};
use aligner_core::model::{CausalLm, ModelConfig};
use aligner_core::rng::Rng;
use aligner_core::{
    Batch, Device, Engine, Error, Forward, Group, LossOutput, Needs, Policy, Prompt, Request, Result, Sample,
    Sampling,
};
use aligner_infer::{CacheSize, EngineConfig, PagedEngine};
use serde_json::json;

const VOCAB: u64 = 4096;
const ROWS: usize = 4;
const ROW_TOKENS: usize = 256;
const BATCHES: [usize; 3] = [1, 8, 32];
/// Tokens of each answer that a round times.
const DRAWN: usize = 24;

fn model(experts: bool) -> Result<CausalLm> {
    let mut json = json!({
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 512, "intermediate_size": 1024,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
    });
    if experts {
        for (key, value) in [
            ("model_type", json!("mixtral")),
            ("intermediate_size", json!(512)),
            ("num_local_experts", json!(8)),
            ("num_experts_per_tok", json!(2)),
        ] {
            json[key] = value;
        }
    }
    CausalLm::init(ModelConfig::from_json("bench".as_ref(), &json)?, 1, &Device::flex())
}

fn tokens(id: u64, count: usize) -> Vec<u32> {
    let rng = Rng::new(&[5, id]);
    (0..count as u64).map(|i| 3 + rng.below(i, VOCAB - 3) as u32).collect()
}

fn rows(from: u64) -> Vec<Group> {
    let row = |id: u64| {
        let all = tokens(id, ROW_TOKENS);
        Group::single(id.to_string(), Sample::response(&all[..8], &all[8..]))
    };
    (from..from + ROWS as u64).map(row).collect()
}

fn loss(out: &Forward, _: &Batch) -> Result<LossOutput> {
    Ok(LossOutput::new(out.logps()?.clone().neg().sum()))
}

/// Processor seconds of this process: ticks of user and system time, 100 a second on Linux.
fn cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = text.rsplit(") ").next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Wall and processor seconds a token, of each round.
#[derive(Default)]
struct Times {
    wall: Vec<f64>,
    cpu: Vec<f64>,
}

impl Times {
    fn add(&mut self, tokens: usize, work: impl FnOnce() -> Result<()>) -> Result<()> {
        let (began, cpu) = (Instant::now(), cpu_seconds());
        work()?;
        self.wall.push(began.elapsed().as_secs_f64() / tokens as f64);
        self.cpu.push((cpu_seconds() - cpu) / tokens as f64);
        Ok(())
    }
}

/// One of the two models with what its rounds have taken.
struct Side {
    model: CausalLm,
    learner: Learner,
    engine: PagedEngine,
    asked: u64,
    gradients: Times,
    step: Times,
    decode: [Times; BATCHES.len()],
}

impl Side {
    fn new(experts: bool) -> Result<Self> {
        let model = model(experts)?;
        let config = LearnerConfig { learning_rate: 1e-6, ..LearnerConfig::default() };
        let learner = Learner::new(Box::new(model.clone()), config, 1000, Arc::new(aligner_parallel::Solo))?;
        let config = EngineConfig {
            cache: CacheSize::Tokens(1 << 14),
            prefix_cache: false,
            ..EngineConfig::default()
        };
        let engine = PagedEngine::new(model.clone(), config)?;
        let (gradients, step, decode) = Default::default();
        Ok(Self { model, learner, engine, asked: 0, gradients, step, decode })
    }

    fn round(&mut self, at: u64) -> Result<()> {
        let groups = rows(at * 100);
        let batch = [Batch::collate(&groups)?];
        let tokens = ROWS * ROW_TOKENS;
        let Self { model, learner, gradients, step, .. } = self;
        gradients.add(tokens, || model.accumulate(&batch, Needs::NOTHING, &loss).map(|_| ()))?;
        let algorithm = Sft::new(SftConfig::default());
        step.add(tokens, || learner.step(&algorithm, groups).map(|_| ()))?;
        for (place, batch) in BATCHES.into_iter().enumerate() {
            self.decode(place, batch)?;
        }
        Ok(())
    }

    /// Answers of so many requests at once; their prompts are computed first, and not timed.
    fn decode(&mut self, place: usize, batch: usize) -> Result<()> {
        let sampling = Sampling { max_tokens: DRAWN + 2, seed: 7, ..Sampling::default() };
        for _ in 0..batch {
            self.asked += 1;
            let tokens = tokens(self.asked, 32);
            let prompt = Prompt { id: self.asked.to_string(), tokens, metadata: serde_json::Value::Null };
            self.engine.submit(Request::new(prompt, sampling.clone()))?;
        }
        let mut drawn = 0;
        while drawn < batch {
            drawn += self.engine.poll()?.len();
        }
        let engine = &mut self.engine;
        self.decode[place].add(batch * DRAWN, || (0..DRAWN).try_for_each(|_| engine.poll().map(|_| ())))?;
        while self.engine.stats().running > 0 {
            self.engine.poll()?;
        }
        Ok(())
    }

    fn times(&self) -> impl Iterator<Item = (String, &Times)> {
        let of_decode = BATCHES.iter().zip(&self.decode);
        let decode = of_decode.map(|(batch, times)| (format!("a drawn token, batch {batch}"), times));
        [("gradients".to_string(), &self.gradients), ("step with the optimizer".to_string(), &self.step)]
            .into_iter()
            .chain(decode)
    }
}

fn main() -> Result<()> {
    let rounds: u64 = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(7);
    let mut sides = [Side::new(false)?, Side::new(true)?];
    for at in 0..=rounds {
        // Whoever is first in a round is second in the next.
        for place in [at % 2, 1 - at % 2] {
            sides[place as usize].round(at)?;
        }
        if at == 0 {
            // The first one makes moments and buffers.
            for side in &mut sides {
                (side.gradients, side.step, side.decode) = Default::default();
            }
        }
    }
    let [dense, mixture] = &sides;
    let counts = [dense, mixture].map(|side| side.model.config().num_active_params() as f64 / 1e6);
    let mut out = std::io::stdout().lock();
    writeln!(out, "{:.1} M parameters for a token, dense; {:.1} M, mixture", counts[0], counts[1])
        .map_err(Error::io("standard output"))?;
    let mut lines = serde_json::Map::new();
    for ((name, dense), (_, mixture)) in dense.times().zip(mixture.times()) {
        let [wall, cpu] = [[&dense.wall, &mixture.wall], [&dense.cpu, &mixture.cpu]]
            .map(|both| both.map(|v| 1e6 * median(v)));
        let ratio = wall[1] / wall[0];
        let text = format!(
            "{name:<26} dense {:8.1} us ({:8.1} CPU), mixture {:8.1} us ({:8.1} CPU), {ratio:.2} times, {:.2} of CPU",
            wall[0],
            cpu[0],
            wall[1],
            cpu[1],
            cpu[1] / cpu[0]
        );
        writeln!(out, "{text}").map_err(Error::io("standard output"))?;
        lines.insert(name, json!({ "wall_us": wall, "cpu_us": cpu, "ratio": ratio }));
    }
    writeln!(out, "{}", serde_json::Value::Object(lines)).map_err(Error::io("standard output"))
}
