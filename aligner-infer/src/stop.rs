//! Text of a response as it grows: stop strings and pieces for a stream.

#[cfg(test)]
mod tests;
mod window;

use std::sync::Arc;

use aligner_core::{Detokenize, Sampling};

use window::Window;

/// Finds stop strings in a response, wherever token borders fall.
///
/// A token costs the decoding of a few tokens, however long the response is.
pub struct StopText {
    stream: TextStream,
}

impl StopText {
    /// A matcher for the stop strings of `sampling`.
    pub fn new(detokenizer: Arc<dyn Detokenize>, sampling: &Sampling) -> Self {
        Self { stream: TextStream::new(detokenizer, sampling) }
    }

    /// Adds the response's next token and says whether the response holds a stop string now. One that is
    /// complete before `min_tokens` is not heeded.
    pub fn push(&mut self, token: u32) -> bool {
        if !self.stream.stops.is_empty() {
            self.stream.push(token);
        }
        self.stream.stopped
    }
}

/// The text of a response in pieces, cut before the first stop string.
///
/// Holds back what could still become a stop string, and characters that are not complete yet. What it
/// gave out never changes. The pieces together are the text of all tokens, where the detokenizer gives a
/// token the same text whatever stands far before it.
pub struct TextStream {
    window: Window,
    stops: Vec<String>,
    /// Complete text that is not given out yet.
    held: String,
    /// Tokens of the response.
    tokens: usize,
    min_tokens: usize,
    stopped: bool,
}

impl TextStream {
    /// A stream that ends at the stop strings of `sampling`.
    pub fn new(detokenizer: Arc<dyn Detokenize>, sampling: &Sampling) -> Self {
        Self {
            window: Window::new(detokenizer),
            stops: sampling.stop_strings.iter().filter(|stop| !stop.is_empty()).cloned().collect(),
            held: String::new(),
            tokens: 0,
            min_tokens: sampling.min_tokens,
            stopped: false,
        }
    }

    /// Adds the response's next token and returns the text that can be shown now; empty after a stop
    /// string.
    pub fn push(&mut self, token: u32) -> String {
        if self.stopped {
            return String::new();
        }
        self.tokens += 1;
        let before = self.held.len();
        self.window.push(token, &mut self.held);
        if self.tokens >= self.min_tokens
            && let Some(at) = self.first_stop(before)
        {
            self.stopped = true;
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let rest = self.held.split_off(self.shown_len());
        std::mem::replace(&mut self.held, rest)
    }

    /// Whether a stop string has come.
    pub fn stopped(&self) -> bool {
        self.stopped
    }

    /// The text that is still held back, at the end of the response. An incomplete character comes as
    /// U+FFFD.
    pub fn finish(&mut self) -> String {
        if !self.stopped {
            self.window.finish(&mut self.held);
        }
        std::mem::take(&mut self.held)
    }

    /// Where the first stop string begins that ends beyond `before`: one that ended earlier came before
    /// `min_tokens`.
    fn first_stop(&self, before: usize) -> Option<usize> {
        let first = |stop: &String| {
            let earliest = (before + 1).saturating_sub(stop.len());
            let start = (earliest..=self.held.len()).find(|&at| self.held.is_char_boundary(at))?;
            self.held[start..].find(stop.as_str()).map(|at| start + at)
        };
        self.stops.iter().filter_map(first).min()
    }

    /// How much of the held text no stop string can begin in: all but the longest end that is the
    /// beginning of one.
    fn shown_len(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let earliest = (self.held.len() + 1).saturating_sub(longest.max(1));
        let begins = |at: usize| {
            let end = &self.held[at..];
            self.stops.iter().any(|stop| stop.len() > end.len() && stop.starts_with(end))
        };
        let mut starts = (earliest..self.held.len()).filter(|&at| self.held.is_char_boundary(at));
        starts.find(|&at| begins(at)).unwrap_or(self.held.len())
    }
}
