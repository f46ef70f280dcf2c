//! Deserialises a [`Node`], gathering every mistake on the way instead of stopping at the first.
//!
//! serde stops at the first error. Two things make it go on. Unknown keys are noticed here, since
//! a struct's own field names come with `deserialize_struct`, recorded, and skipped: so key lists
//! never go stale. A value that is wrong is recorded and taken out of the tree, one that is missing
//! is recorded and stood in for, and the whole is read again, so that the next mistake shows.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde::de::value::{BorrowedStrDeserializer, MapAccessDeserializer, StrDeserializer};
use serde::de::{self, DeserializeOwned, DeserializeSeed, IntoDeserializer, Visitor};

use super::failure::{Failure, join};
use super::problem::{Problem, Problems, unknown};
use super::tree::{Entry, Node, Origin, Value};

/// A table that could be read, if need be with stand-ins.
pub(crate) struct Reading<T> {
    pub(crate) value: T,
    pub(crate) unsound: Unsound,
}

/// Paths of values that are not the file's: their faults have been recorded.
#[derive(Debug, Clone, Default)]
pub(crate) struct Unsound(BTreeSet<String>);

impl Unsound {
    /// Whether `path` is one of them, or inside one.
    pub(crate) fn holds(&self, path: &str) -> bool {
        let leads = |of: &String| {
            path.strip_prefix(of.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        self.0.iter().any(leads)
    }
}

/// Reads `T` from the table at `path` of the run file; `None` where that is hopeless.
pub(crate) fn read<T: DeserializeOwned>(
    root: &Node,
    path: &str,
    problems: &mut Problems,
) -> Option<Reading<T>> {
    let mut tree = root.clone();
    let mut unsound = Unsound::default();
    loop {
        let node = if path.is_empty() { &tree } else { &tree.find(path)?.node };
        let failure = match pass(node, path, problems) {
            Ok(value) => return Some(Reading { value, unsound }),
            Err(failure) => failure,
        };
        let at = failure.key(path);
        let known = unsound.holds(&at);
        if !known {
            problems.push(failure.origin.clone(), failure.report(&at));
        }
        // What stands in for a value has no faults that anybody could mend.
        let mended = if failure.missing.is_some() {
            stand_in(&mut tree, &at)
        } else {
            !known && at != path && tree.remove(&at)
        };
        if !mended {
            return None;
        }
        unsound.0.insert(at);
    }
}

/// Reads once, up to the first wrong value; unknown keys are all recorded.
fn pass<T: DeserializeOwned>(node: &Node, path: &str, problems: &mut Problems) -> Result<T, Failure> {
    let unknown_keys = RefCell::new(Vec::new());
    let result = T::deserialize(Reader { node, path: path.to_string(), unknown: &unknown_keys });
    for Problem { origin, message } in unknown_keys.into_inner() {
        problems.push(origin, message);
    }
    result
}

/// Puts something in the place of a missing value.
fn stand_in(tree: &mut Node, at: &str) -> bool {
    let node = Node { origin: Origin::File(0..0), value: Value::Absent };
    tree.set(&at.split('.').collect::<Vec<_>>(), node).is_ok()
}

/// A deserializer over one node.
struct Reader<'t, 'p> {
    node: &'t Node,
    path: String,
    unknown: &'p RefCell<Vec<Problem>>,
}

impl<'t> Reader<'t, '_> {
    fn child(&self, key: &str, node: &'t Node) -> Self {
        Self { node, path: join(&self.path, key), unknown: self.unknown }
    }

    fn placed<V>(&self, result: Result<V, Failure>) -> Result<V, Failure> {
        result.map_err(|failure| failure.at(&self.path, &self.node.origin))
    }

    fn report(&self, entry: &Entry, fields: &[&str]) {
        let place = if self.path.is_empty() { String::new() } else { format!(" in [{}]", self.path) };
        let noun = if self.path.is_empty() { "section" } else { "key" };
        let message = unknown(noun, &entry.key, &place, fields);
        self.unknown.borrow_mut().push(Problem { origin: Some(entry.origin.clone()), message });
    }

    /// All items of an array; more than the setting takes is a mistake.
    fn sequence<V: Visitor<'t>>(&self, items: &'t [Node], visitor: V) -> Result<V::Value, Failure> {
        let mut access = Items { reader: self, rest: items.iter() };
        let value = visitor.visit_seq(&mut access)?;
        match access.rest.len() {
            0 => Ok(value),
            left => {
                let taken = items.len() - left;
                Err(Failure::new(format!("expected {taken} items, got {}", items.len())))
            }
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

/// Values for what is missing; of other types, a stand-in is a mistake that nobody is told of.
macro_rules! stands_in {
    ($($method:ident => $visit:ident($value:expr),)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Failure> {
            match self.node.value {
                Value::Absent => visitor.$visit($value),
                _ => self.deserialize_any(visitor),
            }
        }
    )*};
}

impl<'de> de::Deserializer<'de> for Reader<'de, '_> {
    type Error = Failure;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Failure> {
        let result = match &self.node.value {
            Value::Boolean(flag) => visitor.visit_bool(*flag),
            Value::Integer(number) => visitor.visit_i64(*number),
            Value::Float(number) => finite(*number).and_then(|number| visitor.visit_f64(number)),
            Value::TooLarge(number) => {
                Err(Failure::new(format!("expected a whole number up to {}, got {number}", i64::MAX)))
            }
            Value::String(text) => visitor.visit_borrowed_str(text),
            Value::Array(items) => self.sequence(items, visitor),
            Value::Table(_) | Value::Absent => return self.map(None, visitor),
        };
        self.placed(result)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Failure> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Failure> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Failure> {
        match &self.node.value {
            Value::Table(_) | Value::Absent => self.map(Some(fields), visitor),
            other => {
                let failure = Failure::new(format!("expected a table, got {}", other.kind()));
                self.placed(Err(failure))
            }
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Failure> {
        let result = match &self.node.value {
            Value::String(text) => visitor.visit_enum(variant(text)),
            Value::Absent => visitor.visit_enum(variant(variants.first().copied().unwrap_or_default())),
            Value::Table(entries) if entries.len() == 1 => {
                visitor.visit_enum(MapAccessDeserializer::new(Entries {
                    reader: &self,
                    rest: entries.iter().collect::<Vec<_>>().into_iter(),
                    value: None,
                }))
            }
            other => Err(Failure::new(format!("expected a string, got {}", other.kind()))),
        };
        self.placed(result)
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Failure> {
        visitor.visit_unit()
    }

    stands_in! {
        deserialize_bool => visit_bool(false),
        deserialize_i64 => visit_i64(0),
        deserialize_u32 => visit_u64(0),
        deserialize_u64 => visit_u64(0),
        deserialize_f32 => visit_f64(0.0),
        deserialize_f64 => visit_f64(0.0),
        deserialize_str => visit_borrowed_str(""),
        deserialize_string => visit_borrowed_str(""),
    }

    serde::forward_to_deserialize_any! {
        i8 i16 i32 i128 u8 u16 u128 char bytes byte_buf unit unit_struct seq tuple tuple_struct map
        identifier
    }
}

/// A number that a setting may have: none means NaN or an infinity, and what 32 bits do not hold would
/// become one in the tensors.
fn finite(number: f64) -> Result<f64, Failure> {
    if number.is_finite() && number.abs() <= f64::from(f32::MAX) {
        return Ok(number);
    }
    Err(Failure::new(format!("expected a finite number of at most {:e}, got {number}", f32::MAX)))
}

fn variant(name: &str) -> StrDeserializer<'_, Failure> {
    name.into_deserializer()
}

struct Entries<'r, 't> {
    reader: &'r Reader<'t, 'r>,
    rest: std::vec::IntoIter<&'t Entry>,
    value: Option<&'t Entry>,
}

impl<'t> de::MapAccess<'t> for Entries<'_, 't> {
    type Error = Failure;

    fn next_key_seed<K: DeserializeSeed<'t>>(&mut self, seed: K) -> Result<Option<K::Value>, Failure> {
        self.value = self.rest.next();
        let Some(entry) = self.value else { return Ok(None) };
        let key: BorrowedStrDeserializer<'t, Failure> = BorrowedStrDeserializer::new(&entry.key);
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
    reader: &'r Reader<'t, 'r>,
    rest: std::slice::Iter<'t, Node>,
}

impl<'t> de::SeqAccess<'t> for Items<'_, 't> {
    type Error = Failure;

    fn next_element_seed<S: DeserializeSeed<'t>>(&mut self, seed: S) -> Result<Option<S::Value>, Failure> {
        let Some(node) = self.rest.next() else { return Ok(None) };
        // An item has its array's path, for the array is what is taken out; the span is its own.
        let item = Reader { node, path: self.reader.path.clone(), unknown: self.reader.unknown };
        seed.deserialize(item).map(Some)
    }
}

/// A section that must be there and is read elsewhere.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct ReadElsewhere;

impl<'de> Deserialize<'de> for ReadElsewhere {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        BTreeMap::<String, de::IgnoredAny>::deserialize(deserializer).map(|_| Self)
    }
}
