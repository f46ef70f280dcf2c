//! The sentences of an English text: Punkt, as NLTK applies it.
//!
//! Kiss and Strunk 2006, "Unsupervised Multilingual Sentence Boundary Detection". The rules follow NLTK 3.10's
//! `PunktSentenceTokenizer`, which is what `IFEval` counts with; the parameters are NLTK's for English.

use std::collections::{HashMap, HashSet};
use std::sync::LazyLock;

use ::regex::Regex;

static ENGLISH: LazyLock<Parameters> = LazyLock::new(|| Parameters::read(include_str!("punkt/english.txt")));

static NUMBER: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"^-?[.,]?\d[\d,.-]*\.?$").expect("a valid pattern"));

/// What a corpus says of its words.
struct Parameters {
    abbreviations: HashSet<&'static str>,
    /// Words that often begin sentences.
    starters: HashSet<&'static str>,
    /// Pairs around a full stop that no sentence ends between.
    collocations: HashSet<(&'static str, &'static str)>,
    /// How the words occur that occur with a small letter at all.
    cases: HashMap<&'static str, Case>,
}

/// Where a word that also occurs with a small letter occurs with either.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Case {
    /// With a capital within sentences, too.
    CapitalAnywhere,
    /// With a capital at the beginning of sentences at most.
    CapitalFirst,
    /// With a small letter at the beginning of sentences, and never with a capital.
    SmallFirst,
}

impl Parameters {
    fn read(text: &'static str) -> Self {
        let words = |section: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(section)?.strip_prefix(' '));
            line.unwrap_or_default().split(' ')
        };
        let cases = [
            ("capital_anywhere", Case::CapitalAnywhere),
            ("capital_first", Case::CapitalFirst),
            ("small_first", Case::SmallFirst),
        ];
        Self {
            abbreviations: words("abbreviations").collect(),
            starters: words("starters").collect(),
            collocations: words("collocations").filter_map(|pair| pair.split_once(',')).collect(),
            cases: cases
                .into_iter()
                .flat_map(|(section, case)| words(section).map(move |word| (word, case)))
                .collect(),
        }
    }
}

/// The sentences of a text, in order; the space between them is left out.
pub(super) fn sentences(text: &str) -> Vec<String> {
    let text: Vec<char> = text.chars().collect();
    let spans = spans(&text);
    let mut found = Vec::new();
    // How much of a sentence belongs to the one before.
    let mut taken = 0;
    for (at, &(start, end)) in spans.iter().enumerate() {
        let start = start + taken;
        let next = spans.get(at + 1).map_or(&text[..0], |&(start, end)| &text[start..end.max(start)]);
        taken = closing_len(next);
        let end = if taken > 0 { spans[at + 1].0 + taken } else { end };
        if start < end || taken > 0 {
            let span: String = text[start.min(end)..end].iter().collect();
            found.push(span.trim_end_matches(is_space).to_owned());
        }
    }
    found
}

/// Where sentences begin and end, before closing quotes and brackets are given back to the sentence before.
fn spans(text: &[char]) -> Vec<(usize, usize)> {
    let (mut spans, mut start) = (Vec::new(), 0);
    for candidate in candidates(text) {
        if contains_break(&text[candidate.word..candidate.context_end]) {
            spans.push((start, candidate.end));
            start = candidate.next;
        }
    }
    let trailing = text.iter().rev().take_while(|symbol| is_space(**symbol)).count();
    spans.push((start, text.len() - trailing));
    spans
}

/// A place where a sentence may end.
struct Candidate {
    /// Where the word before it begins.
    word: usize,
    /// Past the mark that may end the sentence.
    end: usize,
    /// Past what follows the mark: a punctuation mark, or space and the next word.
    context_end: usize,
    /// Where the next sentence would begin.
    next: usize,
}

/// The marks that may end a sentence, the last of each run.
fn candidates(text: &[char]) -> Vec<Candidate> {
    let mut found: Vec<Candidate> = Vec::new();
    let mut before = 0..0;
    for at in 0..text.len() {
        let Some((context_end, next)) = context(text, at) else { continue };
        let gap = &text[before.end..at];
        let space = gap.iter().rposition(|symbol| " \t\n\r\u{b}\u{c}".contains(*symbol));
        // A space at the very beginning is not told from no space, there as here.
        let word = space.filter(|&space| space > 0).map_or(before.start, |space| before.end + space + 1);
        if !found.is_empty() && before.end > word {
            found.pop();
        }
        found.push(Candidate { word, end: at + 1, context_end, next });
        before = word..at;
    }
    found
}

