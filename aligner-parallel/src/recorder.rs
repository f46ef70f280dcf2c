//! The flight recorder: a rank's last operations.

use std::collections::VecDeque;
use std::fmt::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::call::{Call, name_ranks};

/// How many operations are kept.
const KEPT: usize = 8;

/// A rank's last operations, for errors.
#[derive(Debug)]
pub struct Recorder {
    /// Times count from here.
    start: Instant,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Operations so far.
    count: u64,
    last: VecDeque<Entry>,
}

#[derive(Debug)]
struct Entry {
    number: u64,
    call: Call,
    /// The group's ranks.
    ranks: Arc<[usize]>,
    /// The one that values go to or come from.
    peer: Option<usize>,
    began: Duration,
    took: Option<Duration>,
}

impl Recorder {
    pub(crate) fn new(start: Instant) -> Self {
        Self { start, state: Mutex::default() }
    }

    /// Notes that a call among these ranks begins; returns its number.
    pub(crate) fn begin(&self, call: &Call, ranks: &Arc<[usize]>, peer: Option<usize>) -> u64 {
        let began = self.start.elapsed();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.count += 1;
        let number = state.count;
        if state.last.len() == KEPT {
            state.last.pop_front();
        }
        state.last.push_back(Entry {
            number,
            call: call.clone(),
            ranks: ranks.clone(),
            peer,
            began,
            took: None,
        });
        number
    }

    /// Notes that the call of this number has done its work.
    pub(crate) fn end(&self, number: u64) {
        let now = self.start.elapsed();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = state.last.iter_mut().rev().find(|entry| entry.number == number) {
            entry.took = Some(now.saturating_sub(entry.began));
        }
    }

    /// The last operations of `rank`, the newest last, each on a line of its own.
    pub(crate) fn tell(&self, rank: usize) -> String {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut text = String::new();
        if state.last.is_empty() {
            let _ = write!(text, "\n  rank {rank}: none");
        }
        for entry in &state.last {
            let (began, ranks) = (entry.began.as_secs_f64(), name_ranks(&entry.ranks));
            let peer = entry.peer.map(|peer| format!(" with rank {peer}")).unwrap_or_default();
            let end = match entry.took {
                Some(took) => format!("took {:.1} ms", took.as_secs_f64() * 1e3),
                None => "unfinished".into(),
            };
            let (number, call) = (entry.number, &entry.call);
            let _ = write!(
                text,
                "\n  rank {rank}: #{number} {call}{peer}, among {ranks}, began at {began:.3} s, {end}"
            );
        }
        text
    }
}

/// What an error says before the ranks' last operations.
pub(crate) const TITLE: &str = "\nlast operations:";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::{Element, Op};

    #[test]
    fn last_operations_are_kept_and_unfinished_ones_are_told_apart() {
        let recorder = Recorder::new(Instant::now());
        assert_eq!(recorder.tell(3), "\n  rank 3: none");
        let ranks: Arc<[usize]> = Arc::new([0, 3]);
        for elements in 0..10 {
            let call = Call {
                op: Op::AllGather,
                element: Element::F32,
                elements,
                stage: 0,
                phase: "weights".into(),
            };
            let number = recorder.begin(&call, &ranks, None);
            if elements < 9 {
                recorder.end(number);
            }
        }
        let text = recorder.tell(3);
        let lines: Vec<&str> = text.lines().skip(1).collect();
        assert_eq!(lines.len(), KEPT);
        assert!(
            lines[0].starts_with("  rank 3: #3 all_gather of 2 f32 in \"weights\", among ranks 0, 3"),
            "{text}"
        );
        assert!(lines[0].contains("took"), "{text}");
        assert!(lines[7].contains("#10") && lines[7].ends_with("unfinished"), "{text}");
    }
}
