//! `aligner simulate`: what a step would take on ranks that are not there.

mod place;

use aligner_parallel::simulate::{published, table};

use crate::progress::result;

pub(crate) use place::{Place, heading};

/// Predict what a step takes on a cluster that is described: seconds by phase, memory of a rank.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// A file with `[cluster]`, `[mesh]`, `[model]` and `[job]`; without it, a node of 8 H100.
    #[arg(value_name = "CLUSTER.TOML")]
    path: Option<std::path::PathBuf>,
    #[command(flatten)]
    place: Place,
    /// A shape that is built in (llama3-8b, llama3-70b, llama3-405b), or a `config.json`.
    #[arg(long, value_name = "SHAPE or FILE")]
    model: Option<String>,
    /// What the step does: sft, dpo, ppo or grpo.
    #[arg(long)]
    algorithm: Option<String>,
    /// Print what the model says of runs that others have published, with its errors.
    #[arg(long, exclusive = true)]
    published: bool,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    if arguments.published {
        let (rates, rows) = published()?;
        result(table(&rates, &rows).trim_end());
        return Ok(());
    }
    let mut flags = Vec::new();
    if let Some(model) = &arguments.model {
        let key = if model.contains(['.', '/']) { "path" } else { "shape" };
        flags.push(format!("model.{key}={model}"));
    }
    flags.extend(arguments.algorithm.iter().map(|name| format!("job.algorithm={name}")));
    let defaults = if arguments.model.is_some() { Vec::new() } else { vec!["model.shape=llama3-8b".into()] };
    let scenario = arguments.place.scenario(arguments.path.as_deref(), &defaults, &flags, None)?;
    let report = scenario.simulate()?;
    result(&format!("{}{}", heading(&scenario), report.describe(&scenario)));
    Ok(())
}
