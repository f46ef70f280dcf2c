//! Idle time of ranks that draw responses of long-tailed lengths: prompts split in advance, or taken from the server.
//!
//! `cargo xtask bench balance` runs it, prints its table and draws it; its last line is JSON.
#![expect(clippy::print_stdout, reason = "an example reports to the terminal")]

use std::time::{Duration, Instant};

use aligner_core::{Communicator, Error, Phase, Result};
use aligner_parallel::balance::{LengthHistory, PromptServer, Split};
use aligner_parallel::simulate::{Cluster, Job, Lengths, Scenario, Workload, shape};
use aligner_parallel::{Mesh, ThreadComm};
use serde_json::{Value, json};

/// How prompts come to ranks, with what is known of lengths.
const WAYS: [(&str, Split, f64); 3] = [
    ("static split", Split::Static, 0.5),
    ("stealing, nothing known", Split::Stealing, 0.0),
    ("stealing, longest expected first", Split::Stealing, 0.5),
];
/// What a real rank sleeps for a token.
const TOKEN: Duration = Duration::from_micros(100);
/// Runs of the threads.
const ROUNDS: usize = 9;

fn main() -> Result<()> {
    println!("{:<24} {:<34} {:>8} {:>8}", "ranks", "prompts", "seconds", "idle");
    let mut panels = Vec::new();
    for (name, split, known) in WAYS {
        panels.push(report("8 simulated", name, &simulated(split, known)?));
    }
    for (name, split, known) in WAYS {
        // Sleeping threads of a loaded machine wake late: of several runs, the one of the median time is shown.
        let mut runs = (0..ROUNDS).map(|_| threads(split, known)).collect::<Result<Vec<_>>>()?;
        runs.sort_by(|a, b| last(a).total_cmp(&last(b)));
        panels.push(report("4 threads", name, &runs[ROUNDS / 2]));
    }
    println!("{}", json!({ "panels": panels }));
    Ok(())
}

/// When the last rank ended.
fn last(ends: &[f64]) -> f64 {
    ends.iter().copied().fold(0.0, f64::max)
}

/// A line of the table, and the same as JSON. `ends` tells when each rank has drawn its last token.
fn report(ranks: &str, prompts: &str, ends: &[f64]) -> Value {
    let seconds = last(ends);
    let idle = 1.0 - ends.iter().sum::<f64>() / (seconds * ends.len() as f64);
    println!("{ranks:<24} {prompts:<34} {seconds:>8.2} {:>6.1} %", 100.0 * idle);
    json!({ "ranks": ranks, "prompts": prompts, "seconds": seconds, "idle": idle, "ends": ends })
}

/// Llama 3 8B on a node of 8: 64 prompts of 16 samples of at most 2048 tokens, 16 of them on an engine at once.
fn simulated(split: Split, known_variance: f64) -> Result<Vec<f64>> {
    let job = Job {
        algorithm: Workload::Grpo,
        max_response_tokens: 2048,
        max_running: 16,
        split,
        known_variance,
        ..Job::default()
    };
    let mesh = Mesh::new([1, 1, 1, 8, 1])?;
    let report =
        Scenario { cluster: Cluster::default(), mesh, model: shape("llama3-8b")?, job }.simulate()?;
    report.rollout.map(|rollout| rollout.ends).ok_or_else(|| Error::Invalid("nothing was drawn".into()))
}

/// Four threads that sleep for each token of 64 prompts, one prompt at a time, with the prompt server.
fn threads(split: Split, known_variance: f64) -> Result<Vec<f64>> {
    // The responses' lengths, cut as those of the simulation are.
    let job = Job { prompts: 64, num_generations: 1, response_tokens: 300.0, ..Job::default() };
    let lengths = Lengths::draw(&job);
    let prompts: Vec<String> = (0..64).map(|prompt| format!("row {prompt}")).collect();
    let mut history = LengthHistory::default();
    if known_variance > 0.0 {
        for (prompt, expected) in prompts.iter().zip(&lengths.expected) {
            history.observe(prompt, *expected);
        }
    }
    let begin = Phase::new("beginning");
    let ends = ThreadComm::run(4, |comm| {
        comm.barrier(begin)?;
        let start = Instant::now();
        let mut server = PromptServer::new(&comm, 0, &prompts, &history, split);
        while let Some(prompt) = server.take()? {
            std::thread::sleep(TOKEN * lengths.tokens[prompt] as u32);
        }
        let end = start.elapsed().as_secs_f64();
        comm.barrier(begin)?;
        Ok(end)
    });
    ends.into_iter().collect()
}
