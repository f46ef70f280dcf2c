//! `{% generation %}` marks: rewritten before a template is compiled, found again in its output.
//!
//! Hugging Face templates put what the model itself writes between `{% generation %}` and
//! `{% endgeneration %}`. The template engine has no tags of ours, so the pair is rewritten into a
//! filter block, which obeys the same whitespace control, and the filter puts a marker character on
//! either side of the block's text. The markers are characters that occur nowhere in the template's
//! input, so text cannot forge them, and they are cut out of the output while their places are kept.

use std::ops::Range;

use serde_json::Value;

/// Name of the filter that the marks become.
pub(super) const FILTER: &str = "__generation";

/// The characters that stand for a mark's begin and end in rendered text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Markers {
    open: char,
    close: char,
}

impl Markers {
    /// What is used unless the input contains it: the last characters of a private-use plane.
    pub(super) const USUAL: Self = Self { open: '\u{FFFFC}', close: '\u{FFFFD}' };

    /// Private-use characters that occur in no string of `input`.
    pub(super) fn unused_in(input: &[&Value]) -> Option<Self> {
        if !input.iter().any(|value| Self::USUAL.occurs_in(value)) {
            return Some(Self::USUAL);
        }
        let mut free = ('\u{F0000}'..'\u{FFFFC}').filter(|&c| !input.iter().any(|value| occurs(c, value)));
        Some(Self { open: free.next()?, close: free.next()? })
    }

    fn occurs_in(self, value: &Value) -> bool {
        occurs(self.open, value) || occurs(self.close, value)
    }

    /// `text` between the markers.
    pub(super) fn wrap(self, text: &str) -> String {
        format!("{}{text}{}", self.open, self.close)
    }

    /// Cuts the markers out of `rendered` and says, in bytes, where the marked spans were.
    ///
    /// `None` if they do not pair up: the template took the marked text apart.
    pub(super) fn cut(self, rendered: &str) -> Option<(String, Vec<Range<usize>>)> {
        let mut text = String::with_capacity(rendered.len());
        let mut spans = Vec::new();
        let mut opened = Vec::new();
        for c in rendered.chars() {
            if c == self.open {
                opened.push(text.len());
            } else if c == self.close {
                let start = opened.pop()?;
                // A mark inside a mark adds nothing to it.
                if opened.is_empty() {
                    spans.push(start..text.len());
                }
            } else {
                text.push(c);
            }
        }
        opened.is_empty().then_some((text, spans))
    }
}

