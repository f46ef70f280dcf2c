//! Warnings of a run that learns from its own samples: told once, and logged at every step at which they hold.

use std::collections::BTreeMap;

use aligner_algos::{Warning, Warnings, WarningsConfig};
use aligner_core::Result;

use crate::Run;
use crate::rundir::{self, Record, RunDir};

/// What the run has been warned of.
pub(super) struct Told {
    warnings: Warnings,
    /// Each at the step at which it began to hold.
    pub(super) all: Vec<Warning>,
    /// Names of the rewards that are not learned from.
    pub(super) judges: Vec<String>,
}

impl Told {
    /// As it stood when the run had logged `step` steps.
    ///
    /// # Errors
    /// Settings out of range; a log that cannot be read.
    pub(super) fn as_logged(run: &Run, dir: &RunDir, step: u64) -> Result<Self> {
        let judges = run.rewards.iter().filter(|reward| reward.is_judge()).map(|judge| judge.name.clone());
        let mut records = rundir::read_metrics(&dir.metrics())?;
        records.retain(|record| record.step <= step);
        Self::after(&records, run.config.warnings.clone().unwrap_or_default(), judges.collect())
    }

    fn after(records: &[Record], config: WarningsConfig, judges: Vec<String>) -> Result<Self> {
        let mut told = Self { warnings: Warnings::new(config, judges.clone())?, all: Vec::new(), judges };
        // An evaluation has a record of its own, with the number of the step before it.
        for record in records.iter().filter(|record| record.values.contains_key("timing_s/step")) {
            told.take(record.step, &record.values);
        }
        Ok(told)
    }

    /// Takes a step's figures, marks there what holds, and tells what is new; says what is to end the run.
    pub(super) fn observe(&mut self, step: u64, values: &mut BTreeMap<String, f64>) -> Option<String> {
        let held = self.take(step, values);
        for warning in &held {
            values.insert(warning.kind.metric().into(), 1.0);
            if warning.is_new {
                tracing::warn!("step {step}: {}", warning.message);
            }
        }
        let last = held.into_iter().find(|warning| warning.stops)?;
        Some(format!("step {step}: {}; warnings.stop says that the run ends here", last.message))
    }

    fn take(&mut self, step: u64, values: &BTreeMap<String, f64>) -> Vec<Warning> {
        let held = self.warnings.observe(step, |name| values.get(name).copied());
        self.all.extend(held.iter().filter(|warning| warning.is_new).cloned());
        held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resumed_run_stands_where_the_log_ends() {
        let config = WarningsConfig { window: 2, ..WarningsConfig::default() };
        let step = |length: f64| {
            BTreeMap::from([("completions/mean_length".to_string(), length), ("timing_s/step".into(), 1.0)])
        };
        let mut whole = Told::after(&[], config.clone(), Vec::new()).expect("valid");
        let mut records = Vec::new();
        for (at, length) in [10.0, 10.0, 30.0, 30.0, 30.0].into_iter().enumerate() {
            let mut values = step(length);
            assert_eq!(whole.observe(1 + at as u64, &mut values), None);
            assert_eq!(values.contains_key("warnings/length"), at >= 3);
            records.push(Record { step: 1 + at as u64, values });
        }
        // An evaluation, which has a length too.
        records.push(Record { step: 5, values: BTreeMap::from([("eval/reward".into(), 1.0)]) });
        let mut resumed = Told::after(&records, config, Vec::new()).expect("valid");
        assert_eq!(resumed.all, whole.all);
        assert_eq!(resumed.all.iter().map(|warning| warning.step).collect::<Vec<_>>(), [4]);
        let _ = resumed.observe(6, &mut step(30.0));
        assert_eq!(resumed.all.len(), 1, "it is not told again");
    }
}
