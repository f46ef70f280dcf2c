//! The pickle of a dictionary of tensors, read without running it.
//!
//! A pickle is a program. Of its instructions those are known that dictionaries, lists, tuples, numbers and strings
//! need; of the functions that it may call, those that rebuild a tensor and an ordered dictionary, which are
//! done here. Anything else is an error that names it. Containers lie in tables and values refer to them by
//! number: nothing is copied by following references, and no depth of nesting is a depth of calls.

mod calls;

use std::collections::HashMap;
use std::rc::Rc;

use super::tensor::Strided;
use calls::{Global, Storage};

/// Most values on the stack at a time; a pickler sets items by the thousand.
const MAX_STACK: usize = 1 << 16;

/// What a pickle has built.
#[derive(Debug, Clone)]
enum Value {
    None,
    Integer(i64),
    /// A flag, or a number with a fraction: nothing here asks for its value.
    Other,
    Text(Rc<str>),
    /// Of a tuple or a list.
    Row(usize),
    Dictionary(usize),
    Global(Global),
    Storage(usize),
    Tensor(usize),
}

/// Tensors by name.
pub(super) type Tensors = Vec<(String, Strided)>;

/// Reads a dictionary of tensors.
///
/// # Errors
/// In words: an instruction or a name that is not of such a dictionary, and a pickle that ends too soon.
pub(super) fn tensors(bytes: &[u8]) -> Result<Tensors, String> {
    let mut machine = Machine { bytes, ..Machine::default() };
    let top = machine.run()?;
    let Value::Dictionary(at) = top else {
        return Err(format!("expected a dictionary of tensors, got {}", machine.describe(&top)));
    };
    let mut found = Tensors::new();
    for (key, value) in &machine.dictionaries[at] {
        match (key, value) {
            (Value::Text(name), Value::Tensor(tensor)) => {
                found.push((name.to_string(), machine.tensors[*tensor].clone()));
            }
            (Value::Text(name), other) => {
                let got = machine.describe(other);
                return Err(format!(
                    "key {name:?}: expected a tensor, got {got}; is it a checkpoint of training?"
                ));
            }
            (other, _) => {
                return Err(format!("expected a tensor's name, got {}", machine.describe(other)));
            }
        }
    }
    Ok(found)
}

#[derive(Default)]
struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    stack: Vec<Value>,
    marks: Vec<usize>,
    memo: HashMap<u32, Value>,
    rows: Vec<Vec<Value>>,
    dictionaries: Vec<Vec<(Value, Value)>>,
    storages: Vec<Storage>,
    tensors: Vec<Strided>,
}

impl<'a> Machine<'a> {
    /// Runs to the end; the value that is left.
    fn run(&mut self) -> Result<Value, String> {
        loop {
            let opcode = self.u8()?;
            if opcode == b'.' {
                return self.pop();
            }
            self.step(opcode)?;
            if self.stack.len() >= MAX_STACK {
                return Err(format!("the pickle has {MAX_STACK} values and more at a time"));
            }
        }
    }

