//! Deserialises a [`Node`], gathering every mistake on the way instead of stopping at the first.
//!
//! serde stops at the first error. Two things make it go on. Unknown keys are noticed here, since
//! a struct's own field names come with `deserialize_struct`, recorded, and skipped: so key lists
//! never go stale. A value that is wrong is recorded, taken out of the tree, and the whole is read
//! again, so that the next mistake shows.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt::Display;

use serde::Deserialize;
use serde::de::value::StrDeserializer;
use serde::de::{self, DeserializeOwned, DeserializeSeed, IntoDeserializer, Visitor};

use super::problem::{Problem, Problems, unknown};
use super::tree::{Entry, Node, Origin, Value};

/// Reads `T` from the table at `path` of the run file; `None` where anything was wrong.
pub(crate) fn read<T: DeserializeOwned>(root: &Node, path: &str, problems: &mut Problems) -> Option<T> {
    let mut tree = match path {
        "" => root.clone(),
        path => root.find(path)?.node.clone(),
    };
    let mut removed = BTreeSet::new();
    loop {
        let unknown_keys = RefCell::new(Vec::new());
        let reader = Reader { node: &tree, path: path.to_string(), unknown: Some(&unknown_keys) };
        let result = T::deserialize(reader);
        for Problem { origin, message } in unknown_keys.into_inner() {
            problems.push(origin, message);
        }
        let failure = match result {
            Ok(value) => return removed.is_empty().then_some(value),
            Err(failure) => failure,
        };
        let at = failure.path.unwrap_or_else(|| path.to_string());
        let absent = failure.missing.map(|field| join(&at, field));
        // A key that is missing because it was taken out has been reported already.
        if !absent.is_some_and(|absent| removed.contains(&absent)) {
            let key =
                if at.is_empty() || failure.missing.is_some() { String::new() } else { format!("`{at}`: ") };
            problems.push(failure.origin, format!("{key}{}", failure.message));
        }
        let relative = if path.is_empty() {
            Some(at.as_str())
        } else {
            at.strip_prefix(path).and_then(|rest| rest.strip_prefix('.'))
        };
        match relative {
            Some(relative) if tree.remove(relative) => removed.insert(at),
            _ => return None,
        };
    }
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_string() } else { format!("{path}.{key}") }
}

/// The first mistake of one pass.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    message: String,
    path: Option<String>,
    origin: Option<Origin>,
    missing: Option<&'static str>,
}

impl Failure {
    fn new(message: String) -> Self {
        Self { message, path: None, origin: None, missing: None }
    }

    /// Says where it was, unless something deeper has said so.
    fn at(mut self, path: &str, origin: &Origin) -> Self {
        if self.path.is_none() {
            self.path = Some(path.to_string());
            self.origin = Some(origin.clone());
            if let Some(field) = self.missing {
                let place = if path.is_empty() { String::new() } else { format!(" in [{path}]") };
                self.message = format!("missing key `{field}`{place}");
                // The document's own span is the whole file: nothing worth pointing at.
                self.origin = self.origin.filter(|_| !path.is_empty());
            }
        }
        self
    }
}

impl Display for Failure {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

impl de::Error for Failure {
    fn custom<T: Display>(message: T) -> Self {
        Self::new(message.to_string())
    }

    fn invalid_type(got: de::Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        Self::new(format!("expected {expected}, got {got}"))
    }

    fn invalid_value(got: de::Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        Self::new(format!("expected {expected}, got {got}"))
    }

    fn unknown_variant(variant: &str, expected: &'static [&'static str]) -> Self {
        Self::new(unknown("value", variant, "", expected))
    }

    fn missing_field(field: &'static str) -> Self {
        Self { missing: Some(field), ..Self::new(format!("missing key `{field}`")) }
    }
}

/// A deserializer over one node.
pub(crate) struct Reader<'t> {
    node: &'t Node,
    path: String,
    unknown: Option<&'t RefCell<Vec<Problem>>>,
}

impl<'t> Reader<'t> {
    fn child(&self, key: &str, node: &'t Node) -> Self {
        Self { node, path: join(&self.path, key), unknown: self.unknown }
    }

    fn placed<V>(&self, result: Result<V, Failure>) -> Result<V, Failure> {
        result.map_err(|failure| failure.at(&self.path, &self.node.origin))
    }

    fn report(&self, entry: &Entry, fields: &[&str]) {
        let place = if self.path.is_empty() { String::new() } else { format!(" in [{}]", self.path) };
        let noun = if self.path.is_empty() { "section" } else { "key" };
        if let Some(unknown_keys) = self.unknown {
            let message = unknown(noun, &entry.key, &place, fields);
            unknown_keys.borrow_mut().push(Problem { origin: Some(entry.origin.clone()), message });
        }
    }

