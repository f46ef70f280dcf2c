//! Counters of the server, in the text format of Prometheus.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::EngineHandle;

/// Upper bounds in seconds; a last bucket has no bound.
const FIRST_TOKEN_BOUNDS: [f64; 11] = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0];
const PER_TOKEN_BOUNDS: [f64; 11] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0];

/// What is counted.
#[derive(Debug, Default)]
pub(super) struct Metrics(Mutex<Counts>);

#[derive(Debug, Default)]
struct Counts {
    /// By route and status.
    requests: BTreeMap<(&'static str, u16), u64>,
    prompt_tokens: u64,
    generated_tokens: u64,
    cancelled: u64,
    engine_failures: u64,
    first_token: Histogram,
    per_token: Histogram,
}

#[derive(Debug, Default)]
struct Histogram {
    /// How many lie under each bound and over the one before; the last has those over all.
    counts: [u64; 12],
    sum: f64,
}

impl Histogram {
    fn add(&mut self, bounds: &[f64; 11], secs: f64) {
        self.counts[bounds.partition_point(|&bound| bound < secs)] += 1;
        self.sum += secs;
    }

    fn write(&self, out: &mut Text, name: &str, help: &str, bounds: &[f64; 11]) {
        out.head(name, "histogram", help);
        let mut below = 0;
        for (at, count) in self.counts.iter().enumerate() {
            below += count;
            let bound = bounds.get(at).map_or("+Inf".to_string(), f64::to_string);
            out.line(&format!("{name}_bucket{{le=\"{bound}\"}}"), below);
        }
        out.line(&format!("{name}_sum"), self.sum);
        out.line(&format!("{name}_count"), below);
    }
}

impl Metrics {
    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn request(&self, route: &'static str, status: u16) {
        *self.counts().requests.entry((route, status)).or_default() += 1;
    }

    pub(super) fn prompt_tokens(&self, count: usize) {
        self.counts().prompt_tokens += count as u64;
    }

    pub(super) fn token(&self, is_first: bool, since: Duration) {
        let mut counts = self.counts();
        counts.generated_tokens += 1;
        let secs = since.as_secs_f64();
        if is_first {
            counts.first_token.add(&FIRST_TOKEN_BOUNDS, secs);
        } else {
            counts.per_token.add(&PER_TOKEN_BOUNDS, secs);
        }
    }

    pub(super) fn cancelled(&self) {
        self.counts().cancelled += 1;
    }

    pub(super) fn engine_failed(&self) {
        self.counts().engine_failures += 1;
    }
}

/// Everything, as Prometheus reads it.
pub(super) fn text(engine: &EngineHandle) -> String {
    let (stats, counts) = (engine.stats(), engine.metrics().counts());
    let mut out = Text::default();
    out.head("aligner_requests_total", "counter", "Requests by route and status.");
    for ((route, status), count) in &counts.requests {
        out.line(&format!("aligner_requests_total{{route=\"{route}\",status=\"{status}\"}}"), count);
    }
    let mut counter = |name: &str, help: &str, value: u64| out.single(name, "counter", help, value);
    counter("aligner_prompt_tokens_total", "Prompt tokens taken.", counts.prompt_tokens);
    counter("aligner_generated_tokens_total", "Tokens drawn.", counts.generated_tokens);
    counter("aligner_computed_tokens_total", "Tokens that went through the model.", stats.computed_tokens);
    counter("aligner_reused_tokens_total", "Prompt tokens from the prefix cache.", stats.reused_tokens);
    counter("aligner_preemptions_total", "Times a request gave up its pages.", stats.preemptions);
    counter("aligner_cancelled_total", "Requests ended because nobody waited for them.", counts.cancelled);
    counter("aligner_engine_failures_total", "Failed steps of the engine.", counts.engine_failures);
    let mut gauge = |name: &str, help: &str, value: usize| out.single(name, "gauge", help, value);
    gauge("aligner_queue_open", "Requests that hold a place of the queue.", engine.open());
    gauge("aligner_queue_limit", "Places of the queue.", engine.max_queue());
    gauge("aligner_requests_waiting", "Requests that wait in the engine.", stats.waiting);
    gauge("aligner_requests_running", "Requests that hold cache pages.", stats.running);
    gauge("aligner_cache_pages", "Pages of the key-value cache.", stats.pages);
    gauge("aligner_cache_free_pages", "Pages that nothing holds.", stats.free_pages);
    let first = "Seconds from submission to the first token.";
    counts.first_token.write(&mut out, "aligner_time_to_first_token_seconds", first, &FIRST_TOKEN_BOUNDS);
    let per = "Seconds between two tokens of a response.";
    counts.per_token.write(&mut out, "aligner_time_per_token_seconds", per, &PER_TOKEN_BOUNDS);
    out.0
}

#[derive(Default)]
struct Text(String);

impl Text {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    fn line(&mut self, name: &str, value: impl std::fmt::Display) {
        let _ = writeln!(self.0, "{name} {value}");
    }

    fn single(&mut self, name: &str, kind: &str, help: &str, value: impl std::fmt::Display) {
        self.head(name, kind, help);
        self.line(name, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative_and_include_their_bound() {
        let mut histogram = Histogram::default();
        for secs in [0.01, 0.02, 100.0] {
            histogram.add(&FIRST_TOKEN_BOUNDS, secs);
        }
        let mut out = Text::default();
        histogram.write(&mut out, "h", "help", &FIRST_TOKEN_BOUNDS);
        for line in ["h_bucket{le=\"0.01\"} 1", "h_bucket{le=\"0.025\"} 2", "h_bucket{le=\"60\"} 2"] {
            assert!(out.0.contains(line), "{}", out.0);
        }
        assert!(out.0.contains("h_bucket{le=\"+Inf\"} 3") && out.0.ends_with("h_count 3\n"), "{}", out.0);
    }
}
