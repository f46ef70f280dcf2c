//! Files of lines: one row a line, blank lines between them ignored.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use aligner_core::{Error, Result};

use super::{BYTE_ORDER_MARK, Entry};

pub(super) fn index(path: &Path, file: &File) -> Result<Vec<Entry>> {
    let mut reader = BufReader::with_capacity(1 << 16, file);
    let mut entries = Vec::new();
    let mut line = Vec::new();
    let mut offset = 0;
    for number in 1.. {
        line.clear();
        let read = reader.read_until(b'\n', &mut line).map_err(Error::io(path))?;
        if read == 0 {
            break;
        }
        let skip = if number == 1 && line.starts_with(BYTE_ORDER_MARK) { BYTE_ORDER_MARK.len() } else { 0 };
        let content = line[skip..].trim_ascii_end();
        if !content.is_empty() {
            entries.push(Entry { offset: offset + skip as u64, len: content.len(), number, line: number });
        }
        offset += read as u64;
    }
    Ok(entries)
}