    fn map<'f, V: Visitor<'t>>(self, fields: Option<&'f [&'f str]>, visitor: V) -> Result<V::Value, Failure> {
        let mut entries = Vec::new();
        for entry in self.node.entries() {
            match fields {
                Some(fields) if !fields.contains(&entry.key.as_str()) => self.report(entry, fields),
                _ => entries.push(entry),
            }
        }
        let access = Entries { reader: &self, rest: entries.into_iter(), value: None };
        self.placed(visitor.visit_map(access))
    }
}

impl<'t> de::Deserializer<'t> for Reader<'t> {
    type Error = Failure;

    fn deserialize_any<V: Visitor<'t>>(self, visitor: V) -> Result<V::Value, Failure> {
        let result = match &self.node.value {
            Value::Boolean(flag) => visitor.visit_bool(*flag),
            Value::Integer(number) => visitor.visit_i64(*number),
            Value::Float(number) => visitor.visit_f64(*number),
            Value::String(text) => visitor.visit_borrowed_str(text),
            Value::Array(items) => visitor.visit_seq(Items { reader: &self, rest: items.iter().enumerate() }),
            Value::Table(_) => return self.map(None, visitor),
        };
        self.placed(result)
    }

    fn deserialize_option<V: Visitor<'t>>(self, visitor: V) -> Result<V::Value, Failure> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'t>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Failure> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_struct<V: Visitor<'t>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Failure> {
        match &self.node.value {
            Value::Table(_) => self.map(Some(fields), visitor),
            other => {
                let failure = Failure::new(format!("expected a table, got {}", other.kind()));
                self.placed(Err(failure))
            }
        }
    }

    fn deserialize_enum<V: Visitor<'t>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Failure> {
        let result = match &self.node.value {
            Value::String(text) => {
                let name: StrDeserializer<'t, Failure> = text.as_str().into_deserializer();
                visitor.visit_enum(name)
            }
            Value::Table(entries) if entries.len() == 1 => {
                visitor.visit_enum(de::value::MapAccessDeserializer::new(Entries {
                    reader: &self,
                    rest: entries.iter().collect::<Vec<_>>().into_iter(),
                    value: None,
                }))
            }
            other => Err(Failure::new(format!("expected a string, got {}", other.kind()))),
        };
        self.placed(result)
    }

    fn deserialize_ignored_any<V: Visitor<'t>>(self, visitor: V) -> Result<V::Value, Failure> {
        visitor.visit_unit()
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct seq tuple tuple_struct map identifier
    }
}

struct Entries<'r, 't> {
    reader: &'r Reader<'t>,
    rest: std::vec::IntoIter<&'t Entry>,
    value: Option<&'t Entry>,
}

impl<'t> de::MapAccess<'t> for Entries<'_, 't> {
    type Error = Failure;

    fn next_key_seed<K: DeserializeSeed<'t>>(&mut self, seed: K) -> Result<Option<K::Value>, Failure> {
        self.value = self.rest.next();
        let Some(entry) = self.value else { return Ok(None) };
        let key: de::value::BorrowedStrDeserializer<'t, Failure> =
            de::value::BorrowedStrDeserializer::new(&entry.key);
        let placed = |failure: Failure| failure.at(&join(&self.reader.path, &entry.key), &entry.origin);
        seed.deserialize(key).map(Some).map_err(placed)
    }

    fn next_value_seed<S: DeserializeSeed<'t>>(&mut self, seed: S) -> Result<S::Value, Failure> {
        let Some(entry) = self.value.take() else {
            return Err(de::Error::custom("a value was asked for before its key"));
        };
        let child = self.reader.child(&entry.key, &entry.node);
        let path = child.path.clone();
        seed.deserialize(child).map_err(|failure| failure.at(&path, &entry.node.origin))
    }
}

struct Items<'r, 't> {
    reader: &'r Reader<'t>,
    rest: std::iter::Enumerate<std::slice::Iter<'t, Node>>,
}

impl<'t> de::SeqAccess<'t> for Items<'_, 't> {
    type Error = Failure;

    fn next_element_seed<S: DeserializeSeed<'t>>(&mut self, seed: S) -> Result<Option<S::Value>, Failure> {
        let Some((_, node)) = self.rest.next() else { return Ok(None) };
        // An item has its array's path, for the array is what is taken out; the span is its own.
        let item = Reader { node, path: self.reader.path.clone(), unknown: self.reader.unknown };
        seed.deserialize(item).map(Some)
    }
}

/// A section that is read elsewhere: only its names are kept.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Names(pub(crate) Vec<String>);

impl<'de> Deserialize<'de> for Names {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let map = std::collections::BTreeMap::<String, de::IgnoredAny>::deserialize(deserializer)?;
        Ok(Self(map.into_keys().collect()))
    }
}
