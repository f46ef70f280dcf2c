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
                rollout.most_passes(),
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
                "predicted  {name:<18} {:>10} {:>10} {:>10} {:>14} {:>10}",
                short(seconds),
                short(compute),
                short(bubble),
                short(communication),
                short(waiting)
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
                let _ = writeln!(out, "predicted  {what:<10}  {} a rank: {list}", amount(sum));
            }
        }
        let (peak, there) = (self.memory.peak(), scenario.cluster.memory_bytes);
        let verdict = if peak <= there { "fits" } else { "does not fit" };
        let _ = write!(
            out,
            "predicted  memory      {} at the peak of a rank of {}: it {verdict}",
            amount(peak),
            amount(there)
        );
        out
    }
}

fn kind((name, bytes): &Kind) -> String {
    format!("{name} {}", amount(*bytes))
}

fn amount(bytes: f64) -> String {
    if bytes < 1e9 { format!("{:.1} MB", bytes / 1e6) } else { format!("{:.2} GB", bytes / 1e9) }
}

/// A time in seconds with three decimals, or with three digits where that would be nothing.
fn short(seconds: f64) -> String {
    if seconds == 0.0 || seconds >= 0.01 { format!("{seconds:.3}") } else { format!("{seconds:.2e}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_times_and_sizes_are_no_zeros() {
        assert_eq!([0.0, 12.3456, 0.000_123].map(short), ["0.000", "12.346", "1.23e-4"]);
        assert_eq!([5.5e6, 2.5e9].map(amount), ["5.5 MB", "2.50 GB"]);
    }
}
