//! JSON as Python's `json.dumps` writes it: chat templates put it into prompts byte for byte.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::Value;
use serde_json::ser::{Formatter, Serializer};

use super::work::Bounded;

/// The keyword arguments of `tojson` that change the output.
#[derive(Debug, Clone, Default)]
pub(super) struct Style {
    /// Spaces for each level; none writes one line.
    pub(super) indent: Option<usize>,
    /// Between items, and between a key and its value.
    pub(super) separators: Option<(String, String)>,
    /// Whether keys are sorted.
    pub(super) sort_keys: bool,
}

/// `value` as `json.dumps(value, ensure_ascii=False, …)` writes it.
pub(super) fn dumps(value: &Value, style: &Style) -> serde_json::Result<String> {
    let default_item = if style.indent.is_some() { "," } else { ", " };
    let (item, key) = style.separators.clone().unwrap_or_else(|| (default_item.into(), ": ".into()));
    let formatter = Python { indent: style.indent, item, key, level: 0, has_items: false };
    let mut out = Bounded::default();
    let mut serializer = Serializer::with_formatter(&mut out, formatter);
    if style.sort_keys {
        sorted(value).serialize(&mut serializer)?;
    } else {
        value.serialize(&mut serializer)?;
    }
    String::from_utf8(out.into_bytes()).map_err(serde::ser::Error::custom)
}

fn sorted(value: &Value) -> Value {
    match value {
        Value::Array(items) => items.iter().map(sorted).collect(),
        Value::Object(object) => {
            let mut entries: Vec<_> = object.iter().collect();
            entries.sort_by_key(|(key, _)| *key);
            entries.into_iter().map(|(key, value)| (key.clone(), sorted(value))).collect()
        }
        scalar => scalar.clone(),
    }
}

struct Python {
    indent: Option<usize>,
    item: String,
    key: String,
    level: usize,
    has_items: bool,
}

impl Python {
    fn begin(&mut self, out: &mut (impl Write + ?Sized), bracket: &[u8]) -> io::Result<()> {
        self.level += 1;
        self.has_items = false;
        out.write_all(bracket)
    }

    fn next(&self, out: &mut (impl Write + ?Sized), first: bool) -> io::Result<()> {
        if !first {
            out.write_all(self.item.as_bytes())?;
        }
        self.new_line(out)
    }

    fn end(&mut self, out: &mut (impl Write + ?Sized), bracket: &[u8]) -> io::Result<()> {
        self.level -= 1;
        if self.has_items {
            self.new_line(out)?;
        }
        self.has_items = true;
        out.write_all(bracket)
    }

    fn new_line(&self, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
        let Some(indent) = self.indent else { return Ok(()) };
        out.write_all(b"\n")?;
        (0..indent.saturating_mul(self.level)).try_for_each(|_| out.write_all(b" "))
    }
}

impl Formatter for Python {
    fn begin_array<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.begin(out, b"[")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.next(out, first)
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, _out: &mut W) -> io::Result<()> {
        self.has_items = true;
        Ok(())
    }

    fn end_array<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.end(out, b"]")
    }

    fn begin_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.begin(out, b"{")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.next(out, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(self.key.as_bytes())
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, _out: &mut W) -> io::Result<()> {
        self.has_items = true;
        Ok(())
    }

    fn end_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.end(out, b"}")
    }

    fn write_f64<W: ?Sized + Write>(&mut self, out: &mut W, value: f64) -> io::Result<()> {
        out.write_all(python_float(value).as_bytes())
    }
}

/// `repr(value)` in Python: the shortest digits, plain between 1e-4 and 1e16, else with an
/// exponent of at least two digits.
fn python_float(value: f64) -> String {
    let scientific = format!("{value:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    let power: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&power) {
        let plain = value.to_string();
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if power < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", power.abs())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn one_line_has_spaces_after_separators_and_keeps_characters() {
        let value = json!({"b": [1, 2.0, null], "a": {"é": "<\"\n\u{1}>"}, "empty": [], "none": {}});
        let text = dumps(&value, &Style::default()).unwrap();
        assert_eq!(text, r#"{"b": [1, 2.0, null], "a": {"é": "<\"\n\u0001>"}, "empty": [], "none": {}}"#);
    }

    #[test]
    fn indent_breaks_lines_but_not_empty_containers() {
        let style = Style { indent: Some(2), sort_keys: true, separators: None };
        let text = dumps(&json!({"b": [1, {}], "a": []}), &style).unwrap();
        assert_eq!(text, "{\n  \"a\": [],\n  \"b\": [\n    1,\n    {}\n  ]\n}");
    }

    #[test]
    fn floats_are_written_as_repr_does() {
        let cases = [(21.5, "21.5"), (1e22, "1e+22"), (1e15, "1000000000000000.0"), (1.5e-7, "1.5e-07")];
        for (value, expected) in cases {
            assert_eq!(python_float(value), expected);
        }
    }
}
