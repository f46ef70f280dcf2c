//! What a refit over ranks moves, and what it takes: `cargo run --release --workspace --example bench_refit`.
//!
//! A model of SmolLM2-135M's shape lies on thread ranks in a layout to train in; each of them gets it in one to generate
//! in. `extra` is what the process held at most beside the parameters in both layouts, by `/proc/self/status`.

#![expect(clippy::print_stdout, reason = "the table is what it is for")]

use std::sync::{Arc, Mutex};
use std::time::Instant;

use aligner_core::model::{CausalLm, ModelConfig};
use aligner_core::{Communicator, Device, ParamSet, Phase, Policy, Result};
use aligner_parallel::reshard::{BUCKET_BYTES, Layout, Reshard, Traffic};
use aligner_parallel::{Cut, Mesh, MeshComms, ParallelLm, ThreadComm};

const TIMES: usize = 5;
const MIB: f64 = (1 << 20) as f64;

struct Case {
    name: &'static str,
    mesh: [usize; 5],
    share_parameters: bool,
    /// Ranks that share a replica to generate with.
    tensor: usize,
}

#[derive(Default)]
struct Outcome {
    seconds: Vec<f64>,
    traffic: Option<Traffic>,
    extra: f64,
}

fn main() -> Result<()> {
    let model = CausalLm::init(smollm2()?, 1, &Device::flex())?;
    let case = |name, mesh, share_parameters, tensor| Case { name, mesh, share_parameters, tensor };
    let cases = [
        case("tp 3", [3, 1, 1, 1, 1], false, 1),
        case("pp 2", [1, 1, 1, 1, 2], false, 1),
        case("tp 3 x pp 2", [3, 1, 1, 1, 2], false, 1),
        case("pp 2 x dp 2", [1, 1, 1, 2, 2], false, 1),
        case("pp 3, to tp 3", [1, 1, 1, 1, 3], false, 3),
        case("dp 4, parameters shared out", [1, 1, 1, 4, 1], true, 1),
    ];
    println!(
        "{:<28} {:>9} {:>9} {:>7} {:>10} {:>8} {:>9} {:>9} {:>8}",
        "layout", "moved MiB", "least MiB", "ratio", "sent, most", "buckets", "planned", "extra", "seconds"
    );
    for case in cases {
        let outcome = measure(&model, &case)?;
        let Some(traffic) = outcome.traffic else { continue };
        let ranks = case.mesh.iter().product::<usize>();
        let mut seconds = outcome.seconds;
        seconds.sort_by(f64::total_cmp);
        println!(
            "{:<28} {:>9.1} {:>9.1} {:>7.3} {:>10.1} {:>8} {:>9.1} {:>9.1} {:>8.3}",
            case.name,
            traffic.bytes as f64 / MIB,
            traffic.least as f64 / MIB,
            traffic.bytes as f64 / traffic.least as f64,
            traffic.most_sent as f64 / MIB,
            traffic.buckets,
            (ranks * traffic.extra) as f64 / MIB,
            outcome.extra,
            seconds[seconds.len() / 2],
        );
    }
    Ok(())
}

fn measure(model: &CausalLm, case: &Case) -> Result<Outcome> {
    let mesh = Mesh::new(case.mesh)?;
    let how = Cut { share_parameters: case.share_parameters, chunks: 1, ..Cut::default() };
    let params: Vec<(String, Vec<usize>)> =
        model.params().iter().map(|param| (param.name.clone(), param.shape.clone())).collect();
    let outcome = Mutex::new(Outcome::default());
    let met = Phase::new("measuring");
    let results = ThreadComm::run(mesh.size(), |comm| {
        let comm: Arc<dyn Communicator> = Arc::new(comm);
        let comms = MeshComms::new(mesh, comm.clone())?;
        let own = ParallelLm::new(model, &comms, how)?.params().clone();
        let from = Layout::training(&params, model.config(), mesh, how)?;
        let to = Layout::replicas(&params, model.config(), mesh.size(), case.tensor)?;
        let plan = Reshard::new(from, to, BUCKET_BYTES)?;
        for time in 0..TIMES {
            comm.barrier(met)?;
            let before = (comm.is_main() && time == 0).then(begin_peak);
            comm.barrier(met)?;
            let start = Instant::now();
            let new = plan.carry(comm.as_ref(), &own)?;
            comm.barrier(met)?;
            let seconds = start.elapsed().as_secs_f64();
            let made = [made(&own, &new)];
            let mut all = made;
            comm.all_reduce_host(&mut all, aligner_core::Reduce::Sum, met)?;
            if comm.is_main() {
                let mut outcome = outcome.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                outcome.seconds.push(seconds);
                outcome.traffic = Some(plan.traffic());
                if let Some(before) = before {
                    outcome.extra = peak() - before - all[0];
                }
            }
        }
        Ok(())
    });
    results.into_iter().collect::<Result<Vec<()>>>()?;
    Ok(outcome.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner))
}

/// MiB of the new parameters that are not the old ones by handle.
fn made(own: &ParamSet, new: &ParamSet) -> f64 {
    let is_kept = |name: &str, elements| own.by_name(name).is_some_and(|own| own.elements() == elements);
    let made = new.iter().filter(|param| !is_kept(&param.name, param.elements()));
    made.map(|param| 4.0 * param.elements() as f64 / MIB).sum()
}

/// Forgets the highest mark of memory; returns what is held now, in MiB.
fn begin_peak() -> f64 {
    // Where it is not allowed, the mark is that of the process's life: too high, never too low.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
    status("VmRSS:")
}

fn peak() -> f64 {
    status("VmHWM:")
}

fn status(name: &str) -> f64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok())
        .map_or(f64::NAN, |kib| kib / 1024.0)
}

fn smollm2() -> Result<ModelConfig> {
    let config = serde_json::json!({
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100_000.0,
        "tie_word_embeddings": true,
    });
    ModelConfig::from_json("SmolLM2-135M".as_ref(), &config)
}
