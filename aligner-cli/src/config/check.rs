//! Checks across keys, and of the files that they name, before anything is loaded.

use std::path::Path;

use aligner_algos::WarningKind;
use aligner_core::weights::{AdapterCheckpoint, WEIGHT_FILES};
use aligner_core::{Error, Needs};
use aligner_data::{DatasetConfig, Tokenizer};

use super::{Node, Problems, Reading, RunConfig, blame};
use crate::registry::{Built, BuiltReward};

/// Records every value that cannot work; opens no model and touches no device.
pub(super) fn values(reading: &Reading<RunConfig>, root: &Node, problems: &mut Problems) {
    let mut found = Vec::new();
    let config = &reading.value;
    model(config, &mut found);
    data(config, &mut found);
    learner(config, &mut found);
    add_errors(&mut found, "preflight", config.preflight.errors());
    run(config, &mut found);
    mesh(config, &mut found);
    // What stands in for a bad value has faults that nobody wrote.
    for (key, message) in found.into_iter().filter(|(key, _)| !reading.unsound.holds(key)) {
        blame(root, &key, &message, problems);
    }
}

/// Records what does not go with an algorithm that draws its own samples, or with one that does not.
pub(super) fn online(
    config: &RunConfig,
    built: &Built,
    rewards: &[BuiltReward],
    root: &Node,
    problems: &mut Problems,
) {
    let name = &built.name;
    if built.online {
        let mut found = Vec::new();
        // One that could not be read is no judge.
        if root.find("reward").is_some_and(|section| section.node.entries().len() == rewards.len()) {
            judges(config, rewards, &mut found);
        }
        if let Some(warnings) = &config.warnings {
            add_errors(&mut found, "warnings", warnings.errors());
        }
        if let Some(rollout) = &config.rollout {
            add_errors(&mut found, "rollout", rollout.errors());
            // A coefficient that a step sets acts on penalties in the rewards alone.
            let refers = built.algorithm.needs().contains(Needs::REF_LOGPS);
            if rollout.adaptive_kl.is_some() && !(built.penalising && refers) {
                let message = format!("`{name}` takes no KL penalty off its rewards with these settings");
                add(&mut found, "rollout.adaptive_kl", message);
            }
        }
        if config.data.eval.as_ref().is_some_and(|eval| eval.task.is_some()) {
            let message = "questions that training never asks come from data.train.holdout";
            add(&mut found, "data.eval.task", message);
        }
        if let Some(critic) = &config.critic {
            add_errors(&mut found, "critic.learner", critic.learner.errors());
            if let Some(lora) = &critic.lora {
                let problems = lora.problems().into_iter();
                found.extend(problems.map(|(key, message)| (format!("critic.lora.{key}"), message)));
                add_errors(&mut found, "critic.lora", lora.config().errors());
            }
            if let Some(message) = critic.path.as_deref().and_then(not_a_model) {
                add(&mut found, "critic.path", message);
            }
        }
        if root.find("reward").is_none_or(|entry| entry.node.entries().is_empty()) {
            problems.push(
                None,
                format!(
                    "`{name}` learns from the rewards of its samples: add a section such as [reward.regex]"
                ),
            );
        }
        for (key, message) in found {
            blame(root, &key, &message, problems);
        }
        return;
    }
    for section in ["rollout", "reward", "critic", "warnings"] {
        if root.find(section).is_some() {
            blame(
                root,
                section,
                &format!("`{name}` draws no samples, so this section means nothing"),
                problems,
            );
        }
    }
}

/// What is wrong with the rewards that nothing is learned from.
fn judges(config: &RunConfig, rewards: &[BuiltReward], found: &mut Found) {
    let all_judge = !rewards.is_empty() && rewards.iter().all(BuiltReward::is_judge);
    if all_judge {
        add(found, "reward", "every weight is 0, so there is nothing to learn from");
    }
    let stops = config.warnings.as_ref().is_some_and(|warnings| warnings.stop.contains(&WarningKind::Judge));
    if stops && !rewards.iter().any(BuiltReward::is_judge) {
        add(found, "warnings.stop", "there is no judge: a reward with weight = 0");
    }
}

/// Keys and what is wrong with their values.
type Found = Vec<(String, String)>;

fn add(found: &mut Found, key: &str, message: impl Into<String>) {
    found.push((key.to_string(), message.into()));
}

/// A section's own findings, whose keys are relative to it.
fn add_errors(found: &mut Found, section: &str, errors: impl IntoIterator<Item = Error>) {
    for error in errors {
        match error {
            // `betas[1]` is a part of the key `betas`.
            Error::Setting { key, message } => {
                let key = key.split('[').next().unwrap_or_default();
                add(found, &format!("{section}.{key}"), message);
            }
            other => add(found, section, other.to_string()),
        }
    }
}

