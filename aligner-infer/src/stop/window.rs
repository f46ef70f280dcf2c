//! Decoding token by token.

use std::sync::Arc;

use aligner_core::Detokenize;

/// What a decoder writes for bytes that are no character, or none yet.
const REPLACEMENT: char = '\u{FFFD}';

/// Pending tokens at which the oldest are settled although the text does not end in a whole character.
const MOST_PENDING: usize = 64;

/// A character has four bytes at most and a token at least one, so older tokens do not change any more.
const SETTLED_AFTER: usize = 4;

/// The last tokens of a response. They are decoded together with the ones before, because a decoder may
/// treat a text's first token in a way of its own (it drops its space, for instance).
pub(super) struct Window {
    detokenizer: Arc<dyn Detokenize>,
    tokens: Vec<u32>,
    /// Tokens before this one are context: their text is complete and given out.
    pending: usize,
    /// What was given out of the window's text.
    shown: String,
}

impl Window {
    pub(super) fn new(detokenizer: Arc<dyn Detokenize>) -> Self {
        Self { detokenizer, tokens: Vec::new(), pending: 0, shown: String::new() }
    }

    /// Adds a token and appends the text that is sure by now: all but U+FFFD at the end, which may stand
    /// for an incomplete character.
    pub(super) fn push(&mut self, token: u32, out: &mut String) {
        self.tokens.push(token);
        let text = self.detokenizer.text(&self.tokens);
        let sure = text.trim_end_matches(REPLACEMENT);
        let fresh = unseen(&self.shown, sure);
        out.push_str(fresh);
        if sure.len() == text.len() && !fresh.is_empty() {
            let kept = self.detokenizer.text(&self.tokens[self.pending..]);
            self.advance(self.tokens.len(), kept);
        } else {
            if !fresh.is_empty() {
                sure.clone_into(&mut self.shown);
            }
            if self.tokens.len() - self.pending >= MOST_PENDING {
                self.settle(&text, out);
            }
        }
    }

    /// Appends what was not sure.
    pub(super) fn finish(&mut self, out: &mut String) {
        let text = self.detokenizer.text(&self.tokens);
        out.push_str(unseen(&self.shown, &text));
        self.shown = text;
    }

    /// Makes tokens before `end` context and drops the context before them; `kept` is their text alone.
    fn advance(&mut self, end: usize, kept: String) {
        self.tokens.drain(..self.pending);
        (self.pending, self.shown) = (end - self.pending, kept);
    }

    /// Gives out the oldest pending tokens, cut where both parts have the same text alone as together:
    /// no character crosses such a border. `text` is the window's.
    fn settle(&mut self, text: &str, out: &mut String) {
        let last = self.tokens.len() - SETTLED_AFTER;
        let parts = |end: usize| (self.detokenizer.text(&self.tokens[..end]), end);
        let clean = |(head, end): &(String, usize)| {
            text.strip_prefix(head.as_str())
                .is_some_and(|tail| tail == self.detokenizer.text(&self.tokens[*end..]))
        };
        let border = (self.pending + 1..=last).rev().map(parts).find(clean);
        let (head, end) = border.unwrap_or_else(|| (text.to_owned(), self.tokens.len()));
        let fresh = unseen(&self.shown, &head);
        let mut kept = self.detokenizer.text(&self.tokens[self.pending..end]);
        if fresh.is_empty() && kept.is_empty() {
            // Tokens without a text are no context.
            self.tokens.drain(self.pending..end);
            return;
        }
        out.push_str(fresh);
        // Text beyond the border may be out already.
        kept.push_str(self.shown.strip_prefix(head.as_str()).unwrap_or(""));
        self.advance(end, kept);
    }
}

/// What `text` has beyond `shown`. Where it does not begin with that, because a decoder changed its mind
/// about bytes that are no characters, as many characters count as shown.
fn unseen<'a>(shown: &str, text: &'a str) -> &'a str {
    text.strip_prefix(shown).unwrap_or_else(|| {
        let start = text.char_indices().nth(shown.chars().count()).map_or(text.len(), |(at, _)| at);
        &text[start..]
    })
}
