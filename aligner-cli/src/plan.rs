//! `aligner plan`: what a run will do and take, before it is started.

pub(crate) mod memory;
mod ranks;
mod rollouts;
mod shape;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use aligner_algos::{Learner, Reference};
use aligner_core::Needs;
use aligner_core::model::Adapter;
use aligner_data::Loader;

use crate::arguments::RunFile;
use crate::progress::{clock, result};
use crate::simulate::Place;
use crate::train::{engine_config, total_steps};
use crate::wire::{self, Addition, Data, LoadedModel, Reading};
use crate::{Registry, Run};
use memory::Memory;
use shape::Shape;

/// Show what a run will do: its batches, parameters and memory, without starting it.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    file: RunFile,
    /// Load the model and time two steps, to estimate how long the run takes.
    #[arg(long)]
    measure: bool,
    /// A cluster's file, as `aligner simulate` reads it, to predict a step of this run on its ranks.
    #[arg(long, value_name = "CLUSTER.TOML")]
    cluster: Option<PathBuf>,
    #[command(flatten)]
    place: Place,
}

pub(crate) fn run(arguments: &Arguments, registry: &Registry) -> anyhow::Result<()> {
    let run = arguments.file.load(registry)?;
    let model = LoadedModel::of_run(&run)?;
    let data = Data::open(&run, &model)?;
    let steps = total_steps(&run, data.train_rows())?;
    let shape = Shape::of(&data, &run.config)?;
    let mut out = shape.describe(&run, &data, steps);
    out.push_str(&memory::parameters(model.checkpoint.config()));
    let adapter = wire::planned_adapter(&run, &model.checkpoint)?;
    if let Some(adapter) = &adapter {
        out.push_str(&memory::adapter(adapter, model.checkpoint.config()));
    }
    let trained = adapter.as_ref().map(|adapter: &Adapter| adapter.num_params() + adapter.num_saved());
    out.push_str(&Memory::estimate(model.checkpoint.config(), trained, &run, &shape).describe());
    if !run.algorithm.needs().contains(Needs::SCORES) {
        let prompts = data.prompts(run.config.run.sample_prompts)?;
        let engine = engine_config(&prompts, run.config.run.sample_tokens);
        out.push_str(&memory::cache(&engine, model.checkpoint.config(), prompts.len()));
    }
    if run.online {
        let config = model.checkpoint.config();
        let trained = trained.unwrap_or_else(|| config.num_params());
        out.push_str(&rollouts::describe(&run, config, data.longest, trained, steps));
    }
    if arguments.measure && run.online {
        return Err(crate::Usage(format!(
            "--measure: times steps on rows, and `{}` draws its own samples; its log says what each phase takes (timing_s)",
            run.name
        ))
        .into());
    }
    if arguments.measure {
        out.push_str(&time(&run, &model, &data, steps)?);
    } else {
        out.push_str("\ntime        `--measure` times two steps of this run on this machine");
    }
    if arguments.cluster.is_some() || arguments.place.is_given() {
        out.push_str(&ranks::describe(&run, model.checkpoint.config().clone(), &shape, arguments)?);
    }
    result(&out);
    Ok(())
}

/// Times the second of two steps: the first also warms caches and makes the optimizer's moments.
fn time(run: &Run, model: &LoadedModel, data: &Data, steps: u64) -> anyhow::Result<String> {
    let device = wire::device(&run.config.model.device)?;
    let policy = wire::trained_policy(run, &model.checkpoint, Addition::OfRun, Reading::Whole, &device)?;
    let wants_reference = run.algorithm.needs().contains(Needs::REF_LOGPS);
    let budget = run.config.learner.micro_batch_tokens;
    let base =
        || if policy.config().adapter.is_some() { policy.without_adapter() } else { Ok(policy.clone()) };
    let frozen = wants_reference.then(base).transpose()?;
    let mut reference = frozen.map(|frozen| Reference::live(Box::new(frozen), budget));
    let mut learner = Learner::new(Box::new(policy), run.config.learner.clone(), steps, wire::alone())?;
    let mut loader = Loader::new(data.train.clone(), run.config.run.seed, run.config.data.shuffle)?;
    let (mut of_reference, mut of_step) = (Duration::ZERO, Duration::ZERO);
    for _ in 0..2 {
        let mut groups = loader.next(run.config.run.batch_size)?;
        let started = Instant::now();
        if let Some(reference) = &mut reference {
            reference.fill(&mut groups)?;
        }
        of_reference = started.elapsed();
        let started = Instant::now();
        learner.step(run.algorithm.as_ref(), groups)?;
        of_step = started.elapsed();
    }
    let epochs = steps as f64 * run.config.run.batch_size as f64 / data.train_rows() as f64;
    // With a cache, each row meets the reference in the first epoch only.
    let share = if run.config.reference.cache { (1.0 / epochs).min(1.0) } else { 1.0 };
    let per_step = of_step + of_reference.mul_f64(share);
    Ok(format!(
        "\ntime        {:.2}s a step, of which {:.2}s are the reference's; {} for {steps} steps, evaluations not counted",
        per_step.as_secs_f64(),
        of_reference.mul_f64(share).as_secs_f64(),
        clock(per_step.mul_f64(steps as f64))
    ))
}
