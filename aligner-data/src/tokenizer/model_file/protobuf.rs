//! The fields of a protocol buffer's message, which borrow from its bytes: nothing is taken on trust, and no
//! memory is taken at all.

/// What a field holds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Held<'a> {
    Number(u64),
    Fixed64([u8; 8]),
    Bytes(Message<'a>),
    Fixed32([u8; 4]),
}

/// A field's number, and what it holds.
pub(super) type Field<'a> = (u64, Held<'a>);

/// A stretch of a file: a message, a text, or bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Message<'a> {
    pub(super) bytes: &'a [u8],
    /// Where it begins in the file, for messages.
    pub(super) start: usize,
}

impl<'a> Message<'a> {
    /// The fields, in the file's order; none follows an error.
    pub(super) fn fields(self) -> impl Iterator<Item = Result<Field<'a>, String>> {
        let mut reader = Reader { message: self, at: 0 };
        let mut is_broken = false;
        std::iter::from_fn(move || {
            if is_broken || reader.at == reader.message.bytes.len() {
                return None;
            }
            let field = reader.field();
            is_broken = field.is_err();
            Some(field)
        })
    }
}

struct Reader<'a> {
    message: Message<'a>,
    at: usize,
}

impl<'a> Reader<'a> {
    fn error(&self, message: &str) -> String {
        format!(
            "byte {}: {message}; is this a SentencePiece model, and is it whole?",
            self.message.start + self.at
        )
    }

    fn field(&mut self) -> Result<Field<'a>, String> {
        let key = self.varint()?;
        let held = match key & 7 {
            0 => Held::Number(self.varint()?),
            1 => Held::Fixed64(self.array()?),
            2 => {
                let len = self.varint()?;
                Held::Bytes(self.take(len)?)
            }
            5 => Held::Fixed32(self.array()?),
            other => return Err(self.error(&format!("fields of wire type {other} are not known"))),
        };
        Ok((key >> 3, held))
    }

    fn varint(&mut self) -> Result<u64, String> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let [byte] = self.array()?;
            number |= u64::from(byte & 0x7F) << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err(self.error("a number has no end"))
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let bytes = self.take(N as u64)?.bytes;
        bytes.try_into().map_err(|_| self.error("bytes are missing"))
    }

    fn take(&mut self, len: u64) -> Result<Message<'a>, String> {
        let left = &self.message.bytes[self.at..];
        let taken = usize::try_from(len).ok().and_then(|len| left.get(..len));
        let Some(bytes) = taken else {
            return Err(self.error(&format!("{len} bytes should follow, but {} are left", left.len())));
        };
        let start = self.message.start + self.at;
        self.at += bytes.len();
        Ok(Message { bytes, start })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(bytes: &[u8]) -> Result<Vec<Field<'_>>, String> {
        Message { bytes, start: 0 }.fields().collect()
    }

    #[test]
    fn fields_of_every_wire_type_are_read() {
        let bytes = [0x08, 0xAC, 0x02, 0x12, 2, b'h', b'i', 0x1D, 1, 2, 3, 4, 0x21, 1, 2, 3, 4, 5, 6, 7, 8];
        let expected = [
            (1, Held::Number(300)),
            (2, Held::Bytes(Message { bytes: b"hi", start: 5 })),
            (3, Held::Fixed32([1, 2, 3, 4])),
            (4, Held::Fixed64([1, 2, 3, 4, 5, 6, 7, 8])),
        ];
        assert_eq!(fields(&bytes).unwrap(), expected);
    }

    #[test]
    fn what_is_cut_short_or_has_no_end_is_named_by_its_place() {
        for (bytes, expected) in [
            (&[0x08][..], "byte 1: 1 bytes should follow, but 0 are left"),
            (&[0x08, 1, 0x12, 200], "byte 4: 1 bytes should follow"),
            (&[0x12, 9, b'h'], "byte 2: 9 bytes should follow, but 1 are left"),
            (
                &[0x12, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 1],
                "byte 11: 18446744073709551615",
            ),
            (&[0xFF; 11], "a number has no end"),
            (&[0x0B], "wire type 3"),
        ] {
            let message = fields(bytes).unwrap_err();
            assert!(message.contains(expected), "{bytes:?}: {message}");
        }
    }
}
