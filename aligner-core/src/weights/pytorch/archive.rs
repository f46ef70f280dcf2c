//! The zip archive around a file of `torch.save`: which records it has, and where they lie.
//!
//! torch stores records as they are. Compressed ones are refused, so a small file cannot stand for much memory.

use std::collections::BTreeMap;

use super::super::source::Source;
use crate::{Error, Result};

/// The end record and the longest comment behind it.
const END_BYTES: u64 = 22 + 65_535;
/// Most bytes of the list of records.
const MAX_DIRECTORY_BYTES: u64 = 64 << 20;

const END: [u8; 4] = *b"PK\x05\x06";
const END_64: [u8; 4] = *b"PK\x06\x06";
const END_64_LOCATOR: [u8; 4] = *b"PK\x06\x07";
const ENTRY: [u8; 4] = *b"PK\x01\x02";
const LOCAL: [u8; 4] = *b"PK\x03\x04";

/// A record's bytes in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) start: u64,
    pub(super) len: u64,
}

/// Records by name.
pub(super) type Records = BTreeMap<String, Record>;

/// Finds all records.
///
/// # Errors
/// What is no zip archive, or is truncated; records that are compressed, encrypted, there twice, or not within the
/// file.
pub(super) fn records(source: &Source) -> Result<Records> {
    let (start, len, count) = directory(source)?;
    let bytes = source.bytes(start, len as usize)?;
    let mut fields = Fields { source, bytes: &bytes, at: 0 };
    let mut records = Records::new();
    for _ in 0..count {
        let (name, record) = entry(&mut fields)?;
        if records.insert(name.clone(), record).is_some() {
            return Err(wrong(source, format!("record {name:?} is there twice")));
        }
    }
    Ok(records)
}

fn wrong(source: &Source, message: impl Into<String>) -> Error {
    Error::format(source.path(), message)
}

/// Start, length and number of entries of the list of records.
fn directory(source: &Source) -> Result<(u64, u64, u64)> {
    let tail_len = source.len().min(END_BYTES);
    let tail_start = source.len() - tail_len;
    let tail = source.bytes(tail_start, tail_len as usize)?;
    let no_end = "expected a zip archive of torch.save; its end is not there: is the file truncated?";
    let at = tail.windows(4).rposition(|window| window == END).ok_or_else(|| wrong(source, no_end))?;
    let mut end = Fields { source, bytes: &tail, at: at + 10 };
    let mut count = u64::from(end.u16()?);
    let mut len = u64::from(end.u32()?);
    let mut start = u64::from(end.u32()?);
    let comment = usize::from(end.u16()?);
    if end.at + comment != tail.len() {
        return Err(wrong(source, "the zip archive ends too soon or too late; is the file truncated?"));
    }
    // What does not fit 32 bits stands in another record, and torch writes that always.
    if let Some(locator) = at.checked_sub(20).filter(|&from| tail[from..].starts_with(&END_64_LOCATOR)) {
        let place = Fields { source, bytes: &tail, at: locator + 8 }.u64()?;
        if place.checked_add(56).is_none_or(|after| after > source.len()) {
            return Err(wrong(source, "the zip archive's end record is not within the file"));
        }
        let bytes = source.bytes(place, 56)?;
        if !bytes.starts_with(&END_64) {
            return Err(wrong(source, "the zip archive's end record is another"));
        }
        let mut end = Fields { source, bytes: &bytes, at: 32 };
        (count, len, start) = (end.u64()?, end.u64()?, end.u64()?);
    }
    let within = start.checked_add(len).is_some_and(|after| after <= source.len());
    if !within || len > MAX_DIRECTORY_BYTES {
        let message =
            format!("the zip archive's list of records, {len} bytes at {start}, is not within the file");
        return Err(wrong(source, message));
    }
    Ok((start, len, count))
}

/// One entry of the list: a name and the place of its bytes.
fn entry(fields: &mut Fields<'_>) -> Result<(String, Record)> {
    let source = fields.source;
    if fields.take(4)? != ENTRY {
        return Err(wrong(source, "the zip archive's list of records is broken"));
    }
    fields.take(4)?;
    let (flags, method) = (fields.u16()?, fields.u16()?);
    fields.take(8)?;
    let (packed, len) = (fields.u32()?, fields.u32()?);
    let [name, extra, comment] = [fields.u16()?, fields.u16()?, fields.u16()?].map(usize::from);
    fields.take(8)?;
    let offset = fields.u32()?;
    let name = String::from_utf8_lossy(fields.take(name)?).into_owned();
    let extra = fields.take(extra)?;
    fields.take(comment)?;
    let refuse = |message: String| Err(wrong(source, format!("record {name:?} {message}")));
    if method != 0 {
        return refuse(format!("is compressed (method {method}); torch stores records as they are"));
    }
    if flags & 1 != 0 {
        return refuse("is encrypted".into());
    }
    let [len, packed, offset] = wide(source, extra, [len, packed, offset])?;
    if len != packed {
        return refuse(format!("has {packed} bytes for {len}"));
    }
    let start = data_start(source, offset);
    let within = |start: &u64| start.checked_add(len).is_some_and(|after| after <= source.len());
    match start?.filter(within) {
        Some(start) => Ok((name, Record { start, len })),
        None => refuse(format!("of {len} bytes is not within the file; is it truncated?")),
    }
}

/// The values of an entry; those that are all ones stand in its extra field, in this order.
fn wide(source: &Source, extra: &[u8], values: [u32; 3]) -> Result<[u64; 3]> {
    let mut out = values.map(u64::from);
    if values.iter().all(|&value| value != u32::MAX) {
        return Ok(out);
    }
    let mut fields = Fields { source, bytes: extra, at: 0 };
    while fields.at < extra.len() {
        let (kind, len) = (fields.u16()?, fields.u16()?);
        let mut inner = Fields { source, bytes: fields.take(usize::from(len))?, at: 0 };
        if kind != 1 {
            continue;
        }
        for (out, value) in out.iter_mut().zip(values) {
            if value == u32::MAX {
                *out = inner.u64()?;
            }
        }
        return Ok(out);
    }
    Err(wrong(source, "a record of the zip archive lacks its length"))
}

/// Where a record's bytes begin: behind a header of its own.
fn data_start(source: &Source, offset: u64) -> Result<Option<u64>> {
    if offset.checked_add(30).is_none_or(|after| after > source.len()) {
        return Ok(None);
    }
    let header = source.bytes(offset, 30)?;
    if !header.starts_with(&LOCAL) {
        return Ok(None);
    }
    let mut fields = Fields { source, bytes: &header, at: 26 };
    Ok(Some(offset + 30 + u64::from(fields.u16()?) + u64::from(fields.u16()?)))
}

/// Little-endian numbers, front to back.
struct Fields<'a> {
    source: &'a Source,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Fields<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let broken = || wrong(self.source, "the zip archive's list of records ends too soon");
        let bytes = self.bytes.get(self.at..self.at.saturating_add(len)).ok_or_else(broken)?;
        self.at += len;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        Ok(self.take(N)?.try_into().expect("N bytes were taken"))
    }

    fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }
}
