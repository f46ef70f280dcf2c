//! What a pickle of tensors may name and call.

use std::rc::Rc;

use super::super::tensor::{Element, Strided};
use super::{Machine, Value};

/// Most arguments of a call, and more than the axes of any tensor.
const MAX_ARGUMENTS: usize = 16;

/// What a pickle may name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Global {
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
pub(super) struct Storage {
    key: Rc<str>,
    /// None of a storage of bytes.
    element: Option<Element>,
    /// Elements, or bytes.
    len: u64,
}

impl Machine<'_> {
    pub(super) fn global(&mut self, module: &str, name: &str) -> Result<(), String> {
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
    pub(super) fn persistent(&mut self) -> Result<(), String> {
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

    pub(super) fn reduce(&mut self) -> Result<(), String> {
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
    pub(super) fn build(&mut self) -> Result<(), String> {
        self.pop()?;
        match self.stack.last() {
            Some(Value::Dictionary(_)) => Ok(()),
            _ => Err("the pickle sets attributes of what is no dictionary".into()),
        }
    }
}
