//! What the model says of runs that others have published, fitted to some of them.

use std::fmt::Write as _;

use aligner_core::Result;

use super::fit::{Measured, least_squares, rate};
use super::{Cluster, Job, Rates, Report, Scenario, Workload, shape};
use crate::mesh::Mesh;

/// A published time and what the model says of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// The run, and the phase where it is not the whole step.
    pub what: String,
    /// Seconds.
    pub published: f64,
    /// Seconds.
    pub predicted: f64,
    /// Whether a rate was fitted to it, so that the prediction says nothing.
    pub fitted: bool,
}

impl Row {
    /// Relative to the published time.
    pub fn error(&self) -> f64 {
        self.predicted / self.published - 1.0
    }
}

/// All rows that the model is checked against, as a table.
///
/// # Errors
/// None that these runs have.
pub fn published() -> Result<(Rates, Vec<Row>)> {
    let (rates, mut rows) = nemo_rl()?;
    rows.extend(nemo_aligner(rates)?);
    Ok((rates, rows))
}

/// The rows as Markdown.
pub fn table(rates: &Rates, rows: &[Row]) -> String {
    let mut out = format!(
        "predicted with rates of the fitted rows: train {:.3}, score {:.3}, a decode pass {:.4} s\n\n\
         | run | published s | predicted s | error |\n|---|---|---|---|\n",
        rates.train, rates.score, rates.pass_secs
    );
    for row in rows {
        let error = if row.fitted { "fitted".into() } else { format!("{:+.0} %", 100.0 * row.error()) };
        let _ = writeln!(
            out,
            "| {} | {:.1} | predicted {:.1} | {error} |",
            row.what, row.published, row.predicted
        );
    }
    out
}

/// NeMo-RL v0.3 and v0.4, GRPO on nodes of 8 H100 with Megatron: 64 prompts of 32 samples, of at most 4096 tokens, in
/// updates of 512; `tokens` are those of an average sequence. Not published, and assumed: prompts of 150 tokens, a sigma
/// of 0.8, engines that draw all that they are given at once.
fn grpo(model: &str, nodes: usize, mesh: [usize; 5], generation_tp: usize, tokens: f64) -> Result<Scenario> {
    let job = Job {
        prompts: 64,
        num_generations: 32,
        prompt_tokens: 150,
        response_tokens: tokens - 150.0,
        max_response_tokens: 4096 - 150,
        batch_sequences: 512,
        max_running: 1024,
        generation_tp: Some(generation_tp),
        // The reference's log-probabilities, and the policy's own.
        score_passes: Some(2),
        ..Job::default()
    };
    let cluster = Cluster { nodes, ..Cluster::default() };
    Ok(Scenario { cluster, mesh: Mesh::new(mesh)?, model: shape(model)?, job })
}

fn with(scenario: &Scenario, change: impl Fn(&mut Rates)) -> Result<Report> {
    let mut scenario = scenario.clone();
    change(&mut scenario.cluster.rates);
    scenario.simulate()
}

const PHASES: [&str; 4] = ["train", "log-probabilities", "generate", "refit"];

/// Fits a rate to each of three phases of a run on 8 GPUs, and predicts larger runs.
fn nemo_rl() -> Result<(Rates, Vec<Row>)> {
    let small = grpo("llama3-8b", 1, [1, 1, 1, 8, 1], 1, 795.0)?;
    let mut rates = Rates::default();
    let phase = |at: usize, rates: Rates| Ok(with(&small, |own| *own = rates)?.phase(PHASES[at]));
    rates.train = rate(28.0, (0.01, 1.0), |train| phase(0, Rates { train, ..rates }))?;
    rates.score = rate(18.0, (0.01, 1.0), |score| phase(1, Rates { score, ..rates }))?;
    rates.pass_secs = rate(58.0, (0.0, 0.1), |pass_secs| phase(2, Rates { pass_secs, ..rates }))?;
    let large = grpo("llama3-70b", 8, [4, 1, 1, 4, 4], 4, 398.0)?;
    let middle = grpo("llama3-8b", 2, [1, 1, 1, 8, 2], 1, 1060.0)?;
    let mut rows = Vec::new();
    let runs = [
        ("GRPO, Llama 3.1 8B, 8 GPUs", &small, [28.0, 18.0, 58.0, 5.0], true),
        ("GRPO, Llama 3.1 70B, 64 GPUs (tp 4, pp 4)", &large, [28.0, 18.0, 84.0, 14.0], false),
    ];
    for (name, scenario, seconds, first) in runs {
        let report = with(scenario, |own| *own = rates)?;
        for (phase, published) in PHASES.into_iter().zip(seconds) {
            let (what, fitted) = (format!("{name}: {phase}"), first && phase != "refit");
            rows.push(Row { what, published, predicted: report.phase(phase), fitted });
        }
    }
    let predicted = with(&middle, |own| *own = rates)?.seconds();
    let what = "GRPO, Llama 3.1 8B, 16 GPUs (pp 2): step".into();
    rows.push(Row { what, published: 97.7, predicted, fitted: false });
    Ok((rates, rows))
}

