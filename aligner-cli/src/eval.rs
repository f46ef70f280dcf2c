//! `aligner eval`: a model on a run's held-out rows.

use std::collections::BTreeMap;
use std::path::PathBuf;

use aligner_algos::{Learner, Reference, Sft, SftConfig};
use aligner_core::model::CausalLm;
use aligner_core::{Algorithm, Device, Group, Needs, Prompt};
use anyhow::ensure;

use crate::arguments::RunFile;
use crate::progress::{result, say};
use crate::ranks::Ranks;
use crate::report::STANDARD_ERROR;
use crate::train::rewards_of;
use crate::wire::{self, Beside, Data, LoadedModel, Reading, Subject};
use crate::{Registry, Run, Usage, evaluate};

/// Measure a model on a run's held-out rows: loss, perplexity, pair accuracy, rewards.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    file: RunFile,
    /// The model to measure; by default what the run has trained, or else what it starts from.
    #[arg(long)]
    model: Option<PathBuf>,
    /// A low-rank adapter to measure on the model, or on what the run starts from.
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Print one JSON object in place of a table.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments, registry: &Registry) -> anyhow::Result<()> {
    let mut run = arguments.file.load(registry)?;
    let base = LoadedModel::of_run(&run)?;
    let groups = Data::open(&run, &base)?.held_out_groups()?;
    let advice = "no row is held out; set `data.train.holdout`, or give rows of their own as [data.eval]";
    ensure!(!groups.is_empty(), Usage(advice.into()));
    let device = wire::device(&run.config.model.device)?;
    let subject = subject(arguments, &run);
    say(&format!("measuring {} on {} held-out groups", subject.shown(), groups.len()));
    let policy = wire::measured_policy(&run, &base, &subject, &device)?;
    let values = if run.online {
        drawn(&mut run, &base, &policy, groups)?
    } else {
        measure(&run, &base, policy, groups)?
    };
    let values =
        values.into_iter().map(|(name, value)| (name.trim_start_matches("eval/").to_string(), value));
    let values: BTreeMap<String, f64> = values.collect();
    let text = if arguments.json { serde_json::to_string(&values)? } else { table(&values) };
    result(&text);
    Ok(())
}

/// What is asked for; what the run has trained if it is finished; or else what it starts from.
fn subject(arguments: &Arguments, run: &Run) -> Subject {
    let trained = Some(run.config.run.dir.join("model")).filter(|path| path.exists());
    match (arguments.model.clone(), arguments.adapter.clone()) {
        (model, Some(adapter)) => Subject::Adapter { model, adapter },
        (Some(model), None) => Subject::Model(model),
        (None, None) => trained.map_or(Subject::Start, Subject::Model),
    }
}

fn measure(
    run: &Run,
    base: &LoadedModel,
    policy: CausalLm,
    mut groups: Vec<Group>,
) -> anyhow::Result<BTreeMap<String, f64>> {
    let device = wire::device(&run.config.model.device)?;
    if run.algorithm.needs().contains(Needs::REF_LOGPS) {
        wire::fill(&mut reference(run, base, &device)?, &mut groups)?;
    }
    let learner = Learner::new(Box::new(policy), run.config.learner.clone(), 1, wire::alone())?;
    let mut values = on(&learner, &run.guarded("the measurement"), &groups)?;
    let language_model = !run.algorithm.needs().contains(Needs::SCORES);
    if language_model && !values.contains_key("eval/perplexity") {
        // Of pairs, the perplexity of the chosen answers.
        let chosen: Vec<Group> = groups.iter().filter_map(first_sample).collect();
        let sft = on(&learner, &Sft::new(SftConfig::default()), &chosen)?;
        values.extend(sft.into_iter().filter(|(name, _)| name.contains("perplexity")));
    }
    Ok(values)
}

/// What the policy's own responses to the held-out prompts are worth.
fn drawn(
    run: &mut Run,
    base: &LoadedModel,
    policy: &CausalLm,
    groups: Vec<Group>,
) -> anyhow::Result<BTreeMap<String, f64>> {
    let prompts: Vec<Prompt> = groups.into_iter().filter_map(wire::prompt_of).collect();
    let longest_prompt = prompts.iter().map(|prompt| prompt.tokens.len()).max().unwrap_or(0);
    let beside = Beside { longest_prompt, ..Beside::default() };
    let (mut online, _) = wire::online(run, &Ranks::one(), base, policy, beside)?;
    rewards_of(&mut online, prompts)
}

fn on(
    learner: &Learner,
    algorithm: &dyn Algorithm,
    groups: &[Group],
) -> anyhow::Result<BTreeMap<String, f64>> {
    Ok(evaluate::held_out(groups, |group| learner.evaluate(algorithm, std::slice::from_ref(group)))?)
}

fn reference(run: &Run, base: &LoadedModel, device: &Device) -> anyhow::Result<Reference> {
    let mut frozen = match &run.config.reference.path {
        Some(path) => wire::reference_model(path, base, Reading::Whole, device)?,
        None if run.config.model.lora.is_some() => wire::base_model(run, &base.checkpoint, device)?,
        None => base.policy(device)?,
    };
    frozen.set_bf16_products(run.config.is_in_bf16());
    Ok(Reference::live(Box::new(frozen), run.config.learner.micro_batch_tokens))
}

fn first_sample(group: &Group) -> Option<Group> {
    let sample = group.samples.first()?.clone();
    Some(Group::single(group.id.as_str(), sample))
}

fn table(values: &BTreeMap<String, f64>) -> String {
    let row = |(name, value): (&String, &f64)| match values.get(&format!("{name}{STANDARD_ERROR}")) {
        Some(error) => format!("{name:<24} {value:>12.4} ± {error:.4}"),
        None => format!("{name:<24} {value:>12.4}"),
    };
    let shown = values.iter().filter(|(name, _)| !name.ends_with(STANDARD_ERROR));
    shown.map(row).collect::<Vec<_>>().join("\n")
}
