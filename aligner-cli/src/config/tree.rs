//! The run file as a tree of values, each of which knows where it was written.

use std::ops::Range;
use std::sync::Arc;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Where a key or a value was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Bytes of the run file.
    File(Range<usize>),
    /// The text of a `--set` argument.
    Override(Arc<str>),
}

/// A value with its origin.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub(crate) origin: Origin,
    pub(crate) value: Value,
}

/// TOML's types; dates are kept as text, since no key takes one.
#[derive(Debug, Clone)]
pub(crate) enum Value {
    Boolean(bool),
    Integer(i64),
    Float(f64),
    String(String),
    Array(Vec<Node>),
    Table(Vec<Entry>),
    /// A whole number past 64 bits, which TOML's own integers do not reach.
    TooLarge(String),
    /// Stands in for a required value that is missing, so that reading can go on.
    Absent,
}

/// One key of a table.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) key: String,
    pub(crate) origin: Origin,
    pub(crate) node: Node,
}

impl Value {
    /// What the value is, for "expected …, got …".
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Boolean(_) => "a boolean",
            Self::Integer(_) | Self::TooLarge(_) => "an integer",
            Self::Float(_) => "a number",
            Self::String(_) => "a string",
            Self::Array(_) => "an array",
            Self::Table(_) => "a table",
            Self::Absent => "nothing",
        }
    }
}

impl Node {
    /// The tree of a parsed file; `origin` gives the origin of each span.
    pub(crate) fn from_table(table: Spanned<DeTable<'_>>, origin: &dyn Fn(Range<usize>) -> Origin) -> Self {
        let span = table.span();
        Self::from_value(Spanned::new(span, DeValue::Table(table.into_inner())), origin)
    }

    /// The tree of a parsed value.
    pub(crate) fn from_value(value: Spanned<DeValue<'_>>, origin: &dyn Fn(Range<usize>) -> Origin) -> Self {
        let span = value.span();
        let value = match value.into_inner() {
            DeValue::String(text) => Value::String(text.into_owned()),
            DeValue::Integer(number) => match i64::from_str_radix(number.as_str(), number.radix()) {
                Ok(number) => Value::Integer(number),
                Err(_) => Value::TooLarge(number.to_string()),
            },
            DeValue::Float(number) => match number.as_str().parse() {
                Ok(number) => Value::Float(number),
                Err(_) => Value::String(number.to_string()),
            },
            DeValue::Boolean(flag) => Value::Boolean(flag),
            DeValue::Datetime(date) => Value::String(date.to_string()),
            DeValue::Array(items) => {
                Value::Array(items.into_iter().map(|item| Self::from_value(item, origin)).collect())
            }
            DeValue::Table(table) => {
                let entry = |(key, value): (Spanned<_>, _)| {
                    let key_origin = origin(key.span());
                    let key: std::borrow::Cow<'_, str> = key.into_inner();
                    Entry { key: key.into_owned(), origin: key_origin, node: Self::from_value(value, origin) }
                };
                Value::Table(table.into_iter().map(entry).collect())
            }
        };
        Self { origin: origin(span), value }
    }

    /// The entries, where the node is a table.
    pub(crate) fn entries(&self) -> &[Entry] {
        match &self.value {
            Value::Table(entries) => entries,
            _ => &[],
        }
    }

    /// The entry at a dotted path.
    pub(crate) fn find(&self, path: &str) -> Option<&Entry> {
        let (key, rest) = path.split_once('.').map_or((path, None), |(key, rest)| (key, Some(rest)));
        let entry = self.entries().iter().find(|entry| entry.key == key)?;
        match rest {
            Some(rest) => entry.node.find(rest),
            None => Some(entry),
        }
    }

    /// Takes out the entry at a dotted path; false where there is none.
    pub(crate) fn remove(&mut self, path: &str) -> bool {
        let Value::Table(entries) = &mut self.value else { return false };
        let (key, rest) = path.split_once('.').map_or((path, None), |(key, rest)| (key, Some(rest)));
        let Some(at) = entries.iter().position(|entry| entry.key == key) else { return false };
        if let Some(rest) = rest {
            return entries[at].node.remove(rest);
        }
        entries.remove(at);
        true
    }

    /// Writes `value` at a dotted path, making the tables on the way.
    ///
    /// # Errors
    /// The path of a value on the way that is not a table.
    pub(crate) fn set(&mut self, path: &[&str], value: Node) -> Result<(), String> {
        let [key, rest @ ..] = path else {
            *self = value;
            return Ok(());
        };
        let origin = value.origin.clone();
        if matches!(self.value, Value::Absent) {
            self.value = Value::Table(Vec::new());
        }
        let Value::Table(entries) = &mut self.value else {
            return Err(format!("`{key}` cannot be set inside {}", self.value.kind()));
        };
        let at = entries.iter().position(|entry| entry.key == *key).unwrap_or_else(|| {
            let node = Node { origin: origin.clone(), value: Value::Table(Vec::new()) };
            entries.push(Entry { key: (*key).to_string(), origin: origin.clone(), node });
            entries.len() - 1
        });
        if rest.is_empty() {
            entries[at].origin = origin;
        }
        entries[at].node.set(rest, value)
    }
}
