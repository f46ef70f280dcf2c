//! Values of GGUF metadata.

/// A metadata value. The format's widths of integers and floats are merged.
#[derive(Debug, Clone, PartialEq)]
pub enum GgufValue {
    /// Any integer type.
    Integer(i64),
    /// Either float type.
    Float(f64),
    /// A boolean.
    Flag(bool),
    /// A string.
    Text(String),
    /// An array of bytes, to be written; read, they are integers.
    Bytes(Vec<u8>),
    /// An array of integers.
    Integers(Vec<i64>),
    /// An array of floats.
    Floats(Vec<f64>),
    /// An array of booleans.
    Flags(Vec<bool>),
    /// An array of strings.
    Texts(Vec<String>),
    /// An array of arrays.
    Lists(Vec<GgufValue>),
}

impl GgufValue {
    /// What it is, for messages.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Integer(number) => format!("the integer {number}"),
            Self::Float(number) => format!("the number {number}"),
            Self::Flag(flag) => format!("{flag}"),
            Self::Text(_) => "a string".into(),
            Self::Bytes(bytes) => format!("an array of {} bytes", bytes.len()),
            Self::Integers(numbers) => format!("an array of {} integers", numbers.len()),
            Self::Floats(numbers) => format!("an array of {} numbers", numbers.len()),
            Self::Flags(flags) => format!("an array of {} booleans", flags.len()),
            Self::Texts(texts) => format!("an array of {} strings", texts.len()),
            Self::Lists(lists) => format!("an array of {} arrays", lists.len()),
        }
    }
}