fn occurs(c: char, value: &Value) -> bool {
    match value {
        Value::String(text) => text.contains(c),
        Value::Array(items) => items.iter().any(|item| occurs(c, item)),
        Value::Object(object) => object.iter().any(|(key, value)| key.contains(c) || occurs(c, value)),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

/// The template with its marks as filter blocks, and whether it has any.
///
/// Comments, strings and raw blocks are left as they are.
pub(super) fn rewrite(source: &str) -> (String, bool) {
    // Jinja reads every line end as a line feed.
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut out = String::with_capacity(source.len() + 64);
    let mut marked = false;
    let mut rest = source.as_str();
    while let Some((before, tag, after)) = next_tag(rest) {
        out.push_str(before);
        rest = after;
        match statement(tag) {
            Some((lead, "generation", trail)) => {
                marked = true;
                out.extend(["{%", lead, " filter ", FILTER, " ", trail, "%}"]);
            }
            Some((lead, "endgeneration", trail)) => out.extend(["{%", lead, " endfilter ", trail, "%}"]),
            Some((_, "raw", _)) => {
                let end = raw_end(after);
                out.push_str(tag);
                out.push_str(&after[..end]);
                rest = &after[end..];
            }
            _ => out.push_str(tag),
        }
    }
    out.push_str(rest);
    (out, marked)
}

/// Splits at the next whole tag: the text before it, the tag, the text after it.
fn next_tag(source: &str) -> Option<(&str, &str, &str)> {
    let mut from = 0;
    loop {
        let start = from + source[from..].find('{')?;
        let inner = &source[start + 1..];
        let len = match inner.as_bytes().first() {
            Some(b'#') => inner.find("#}").map(|at| at + 3),
            Some(b'%') => unquoted(&inner[1..], "%}").map(|at| at + 4),
            Some(b'{') => unquoted(&inner[1..], "}}").map(|at| at + 4),
            _ => {
                from = start + 1;
                continue;
            }
        };
        // A tag that never ends is the compiler's to report.
        let end = start + len?;
        return Some((&source[..start], &source[start..end], &source[end..]));
    }
}

/// Where `needle` first stands outside a string literal.
fn unquoted(text: &str, needle: &str) -> Option<usize> {
    let mut quote = None;
    let mut escaped = false;
    for (at, c) in text.char_indices() {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if c == '\\' => escaped = true,
            Some(open) if c == open => quote = None,
            None if text[at..].starts_with(needle) => return Some(at),
            None if c == '\'' || c == '"' => quote = Some(c),
            Some(_) | None => {}
        }
    }
    None
}

/// A statement tag as whitespace control, content, whitespace control.
fn statement(tag: &str) -> Option<(&str, &str, &str)> {
    let inner = tag.strip_prefix("{%")?.strip_suffix("%}")?;
    let is_control = |c: char| c == '-' || c == '+';
    let lead = if inner.starts_with(is_control) { &inner[..1] } else { "" };
    let inner = &inner[lead.len()..];
    let trail = if inner.ends_with(is_control) { &inner[inner.len() - 1..] } else { "" };
    Some((lead, inner[..inner.len() - trail.len()].trim(), trail))
}

/// Where the raw block that begins before `source` ends: just before its closing tag.
fn raw_end(source: &str) -> usize {
    let mut from = 0;
    while let Some(at) = source[from..].find("{%") {
        let start = from + at;
        let word = source[start + 2..].trim_start_matches(['-', '+']).trim_start();
        if word.starts_with("endraw") {
            return start;
        }
        from = start + 2;
    }
    source.len()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn marks_become_filter_blocks_with_their_whitespace_control() {
        let (source, marked) = rewrite("a{%- generation -%}b{%+ endgeneration %}c");
        assert!(marked);
        assert_eq!(source, "a{%- filter __generation -%}b{%+ endfilter %}c");
    }

    #[test]
    fn comments_strings_and_raw_blocks_keep_their_text() {
        for source in [
            "{#- has {% generation %} -#}",
            "{{ '{% generation %}' }}",
            "{% set x = \"%}{% generation %}\" %}",
            "{% raw %}{% generation %}{% endraw %}",
            "{% generation",
        ] {
            assert_eq!(rewrite(source), (source.to_owned(), false), "{source}");
        }
    }

    #[test]
    fn line_ends_become_line_feeds() {
        assert_eq!(rewrite("a\r\nb\rc\n").0, "a\nb\nc\n");
    }

    #[test]
    fn markers_are_cut_out_and_their_places_kept() {
        let markers = Markers::USUAL;
        let rendered = format!("é{}x{}", markers.wrap("ab"), markers.wrap(&markers.wrap("c")));
        assert_eq!(markers.cut(&rendered), Some(("éabxc".into(), vec![2..4, 5..6])));
        assert_eq!(markers.cut("\u{FFFFD}"), None);
        assert_eq!(markers.cut("\u{FFFFC}"), None);
    }

    #[test]
    fn input_that_holds_the_usual_markers_gets_others() {
        let input = json!([{"content": "\u{FFFFC}\u{F0000}"}]);
        let markers = Markers::unused_in(&[&input]).unwrap();
        assert!(!markers.occurs_in(&input));
        assert_ne!(markers.open, markers.close);
        assert_eq!(Markers::unused_in(&[&json!("plain")]), Some(Markers::USUAL));
    }
}
