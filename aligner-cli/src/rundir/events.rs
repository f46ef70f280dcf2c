//! `TensorBoard` event files: `TFRecord` framing around hand-written protocol buffers.
//!
//! The messages are `tensorflow.Event` and `tensorflow.Summary` (event.proto, summary.proto), of
//! which scalars need six fields: no generated code is worth that.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Appends scalars to one event file.
#[derive(Debug)]
pub(crate) struct EventWriter {
    file: File,
}

impl EventWriter {
    /// Starts a new file in `dir`; events of earlier files at `first_step` and after are void.
    pub(crate) fn create(dir: &Path, first_step: u64) -> io::Result<Self> {
        let now = wall_time();
        let name = format!(
            "events.out.tfevents.{}.{:06}.{}",
            now as u64,
            (now.fract() * 1e6) as u64,
            std::process::id()
        );
        let mut writer = Self { file: File::create(dir.join(name))? };
        writer.write(&event(now, 0, &field_bytes(3, b"brain.Event:2")))?;
        if first_step > 0 {
            // SessionLog { status: START }: a reader drops what a killed run logged past its checkpoint.
            let session_log = field_varint(1, 1);
            writer.write(&event(now, first_step, &field_bytes(7, &session_log)))?;
        }
        Ok(writer)
    }

    /// Writes all `values` of one step as one event.
    pub(crate) fn scalars<'a>(
        &mut self,
        step: u64,
        values: impl IntoIterator<Item = (&'a str, f64)>,
    ) -> io::Result<()> {
        let mut summary = Vec::new();
        for (tag, value) in values {
            let mut entry = field_bytes(1, tag.as_bytes());
            entry.extend(key(2, 5));
            entry.extend((value as f32).to_le_bytes());
            summary.extend(field_bytes(1, &entry));
        }
        self.write(&event(wall_time(), step, &field_bytes(5, &summary)))
    }

    fn write(&mut self, data: &[u8]) -> io::Result<()> {
        self.file.write_all(&record(data))
    }
}

fn wall_time() -> f64 {
    // A clock before 1970 is not worth an error in a log.
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// One `TFRecord`: length, its checksum, data, its checksum.
fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut out = Vec::with_capacity(data.len() + 16);
    out.extend(length);
    out.extend(masked_crc(&length).to_le_bytes());
    out.extend(data);
    out.extend(masked_crc(data).to_le_bytes());
    out
}

/// CRC-32C, rotated and offset, so that a checksum of data that holds checksums stays good.
fn masked_crc(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

fn event(wall_time: f64, step: u64, what: &[u8]) -> Vec<u8> {
    let mut out = key(1, 1);
    out.extend(wall_time.to_le_bytes());
    out.extend(field_varint(2, step));
    out.extend(what);
    out
}

fn key(field: u32, wire_type: u32) -> Vec<u8> {
    varint(u64::from(field << 3 | wire_type))
}

fn field_varint(field: u32, value: u64) -> Vec<u8> {
    [key(field, 0), varint(value)].concat()
}

fn field_bytes(field: u32, value: &[u8]) -> Vec<u8> {
    [key(field, 2), varint(value.len() as u64), value.to_vec()].concat()
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut out = Vec::new();
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Splits a file into records and checks every length and checksum.
    fn records(mut bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut out = Vec::new();
        while !bytes.is_empty() {
            let (length, rest) = bytes.split_at(8);
            let (length_crc, rest) = rest.split_at(4);
            assert_eq!(length_crc, masked_crc(length).to_le_bytes());
            let (data, rest) = rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
            let (data_crc, rest) = rest.split_at(4);
            assert_eq!(data_crc, masked_crc(data).to_le_bytes());
            out.push(data.to_vec());
            bytes = rest;
        }
        out
    }

    #[test]
    fn checksums_are_crc32c_masked() {
        // RFC 3720, B.4: the CRC-32C of 32 zero bytes is 0x8a9136aa.
        assert_eq!(masked_crc(&[0; 32]), 0x8a91_36aa_u32.rotate_right(15).wrapping_add(0xa282_ead8));
        // The first record of every TensorBoard file made by TensorFlow is 24 bytes of event: its
        // length's checksum as TensorFlow wrote it.
        assert_eq!(masked_crc(&24u64.to_le_bytes()), 0x224b_7fa3);
    }

    #[test]
    fn scalars_come_back() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = EventWriter::create(dir.path(), 7).unwrap();
        writer.scalars(300, [("loss", 0.5), ("rewards/margins", -2.0)]).unwrap();
        let path = std::fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap().path();
        let records = records(&std::fs::read(path).unwrap());
        assert_eq!(records.len(), 3);
        assert!(records[0].ends_with(b"\x1a\x0dbrain.Event:2"));
        assert!(records[1].ends_with(b"\x10\x07\x3a\x02\x08\x01"), "session start at step 7");
        let scalars = &records[2][9..];
        let mut expected = vec![0x10, 0xac, 0x02, 0x2a, 11 + 2 + 22 + 2, 0x0a, 11, 0x0a, 4];
        expected.extend(b"loss\x15");
        expected.extend(0.5f32.to_le_bytes());
        expected.extend([0x0a, 22, 0x0a, 15]);
        expected.extend(b"rewards/margins\x15");
        expected.extend((-2.0f32).to_le_bytes());
        assert_eq!(scalars, expected);
    }
}
