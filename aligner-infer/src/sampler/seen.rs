//! Which tokens a request holds, for the penalties.

use std::collections::HashMap;

use aligner_core::Sampling;

/// The tokens of a prompt and of its response so far, counted as they come.
///
/// Counts are kept only for settings that have a penalty; the response's length always is.
#[derive(Debug, Clone, Default)]
pub struct Seen {
    /// A list beside the map, so that applying penalties is a walk over memory in order.
    entries: Vec<Entry>,
    places: HashMap<u32, usize>,
    counts: bool,
    len: usize,
}

/// One token and where it was seen.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub(super) token: u32,
    pub(super) in_prompt: bool,
    /// Times that the response holds it.
    pub(super) count: u32,
}

impl Seen {
    /// What a response to `prompt` starts with.
    pub fn new(prompt: &[u32], sampling: &Sampling) -> Self {
        let penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty);
        let counts = penalties != (1.0, 0.0, 0.0);
        let mut seen = Self { counts, ..Self::default() };
        if counts {
            for &token in prompt {
                seen.entry(token).in_prompt = true;
            }
        }
        seen
    }

    /// The response has one more token.
    pub fn push(&mut self, token: u32) {
        self.len += 1;
        if self.counts {
            self.entry(token).count += 1;
        }
    }

    /// Takes the last push back, as when a proposed token is refused; `token` is that push's.
    pub fn pop(&mut self, token: u32) {
        self.len = self.len.saturating_sub(1);
        if self.counts {
            let entry = self.entry(token);
            entry.count = entry.count.saturating_sub(1);
        }
    }

    /// Tokens of the response: the index of the next one, which is its draw's counter.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the response has no token yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The tokens that penalties concern, each once.
    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    fn entry(&mut self, token: u32) -> &mut Entry {
        let place = *self.places.entry(token).or_insert(self.entries.len());
        if place == self.entries.len() {
            self.entries.push(Entry { token, in_prompt: false, count: 0 });
        }
        &mut self.entries[place]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_follow_pushes_and_pops() {
        let sampling = Sampling { frequency_penalty: 1.0, ..Sampling::default() };
        let mut seen = Seen::new(&[5, 6, 5], &sampling);
        for token in [6, 7, 7] {
            seen.push(token);
        }
        seen.pop(7);
        let entries: Vec<_> = seen.entries().iter().map(|e| (e.token, e.in_prompt, e.count)).collect();
        assert_eq!(entries, [(5, true, 0), (6, true, 1), (7, false, 1)]);
        assert_eq!(seen.len(), 2);
    }

    #[test]
    fn without_a_penalty_only_the_length_is_kept() {
        let mut seen = Seen::new(&[1, 2, 3], &Sampling::default());
        seen.push(4);
        assert!(seen.entries().is_empty() && seen.len() == 1 && !seen.is_empty());
    }
}
