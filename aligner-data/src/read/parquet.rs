//! Parquet files: their rows as JSON lines in a temporary file.
//!
//! A Parquet row is reached only by decoding all rows of its group before it, so the file is read
//! once, in order, and its rows are spooled to disk: random access costs no memory then.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use aligner_core::{Error, Result};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row};
use serde_json::{Map, Value};

use super::Entry;

pub(super) fn spool(path: &Path) -> Result<(File, Vec<Entry>)> {
    let file = File::open(path).map_err(Error::io(path))?;
    let broken = |error: parquet::errors::ParquetError| Error::format(path, format!("parquet: {error}"));
    let reader = SerializedFileReader::new(file).map_err(broken)?;
    let spooled = tempfile::tempfile().map_err(Error::io(std::env::temp_dir()))?;
    let mut out = BufWriter::new(&spooled);
    let mut entries = Vec::new();
    let mut offset = 0;
    for (at, row) in reader.get_row_iter(None).map_err(broken)?.enumerate() {
        let number = at + 1;
        let row = row.map_err(|error| Error::row(path, number, format!("parquet: {error}")))?;
        let text = object(row).map_err(|message| Error::row(path, number, message))?.to_string();
        out.write_all(text.as_bytes()).map_err(Error::io(std::env::temp_dir()))?;
        entries.push(Entry { offset, len: text.len(), number, line: number });
        offset += text.len() as u64;
    }
    out.flush().map_err(Error::io(std::env::temp_dir()))?;
    drop(out);
    Ok((spooled, entries))
}

fn object(row: Row) -> Result<Value, String> {
    let fields = row.into_columns().into_iter();
    let fields = fields.map(|(name, field)| Ok((name, value(field)?)));
    Ok(Value::Object(fields.collect::<Result<Map<_, _>, String>>()?))
}

fn value(field: Field) -> Result<Value, String> {
    Ok(match field {
        Field::Null => Value::Null,
        Field::Bool(value) => value.into(),
        Field::Byte(value) => value.into(),
        Field::Short(value) => value.into(),
        Field::Int(value) | Field::Date(value) | Field::TimeMillis(value) => value.into(),
        Field::Long(value)
        | Field::TimeMicros(value)
        | Field::TimestampMillis(value)
        | Field::TimestampMicros(value) => value.into(),
        Field::UByte(value) => value.into(),
        Field::UShort(value) => value.into(),
        Field::UInt(value) => value.into(),
        Field::ULong(value) => value.into(),
        Field::Float16(value) => f64::from(value).into(),
        Field::Float(value) => f64::from(value).into(),
        Field::Double(value) => value.into(),
        Field::Str(text) => text.into(),
        Field::Bytes(bytes) => {
            let text = std::str::from_utf8(bytes.data()).map_err(|_| "a column of bytes is not UTF-8")?;
            text.into()
        }
        Field::Group(row) => object(row)?,
        Field::ListInternal(list) => list.elements().iter().cloned().map(value).collect::<Result<_, _>>()?,
        Field::MapInternal(map) => {
            let entries = map.entries().iter().map(|(key, item)| Ok((key.to_string(), value(item.clone())?)));
            Value::Object(entries.collect::<Result<Map<_, _>, String>>()?)
        }
        other @ Field::Decimal(_) => {
            return Err(format!("a column of `{other}` cannot be read: expected texts, numbers or lists"));
        }
    })
}
