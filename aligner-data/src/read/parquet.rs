//! Parquet files: their rows as JSON lines in a temporary file.
//!
//! A Parquet row is reached only by decoding all rows of its group before it, so the file is read
//! once, in order, and its rows are spooled to disk: random access costs no memory then. Columns that
//! no schema reads and that JSON cannot say, as images and decimals, are not read.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use aligner_core::{Error, Result};
use parquet::basic::{Compression, ConvertedType, LogicalType, Type as Physical};
use parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData, RowGroupMetaData};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row};
use parquet::schema::types::{Type, TypePtr};
use serde_json::{Map, Value};

use super::{Entry, spool_rows};
use crate::Format;

pub(super) fn spool(path: &Path) -> Result<(File, Vec<Entry>)> {
    let file = File::open(path).map_err(Error::io(path))?;
    let broken = |error: parquet::errors::ParquetError| Error::format(path, format!("parquet: {error}"));
    let reader = SerializedFileReader::new(file).map_err(broken)?;
    let columns = columns(path, reader.metadata())?;
    let rows = reader.get_row_iter(Some(columns)).map_err(broken)?.enumerate().map(|(at, row)| {
        let number = at + 1;
        let row = row.map_err(|error| Error::row(path, number, format!("parquet: {error}")))?;
        Ok(object(row).map_err(|message| Error::row(path, number, message))?.to_string())
    });
    spool_rows(rows)
}

/// The part of the file's schema that is read: what the schemas of rows know, and of the rest what JSON
/// can say.
fn columns(path: &Path, metadata: &ParquetMetaData) -> Result<Type> {
    let schema = metadata.file_metadata().schema();
    let mut kept: Vec<TypePtr> = Vec::new();
    for column in schema.get_fields() {
        let name = column.name();
        // Old writers do not say that their bytes are text, but a schema that reads them does.
        match unreadable(column, Format::reads(name)).or_else(|| compressed(name, metadata)) {
            None => kept.push(Arc::clone(column)),
            Some(fault) if Format::reads(name) => {
                return Err(Error::format(path, format!("parquet: column `{name}`: {fault}")));
            }
            Some(fault) => tracing::debug!(column = name, fault, "this column is not read"),
        }
    }
    if kept.is_empty() {
        let names: Vec<&str> = schema.get_fields().iter().map(|column| column.name()).collect();
        let message = format!("parquet: none of its columns can be read: {}", names.join(", "));
        return Err(Error::format(path, message));
    }
    let part = Type::group_type_builder(schema.name()).with_fields(kept).build();
    part.map_err(|error| Error::format(path, format!("parquet: {error}")))
}

/// What in a column no JSON can say; none where all of it can be read.
fn unreadable(column: &Type, bytes_are_text: bool) -> Option<String> {
    if !column.is_primitive() {
        return column.get_fields().iter().find_map(|part| unreadable(part, bytes_are_text));
    }
    let (physical, info) = (column.get_physical_type(), column.get_basic_info());
    let converted = info.converted_type();
    let readable = match physical {
        Physical::BOOLEAN | Physical::FLOAT | Physical::DOUBLE | Physical::INT96 => true,
        Physical::INT32 | Physical::INT64 => converted != ConvertedType::DECIMAL,
        Physical::BYTE_ARRAY => match converted {
            ConvertedType::UTF8 | ConvertedType::ENUM | ConvertedType::JSON => true,
            ConvertedType::NONE => bytes_are_text,
            _ => false,
        },
        Physical::FIXED_LEN_BYTE_ARRAY => info.logical_type_ref() == Some(&LogicalType::Float16),
    };
    (!readable).then(|| {
        let what =
            if converted == ConvertedType::NONE { physical.to_string() } else { converted.to_string() };
        format!("its type is {what}; expected texts, numbers or lists of them")
    })
}

/// The compression of a column, where this program does not read it.
fn compressed(name: &str, metadata: &ParquetMetaData) -> Option<String> {
    let chunks = metadata.row_groups().iter().flat_map(RowGroupMetaData::columns);
    let own = chunks.filter(|chunk| chunk.column_path().parts().first().is_some_and(|part| part == name));
    let unknown = own.map(ColumnChunkMetaData::compression).find(|compression| {
        matches!(compression, Compression::ZSTD(_) | Compression::BROTLI(_) | Compression::LZO)
    })?;
    let codec = unknown.to_string();
    let codec = codec.split('(').next().unwrap_or_default();
    Some(format!(
        "it is compressed with {codec}; write the file anew with snappy, gzip, lz4 or no compression"
    ))
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

#[cfg(test)]
mod tests {
    use parquet::basic::ZstdLevel;
    use parquet::file::metadata::FileMetaData;
    use parquet::schema::parser::parse_message_type;
    use parquet::schema::types::SchemaDescriptor;

    use super::*;

    fn zstd(schema: &str) -> ParquetMetaData {
        let schema = Arc::new(SchemaDescriptor::new(Arc::new(parse_message_type(schema).unwrap())));
        let chunk = |at: usize| {
            let codec = if at == 0 { Compression::ZSTD(ZstdLevel::default()) } else { Compression::SNAPPY };
            ColumnChunkMetaData::builder(schema.column(at)).set_compression(codec).build().unwrap()
        };
        let chunks = (0..schema.num_columns()).map(chunk).collect();
        let group =
            RowGroupMetaData::builder(Arc::clone(&schema)).set_column_metadata(chunks).build().unwrap();
        ParquetMetaData::new(FileMetaData::new(1, 0, None, None, schema, None), vec![group])
    }

    #[test]
    fn a_codec_that_is_not_read_is_named_with_its_column() {
        let needed = zstd("message schema { REQUIRED BYTE_ARRAY text (UTF8); REQUIRED INT32 a; }");
        let message = columns(Path::new("a.parquet"), &needed).unwrap_err().to_string();
        assert!(
            message.contains("a.parquet: parquet: column `text`: it is compressed with ZSTD;"),
            "{message}"
        );
        let other =
            zstd("message schema { REQUIRED BYTE_ARRAY note (UTF8); REQUIRED BYTE_ARRAY text (UTF8); }");
        let kept = columns(Path::new("a.parquet"), &other).unwrap();
        assert_eq!(kept.get_fields().iter().map(|column| column.name()).collect::<Vec<_>>(), ["text"]);
    }

    #[test]
    fn a_file_of_pictures_alone_has_no_rows_to_read() {
        let schema = zstd("message schema { REQUIRED BYTE_ARRAY photo; }");
        let message = columns(Path::new("a.parquet"), &schema).unwrap_err().to_string();
        assert!(message.contains("none of its columns can be read: photo"), "{message}");
    }
}
