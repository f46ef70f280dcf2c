//! Parquet files of other writers: codecs, and columns of types that no row needs.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use aligner_data::{Dataset, DatasetConfig};
use parquet::basic::{Compression, GzipLevel};
use parquet::data_type::{ByteArray, ByteArrayType, FixedLenByteArray, FixedLenByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

use crate::scene::tokenizer;

/// Writes three rows: texts in `text`, and whatever `column` says in `extra`.
fn write(path: &Path, extra: &str, fixed_bytes: usize, codec: Compression) {
    let schema = format!("message schema {{ REQUIRED BYTE_ARRAY text (UTF8); {extra} }}");
    let schema = Arc::new(parse_message_type(&schema).unwrap());
    let properties = WriterProperties::builder().set_compression(codec).build();
    let file = File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, Arc::new(properties)).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let texts = ["one", "two", "three"].map(|text| ByteArray::from(text.repeat(20).as_str()));
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<ByteArrayType>().write_batch(&texts, None, None).unwrap();
    column.close().unwrap();
    while let Some(mut column) = group.next_column().unwrap() {
        let raw = [0xff, 0xfe, 0xfd, 0xfc];
        if fixed_bytes > 0 {
            let values = vec![FixedLenByteArray::from(raw[..fixed_bytes].to_vec()); 3];
            column.typed::<FixedLenByteArrayType>().write_batch(&values, None, None).unwrap();
        } else {
            let values = vec![ByteArray::from(raw.to_vec()); 3];
            column.typed::<ByteArrayType>().write_batch(&values, None, None).unwrap();
        }
        column.close().unwrap();
    }
    group.close().unwrap();
    writer.close().unwrap();
}

fn open(extra: &str, fixed_bytes: usize, codec: Compression) -> Result<Dataset, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.parquet");
    write(&path, extra, fixed_bytes, codec);
    Dataset::open(&DatasetConfig::new(&path), &tokenizer()).map_err(|error| error.to_string())
}

#[test]
fn the_cheap_codecs_are_read() {
    let gzip = Compression::GZIP(GzipLevel::default());
    for codec in
        [Compression::UNCOMPRESSED, Compression::SNAPPY, gzip, Compression::LZ4, Compression::LZ4_RAW]
    {
        let dataset = open("", 0, codec).unwrap_or_else(|error| panic!("{codec}: {error}"));
        let group = dataset.group(2).unwrap().unwrap();
        assert_eq!(group.samples[0].text, "three".repeat(20), "{codec}");
    }
}

#[test]
fn columns_that_no_schema_reads_may_have_any_type() {
    for (extra, fixed_bytes) in [
        ("REQUIRED BYTE_ARRAY photo;", 0),
        ("REQUIRED BYTE_ARRAY price (DECIMAL(9, 2));", 0),
        ("REQUIRED FIXED_LEN_BYTE_ARRAY (4) price (DECIMAL(9, 2));", 4),
        ("REQUIRED FIXED_LEN_BYTE_ARRAY (4) hash;", 4),
        ("REQUIRED group nested { REQUIRED BYTE_ARRAY bytes; }", 0),
    ] {
        let dataset =
            open(extra, fixed_bytes, Compression::SNAPPY).unwrap_or_else(|error| panic!("{extra}: {error}"));
        let group = dataset.group(0).unwrap().unwrap();
        assert_eq!((dataset.len(), group.metadata), (3, serde_json::json!({})), "{extra}");
    }
}

#[test]
fn columns_that_a_schema_reads_are_named_where_they_cannot_be_read() {
    let decimal = open("REQUIRED BYTE_ARRAY margin (DECIMAL(9, 2));", 0, Compression::SNAPPY).unwrap_err();
    assert!(decimal.contains("rows.parquet: parquet: column `margin`: its type is DECIMAL"), "{decimal}");
    // A picture is not left out silently.
    let image =
        open("REQUIRED group image { REQUIRED FIXED_LEN_BYTE_ARRAY (4) bytes; }", 4, Compression::SNAPPY);
    assert!(image.as_ref().unwrap_err().contains("column `image`"), "{image:?}");
}
