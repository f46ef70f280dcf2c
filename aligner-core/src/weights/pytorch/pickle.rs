//! The pickle of a dictionary of tensors, read without running it.
//!
//! A pickle is a program. Of its instructions those are known that dictionaries, lists, tuples, numbers and strings
//! need; of the functions that it may call, those that rebuild a tensor and an ordered dictionary, which are
//! done here. Anything else is an error that names it. Containers lie in tables and values refer to them by
//! number: nothing is copied by following references, and no depth of nesting is a depth of calls.

use std::collections::HashMap;
use std::rc::Rc;

use super::tensor::{Element, Strided};

/// Most values on the stack at a time; a pickler sets items by the thousand.
const MAX_STACK: usize = 1 << 16;
/// Most arguments of a call, and more than the axes of any tensor.
const MAX_ARGUMENTS: usize = 16;

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

/// What a pickle may name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Global {
    OrderedDict,
    /// `_rebuild_tensor_v2`.
    Tensor,
    /// `_rebuild_tensor_v3`, for element types without a class of storages.
    TypedTensor,
    Parameter,
    Storage(Element),
    /// A storage of bytes.
    Untyped,
    Dtype(Element),
}

/// A run of elements in a record of the archive.
#[derive(Debug, Clone)]
struct Storage {
    key: Rc<str>,
    /// None of a storage of bytes.
    element: Option<Element>,
    /// Elements, or bytes.
    len: u64,
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
            if self.stack.len() > MAX_STACK {
                return Err(format!("the pickle has more than {MAX_STACK} values at a time"));
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

    fn global(&mut self, module: &str, name: &str) -> Result<(), String> {
        let storage = name.strip_suffix("Storage").and_then(Element::of_storage).map(Global::Storage);
        let known = match (module, name) {
            ("collections", "OrderedDict") => Some(Global::OrderedDict),
            ("torch._utils", "_rebuild_tensor_v2") => Some(Global::Tensor),
            ("torch._utils", "_rebuild_tensor_v3") => Some(Global::TypedTensor),
            ("torch._utils", "_rebuild_parameter") => Some(Global::Parameter),
            ("torch.storage", "UntypedStorage") => Some(Global::Untyped),
            ("torch", _) => storage.or_else(|| Element::of_dtype(name).map(Global::Dtype)),
            _ => None,
        };
        let known = known.ok_or_else(|| {
            format!("the pickle asks for {module}.{name}, which is no part of a dictionary of tensors")
        })?;
        self.push(Value::Global(known));
        Ok(())
    }

    /// `("storage", class, key, device, length)`.
    fn persistent(&mut self) -> Result<(), String> {
        let wrong = "a storage in the pickle is none of torch.save";
        let Value::Row(at) = self.pop()? else { return Err(wrong.into()) };
        let [_, Value::Global(class), Value::Text(key), _, Value::Integer(len)] = self.rows[at].as_slice()
        else {
            return Err(wrong.into());
        };
        let element = match class {
            Global::Storage(element) => Some(*element),
            Global::Untyped => None,
            _ => return Err(wrong.into()),
        };
        let len = u64::try_from(*len).map_err(|_| wrong)?;
        self.storages.push(Storage { key: key.clone(), element, len });
        self.push(Value::Storage(self.storages.len() - 1));
        Ok(())
    }

    fn reduce(&mut self) -> Result<(), String> {
        let arguments = self.pop()?;
        let (Value::Global(function), Value::Row(at)) = (self.pop()?, arguments) else {
            return Err("the pickle calls what is no function".into());
        };
        if self.rows[at].len() > MAX_ARGUMENTS {
            return Err(format!("the pickle calls {function:?} with {} arguments", self.rows[at].len()));
        }
        let arguments = self.rows[at].clone();
        match (function, arguments.as_slice()) {
            (Global::OrderedDict, []) => self.dictionary(),
            (Global::Parameter, [tensor @ Value::Tensor(_), ..]) => self.push(tensor.clone()),
            (
                Global::Tensor,
                [Value::Storage(storage), Value::Integer(offset), Value::Row(shape), Value::Row(strides), ..],
            ) => {
                self.tensor(*storage, None, *offset, *shape, *strides)?;
            }
            (
                Global::TypedTensor,
                [
                    Value::Storage(storage),
                    Value::Integer(offset),
                    Value::Row(shape),
                    Value::Row(strides),
                    _,
                    _,
                    Value::Global(Global::Dtype(element)),
                    ..,
                ],
            ) => self.tensor(*storage, Some(*element), *offset, *shape, *strides)?,
            (function, _) => {
                return Err(format!("the pickle calls {function:?} with other arguments than torch.save"));
            }
        }
        Ok(())
    }

    fn tensor(
        &mut self,
        storage: usize,
        dtype: Option<Element>,
        offset: i64,
        shape: usize,
        strides: usize,
    ) -> Result<(), String> {
        let sizes = |row: usize| -> Option<Vec<usize>> {
            let size = |value: &Value| match value {
                Value::Integer(size) => usize::try_from(*size).ok(),
                _ => None,
            };
            self.rows[row].iter().take(MAX_ARGUMENTS + 1).map(size).collect()
        };
        let Storage { key, element, len } = &self.storages[storage];
        let (Some(shape), Some(strides), Ok(offset), Some(element)) =
            (sizes(shape), sizes(strides), usize::try_from(offset), dtype.or(*element))
        else {
            return Err("a tensor in the pickle has a shape that is none".into());
        };
        // A storage of bytes counts bytes.
        let len = if self.storages[storage].element.is_none() { len / element.bytes() as u64 } else { *len };
        let tensor = Strided { key: key.to_string(), element, len, offset, shape, strides };
        tensor.check()?;
        self.tensors.push(tensor);
        self.push(Value::Tensor(self.tensors.len() - 1));
        Ok(())
    }

    /// An ordered dictionary's attributes, of which there is one of versions: they say nothing of tensors.
    fn build(&mut self) -> Result<(), String> {
        self.pop()?;
        match self.stack.last() {
            Some(Value::Dictionary(_)) => Ok(()),
            _ => Err("the pickle sets attributes of what is no dictionary".into()),
        }
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
