//! The first mistake that one pass over a table meets, as serde reports it.

use std::fmt::Display;

use serde::de;

use super::problem::unknown;
use super::tree::Origin;

/// The first mistake of one pass.
#[derive(Debug, Clone)]
pub(super) struct Failure {
    message: String,
    path: Option<String>,
    pub(super) origin: Option<Origin>,
    pub(super) missing: Option<&'static str>,
}

impl Failure {
    pub(super) fn new(message: String) -> Self {
        Self { message, path: None, origin: None, missing: None }
    }

    /// The full key that is wrong or missing; `path` is where reading began.
    pub(super) fn key(&self, path: &str) -> String {
        let place = self.path.as_deref().unwrap_or(path);
        self.missing.map_or_else(|| place.to_string(), |field| join(place, field))
    }

    pub(super) fn report(&self, key: &str) -> String {
        if self.missing.is_some() { self.message.clone() } else { format!("`{key}`: {}", self.message) }
    }

    /// Says where it was, unless something deeper has said so.
    pub(super) fn at(mut self, path: &str, origin: &Origin) -> Self {
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
        Self::new(format!("expected {}, got {got}", in_words(&expected.to_string())))
    }

    fn invalid_value(got: de::Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        Self::new(format!("expected {}, got {got}", in_words(&expected.to_string())))
    }

    fn invalid_length(len: usize, expected: &dyn de::Expected) -> Self {
        let expected = expected.to_string();
        let expected =
            expected.strip_prefix("a tuple of size ").map_or(expected.clone(), |n| format!("{n} items"));
        Self::new(format!("expected {expected}, got {len}"))
    }

    fn unknown_variant(variant: &str, expected: &'static [&'static str]) -> Self {
        Self::new(unknown("value", variant, "", expected))
    }

    fn missing_field(field: &'static str) -> Self {
        Self { missing: Some(field), ..Self::new(format!("missing key `{field}`")) }
    }
}

/// Rust's names of numbers, for people who write TOML.
fn in_words(expected: &str) -> &str {
    match expected {
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number, 0 or more",
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number",
        "f32" | "f64" => "a number",
        other => other,
    }
}

/// A key inside the table at `path`.
pub(super) fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_string() } else { format!("{path}.{key}") }
}
