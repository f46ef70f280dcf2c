//! Everything that is wrong with a run file, reported at once.

use std::fmt::{self, Display, Write as _};
use std::path::{Path, PathBuf};

use super::tree::Origin;

/// One mistake and where it was made; no place where something is absent.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Problem {
    pub(crate) origin: Option<Origin>,
    pub(crate) message: String,
}

/// All mistakes of one run file.
#[derive(Debug, Clone)]
pub(crate) struct Problems {
    path: PathBuf,
    source: String,
    found: Vec<Problem>,
}

impl Problems {
    /// None yet, in the file `path` with the text `source`.
    pub(crate) fn new(path: &Path, source: &str) -> Self {
        Self { path: path.to_path_buf(), source: source.to_string(), found: Vec::new() }
    }

    /// Adds one; the same mistake twice is one.
    pub(crate) fn push(&mut self, origin: Option<Origin>, message: impl Into<String>) {
        let problem = Problem { origin, message: message.into() };
        if !self.found.contains(&problem) {
            self.found.push(problem);
        }
    }

    /// All of them as an error, where there is any.
    pub(crate) fn into_result(mut self) -> anyhow::Result<()> {
        if self.found.is_empty() {
            return Ok(());
        }
        // In the order of the file; absences and overrides come last.
        self.found.sort_by_key(|problem| match &problem.origin {
            Some(Origin::File(span)) => (0, span.start),
            None => (1, 0),
            Some(Origin::Override(_)) => (2, 0),
        });
        Err(crate::Usage(self.to_string()).into())
    }

    fn render(&self, problem: &Problem) -> String {
        let path = self.path.display();
        match &problem.origin {
            None => format!("{path}: {}", problem.message),
            Some(Origin::Override(text)) => format!("--set {text}: {}", problem.message),
            Some(Origin::File(span)) => {
                let (line, column) = position(&self.source, span.start);
                let text = self.source.lines().nth(line - 1).unwrap_or_default();
                let width = self
                    .source
                    .get(span.clone())
                    .map_or(1, |s| s.lines().next().unwrap_or("").chars().count());
                let gutter = line.to_string();
                let mut out = format!("{path}:{line}:{column}: {}", problem.message);
                let _ = write!(
                    out,
                    "\n  {gutter} | {text}\n  {blank} | {space}{marks}",
                    blank = " ".repeat(gutter.len()),
                    space = " ".repeat(column - 1),
                    marks = "^".repeat(width.max(1)),
                );
                out
            }
        }
    }
}

impl Display for Problems {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.found.len();
        let noun = if count == 1 { "problem" } else { "problems" };
        write!(out, "{}: {count} {noun}", self.path.display())?;
        for problem in &self.found {
            write!(out, "\n{}", self.render(problem))?;
        }
        Ok(())
    }
}

/// Line and column, from 1, of a byte of `source`; columns count characters.
fn position(source: &str, byte: usize) -> (usize, usize) {
    let before = source.get(..byte.min(source.len())).unwrap_or(source);
    let line_start = before.rfind('\n').map_or(0, |at| at + 1);
    (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
}

/// The candidate that `word` most likely stands for, if one is near.
pub(crate) fn nearest<'a>(word: &str, candidates: &[&'a str]) -> Option<&'a str> {
    let distance = |candidate: &&str| strsim::damerau_levenshtein(&word.to_lowercase(), candidate);
    let best = candidates.iter().copied().min_by_key(distance)?;
    let near = distance(&best) <= 1 + word.chars().count().max(best.chars().count()) / 3;
    let part = word.len() > 2 && (best.contains(word) || word.contains(best));
    (near || part).then_some(best)
}

/// "unknown `word`", with the nearest candidate or, where none is near, all of them.
pub(crate) fn unknown(noun: &str, word: &str, place: &str, candidates: &[&str]) -> String {
    let advice = match nearest(word, candidates) {
        Some(near) => format!("did you mean `{near}`?"),
        None if candidates.is_empty() => "none is taken here".to_string(),
        None => format!("expected one of {}", quoted(candidates)),
    };
    format!("unknown {noun} `{word}`{place}; {advice}")
}

/// `a`, `b`, `c`.
pub(crate) fn quoted(words: &[&str]) -> String {
    words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_count_characters_from_one() {
        assert_eq!(position("a\nbé = x", 0), (1, 1));
        assert_eq!(position("a\nbé = x", "a\nbé = ".len()), (2, 6));
    }

    #[test]
    fn the_nearest_key_is_near() {
        let keys = ["learning_rate", "weight_decay"];
        assert_eq!(nearest("learning_rte", &keys), Some("learning_rate"));
        assert_eq!(nearest("decay", &keys), Some("weight_decay"));
        assert_eq!(nearest("zzz", &keys), None);
    }
}
