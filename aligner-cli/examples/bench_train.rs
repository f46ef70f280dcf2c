//! Training steps as the `PyTorch` benchmark scripts time them: prints one JSON line.
//!
//! `bench_train MODEL_DIR DATA.json full|variable|dpo-live|dpo-cached [repeats]`

use std::sync::Arc;
use std::time::Instant;

use aligner_algos::{Dpo, DpoConfig, Learner, LearnerConfig, Reference, Sft, SftConfig};
use aligner_core::model::CausalLm;
use aligner_core::weights::Checkpoint;
use aligner_core::{Algorithm, Device, Group, Policy, Sample};
use aligner_parallel::Solo;
use anyhow::{Context, bail};
use serde_json::json;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const PROMPT_TOKENS: usize = 64;

fn main() -> anyhow::Result<()> {
    // As the program does: see its main.rs.
    // SAFETY: one integer of mimalloc's option table, before any thread starts.
    unsafe { libmimalloc_sys::mi_option_set_default(aligner_cli::MIMALLOC_PURGE_DELAY, -1) };
    aligner_cli::join_thread_pool();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, data, mode, rest @ ..] = args.as_slice() else {
        bail!("usage: bench_train MODEL_DIR DATA.json full|variable|dpo-live|dpo-cached [repeats]");
    };
    let repeats: usize = rest.first().map_or(Ok(3), |text| text.parse())?;
    let data: serde_json::Value = serde_json::from_slice(&std::fs::read(data)?)?;
    let steps = match mode.as_str() {
        "full" | "variable" => documents(&data[mode])?,
        "dpo-live" | "dpo-cached" => pairs(&data["pairs"])?,
        other => bail!("unknown mode {other}"),
    };
    let policy = CausalLm::load(&Checkpoint::open(model.as_ref())?, &Device::flex())?;
    let algorithm: Box<dyn Algorithm> = if mode.starts_with("dpo") {
        Box::new(Dpo::new(DpoConfig { beta: 0.1, ..DpoConfig::default() })?)
    } else {
        Box::new(Sft::new(SftConfig::default()))
    };
    let mut reference = Reference::live(policy.with_params(policy.params().clone()), 4096);
    let config = LearnerConfig { micro_batch_tokens: 4096, learning_rate: 1e-6, ..LearnerConfig::default() };
    let mut learner = Learner::new(Box::new(policy), config, 1000, Arc::new(Solo))?;
    let mut steps = steps;
    if mode == "dpo-cached" {
        for groups in &mut steps {
            reference.fill(groups)?;
        }
    }
    let mut seconds = Vec::new();
    let mut cpu = Vec::new();
    for _ in 0..=repeats {
        let (start, cpu_start) = (Instant::now(), cpu_seconds()?);
        for groups in &steps {
            let mut groups = groups.clone();
            if mode == "dpo-live" {
                reference.fill(&mut groups)?;
            }
            learner.step(algorithm.as_ref(), groups)?;
        }
        seconds.push(start.elapsed().as_secs_f64());
        cpu.push(cpu_seconds()? - cpu_start);
    }
    // The first round warms up.
    let (median, cpu) = (median(&seconds[1..]), self::median(&cpu[1..]));
    let tokens: usize = steps.iter().flatten().flat_map(|g| &g.samples).map(|s| s.tokens.len()).sum();
    let line = json!({
        "bench": "aligner", "mode": mode, "median_s": median, "cpu_median_s": cpu, "secs": &seconds[1..],
        "tok_s": tokens as f64 / median, "s_per_step": median / steps.len() as f64,
        "peak_rss_mib": peak_rss_mib()?,
    });
    #[expect(clippy::print_stdout, reason = "the result")]
    {
        println!("{line}");
    }
    Ok(())
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// User and system seconds of this process, from /proc.
fn cpu_seconds() -> anyhow::Result<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let fields: Vec<&str> = stat.rsplit(')').next().context("stat")?.split_whitespace().collect();
    Ok((fields[11].parse::<f64>()? + fields[12].parse::<f64>()?) / 100.0)
}

fn peak_rss_mib() -> anyhow::Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|l| l.starts_with("VmHWM")).context("VmHWM")?;
    Ok(line.split_whitespace().nth(1).context("VmHWM")?.parse::<f64>()? / 1024.0)
}

fn rows(value: &serde_json::Value) -> anyhow::Result<Vec<Vec<Vec<u32>>>> {
    Ok(serde_json::from_value(value.clone())?)
}

fn documents(value: &serde_json::Value) -> anyhow::Result<Vec<Vec<Group>>> {
    let group = |tokens: Vec<u32>| {
        let mask = vec![true; tokens.len()];
        Group::single("row", Sample::new(tokens, mask))
    };
    Ok(rows(value)?.into_iter().map(|step| step.into_iter().map(group).collect()).collect())
}

/// The first half of a step's rows are chosen, the second half rejected.
fn pairs(value: &serde_json::Value) -> anyhow::Result<Vec<Vec<Group>>> {
    let sample = |tokens: &[u32]| Sample::response(&tokens[..PROMPT_TOKENS], &tokens[PROMPT_TOKENS..]);
    let step = |rows: Vec<Vec<u32>>| {
        let (chosen, rejected) = rows.split_at(rows.len() / 2);
        let pairs = chosen.iter().zip(rejected).enumerate();
        pairs.map(|(i, (c, r))| Group::pair(format!("pair {i}"), sample(c), sample(r))).collect()
    };
    Ok(rows(value)?.into_iter().map(step).collect())
}
