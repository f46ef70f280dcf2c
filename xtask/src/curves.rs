//! `cargo xtask curves`: what runs measured over their steps, as a picture.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde_json::Value;

use crate::picture::{self, Line, Panel};

#[derive(Args)]
pub(crate) struct Options {
    /// The file to write.
    out: PathBuf,
    /// What to draw, a panel each, as `eval/reward,objective/kl`.
    #[arg(long, value_delimiter = ',', required = true)]
    metric: Vec<String>,
    /// Runs with the names that the legend gives them, as `ppo=runs/ppo`.
    #[arg(required = true, value_name = "NAME=RUN_DIR", value_parser = parse_run)]
    runs: Vec<Run>,
    /// The picture's title; without it, the runs' names.
    #[arg(long)]
    title: Option<String>,
}

/// A run's directory, and its name in the legend.
#[derive(Debug, Clone, PartialEq)]
struct Run {
    name: String,
    directory: PathBuf,
}

fn parse_run(text: &str) -> Result<Run, String> {
    match text.split_once('=') {
        Some((name, directory)) if !name.is_empty() && !directory.is_empty() => {
            Ok(Run { name: name.into(), directory: directory.into() })
        }
        _ => Err(format!("expected NAME=RUN_DIR, got {text}")),
    }
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let mut panels: Vec<Panel> =
        options.metric.iter().map(|metric| Panel { heading: metric.clone(), lines: Vec::new() }).collect();
    for run in &options.runs {
        let path = run.directory.join("metrics.jsonl");
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        for panel in &mut panels {
            panel.lines.push(line(&path, &text, &panel.heading)?);
        }
    }
    let names: Vec<String> = options.runs.iter().map(|run| run.name.clone()).collect();
    let title = options.title.clone().unwrap_or_else(|| names.join(", "));
    let description = format!("{} over the steps of {}.", options.metric.join(", "), names.join(", "));
    let svg = picture::curves(&title, &description, &names, &panels);
    std::fs::write(&options.out, svg).with_context(|| format!("cannot write {}", options.out.display()))?;
    println!("{}", options.out.display());
    Ok(())
}

/// A metric's values in the lines of `text`, with its standard errors where each value has one.
fn line(path: &Path, text: &str, metric: &str) -> Result<Line> {
    let (mut line, mut spread) = (Line::default(), Vec::new());
    for (at, record) in text.lines().enumerate() {
        let place = || format!("{}:{}", path.display(), at + 1);
        let record: Value = serde_json::from_str(record).with_context(|| format!("{}: not JSON", place()))?;
        let step = record["step"].as_f64().with_context(|| format!("{}: no number `step`", place()))?;
        // Not measured at this step, or not a number then.
        let Some(value) = record.get(metric).filter(|value| !value.is_null()) else { continue };
        let Some(value) = value.as_f64() else { bail!("{}: `{metric}` is no number: {value}", place()) };
        line.points.push((step, value));
        spread.extend(record[format!("{metric}_stderr")].as_f64());
    }
    ensure!(!line.points.is_empty(), "{} has no value of `{metric}`", path.display());
    if spread.len() == line.points.len() {
        line.spread = spread;
    }
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "{\"step\":0,\"eval/reward\":0.5,\"eval/reward_stderr\":0.1}\n{\"step\":1,\"loss\":2.0}\n\
                        {\"step\":2,\"loss\":1.0,\"eval/reward\":0.75,\"eval/reward_stderr\":0.2}\n";

    #[test]
    fn a_metric_is_read_where_it_was_measured() {
        let read = |metric: &str| line("m".as_ref(), TEXT, metric).unwrap();
        assert_eq!(read("loss"), Line { points: vec![(1.0, 2.0), (2.0, 1.0)], spread: vec![] });
        let reward = Line { points: vec![(0.0, 0.5), (2.0, 0.75)], spread: vec![0.1, 0.2] };
        assert_eq!(read("eval/reward"), reward);
    }

    #[test]
    fn errors_name_file_and_line() {
        let message = |text: &str, metric: &str| {
            format!("{:#}", line("run/metrics.jsonl".as_ref(), text, metric).unwrap_err())
        };
        assert!(message("{\"step\":0}\n{\"st", "loss").starts_with("run/metrics.jsonl:2: not JSON"));
        assert!(message("{\"loss\":0}", "loss").starts_with("run/metrics.jsonl:1: no number `step`"));
        assert!(message("{\"step\":0,\"loss\":\"a\"}", "loss").starts_with("run/metrics.jsonl:1: `loss`"));
        assert!(message(TEXT, "kl").contains("run/metrics.jsonl has no value of `kl`"));
    }

    #[test]
    fn runs_have_names() {
        let run = Run { name: "ppo".into(), directory: "runs/ppo".into() };
        assert_eq!(parse_run("ppo=runs/ppo"), Ok(run));
        assert!(parse_run("runs/ppo").is_err() && parse_run("=x").is_err());
    }
}
