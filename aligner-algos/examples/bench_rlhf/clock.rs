//! Where a step's time goes: the parts say which phase begins, and the clock leaves nothing out.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

/// A phase of a step. Between two phases time counts as `Other`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Generation,
    Reference,
    Values,
    OldLogps,
    Credit,
    Critic,
    Policy,
    Weights,
    Other,
}

/// All phases with their names, in the order of a step.
pub(crate) const PHASES: [(Phase, &str); 9] = [
    (Phase::Generation, "generation"),
    (Phase::Reference, "reference"),
    (Phase::Values, "values"),
    (Phase::OldLogps, "old log-probs"),
    (Phase::Credit, "credit"),
    (Phase::Critic, "critic learns"),
    (Phase::Policy, "policy learns"),
    (Phase::Weights, "weights"),
    (Phase::Other, "other"),
];

/// What a phase has taken.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Lap {
    pub(crate) seconds: f64,
    /// Rows that went through a model, padding included.
    pub(crate) rows: u64,
}

/// A stopwatch that every part of a step shares.
#[derive(Debug, Clone)]
pub(crate) struct Clock(Arc<Mutex<Record>>);

#[derive(Debug)]
struct Record {
    phase: Phase,
    since: Instant,
    laps: [Lap; PHASES.len()],
}

impl Record {
    fn new() -> Self {
        Self { phase: Phase::Other, since: Instant::now(), laps: Default::default() }
    }
}

impl Clock {
    /// A clock that runs.
    pub(crate) fn new() -> Self {
        Self(Arc::new(Mutex::new(Record::new())))
    }

    /// Forgets what was before.
    pub(crate) fn restart(&self) {
        *self.lock() = Record::new();
    }

    /// From now on time is `phase`'s.
    pub(crate) fn enter(&self, phase: Phase) {
        let mut record = self.lock();
        let (before, now) = (record.phase, Instant::now());
        record.laps[before as usize].seconds += now.duration_since(record.since).as_secs_f64();
        (record.phase, record.since) = (phase, now);
    }

    /// `rows` more rows went through a model.
    pub(crate) fn count(&self, phase: Phase, rows: u64) {
        self.lock().laps[phase as usize].rows += rows;
    }

    /// Every phase up to now, in the order of [`PHASES`]: the seconds add up to the time since the restart.
    pub(crate) fn laps(&self) -> [Lap; PHASES.len()] {
        self.enter(Phase::Other);
        self.lock().laps
    }

    fn lock(&self) -> MutexGuard<'_, Record> {
        self.0.lock().expect("nothing panics while it holds the clock")
    }
}
