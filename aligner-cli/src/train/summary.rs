//! What a finished run prints: answers and held-out numbers before and after, and where things are.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use aligner_core::weights::AdapterCheckpoint;

use crate::report::STANDARD_ERROR;
use crate::rundir::{Answer, Record, RunDir};

/// First and last held-out values of a run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Outcome {
    /// Held-out metrics before the first step, by name (without `eval/`).
    pub before: BTreeMap<String, f64>,
    /// The same after the last one.
    pub after: BTreeMap<String, f64>,
}

impl Outcome {
    pub(super) fn of(records: &[Record]) -> Self {
        let evaluations =
            || records.iter().filter(|record| record.values.keys().any(|name| name.starts_with("eval/")));
        let values = |record: &Record| {
            let held = record
                .values
                .iter()
                .filter_map(|(name, value)| Some((name.strip_prefix("eval/")?.to_string(), *value)));
            held.collect()
        };
        Self {
            before: evaluations().next().map(values).unwrap_or_default(),
            after: evaluations().next_back().map(values).unwrap_or_default(),
        }
    }

    fn table(&self) -> String {
        let mut out = format!("{:<24} {:>20} {:>20}\n", "held out", "before", "after");
        for name in self.after.keys().filter(|name| !name.ends_with(STANDARD_ERROR)) {
            let _ = writeln!(
                out,
                "{name:<24} {:>20} {:>20}",
                shown(&self.before, name),
                shown(&self.after, name)
            );
        }
        out
    }
}

fn shown(values: &BTreeMap<String, f64>, name: &str) -> String {
    match (values.get(name), values.get(&format!("{name}{STANDARD_ERROR}"))) {
        (None, _) => "-".into(),
        (Some(value), None) => format!("{value:.4}"),
        (Some(value), Some(error)) => format!("{value:.4} ± {error:.4}"),
    }
}

/// The text for standard output.
pub(super) fn text(outcome: &Outcome, answers: &[Answer], dir: &RunDir) -> String {
    let mut out = String::new();
    let last = answers.iter().map(|answer| answer.step).max().unwrap_or(0);
    for before in answers.iter().filter(|answer| answer.step == 0) {
        let after = answers.iter().find(|other| other.step == last && last > 0 && other.id == before.id);
        let _ = writeln!(out, "prompt  {}", indented(&before.prompt));
        let _ = writeln!(out, "before  {}", indented(&before.text));
        let _ = writeln!(out, "after   {}\n", indented(after.map_or("-", |answer| &answer.text)));
    }
    if !outcome.after.is_empty() {
        let _ = writeln!(out, "{}", outcome.table());
    }
    let place = |path: &Path| path.display().to_string();
    let kind = if AdapterCheckpoint::is_adapter(&dir.model()) { "adapter" } else { "model" };
    let _ = write!(out, "{kind:<7} {}\nreport  {}", place(&dir.model()), place(&dir.report()));
    out
}

fn indented(text: &str) -> String {
    text.trim().replace('\n', "\n        ")
}
