//! JSON arrays: where each element begins and ends, found without parsing them.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use aligner_core::{Error, Result};
use serde::de::IgnoredAny;

use super::{Entry, broken};

pub(super) fn index(path: &Path, file: &File) -> Result<Vec<Entry>> {
    scan(path, file).map_err(|error| first_fault(path).unwrap_or(error))
}

/// Where a parser first takes offence, which is nearer to the cause than where the scan noticed.
fn first_fault(path: &Path) -> Option<Error> {
    let reader = BufReader::new(File::open(path).ok()?);
    let error = serde_json::from_reader::<_, Vec<IgnoredAny>>(reader).err()?;
    Some(broken(path, 1, &error))
}

fn scan(path: &Path, file: &File) -> Result<Vec<Entry>> {
    let mut reader = BufReader::with_capacity(1 << 16, file);
    let mut scanner = Scanner::default();
    loop {
        let chunk = reader.fill_buf().map_err(Error::io(path))?;
        if chunk.is_empty() {
            break;
        }
        for &byte in chunk {
            scanner.push(byte).map_err(|message| Error::row(path, scanner.line, message))?;
        }
        let len = chunk.len();
        reader.consume(len);
    }
    match scanner.place {
        Place::After => Ok(scanner.entries),
        _ => Err(Error::row(path, scanner.line, "the JSON array does not end: expected `]`")),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Before,
    /// Where an element or, at first, the end may stand.
    Element {
        may_end: bool,
    },
    Inside {
        depth: usize,
        in_text: bool,
        escaped: bool,
    },
    /// In a number or a word, which nothing closes.
    Bare,
    Comma,
    After,
}

struct Scanner {
    place: Place,
    offset: u64,
    line: usize,
    start: u64,
    start_line: usize,
    entries: Vec<Entry>,
}

impl Default for Scanner {
    fn default() -> Self {
        Self { place: Place::Before, offset: 0, line: 1, start: 0, start_line: 1, entries: Vec::new() }
    }
}

impl Scanner {
    fn push(&mut self, byte: u8) -> Result<(), String> {
        self.place = match self.place {
            Place::Inside { depth, in_text, escaped } => self.inside(byte, depth, in_text, escaped),
            Place::Bare if byte.is_ascii_whitespace() || matches!(byte, b',' | b']') => {
                self.finish(self.offset);
                self.between(byte, Place::Comma)?
            }
            Place::Bare => Place::Bare,
            place => self.between(byte, place)?,
        };
        self.offset += 1;
        self.line += usize::from(byte == b'\n');
        Ok(())
    }

    fn between(&mut self, byte: u8, place: Place) -> Result<Place, String> {
        match (place, byte) {
            (place, b' ' | b'\t' | b'\r' | b'\n') => Ok(place),
            // The bytes of a byte order mark; anything else there would not have begun an array.
            (Place::Before, 0xef | 0xbb | 0xbf) => Ok(Place::Before),
            (Place::Before, b'[') => Ok(Place::Element { may_end: true }),
            (Place::Element { may_end: true } | Place::Comma, b']') => Ok(Place::After),
            (Place::Comma, b',') => Ok(Place::Element { may_end: false }),
            (Place::Element { .. }, b',' | b']' | b'}') => {
                Err(format!("broken JSON array: expected an element, got `{}`", byte as char))
            }
            (Place::Element { .. }, _) => {
                (self.start, self.start_line) = (self.offset, self.line);
                let depth = usize::from(matches!(byte, b'{' | b'['));
                let in_text = byte == b'"';
                Ok(if depth > 0 || in_text {
                    Place::Inside { depth, in_text, escaped: false }
                } else {
                    Place::Bare
                })
            }
            (Place::After, _) => Err("broken JSON array: there is more after its `]`".into()),
            (_, _) => {
                let after = self.entries.len();
                let got = byte.escape_ascii();
                Err(format!("broken JSON array: expected `,` or `]` after element {after}, got `{got}`"))
            }
        }
    }

    fn inside(&mut self, byte: u8, depth: usize, in_text: bool, escaped: bool) -> Place {
        let (depth, in_text, escaped) = match (in_text, byte) {
            (true, _) if escaped => (depth, true, false),
            (true, b'\\') => (depth, true, true),
            (true, b'"') => (depth, false, false),
            (true, _) | (false, b'"') => (depth, true, false),
            (false, b'{' | b'[') => (depth + 1, false, false),
            // The parser of the element says whether its brackets match.
            (false, b'}' | b']') => (depth - 1, false, false),
            (false, _) => (depth, false, false),
        };
        if depth == 0 && !in_text {
            self.finish(self.offset + 1);
            return Place::Comma;
        }
        Place::Inside { depth, in_text, escaped }
    }

    fn finish(&mut self, end: u64) {
        let number = self.entries.len() + 1;
        self.entries.push(Entry {
            offset: self.start,
            len: (end - self.start) as usize,
            number,
            line: self.start_line,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elements(text: &str) -> Result<Vec<&str>, String> {
        let mut scanner = Scanner::default();
        for byte in text.bytes() {
            scanner.push(byte)?;
        }
        if scanner.place != Place::After {
            return Err("no end".into());
        }
        let range = |entry: &Entry| entry.offset as usize..entry.offset as usize + entry.len;
        Ok(scanner.entries.iter().map(|entry| &text[range(entry)]).collect())
    }

    #[test]
    fn elements_are_found_whatever_their_text_holds() {
        let text = " [ {\"a\": \"]},\\\"\\\\\"} ,[1,[2]],\"x,y\", 12 ,null]\n";
        let expected = ["{\"a\": \"]},\\\"\\\\\"}", "[1,[2]]", "\"x,y\"", "12", "null"];
        assert_eq!(elements(text).unwrap(), expected);
        assert_eq!(elements("[]").unwrap(), Vec::<&str>::new());
    }

    #[test]
    fn faults_between_elements_are_named() {
        for (text, expected) in [
            ("[{}{}]", "expected `,` or `]` after element 1"),
            ("[{},]", "expected an element, got `]`"),
            ("[{}] x", "more after"),
            ("[,]", "expected an element"),
            ("[{}", "no end"),
            ("[\"x]", "no end"),
        ] {
            let message = elements(text).unwrap_err();
            assert!(message.contains(expected), "{text}: {message}");
        }
    }
}