    /// One instruction, by its name in Python's `pickletools`.
    fn step(&mut self, opcode: u8) -> Result<(), String> {
        match opcode {
            // PROTO, FRAME
            0x80 => drop(self.take(1)?),
            0x95 => drop(self.take(8)?),
            // NONE, NEWTRUE, NEWFALSE, BINFLOAT
            b'N' => self.push(Value::None),
            0x88 | 0x89 => self.push(Value::Other),
            b'G' => {
                self.take(8)?;
                self.push(Value::Other);
            }
            // BININT1, BININT2, BININT, LONG1
            b'K' => self.unsigned(1)?,
            b'M' => self.unsigned(2)?,
            b'J' => {
                let number = i32::from_le_bytes(self.array()?);
                self.push(Value::Integer(number.into()));
            }
            0x8A => self.long()?,
            // SHORT_BINUNICODE, BINUNICODE, SHORT_BINSTRING
            0x8C | b'U' => self.text(1)?,
            b'X' => self.text(4)?,
            // EMPTY_TUPLE, EMPTY_LIST, EMPTY_DICT
            b')' | b']' => self.row(Vec::new()),
            b'}' => self.dictionary(),
            // MARK, TUPLE, TUPLE1, TUPLE2, TUPLE3
            b'(' => self.marks.push(self.stack.len()),
            b't' => {
                let values = self.marked()?;
                self.row(values);
            }
            0x85..=0x87 => {
                let from = self.stack.len().checked_sub(usize::from(opcode - 0x84)).ok_or(EMPTY)?;
                let values = self.stack.split_off(from);
                self.row(values);
            }
            // APPEND, APPENDS, SETITEM, SETITEMS
            b'a' => {
                let value = self.pop()?;
                self.append(vec![value])?;
            }
            b'e' => {
                let values = self.marked()?;
                self.append(values)?;
            }
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.set(vec![key, value])?;
            }
            b'u' => {
                let values = self.marked()?;
                self.set(values)?;
            }
            // BINPUT, LONG_BINPUT, MEMOIZE, BINGET, LONG_BINGET
            b'q' => self.remember(1)?,
            b'r' => self.remember(4)?,
            0x94 => {
                let at = self.memo.len() as u32;
                self.memo.insert(at, self.stack.last().ok_or(EMPTY)?.clone());
            }
            b'h' => self.recall(1)?,
            b'j' => self.recall(4)?,
            // GLOBAL, STACK_GLOBAL, BINPERSID, REDUCE, BUILD
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.global(module, name)?;
            }
            0x93 => {
                let (Value::Text(name), Value::Text(module)) = (self.pop()?, self.pop()?) else {
                    return Err("the pickle names something by what is no text".into());
                };
                self.global(&module, &name)?;
            }
            b'Q' => self.persistent()?,
            b'R' => self.reduce()?,
            b'b' => self.build()?,
            other => {
                return Err(format!(
                    "the pickle's instruction {other:#04x} is not one of a dictionary of tensors"
                ));
            }
        }
        Ok(())
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], String> {
        let bytes = self.bytes.get(self.at..self.at.saturating_add(len)).ok_or("the pickle ends too soon")?;
        self.at += len;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        Ok(self.take(N)?.try_into().expect("N bytes were taken"))
    }

    fn u8(&mut self) -> Result<u8, String> {
        Ok(self.take(1)?[0])
    }

    /// A number of so many bytes.
    fn number(&mut self, bytes: usize) -> Result<u32, String> {
        let bytes = self.take(bytes)?;
        Ok(bytes.iter().rev().fold(0, |number, &byte| number << 8 | u32::from(byte)))
    }

    fn line(&mut self) -> Result<&'a str, String> {
        let rest = &self.bytes[self.at..];
        let len = rest.iter().position(|&byte| byte == b'\n').ok_or("the pickle ends too soon")?;
        self.at += len + 1;
        std::str::from_utf8(&rest[..len]).map_err(|_| "a name in the pickle is not UTF-8".into())
    }

    fn push(&mut self, value: Value) {
        self.stack.push(value);
    }

    fn pop(&mut self) -> Result<Value, String> {
        let floor = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() <= floor {
            return Err(EMPTY.into());
        }
        self.stack.pop().ok_or_else(|| EMPTY.into())
    }

    fn marked(&mut self) -> Result<Vec<Value>, String> {
        let mark = self.marks.pop().filter(|&mark| mark <= self.stack.len()).ok_or(EMPTY)?;
        Ok(self.stack.split_off(mark))
    }

    fn row(&mut self, values: Vec<Value>) {
        self.rows.push(values);
        self.push(Value::Row(self.rows.len() - 1));
    }

    fn dictionary(&mut self) {
        self.dictionaries.push(Vec::new());
        self.push(Value::Dictionary(self.dictionaries.len() - 1));
    }

    fn unsigned(&mut self, bytes: usize) -> Result<(), String> {
        let number = self.number(bytes)?;
        self.push(Value::Integer(number.into()));
        Ok(())
    }

    /// A number of up to eight bytes, with its sign.
    fn long(&mut self) -> Result<(), String> {
        let len = usize::from(self.u8()?);
        let bytes = self.take(len)?;
        if len > 8 {
            return Err(format!("a number in the pickle has {len} bytes"));
        }
        let fill = if bytes.last().is_some_and(|&byte| byte & 0x80 != 0) { 0xFF } else { 0 };
        let mut whole = [fill; 8];
        whole[..len].copy_from_slice(bytes);
        self.push(Value::Integer(i64::from_le_bytes(whole)));
        Ok(())
    }

    fn text(&mut self, bytes: usize) -> Result<(), String> {
        let len = self.number(bytes)? as usize;
        let text = std::str::from_utf8(self.take(len)?).map_err(|_| "a text in the pickle is not UTF-8")?;
        self.push(Value::Text(text.into()));
        Ok(())
    }

    fn remember(&mut self, bytes: usize) -> Result<(), String> {
        let at = self.number(bytes)?;
        let value = self.stack.last().ok_or(EMPTY)?.clone();
        self.memo.insert(at, value);
        Ok(())
    }

    fn recall(&mut self, bytes: usize) -> Result<(), String> {
        let at = self.number(bytes)?;
        let value = self.memo.get(&at).ok_or("the pickle recalls what it has not remembered")?.clone();
        self.push(value);
        Ok(())
    }

    fn append(&mut self, values: Vec<Value>) -> Result<(), String> {
        let Some(&Value::Row(at)) = self.stack.last() else {
            return Err("the pickle appends to what is no list".into());
        };
        self.rows[at].extend(values);
        Ok(())
    }

    fn set(&mut self, values: Vec<Value>) -> Result<(), String> {
        let Some(&Value::Dictionary(at)) = self.stack.last() else {
            return Err("the pickle sets an item of what is no dictionary".into());
        };
        let mut values = values.into_iter();
        while let Some(key) = values.next() {
            let value = values.next().ok_or("a key in the pickle has no value")?;
            self.dictionaries[at].push((key, value));
        }
        Ok(())
    }

    fn describe(&self, value: &Value) -> String {
        match value {
            Value::None => "None".into(),
            Value::Integer(number) => format!("the number {number}"),
            Value::Other => "a flag or a number".into(),
            Value::Text(text) => format!("the text {text:?}"),
            Value::Row(at) => format!("a list of {}", self.rows[*at].len()),
            Value::Dictionary(at) => format!("a dictionary of {}", self.dictionaries[*at].len()),
            Value::Global(global) => format!("{global:?}"),
            Value::Storage(_) => "a storage".into(),
            Value::Tensor(_) => "a tensor".into(),
        }
    }
}

const EMPTY: &str = "the pickle takes a value that is not there";
