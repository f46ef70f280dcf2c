//! Engines that draw responses, pass by pass.

use std::collections::VecDeque;

use super::{Job, Lengths};
use crate::balance::{Split, contiguous};

/// Seconds of an engine's work.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Passes {
    /// Of a pass, whatever it computes.
    pub(super) fixed: f64,
    /// Of a pass: reading the weights.
    pub(super) weights: f64,
    /// Of a pass, for each token in the cache: reading its keys and values.
    pub(super) cached: f64,
    /// Of a pass, for each running response: its products.
    pub(super) running: f64,
    /// Of a response's prompt.
    pub(super) prompt: f64,
}

impl Passes {
    /// Seconds of one pass: a processor computes while it reads.
    fn seconds(&self, running: f64, cached: f64) -> f64 {
        self.fixed + f64::max(self.running * running, self.weights + self.cached * cached)
    }
}

/// Engines that have drawn all responses of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct Rollout {
    /// Until the last engine has ended.
    pub seconds: f64,
    /// By engine: when it ended.
    pub ends: Vec<f64>,
    /// By engine: its passes.
    pub passes: Vec<usize>,
    /// Tokens that an engine's cache held at once, at most.
    pub cached_tokens: usize,
}

impl Rollout {
    /// Passes of the engine that made most.
    pub fn most_passes(&self) -> usize {
        self.passes.iter().copied().max().unwrap_or(0)
    }

    /// Passes of the average engine.
    pub fn mean_passes(&self) -> f64 {
        self.passes.iter().sum::<usize>() as f64 / self.passes.len().max(1) as f64
    }

    /// The share of all engines' time in which they had nothing left to do.
    pub fn idle(&self) -> f64 {
        let busy = self.ends.iter().sum::<f64>() / self.ends.len().max(1) as f64;
        if self.seconds > 0.0 { 1.0 - busy / self.seconds } else { 0.0 }
    }
}

#[derive(Debug, Clone, Default)]
struct Engine {
    time: f64,
    passes: usize,
    /// Tokens that each running response still has to draw.
    left: Vec<usize>,
    cached: usize,
    /// The most that was cached.
    most: usize,
    /// Of a batch that is not continuous: whether it has begun.
    begun: bool,
    /// How many responses the batch began with.
    batch: usize,
}

/// Simulates `engines` engines that draw responses of these lengths.
///
/// An engine takes one response at a time, and the engine that is earliest, and of those the one that runs fewest, is the
/// next to take: where engines took all that they have room for, the first would take the longest.
pub(super) fn simulate(job: &Job, lengths: &Lengths, engines: usize, passes: &Passes) -> Rollout {
    let mut queues = queues(job.split, lengths, engines);
    let mut state = vec![Engine::default(); engines];
    loop {
        let waiting = |at: usize| queues[at % queues.len()].front().is_some();
        let busy = |at: &usize| !state[*at].left.is_empty() || waiting(*at);
        let order = |a: &usize, b: &usize| {
            let (a, b) = (&state[*a], &state[*b]);
            a.time.total_cmp(&b.time).then(a.left.len().cmp(&b.left.len()))
        };
        let Some(at) = (0..engines).filter(busy).min_by(order) else { break };
        let engine = &mut state[at];
        let room = engine.left.len() < job.max_running && (job.continuous_batching || !engine.begun);
        let count = queues.len();
        let queue = &mut queues[at % count];
        if let Some(response) = room.then(|| queue.pop_front()).flatten() {
            engine.left.push(lengths.tokens[response]);
            engine.cached += job.prompt_tokens;
            engine.time += passes.prompt;
            engine.batch = engine.left.len();
        } else {
            engine.advance(job, passes);
        }
    }
    let ends: Vec<f64> = state.iter().map(|engine| engine.time).collect();
    Rollout {
        seconds: ends.iter().copied().fold(0.0, f64::max),
        ends,
        passes: state.iter().map(|engine| engine.passes).collect(),
        cached_tokens: state.iter().map(|engine| engine.most).max().unwrap_or(0),
    }
}