/// Where the context of a mark ends and the next word begins; none where no sentence can end.
fn context(text: &[char], at: usize) -> Option<(usize, usize)> {
    if !".?!".contains(text[at]) {
        return None;
    }
    let follower = *text.get(at + 1)?;
    if is_no_part_of_words(follower) {
        return Some((at + 2, at + 1));
    }
    let run = |from: usize, space: bool| {
        from + text[from..].iter().take_while(|symbol| is_space(**symbol) == space).count()
    };
    let next = run(at + 1, true);
    (next > at + 1 && next < text.len()).then(|| (run(next, false), next))
}

/// Whether a sentence ends before the last token of a context.
fn contains_break(context: &[char]) -> bool {
    let mut tokens: Vec<Token> =
        context.split(|&symbol| symbol == '\n').flat_map(tokenize).map(Token::new).collect();
    for at in 1..tokens.len() {
        let (before, after) = tokens.split_at_mut(at);
        if let (Some(token), Some(next)) = (before.last_mut(), after.first()) {
            token.reconsider(next);
            if token.ends_sentence {
                return true;
            }
        }
    }
    false
}

/// A word or mark, with what is known of it.
struct Token {
    text: String,
    /// Lower case; all numbers are one type.
    kind: String,
    ends_sentence: bool,
    is_abbreviation: bool,
    is_ellipsis: bool,
}

impl Token {
    /// A token, classified by its type alone.
    fn new(text: String) -> Self {
        let lower = text.to_lowercase();
        let is_ellipsis = text.len() > 1 && text.chars().all(|symbol| symbol == '.');
        let (mut ends_sentence, mut is_abbreviation) = ([".", "?", "!"].contains(&text.as_str()), false);
        if let Some(word) = lower.strip_suffix('.').filter(|word| !word.is_empty() && !word.ends_with('.')) {
            let last_part = word.rsplit('-').next().unwrap_or(word);
            let known = |word| ENGLISH.abbreviations.contains(word);
            // The spaced ellipsis is among NLTK's abbreviations.
            is_abbreviation = known(word) || known(last_part) || word == ". . ";
            ends_sentence = !is_abbreviation;
        }
        let kind = if NUMBER.is_match(&lower) { "##number##".into() } else { lower };
        Self { text, kind, ends_sentence, is_abbreviation, is_ellipsis }
    }

    fn without_period(&self) -> &str {
        self.kind.strip_suffix('.').filter(|kind| !kind.is_empty()).unwrap_or(&self.kind)
    }

    fn without_sentence_period(&self) -> &str {
        if self.ends_sentence { self.without_period() } else { &self.kind }
    }

    fn is_capitalised(&self) -> bool {
        self.text.chars().next().is_some_and(char::is_uppercase)
    }

    fn is_initial(&self) -> bool {
        let mut symbols = self.text.chars();
        symbols.next().is_some_and(|symbol| symbol.is_alphabetic() || symbol == '_')
            && symbols.next() == Some('.')
            && symbols.next().is_none()
    }

    /// Whether it looks like a sentence's first word; none where that cannot be said.
    fn looks_first(&self) -> Option<bool> {
        if [";", ":", ",", ".", "!", "?"].contains(&self.text.as_str()) {
            return Some(false);
        }
        let case = ENGLISH.cases.get(self.without_sentence_period());
        if self.is_capitalised() {
            return case.is_some_and(|case| *case != Case::CapitalAnywhere).then_some(true);
        }
        let is_small = self.text.chars().next().is_some_and(char::is_lowercase);
        (is_small && case != Some(&Case::SmallFirst)).then_some(false)
    }

    /// Looks again, now at the next token too.
    fn reconsider(&mut self, next: &Self) {
        if !self.text.ends_with('.') {
            return;
        }
        let (kind, next_kind) = (self.without_period(), next.without_sentence_period());
        if ENGLISH.collocations.contains(&(kind, next_kind)) {
            self.ends_sentence = false;
            return;
        }
        let (is_initial, is_number) = (self.is_initial(), kind == "##number##");
        if (self.is_abbreviation || self.is_ellipsis) && !is_initial {
            let starts = next.is_capitalised() && ENGLISH.starters.contains(next_kind);
            if next.looks_first() == Some(true) || starts {
                self.ends_sentence = true;
                return;
            }
        }
        if is_initial || is_number {
            let always_capital = next.is_capitalised() && !ENGLISH.cases.contains_key(next_kind);
            match next.looks_first() {
                Some(false) => self.ends_sentence = false,
                None if is_initial && always_capital => self.ends_sentence = false,
                _ => {}
            }
        }
    }
}

