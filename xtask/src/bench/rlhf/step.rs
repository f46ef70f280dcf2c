//! What the example says of a step.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::bench::figure;

/// How far sums of the same numbers in another order may be apart, as a part of them.
const TOLERANCE: f64 = 1e-3;

/// One step of one form.
#[derive(Debug, Clone)]
pub(super) struct Step {
    pub(super) form: usize,
    pub(super) name: String,
    pub(super) phases: Vec<Phase>,
    pub(super) cpu_seconds: f64,
    pub(super) peak_mib: f64,
    /// Hash of the drawn tokens.
    drawn: String,
    /// What has to be the same in all forms.
    work: Vec<(String, f64)>,
}

#[derive(Debug, Clone)]
pub(super) struct Phase {
    pub(super) name: String,
    pub(super) seconds: f64,
    rows: u64,
}

impl Step {
    pub(super) fn parse(line: &Value) -> Result<Self> {
        let text = |value: &Value, name: &str| {
            let text = value[name].as_str().with_context(|| format!("no text `{name}` in {value}"));
            text.map(str::to_owned)
        };
        let phase = |value: &Value| {
            let (name, seconds) = (text(value, "name")?, figure(value, "seconds")?);
            Ok(Phase { name, seconds, rows: figure(value, "rows")? as u64 })
        };
        let phases = line["phases"].as_array().with_context(|| format!("no phases in {line}"))?;
        let numbers = line["work"].as_object().with_context(|| format!("no `work` in {line}"))?;
        let numbers = numbers.iter().filter(|(_, value)| !value.is_string());
        let number = |(name, _): (&String, &Value)| Ok((name.clone(), figure(&line["work"], name)?));
        Ok(Self {
            form: figure(line, "form")? as usize,
            name: text(line, "name")?,
            phases: phases.iter().map(phase).collect::<Result<_>>()?,
            cpu_seconds: figure(line, "cpu_seconds")?,
            peak_mib: figure(line, "peak_mib")?,
            drawn: text(&line["work"], "drawn")?,
            work: numbers.map(number).collect::<Result<_>>()?,
        })
    }

    /// The whole step.
    pub(super) fn seconds(&self) -> f64 {
        self.phases.iter().map(|phase| phase.seconds).sum()
    }

    /// Rows that went through a model, in generation and training, padding included.
    pub(super) fn rows(&self) -> u64 {
        self.phases.iter().map(|phase| phase.rows).sum()
    }

    /// That another form's step drew the same tokens, and learned the same from them.
    pub(super) fn check_same_work(&self, other: &Self) -> Result<()> {
        let (own, others) = (&self.name, &other.name);
        ensure!(self.drawn == other.drawn, "`{own}` and `{others}` drew other tokens");
        for ((name, value), (_, theirs)) in self.work.iter().zip(&other.work) {
            let far = (value - theirs).abs() > TOLERANCE * value.abs().max(theirs.abs());
            ensure!(!far, "`{own}` has {name} = {value}, `{others}` {theirs}: not the same step");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn step(name: &str, loss: f64, drawn: &str) -> Step {
        let phase = |name: &str, seconds: f64| json!({ "name": name, "seconds": seconds, "rows": 3 });
        let line = json!({
            "form": 1, "name": name, "cpu_seconds": 3.0, "peak_mib": 10.0,
            "phases": [phase("generation", 1.5), phase("other", 0.5)], "work": { "loss": loss, "drawn": drawn },
        });
        Step::parse(&line).unwrap()
    }

    #[test]
    fn the_phases_are_the_step() {
        let step = step("a", 1.0, "f");
        assert!((step.seconds() - 2.0).abs() < 1e-12);
        assert_eq!(step.rows(), 6);
    }

    #[test]
    fn other_tokens_and_another_loss_are_another_step() {
        let one = step("a", 1.0, "f");
        assert!(one.check_same_work(&step("b", 1.0005, "f")).is_ok());
        let message = |other: &Step| one.check_same_work(other).unwrap_err().to_string();
        assert!(message(&step("b", 1.01, "f")).contains("loss"));
        assert!(message(&step("b", 1.0, "e")).contains("tokens"));
    }

    #[test]
    fn what_is_absent_is_named() {
        let message = Step::parse(&json!({ "phases": [], "work": {} })).unwrap_err().to_string();
        assert!(message.contains("form"), "{message}");
    }
}