impl Engine {
    /// Goes on until the next response ends.
    fn advance(&mut self, job: &Job, passes: &Passes) {
        let Some(steps) = self.left.iter().copied().min() else { return };
        // A batch that is not continuous is computed whole to its end.
        let running = if job.continuous_batching { self.left.len() } else { self.batch };
        let grown = steps * self.left.len();
        let cached = self.cached as f64 + grown as f64 / 2.0;
        self.time += steps as f64 * passes.seconds(running as f64, cached);
        self.passes += steps;
        self.cached += grown;
        self.most = self.most.max(self.cached);
        self.begun = true;
        // All running responses have their prompt and about as many tokens in the cache.
        let each = self.cached / self.left.len();
        let before = self.left.len();
        self.left.retain(|&left| left > steps);
        self.left.iter_mut().for_each(|left| *left -= steps);
        self.cached = self.cached.saturating_sub(each * (before - self.left.len()));
        if self.left.is_empty() {
            (self.begun, self.cached) = (false, 0);
        }
    }
}

/// What engines take from: a queue of each, or one of all.
fn queues(split: Split, lengths: &Lengths, engines: usize) -> Vec<VecDeque<usize>> {
    let count = lengths.tokens.len();
    match split {
        Split::Static => contiguous(count, engines).into_iter().map(VecDeque::from_iter).collect(),
        Split::Stealing => {
            let mut order: Vec<usize> = (0..count).collect();
            order.sort_by(|&a, &b| lengths.expected[b].total_cmp(&lengths.expected[a]));
            vec![order.into()]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A second for each pass, and nothing else.
    const SECONDS: Passes = Passes { fixed: 1.0, weights: 0.0, cached: 0.0, running: 0.0, prompt: 0.0 };

    fn lengths(tokens: &[usize]) -> Lengths {
        Lengths { tokens: tokens.to_vec(), expected: tokens.iter().map(|&tokens| tokens as f64).collect() }
    }

    #[test]
    fn passes_of_an_engine_are_counted_by_hand() {
        let job = Job { max_running: 2, split: Split::Static, prompt_tokens: 0, ..Job::default() };
        // 5 and 2 run; at 2 comes 4, which ends at 6.
        let rollout = simulate(&job, &lengths(&[5, 2, 4]), 1, &SECONDS);
        assert_eq!((rollout.seconds, rollout.most_passes()), (6.0, 6));
        // In batches: 5 and 2 until 5, then 4 until 9.
        let waves = Job { continuous_batching: false, ..job };
        assert_eq!(simulate(&waves, &lengths(&[5, 2, 4]), 1, &SECONDS).most_passes(), 9);
    }

    #[test]
    fn stealing_ends_earlier_than_a_static_split() {
        let lengths = lengths(&[9, 8, 1, 1, 2, 1, 1, 1]);
        let job = Job { max_running: 1, split: Split::Static, ..Job::default() };
        let fixed = simulate(&job, &lengths, 2, &SECONDS);
        assert_eq!(fixed.ends, [19.0, 5.0]);
        let stolen = simulate(&Job { split: Split::Stealing, ..job }, &lengths, 2, &SECONDS);
        assert_eq!(stolen.ends, [12.0, 12.0]);
        assert!(stolen.idle().abs() < 1e-12 && (fixed.idle() - 7.0 / 19.0).abs() < 1e-12);
    }

    #[test]
    fn a_pass_reads_weights_and_cache_or_computes_whichever_is_longer() {
        let passes = Passes { fixed: 0.5, weights: 2.0, cached: 0.1, running: 1.0, prompt: 3.0 };
        assert!((passes.seconds(1.0, 10.0) - 3.5).abs() < 1e-12);
        assert!((passes.seconds(8.0, 10.0) - 8.5).abs() < 1e-12);
        let job = Job { prompt_tokens: 10, split: Split::Static, ..Job::default() };
        let rollout = simulate(&job, &lengths(&[1]), 1, &passes);
        assert!((rollout.seconds - (3.0 + 0.5 + 2.0 + 0.1 * 10.5)).abs() < 1e-12, "{rollout:?}");
        assert_eq!(rollout.cached_tokens, 11);
    }
}
