//! Typed reads from a JSON object that gather every problem instead of stopping at the first.

use serde_json::{Map, Value};

/// A JSON object under inspection.
pub(super) struct Fields<'a> {
    object: &'a Map<String, Value>,
    /// Put before a key in messages: `rope_scaling.`.
    prefix: &'static str,
    pub(super) problems: Vec<String>,
}

impl<'a> Fields<'a> {
    pub(super) fn new(object: &'a Map<String, Value>, prefix: &'static str) -> Self {
        Self { object, prefix, problems: Vec::new() }
    }

    /// The value of `key`; JSON's null counts as absent.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    fn problem(&mut self, key: &str, expected: &str, got: &Value) {
        let mut got = got.to_string();
        if got.len() > 60 {
            got = format!("{}…", got.chars().take(60).collect::<String>());
        }
        self.problems.push(format!("{}{key}: expected {expected}, got {got}", self.prefix));
    }

    fn missing(&mut self, key: &str) {
        self.problems.push(format!("{}{key} is missing", self.prefix));
    }

    pub(super) fn optional_size(&mut self, key: &str) -> Option<usize> {
        let value = self.get(key)?;
        // Some writers print whole numbers as floats.
        let whole = value.as_f64().filter(|x| x.fract() == 0.0 && (0.0..9e15).contains(x));
        let size = value.as_u64().or(whole.map(|x| x as u64)).and_then(|size| usize::try_from(size).ok());
        if size.is_none() {
            self.problem(key, "a whole number", value);
        }
        size
    }

    /// A required size; after a problem, a stand-in that validation accepts.
    pub(super) fn size(&mut self, key: &str) -> usize {
        if self.get(key).is_none() {
            self.missing(key);
        }
        self.optional_size(key).unwrap_or(1)
    }

    pub(super) fn optional_number(&mut self, key: &str) -> Option<f32> {
        let value = self.get(key)?;
        if value.as_f64().is_none() {
            self.problem(key, "a number", value);
        }
        value.as_f64().map(|number| number as f32)
    }

    pub(super) fn number(&mut self, key: &str) -> Option<f32> {
        if self.get(key).is_none() {
            self.missing(key);
        }
        self.optional_number(key)
    }

    pub(super) fn flag(&mut self, key: &str) -> bool {
        let Some(value) = self.get(key) else { return false };
        if !value.is_boolean() {
            self.problem(key, "true or false", value);
        }
        value.as_bool().unwrap_or(false)
    }

    pub(super) fn text(&mut self, key: &str) -> Option<&'a str> {
        let value = self.get(key)?;
        if !value.is_string() {
            self.problem(key, "a string", value);
        }
        value.as_str()
    }

    /// One token id.
    pub(super) fn token(&mut self, key: &str) -> Option<u32> {
        let value = self.get(key)?;
        // An id of -1 says "none" in some files.
        if value.as_i64() == Some(-1) {
            return None;
        }
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        if id.is_none() {
            self.problem(key, "a token id", value);
        }
        id
    }

    /// One token id, or a list of them.
    pub(super) fn tokens(&mut self, key: &str) -> Vec<u32> {
        let Some(Value::Array(list)) = self.get(key) else { return self.token(key).into_iter().collect() };
        let ids: Option<Vec<u32>> =
            list.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect();
        if ids.is_none() {
            self.problem(key, "token ids", &self.object[key]);
        }
        ids.unwrap_or_default()
    }

    pub(super) fn object(&mut self, key: &str) -> Option<&'a Map<String, Value>> {
        let value = self.get(key)?;
        if !value.is_object() {
            self.problem(key, "an object", value);
        }
        value.as_object()
    }
}
