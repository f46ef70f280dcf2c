//! How much work a rendering may take, beside the engine's own count of instructions.
//!
//! A unit is about a byte that an operation reads or makes. What is made may be [`MOST_BYTES`] long and
//! [`DEEPEST`] levels deep; all operations together get an allowance that grows with the conversation.

use std::cell::Cell;
use std::io;

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};
use serde_json::Value as Json;

/// Most bytes of a rendered conversation, and of a text on the way there: some million tokens.
pub(super) const MOST_BYTES: usize = 1 << 24;

/// Lists within lists: whoever writes, compares or drops such a value does so by calls within calls.
const DEEPEST: usize = 64;

/// The least that an operation, and an item of a list, count for: time, if no space.
const LEAST: usize = 64;
const LEAST_OF_ITEM: usize = 16;

/// Units of a rendering, whatever the conversation, and for each byte of the conversation.
const ALLOWANCE: usize = 1 << 26;
const ALLOWANCE_PER_BYTE: usize = 512;

thread_local! {
    /// What is left to the rendering that runs on this thread.
    static LEFT: Cell<usize> = const { Cell::new(ALLOWANCE) };
}

/// Gives the next rendering on this thread its allowance.
pub(super) fn allow(conversation: &Json) {
    let more = text_bytes(conversation).saturating_mul(ALLOWANCE_PER_BYTE);
    LEFT.set(ALLOWANCE.saturating_add(more));
}

fn text_bytes(value: &Json) -> usize {
    match value {
        Json::String(text) => text.len(),
        Json::Array(items) => items.iter().map(text_bytes).sum(),
        Json::Object(entries) => entries.iter().map(|(key, value)| key.len() + text_bytes(value)).sum(),
        Json::Null | Json::Bool(_) | Json::Number(_) => 0,
    }
}

/// Takes from the allowance.
///
/// # Errors
/// Nothing is left.
pub(super) fn spend(units: usize) -> Result<(), Error> {
    let left = LEFT.get().checked_sub(units.max(LEAST));
    LEFT.set(left.unwrap_or(0));
    left.map(drop).ok_or_else(|| {
        Error::new(ErrorKind::OutOfFuel, "the template takes more work than any conversation needs")
    })
}

/// What is wrong with a template that writes too much.
pub(super) fn too_long() -> String {
    format!("more than {MOST_BYTES} bytes of text")
}

/// # Errors
/// More bytes than a text may have.
pub(super) fn bounded(bytes: usize) -> Result<(), Error> {
    if bytes > MOST_BYTES { Err(Error::new(ErrorKind::InvalidOperation, too_long())) } else { Ok(()) }
}

/// Counts what a value holds, and takes that from the allowance.
///
/// # Errors
/// It holds more than a text may have, or is too deep, or nothing is left of the allowance.
pub(super) fn weigh(value: &Value) -> Result<usize, Error> {
    let mut bytes = 0;
    count(value, 0, &mut bytes)?;
    spend(bytes)?;
    Ok(bytes)
}

/// As [`weigh`], by the length of a text or a list alone.
///
/// # Errors
/// Nothing is left of the allowance.
pub(super) fn glance(value: &Value) -> Result<(), Error> {
    let items = || value.len().unwrap_or(0).saturating_mul(LEAST_OF_ITEM);
    spend(value.as_str().map_or_else(items, str::len))
}

fn count(value: &Value, depth: usize, bytes: &mut usize) -> Result<(), Error> {
    *bytes = bytes.saturating_add(value.as_str().map_or(LEAST_OF_ITEM, |text| text.len().max(LEAST_OF_ITEM)));
    bounded(*bytes)?;
    if depth > DEEPEST {
        let message = format!("lists within lists, more than {DEEPEST} deep");
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            value.try_iter()?.try_for_each(|item| count(&item, depth + 1, bytes))
        }
        ValueKind::Map => value.try_iter()?.try_for_each(|key| {
            count(&key, depth + 1, bytes)?;
            count(&value.get_item(&key)?, depth + 1, bytes)
        }),
        _ => Ok(()),
    }
}

/// Bytes that are kept up to a limit.
#[derive(Debug, Default)]
pub(super) struct Bounded {
    bytes: Vec<u8>,
    refused: bool,
}

impl Bounded {
    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// Whether more was to be written.
    pub(super) fn is_full(&self) -> bool {
        self.refused
    }
}

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > MOST_BYTES - self.bytes.len() {
            self.refused = true;
            return Err(io::Error::other(too_long()));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