/// Words and marks of a line; full stops stay with their words.
fn tokenize(line: &[char]) -> Vec<String> {
    let (mut tokens, mut at) = (Vec::new(), 0);
    while at < line.len() {
        if is_space(line[at]) {
            at += 1;
            continue;
        }
        let len = match run_len(&line[at..]) {
            0 if "(\"`{[:;&#*@)}]-,".contains(line[at]) => 1,
            0 => (1..line.len() - at).find(|len| is_word_end(&line[at + len..])).unwrap_or(line.len() - at),
            len => len,
        };
        tokens.push(line[at..at + len].iter().collect());
        at += len;
    }
    tokens
}

/// The length of the dashes or dots, spaced or not, that `rest` begins with; 0 for fewer than two.
fn run_len(rest: &[char]) -> usize {
    let same = |symbol| rest.iter().take_while(|other| **other == symbol).count();
    let len = same('-').max(same('.'));
    if len > 1 {
        return len;
    }
    let spaced = rest.chunks_exact(2).take_while(|pair| pair[0] == '.' && is_space(pair[1])).count();
    // The last dot needs no space behind it.
    let dots = (2..=spaced).rev().find(|dots| rest.get(2 * dots) == Some(&'.'));
    dots.map_or(0, |dots| 2 * dots + 1)
}

/// Whether a word may end where `rest` begins.
fn is_word_end(rest: &[char]) -> bool {
    let ends = |rest: &[char]| {
        rest.first().is_none_or(|&symbol| is_space(symbol) || is_no_part_of_words(symbol))
            || run_len(rest) > 0
    };
    ends(rest) || (rest.first() == Some(&',') && ends(&rest[1..]))
}

fn is_no_part_of_words(symbol: char) -> bool {
    ")\";}]*:@'({[‘’“”«»?!".contains(symbol)
}

fn is_space(symbol: char) -> bool {
    symbol.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&symbol)
}

/// The length of the closing quotes and brackets that a sentence begins with, and of the space behind them, where they
/// belong to the sentence before.
fn closing_len(sentence: &[char]) -> usize {
    let closing = sentence.iter().take_while(|symbol| "\"')]}‘’“”«»".contains(**symbol)).count();
    let space = sentence[closing..].iter().take_while(|symbol| is_space(**symbol)).count();
    let rest = &sentence[closing..];
    let ends = rest.is_empty() || space > 0 || rest.starts_with(&['-', '-']);
    if closing > 0 && ends { closing + space } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_end_sentences_and_abbreviations_do_not() {
        let cases = [
            ("", 0),
            ("  \n", 0),
            ("one", 1),
            ("One. Two.", 2),
            ("One.Two", 1),
            ("Dr. Smith went home. He was tired.", 2),
            ("(Hi there.) Bye.", 2),
            ("He said \"Stop!\" and left. So did I.", 3),
            ("It cost 3.50 dollars... Then 4.", 1),
            ("It was $5. The end", 2),
            ("J. S. Bach wrote it.", 1),
            ("He lives in the U.S. The food is good.", 2),
            ("Wow!!! Really?! Yes.", 3),
            ("A line\nanother line\n\na third", 1),
        ];
        for (text, expected) in cases {
            assert_eq!(sentences(text).len(), expected, "{text}");
        }
    }

    #[test]
    fn closing_quotes_stay_with_their_sentence() {
        let text = "He said \"Stop!\" and  left.) So did I. ";
        assert_eq!(sentences(text), ["He said \"Stop!\"", "and  left.)", "So did I."]);
    }

    #[test]
    fn the_whole_file_is_read() {
        assert_eq!(ENGLISH.abbreviations.len(), 155);
        assert_eq!((ENGLISH.starters.len(), ENGLISH.collocations.len()), (39, 37));
        assert_eq!(ENGLISH.cases.len(), 2354 + 12344 + 4);
    }
}
