//! `cargo xtask demo-model`: the demo's text, tokenizer, data sets and tiny model, from nothing.
//!
//! Everything is drawn from the grammar in `demo/language.txt` with fixed seeds. What is committed
//! under `examples/demo` is what this task writes; the text of the base model's training is not.

mod base_model;
mod data_sets;
mod grammar;
mod random;
mod vocabulary;

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::Args;

use crate::workspace;
use grammar::Grammar;

#[derive(Args)]
pub(crate) struct Options {
    /// Write the data sets and the untrained model, but train nothing.
    #[arg(long)]
    data_only: bool,
}

/// The run file of the base model's training, and where that run leaves the model.
const BASE_RUN: &str = "examples/demo_base.toml";
const BASE_RESULT: &str = "runs/demo_base/model";
/// What a model's directory may hold.
const MODEL_FILES: [&str; 5] =
    ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];

/// Writes the data sets, then trains the base model through the command line itself.
pub(crate) fn run(options: &Options) -> Result<()> {
    let root = workspace::root();
    let demo = root.join("examples/demo");
    let scratch = root.join("target/demo");
    let grammar = Grammar::parse(include_str!("demo/language.txt")).context("language.txt")?;
    let base_text = data_sets::write(&grammar, &demo, &scratch)?;
    let start = scratch.join("untrained");
    std::fs::create_dir_all(&start).with_context(|| format!("cannot create {}", start.display()))?;
    let vocabulary = vocabulary::train(&base_text)?;
    vocabulary::save(&vocabulary, &start)?;
    base_model::write_untrained(&start, vocabulary.get_vocab_size(true))?;
    println!("{}: untrained model of {} tokens", start.display(), vocabulary.get_vocab_size(true));
    if options.data_only {
        return Ok(());
    }
    train(&root)?;
    copy_model(&root.join(BASE_RESULT), &demo.join("model"))
}

fn copy_model(source: &Path, target: &Path) -> Result<()> {
    std::fs::create_dir_all(target).with_context(|| format!("cannot create {}", target.display()))?;
    for name in MODEL_FILES.iter().filter(|name| source.join(name).exists()) {
        std::fs::copy(source.join(name), target.join(name)).with_context(|| format!("cannot copy {name}"))?;
    }
    println!("{}: trained model", target.display());
    Ok(())
}

fn train(root: &Path) -> Result<()> {
    let status = Command::new("cargo")
        .args(["run", "--release", "--quiet", "--bin", "aligner", "--", "train", BASE_RUN, "--overwrite"])
        .current_dir(root)
        .status()
        .context("cannot start the training")?;
    ensure!(status.success(), "the training of {BASE_RUN} failed: {status}");
    Ok(())
}