fn model(config: &RunConfig, found: &mut Found) {
    let path = &config.model.path;
    if let Some(message) = not_a_model(path) {
        add(found, "model.path", message);
    } else if let Some(tokenizer) = &config.model.tokenizer {
        if !has_tokenizer(tokenizer) {
            add(
                found,
                "model.tokenizer",
                format!("{}: neither tokenizer.json nor tokenizer.model there", tokenizer.display()),
            );
        }
    } else if path.is_dir() && !has_tokenizer(path) {
        let message = format!(
            "{}: there is a model, but neither tokenizer.json nor tokenizer.model beside it; name the directory of \
             one as `model.tokenizer`",
            path.display()
        );
        add(found, "model.path", message);
    }
    if config.is_in_bf16() && config.model.device == "cpu" {
        let message = "products in `bf16` are slower than those in `f32` on the device `cpu`";
        add(found, "model.precision", message);
    }
    let uncorrected = config.rollout.as_ref().is_some_and(|rollout| rollout.importance.is_none());
    if config.is_in_bf16() && uncorrected {
        let message = "the engine draws with other products than `bf16` training's; correct for it with \
                       [rollout.importance]";
        add(found, "model.precision", message);
    }
    if let Some(lora) = &config.model.lora {
        lora.problems()
            .into_iter()
            .for_each(|(key, message)| add(found, &format!("model.lora.{key}"), message));
        add_errors(found, "model.lora", lora.config().errors());
        if lora.base().packed().is_some() && config.model.device != "cpu" {
            let message = "weights in fewer bits are for the device `cpu` alone";
            add(found, "model.lora.base", message);
        }
    }
    if let Some(message) = config.reference.path.as_deref().and_then(not_a_model) {
        add(found, "reference.path", message);
    }
}

/// Why `path` cannot be a model; none where it may be one.
pub(crate) fn not_a_model(path: &Path) -> Option<String> {
    let shown = path.display();
    if !path.exists() {
        return Some(format!("{shown}: no such file or directory"));
    }
    if path.is_file() {
        let gguf = path.extension().is_some_and(|extension| extension == "gguf");
        return (!gguf).then(|| format!("{shown}: expected a model's directory or a .gguf file"));
    }
    if AdapterCheckpoint::is_adapter(path) && !path.join("config.json").is_file() {
        return Some(format!(
            "{shown}: an adapter, where a model is expected; `aligner merge` makes one of it"
        ));
    }
    if !path.join("config.json").is_file() {
        return Some(format!("{shown}: no config.json in this directory"));
    }
    let any = WEIGHT_FILES.iter().any(|name| path.join(name).is_file());
    (!any).then(|| format!("{shown}: none of {} in this directory", WEIGHT_FILES.join(", ")))
}

fn has_tokenizer(path: &Path) -> bool {
    Tokenizer::is_in(path) || path.is_file()
}

fn data(config: &RunConfig, found: &mut Found) {
    let data = &config.data;
    rows("data.train", &data.train, found);
    let Some(eval) = &data.eval else { return };
    rows("data.eval", eval, found);
    let message = "rows are held out of `data.train` only where there is no `data.eval`";
    for (key, holdout) in [("data.train.holdout", data.train.holdout), ("data.eval.holdout", eval.holdout)] {
        if holdout > 0 {
            add(found, key, message);
        }
    }
}

fn rows(section: &str, config: &DatasetConfig, found: &mut Found) {
    add_errors(found, section, config.check().err());
    let named = config.task.is_none() && !config.path.as_os_str().is_empty();
    if named && !config.path.exists() {
        add(found, &format!("{section}.path"), format!("{}: no such file", config.path.display()));
    }
}

fn learner(config: &RunConfig, found: &mut Found) {
    add_errors(found, "learner", config.learner.errors());
}

fn run(config: &RunConfig, found: &mut Found) {
    let run = &config.run;
    if run.steps.is_some() && run.epochs.is_some() {
        add(found, "run.epochs", "give either `steps` or `epochs`");
    }
    if run.steps == Some(0) {
        add(found, "run.steps", "expected at least 1, got 0");
    }
    if let Some(epochs) = run.epochs.filter(|epochs| !(epochs.is_finite() && *epochs > 0.0)) {
        add(found, "run.epochs", format!("expected a number above 0, got {epochs}"));
    }
    if run.batch_size == 0 {
        add(found, "run.batch_size", "expected at least 1 group a step, got 0");
    }
    if !(0.0..=1e9).contains(&run.call_timeout_secs) {
        let message = format!("expected a number of seconds from 0 to 1e9, got {}", run.call_timeout_secs);
        add(found, "run.call_timeout_secs", message);
    }
    if let Some(message) = not_a_run_directory(&run.dir) {
        add(found, "run.dir", message);
    }
}

fn mesh(config: &RunConfig, found: &mut Found) {
    let Some(mesh) = &config.mesh else { return };
    add_errors(found, "mesh", mesh.errors());
    let batches = mesh.ep.saturating_mul(mesh.dp.unwrap_or(1));
    if batches > 0 && !config.run.batch_size.is_multiple_of(batches) {
        let message = format!(
            "{} groups do not divide over {batches} ranks with batches of their own",
            config.run.batch_size
        );
        add(found, "run.batch_size", message);
    }
    if !["cpu", "cuda"].contains(&config.model.device.as_str()) {
        add(found, "model.device", "each rank has a device of its own: say `cuda`, without a number");
    }
    let Some(rollout) = &config.rollout else { return };
    for key in rollout.alone() {
        let message = "not with [mesh]: ranks draw a step's samples to the end before they learn";
        add(found, &format!("rollout.{key}"), message);
    }
}

/// Why nothing can be written under `dir`; none where it may be.
fn not_a_run_directory(dir: &Path) -> Option<String> {
    if dir.as_os_str().is_empty() {
        return Some("expected the name of a directory, got an empty text".into());
    }
    // A file among them would be noticed at the first save only.
    let directories = [dir.to_path_buf(), dir.join("checkpoints"), dir.join("model")];
    let file = directories.into_iter().find(|path| path.symlink_metadata().is_ok() && !path.is_dir())?;
    Some(format!("{}: expected a directory, but this is a file; move it away", file.display()))
}
