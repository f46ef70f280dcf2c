//! A prediction as text, each line of which says what it is.

use std::fmt::Write as _;

use super::memory::Kind;
use super::{Report, Scenario};

impl Report {
    /// Seconds and memory, a line each.
    pub fn describe(&self, scenario: &Scenario) -> String {
        let mut out = self.phases();
        let seconds = self.seconds();
        let share = |part: f64| 100.0 * part / seconds;
        let sum = |of: fn(&super::Phase) -> f64| self.phases.iter().map(of).sum::<f64>();
        let _ = writeln!(
            out,
            "predicted  shares      {:.1} % of the step in pipeline bubbles, {:.1} % in communication that nothing hides, \
             {:.1} % waiting for others",
            share(sum(|phase| phase.bubble)),
            share(sum(|phase| phase.communication)),
            share(sum(|phase| phase.waiting))
        );
        if let Some(rollout) = &self.rollout {
            let _ = writeln!(
                out,
                "predicted  engines     {}; the longest makes {} passes, and {:.1} % of their time is idle",
                rollout.ends.len(),
                rollout.passes,
                100.0 * rollout.idle()
            );
        }
        out.push_str(&self.memory(scenario));
        out
    }

    fn phases(&self) -> String {
        let mut out = format!(
            "predicted  {:<18} {:>10} {:>10} {:>10} {:>14} {:>10}\n",
            "phase", "seconds", "computing", "bubble", "communication", "waiting"
        );
        let mut line = |name: &str, [seconds, compute, bubble, communication, waiting]: [f64; 5]| {
            let _ = writeln!(
                out,
                "predicted  {name:<18} {seconds:>10.3} {compute:>10.3} {bubble:>10.3} {communication:>14.3} {waiting:>10.3}"
            );
        };
        let mut total = [0.0; 5];
        for phase in &self.phases {
            let parts = [phase.seconds(), phase.compute, phase.bubble, phase.communication, phase.waiting];
            total.iter_mut().zip(parts).for_each(|(total, part)| *total += part);
            line(phase.name, parts);
        }
        line("step", total);
        out
    }

    fn memory(&self, scenario: &Scenario) -> String {
        let mut out = String::new();
        for (what, kinds) in [("learning", &self.memory.learning), ("drawing", &self.memory.drawing)] {
            if !kinds.is_empty() {
                let list = kinds.iter().map(kind).collect::<Vec<_>>().join(", ");
                let sum: f64 = kinds.iter().map(|kind| kind.1).sum();
                let _ = writeln!(out, "predicted  {what:<10}  {} a rank: {list}", gigabytes(sum));
            }
        }
        let (peak, there) = (self.memory.peak(), scenario.cluster.memory_bytes);
        let verdict = if peak <= there { "fits" } else { "does not fit" };
        let _ = write!(
            out,
            "predicted  memory      {} at the peak of a rank of {}: it {verdict}",
            gigabytes(peak),
            gigabytes(there)
        );
        out
    }
}

fn kind((name, bytes): &Kind) -> String {
    format!("{name} {}", gigabytes(*bytes))
}

fn gigabytes(bytes: f64) -> String {
    format!("{:.2} GB", bytes / 1e9)
}