/// A run of NeMo-Aligner's PPO with TensorRT-LLM (its `docs/user-guide/rlhf.rst`), on nodes of 8.
struct Ppo {
    model: &'static str,
    /// The policy's, and the critic's.
    nodes: [usize; 2],
    /// Stages that learn, and that draw.
    stages: [usize; 2],
    samples: usize,
    /// Of an average response.
    tokens: f64,
    /// Of the longest response.
    most: usize,
    /// Responses that are drawn to their end together.
    batch: usize,
    seconds: f64,
}

impl Ppo {
    const fn llama3_70b(nodes: [usize; 2], tokens: f64, batch: usize, seconds: f64) -> Self {
        Self { model: "llama3-70b", nodes, stages: [4, 1], samples: 1024, tokens, most: 1024, batch, seconds }
    }

    const fn llama3_405b(batch: usize) -> Self {
        let (nodes, stages) = ([84, 42], [21, 21]);
        Self {
            model: "llama3-405b",
            nodes,
            stages,
            samples: 128,
            tokens: 915.6,
            most: 2048,
            batch,
            seconds: 164.6,
        }
    }

    fn scenario(&self) -> Result<Scenario> {
        let [actor, critic] = self.nodes;
        let [pp, generation_pp] = self.stages;
        let job = Job {
            algorithm: Workload::Ppo,
            prompts: self.samples,
            num_generations: 1,
            prompt_tokens: 250,
            response_tokens: self.tokens,
            response_sigma: 0.6,
            max_response_tokens: self.most,
            batch_sequences: 128,
            max_running: self.batch,
            continuous_batching: false,
            // Batches are handed out in turn, and nothing is known of lengths.
            known_variance: 0.0,
            generation_tp: Some(8),
            generation_pp,
            critic_nodes: critic,
            ..Job::default()
        };
        let cluster = Cluster { nodes: actor + critic, ..Cluster::default() };
        let mesh = Mesh::new([8, 1, 1, actor / pp, pp])?;
        Ok(Scenario { cluster, mesh, model: shape(self.model)?, job })
    }
}

/// As published: nodes, samples, average tokens, and the batch for 70B. Not published, and assumed: H100, tensor
/// parallelism of 8, the pipelines, prompts of 250 tokens, the longest responses, a sigma of 0.6; for 405B the batch
/// too, so that there are two rows, for 8 and for all that an engine is given.
const PPO: [Ppo; 6] = [
    Ppo::llama3_70b([8, 4], 350.7, 8, 366.7),
    Ppo::llama3_70b([16, 8], 323.3, 8, 190.4),
    Ppo::llama3_70b([32, 16], 331.7, 8, 108.0),
    Ppo::llama3_70b([64, 32], 334.0, 16, 56.9),
    Ppo::llama3_405b(8),
    Ppo::llama3_405b(32),
];

/// Fits the time of a decode pass to the smallest run, and predicts the others; beside it the plainest law, A / n + B on
/// n nodes, fitted to the two smallest runs.
fn nemo_aligner(mut rates: Rates) -> Result<Vec<Row>> {
    let first = PPO[0].scenario()?;
    rates.pass_secs = rate(PPO[0].seconds, (0.0, 0.2), |pass_secs| {
        Ok(with(&first, |own| *own = Rates { pass_secs, ..rates })?.seconds())
    })?;
    let measured = |run: &Ppo| Measured::scaling(run.nodes.iter().sum(), run.seconds);
    let law = least_squares(&PPO[..2].iter().map(measured).collect::<Vec<_>>())?;
    let mut rows = Vec::new();
    for (at, run) in PPO.iter().enumerate() {
        let [actor, critic] = run.nodes;
        let name = format!("PPO, {}, {actor}+{critic} nodes, batches of {}", run.model, run.batch);
        let predicted = with(&run.scenario()?, |own| *own = rates)?.seconds();
        let pass = if at == 0 { format!(" (a decode pass {:.4} s)", rates.pass_secs) } else { String::new() };
        rows.push(Row {
            what: format!("{name}: step{pass}"),
            published: run.seconds,
            predicted,
            fitted: at == 0,
        });
        if run.samples == PPO[0].samples {
            let predicted = law[0] / (actor + critic) as f64 + law[1];
            let what = format!("{name}: step, by A / n + B");
            rows.push(Row { what, published: run.seconds, predicted, fitted: at < 2 });
        }
    }
    Ok(rows)
}
