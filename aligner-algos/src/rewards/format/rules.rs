//! What the checks of format count and look for.

use std::sync::LazyLock;

use ::regex::Regex;

/// Compiles a pattern once.
macro_rules! pattern {
    ($pattern:expr) => {{
        static PATTERN: LazyLock<Regex> = LazyLock::new(|| Regex::new($pattern).expect("a valid pattern"));
        &*PATTERN
    }};
}

/// How often `wanted` occurs, in any case of its letters.
pub(super) fn occurrences(text: &str, wanted: &str) -> usize {
    text.to_lowercase().matches(&wanted.to_lowercase()).count()
}

/// Whether `word` occurs with no letter, digit or underscore joined to it, in any case of its letters.
pub(super) fn has_word(text: &str, word: &str) -> bool {
    let (text, word) = (text.to_lowercase(), word.to_lowercase());
    let is_word =
        |symbol: Option<char>| symbol.is_some_and(|symbol| symbol.is_alphanumeric() || symbol == '_');
    let is_edge = |at: usize| is_word(text[..at].chars().next_back()) != is_word(text[at..].chars().next());
    let mut from = 0;
    while let Some(found) = text[from..].find(&word) {
        let at = from + found;
        if is_edge(at) && is_edge(at + word.len()) {
            return true;
        }
        from = at + text[at..].chars().next().map_or(1, char::len_utf8);
    }
    false
}

/// Runs of letters, digits and underscores.
pub(super) fn words(text: &str) -> usize {
    pattern!(r"\w+").find_iter(text).count()
}

/// Paragraphs with `***` between them; none where one in the middle is empty.
pub(super) fn divided_paragraphs(text: &str) -> Option<usize> {
    let paragraphs: Vec<&str> = text.split("***").collect();
    let is_empty = |at: &usize| paragraphs[*at].trim().is_empty();
    let last = paragraphs.len() - 1;
    if (1..last).any(|at| is_empty(&at)) {
        return None;
    }
    Some((0..=last).filter(|at| !is_empty(at)).count())
}

/// Whether there are `count` paragraphs, an empty line between them, and number `nth` begins with `first_word`.
pub(super) fn paragraph_begins(text: &str, count: usize, nth: usize, first_word: &str) -> bool {
    let paragraphs: Vec<&str> = text.split("\n\n").map(str::trim).collect();
    let filled = paragraphs.iter().filter(|paragraph| !paragraph.is_empty()).count();
    let Some(word) = (nth <= filled).then(|| paragraphs[nth - 1].split_whitespace().next()).flatten() else {
        return false;
    };
    let word = word.trim_start_matches('\'').trim_start_matches('"');
    let word = word.split(['.', ',', '?', '!', '\'', '"']).next().unwrap_or(word);
    filled == count && word.to_lowercase() == first_word.to_lowercase()
}

/// Pairs of square brackets within a line.
pub(super) fn placeholders(text: &str) -> usize {
    pattern!(r"\[.*?\]").find_iter(text).count()
}

/// Whether a postscript begins with the marker.
pub(super) fn has_postscript(text: &str, marker: &str) -> bool {
    let text = text.to_lowercase();
    match marker {
        "P.P.S" => pattern!(r"p\.\s?p\.\s?s").is_match(&text),
        "P.S." => pattern!(r"p\.\s?s\.").is_match(&text),
        other => text.contains(&other.to_lowercase()),
    }
}

/// Lines that begin with `*`, but not with `**`, or with `-`.
pub(super) fn bullets(text: &str) -> usize {
    let stars = pattern!(r"(?m)^\s*\*[^*].*$").find_iter(text).count();
    stars + pattern!(r"(?m)^\s*-.*$").find_iter(text).count()
}

/// Whether the text has one of the three answers that `IFEval` offers.
pub(super) fn is_constrained(text: &str) -> bool {
    ["My answer is yes.", "My answer is no.", "My answer is maybe."]
        .iter()
        .any(|answer| text.contains(answer))
}

/// Parts within asterisks, and once more those within two.
pub(super) fn highlights(text: &str) -> usize {
    let single = pattern!(r"\*[^\n*]*\*").find_iter(text);
    let double = pattern!(r"\*\*[^\n*]*\*\*").find_iter(text);
    let filled = |part: &::regex::Match<'_>| !part.as_str().trim_matches('*').trim().is_empty();
    single.filter(filled).count() + double.filter(filled).count()
}

/// How often a section's name with a number occurs.
pub(super) fn sections(text: &str, name: &str) -> usize {
    let pattern = Regex::new(&format!(r"{}\s?\d+", ::regex::escape(name)));
    pattern.map_or(0, |pattern| pattern.find_iter(text).count())
}

/// Whether all of the text is JSON, after a fence of three backticks is taken off.
pub(super) fn is_json(text: &str) -> bool {
    let mut text = text.trim();
    for fence in ["```json", "```Json", "```JSON", "```"] {
        text = text.strip_prefix(fence).unwrap_or(text);
    }
    let text = text.strip_suffix("```").unwrap_or(text).trim();
    serde_json::from_str::<serde_json::Value>(text).is_ok()
}

/// Whether a line has something within double angle brackets.
pub(super) fn has_title(text: &str) -> bool {
    let mut titles = pattern!(r"<<[^\n]+>>").find_iter(text);
    titles.any(|title| !title.as_str().trim_start_matches('<').trim_end_matches('>').trim().is_empty())
}

/// Whether there are two answers that differ, with `******` between them.
pub(super) fn are_two(text: &str) -> bool {
    let parts: Vec<&str> = text.split("******").map(str::trim).collect();
    let middle = parts.get(1..parts.len() - 1).unwrap_or_default();
    let filled: Vec<&&str> = parts.iter().filter(|part| !part.is_empty()).collect();
    middle.iter().all(|part| !part.is_empty()) && filled.len() == 2 && filled[0] != filled[1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_told_from_a_part_of_one() {
        assert!(has_word("The Cat, sat", "cat") && has_word("cat", "CAT") && has_word("über-Ölig", "ölig"));
        assert!(!has_word("concatenate", "cat") && !has_word("cat_1", "cat") && !has_word("", "cat"));
        assert!(has_word("catcat cat", "cat"), "the second occurrence that stands alone");
    }

    #[test]
    fn paragraphs_are_counted_between_dividers() {
        assert_eq!(divided_paragraphs("a *** b\n***\nc"), Some(3));
        assert_eq!(divided_paragraphs("***\na *** b ***"), Some(2));
        assert_eq!(divided_paragraphs("a ****** b"), None);
        assert_eq!(divided_paragraphs(""), Some(0));
    }

    #[test]
    fn sections_need_a_number() {
        assert_eq!(sections("Section 1\na\nSection 2: b, Section X", "Section"), 2);
        assert_eq!(sections("PART. 1", "PART."), 1);
        assert_eq!(sections("PARTS 1", "PART."), 0);
    }
}
