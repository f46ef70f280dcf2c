//! Rows of a data file, by index, without the parsed file in memory.

mod array;
mod lines;
mod parquet;

use std::fs::File;
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use aligner_core::{Error, Result};
use serde_json::{Map, Value};

/// Writes rows, each a JSON object, to a temporary file that is gone with its handle.
fn spool_rows(rows: impl Iterator<Item = Result<String>>) -> Result<(File, Vec<Entry>)> {
    let spooled = tempfile::tempfile().map_err(Error::io(std::env::temp_dir()))?;
    let mut out = BufWriter::new(&spooled);
    let mut entries = Vec::new();
    let mut offset = 0;
    for (at, text) in rows.enumerate() {
        let (text, number) = (text?, at + 1);
        out.write_all(text.as_bytes()).map_err(Error::io(std::env::temp_dir()))?;
        entries.push(Entry { offset, len: text.len(), number, line: number });
        offset += text.len() as u64;
    }
    out.flush().map_err(Error::io(std::env::temp_dir()))?;
    drop(out);
    Ok((spooled, entries))
}

/// Where a row's text stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    /// Offset of its first byte in the indexed file.
    offset: u64,
    /// Its bytes.
    len: usize,
    /// What users call it, from 1: the line of a file of lines, the row elsewhere.
    number: usize,
    /// The line of the file in which it begins, from 1; the row where a file has no lines.
    line: usize,
}

/// The rows of one data file. What is held in memory is where each row stands.
#[derive(Debug)]
pub struct Rows {
    path: PathBuf,
    /// The data file, or a temporary copy of its rows as JSON lines.
    file: Mutex<File>,
    entries: Vec<Entry>,
    /// Whether rows are plain text, not JSON.
    is_text: bool,
}

impl Rows {
    /// Indexes a file of JSON lines, a JSON array, a Parquet file, or a `.txt` file of lines.
    ///
    /// Parquet is told by its first bytes and text by the file name; JSON is an array where its
    /// first character is `[` and the name does not end in `.jsonl`.
    ///
    /// # Errors
    /// A file that cannot be read, has no row, or is not of the structure that it begins with.
    pub fn open(path: &Path) -> Result<Self> {
        let mut file = File::open(path).map_err(Error::io(path))?;
        let mut head = [0; 1024];
        let read = file.read(&mut head).map_err(Error::io(path))?;
        let head = &head[..read];
        let is_text = has_extension(path, "txt");
        let (file, entries) = if head.starts_with(b"PAR1") || has_extension(path, "parquet") {
            parquet::spool(path)?
        } else {
            file.seek(SeekFrom::Start(0)).map_err(Error::io(path))?;
            let is_array = !is_text && !has_extension(path, "jsonl") && begins_array(head);
            let entries = if is_array { array::index(path, &file)? } else { lines::index(path, &file)? };
            (file, entries)
        };
        if entries.is_empty() {
            return Err(Error::format(path, "the data set is empty: expected at least one row"));
        }
        Ok(Self { path: path.to_path_buf(), file: Mutex::new(file), entries, is_text })
    }

    /// Rows that are made, not read: JSON objects, under the name of what makes them.
    ///
    /// # Errors
    /// What the rows' maker says; a temporary file that cannot be written.
    pub(crate) fn made(name: &str, rows: impl Iterator<Item = Result<String>>) -> Result<Self> {
        let (file, entries) = spool_rows(rows)?;
        Ok(Self { path: name.into(), file: Mutex::new(file), entries, is_text: false })
    }

    /// How many rows there are; never 0.
    #[expect(clippy::len_without_is_empty, reason = "an empty file is refused when it is opened")]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// The data file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What users call row `index`, from 1: its line in a file of lines, its row elsewhere.
    pub fn number(&self, index: usize) -> usize {
        self.entries[index].number
    }

    /// The fields of row `index`.
    ///
    /// # Errors
    /// [`Error::Row`] where the row is not UTF-8, not JSON, or not an object.
    pub fn get(&self, index: usize) -> Result<Map<String, Value>> {
        let entry = self.entries[index];
        let fault = |message: String| Error::row(&self.path, entry.number, message);
        let bytes = self.bytes(entry)?;
        let text = String::from_utf8(bytes).map_err(|error| {
            fault(format!(
                "not UTF-8: byte {} of the row is no character",
                error.utf8_error().valid_up_to() + 1
            ))
        })?;
        if self.is_text {
            return Ok(Map::from_iter([("text".to_owned(), Value::String(text))]));
        }
        match serde_json::from_str(&text) {
            Ok(Value::Object(fields)) => Ok(fields),
            Ok(other) => Err(fault(format!("expected an object, got {}", kind(&other)))),
            Err(error) => Err(broken(&self.path, entry.line, &error)),
        }
    }

    fn bytes(&self, entry: Entry) -> Result<Vec<u8>> {
        // A thread that died while it held the file leaves only a position behind, which is set here.
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let mut bytes = vec![0; entry.len];
        file.seek(SeekFrom::Start(entry.offset))
            .and_then(|_| file.read_exact(&mut bytes))
            .map_err(Error::io(&self.path))?;
        Ok(bytes)
    }
}

/// The error of a JSON text that begins in `line` of `path`.
fn broken(path: &Path, line: usize, error: &serde_json::Error) -> Error {
    let message = error.to_string();
    // The parser counts lines from the text's own beginning.
    let what = message.rsplit_once(" at line ").map_or(message.as_str(), |(what, _)| what);
    let column = error.column();
    Error::row(path, line + error.line().saturating_sub(1), format!("broken JSON: {what} at column {column}"))
}

fn has_extension(path: &Path, extension: &str) -> bool {
    path.extension().is_some_and(|found| found.eq_ignore_ascii_case(extension))
}

fn begins_array(head: &[u8]) -> bool {
    let head = head.strip_prefix(BYTE_ORDER_MARK).unwrap_or(head);
    head.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[')
}

/// Some editors put it before UTF-8 text, where it means nothing.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// A JSON value's kind with its article, for messages.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
