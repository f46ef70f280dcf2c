//! Where in a response its answer stands.

use std::sync::LazyLock;

use ::regex::Regex;
use aligner_core::{Error, Result};
use serde::{Deserialize, Serialize};

/// Where an answer stands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Extract {
    /// The whole response.
    #[default]
    Whole,
    /// The last line that is not blank.
    LastLine,
    /// The last number.
    LastNumber,
    /// The rest of the line after the last marker.
    Marker,
    /// What the last pair of tags holds.
    Tag,
    /// What the last `\boxed{…}` holds.
    Boxed,
    /// The tags' content; where there is none, the box's; where there is none, what follows the marker.
    Auto,
}

/// Finds answers.
#[derive(Debug, Clone)]
pub(super) struct Extractor {
    place: Extract,
    marker: String,
    opening: String,
    closing: String,
}

impl Extractor {
    /// An extractor with a marker and the name of a tag, for the places that ask for them.
    ///
    /// # Errors
    /// [`Error::Setting`] for an empty marker or tag, where it is needed.
    pub(super) fn new(place: Extract, marker: &str, tag: &str) -> Result<Self> {
        let needed = |at| place == at || place == Extract::Auto;
        for (key, value, place) in [("marker", marker, Extract::Marker), ("tag", tag, Extract::Tag)] {
            if needed(place) && value.is_empty() {
                return Err(Error::setting(key, "must not be empty"));
            }
        }
        Ok(Self { place, marker: marker.into(), opening: format!("<{tag}>"), closing: format!("</{tag}>") })
    }

    /// The answer, without white space around it; none where its place is absent.
    pub(super) fn find<'t>(&self, text: &'t str) -> Option<&'t str> {
        let found = match self.place {
            Extract::Whole => Some(text),
            Extract::LastLine => last_line(text),
            Extract::LastNumber => last_number(text),
            Extract::Marker => after(text, &self.marker),
            Extract::Tag => self.tagged(text),
            Extract::Boxed => boxed(text),
            Extract::Auto => self.tagged(text).or_else(|| boxed(text)).or_else(|| after(text, &self.marker)),
        };
        found.map(str::trim)
    }

    /// Where the place is automatic, what to take where nothing marks an answer.
    pub(super) fn find_or<'t>(
        &self,
        text: &'t str,
        otherwise: impl FnOnce(&'t str) -> Option<&'t str>,
    ) -> Option<&'t str> {
        match self.find(text) {
            None if self.place == Extract::Auto => otherwise(text).map(str::trim),
            found => found,
        }
    }

    fn tagged<'t>(&self, text: &'t str) -> Option<&'t str> {
        let (before, _) = text.rsplit_once(&self.closing)?;
        before.rsplit_once(&self.opening).map(|(_, content)| content)
    }
}

/// The rest of the line after the last `marker`.
pub(super) fn after<'t>(text: &'t str, marker: &str) -> Option<&'t str> {
    let (_, rest) = text.rsplit_once(marker)?;
    rest.lines().next().or(Some(""))
}

/// The last line that is not blank.
pub(super) fn last_line(text: &str) -> Option<&str> {
    text.lines().rfind(|line| !line.trim().is_empty())
}

/// What the last `\boxed{…}` holds, braces within it balanced.
fn boxed(text: &str) -> Option<&str> {
    let (_, rest) = text.rsplit_once("\\boxed{")?;
    let mut depth = 1_usize;
    for (at, symbol) in rest.char_indices() {
        match symbol {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(&rest[..at]);
        }
    }
    None
}

static DIGITS: LazyLock<Regex> = LazyLock::new(|| {
    let pattern = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|\.[0-9]+";
    Regex::new(pattern).expect("a valid pattern")
});

/// The last number, with its sign, and with its numerator where it is a fraction's denominator.
pub(super) fn last_number(text: &str) -> Option<&str> {
    let (mut before, mut last) = (None, DIGITS.find(text)?);
    for next in DIGITS.find_iter(text).skip(1) {
        before = Some(last);
        last = next;
    }
    let start = match before {
        Some(numerator) if &text[numerator.end()..last.start()] == "/" => numerator.start(),
        _ => last.start(),
    };
    Some(&text[start - sign_len(&text[..start])..last.end()])
}

/// Bytes of the sign that `before` ends in; a minus after a letter, a digit or a bracket subtracts.
fn sign_len(before: &str) -> usize {
    let mut symbols = before.chars().rev();
    let Some(sign) = symbols.next().filter(|symbol| "-+−".contains(*symbol)) else { return 0 };
    match symbols.next() {
        Some(other) if other.is_alphanumeric() || ")]}".contains(other) => 0,
        _ => sign.len_utf8(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(place: Extract, text: &str) -> Option<&str> {
        Extractor::new(place, "####", "answer").expect("settings").find(text)
    }

    #[test]
    fn each_place_is_found() {
        let text =
            "<answer>1</answer> so\n#### 2 \\boxed{\\frac{3}{4}}\n<answer> 5\n6 </answer>\n\nthen 7, I say\n";
        assert_eq!(find(Extract::Whole, " a b\n"), Some("a b"));
        assert_eq!(find(Extract::LastLine, text), Some("then 7, I say"));
        assert_eq!(find(Extract::LastNumber, text), Some("7"));
        assert_eq!(find(Extract::Marker, text), Some("2 \\boxed{\\frac{3}{4}}"));
        assert_eq!(find(Extract::Tag, text), Some("5\n6"));
        assert_eq!(find(Extract::Boxed, text), Some("\\frac{3}{4}"));
        assert_eq!(find(Extract::Auto, text), Some("5\n6"));
        assert_eq!(find(Extract::Auto, "\\boxed{1} #### 2"), Some("1"));
        assert_eq!(find(Extract::Auto, "#### 2"), Some("2"));
    }

    #[test]
    fn an_absent_place_has_no_answer() {
        for place in [Extract::Marker, Extract::Tag, Extract::Boxed, Extract::Auto, Extract::LastNumber] {
            assert_eq!(find(place, "none at all <answer> \\boxed{ {} "), None, "{place:?}");
        }
        assert_eq!(find(Extract::LastLine, " \n\n"), None);
        assert_eq!(find(Extract::Marker, "####"), Some(""));
        assert_eq!(find(Extract::Tag, "</answer><answer>"), None);
    }

    #[test]
    fn signs_separators_and_fractions_belong_to_numbers() {
        let cases = [
            ("it is -5.", "-5"),
            ("it is −5", "−5"),
            ("10-4", "4"),
            ("(2)-4", "4"),
            ("x = +.5", "+.5"),
            ("$1,234,567.89 in all", "1,234,567.89"),
            ("1,2", "2"),
            ("about 3/4 of it", "3/4"),
            ("-3/4", "-3/4"),
            ("1.5e-3 s", "1.5e-3"),
            ("2 / 3", "3"),
        ];
        for (text, number) in cases {
            assert_eq!(last_number(text), Some(number), "{text}");
        }
        assert_eq!(last_number("none"), None);
    }

    #[test]
    fn markers_and_tags_have_names() {
        assert!(
            Extractor::new(Extract::Marker, "", "a")
                .expect_err("no marker")
                .to_string()
                .starts_with("marker: ")
        );
        assert!(Extractor::new(Extract::Auto, "a", "").expect_err("no tag").to_string().starts_with("tag: "));
        assert!(Extractor::new(Extract::Whole, "", "").is_ok());
    }
}
