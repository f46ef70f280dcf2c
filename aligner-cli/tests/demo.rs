//! The README's demo in small: with any seed, the tiny model learns to be kind.

use std::path::Path;

use aligner_cli::{Outcome, Registry, train};

const ACCURACY: &str = "rewards/accuracies";
const ACCURACY_ERROR: &str = "rewards/accuracies_stderr";

/// Trains an example into a directory of its own. Paths in the examples are relative to the
/// workspace's root, so that is where the process goes.
fn run_example(file: &str, overrides: &[&str]) -> Outcome {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    std::env::set_current_dir(&root).expect("the workspace's root is there");
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let place = format!("run.dir={:?}", directory.path().join("run").display().to_string());
    let quiet = ["run.sample_prompts=0", "run.eval_every=0"];
    let overrides = overrides.iter().chain(&quiet).map(|&text| text.to_owned()).chain([place]);
    train(Path::new(file), &overrides.collect::<Vec<_>>(), &Registry::built_in()).expect("the example trains")
}

fn dpo_raises_held_out_accuracy(seed: u64) {
    let outcome = run_example("examples/demo_dpo.toml", &[&format!("run.seed={seed}"), "run.steps=12"]);
    assert!(
        (outcome.before[ACCURACY] - 0.5).abs() < 1e-12,
        "policy and reference are equal, and ties count one half"
    );
    let (after, error) = (outcome.after[ACCURACY], outcome.after[ACCURACY_ERROR]);
    assert!(after - 2.0 * error > 0.5, "seed {seed}: {after} ± {error}");
    assert!(outcome.after["rewards/margins"] > 0.0);
}

#[test]
fn dpo_raises_held_out_accuracy_with_seed_1() {
    dpo_raises_held_out_accuracy(1);
}

#[test]
fn dpo_raises_held_out_accuracy_with_seed_2() {
    dpo_raises_held_out_accuracy(2);
}

#[test]
fn dpo_raises_held_out_accuracy_with_seed_3() {
    dpo_raises_held_out_accuracy(3);
}

#[test]
fn supervised_fine_tuning_lowers_held_out_loss() {
    let outcome = run_example("examples/demo_sft.toml", &["run.steps=20"]);
    let (before, after) = (outcome.before["loss"], outcome.after["loss"]);
    assert!(after < 0.7 * before, "{before} -> {after}");
}
