//! Writing GGUF, version 3: a checkpoint under llama.cpp's names and in its order of rows.

use std::collections::HashMap;
use std::io::{self, Write};
use std::path::Path;

use super::dtype::GgufDtype;
use super::names::{Form, Names};
use super::value::GgufValue;
use super::{DEFAULT_ALIGNMENT, Gguf};
use crate::model::config::ROPE_DIVISORS;
use crate::model::{CausalLm, ModelConfig, ParamSpec};
use crate::weights::{Checkpoint, atomic_write};
use crate::{Error, Result};

/// Elements converted at a time; a multiple of every block.
const CHUNK_ELEMENTS: usize = 1 << 16;

/// A tensor of the file.
struct Planned {
    stored: String,
    /// Row-major; the file has the innermost first.
    shape: Vec<usize>,
    dtype: GgufDtype,
    /// Parameters whose elements follow each other in it.
    content: Content,
}

enum Content {
    Parameters(Vec<ParamSpec>, Form),
    /// The divisors of rotary frequencies.
    Values(Vec<f32>),
}

/// Writes a checkpoint as a GGUF file that llama.cpp's readers take, in the conventions of its converter: its
/// names, neighbouring rotary rows in `llama` files, Gemma's norms with one added, all experts of a layer in one
/// tensor. `more` are keys beside those of the model: its name, its tokenizer. One tensor at a time is in
/// memory; `watch` is told how many are written, of how many.
///
/// # Errors
/// [`Error::Invalid`] names what GGUF cannot say of the model: a head of scores, or a setting that its readers
/// would take for another; then nothing is written. [`Error::Io`] names the file, also where a parameter cannot be
/// read or is not finite in `dtype`; the old file stays as it was.
pub fn save_gguf(
    path: &Path,
    checkpoint: &Checkpoint,
    more: &[(String, GgufValue)],
    dtype: GgufDtype,
    watch: &mut dyn FnMut(usize, usize),
) -> Result<()> {
    let config = checkpoint.config();
    if config.num_labels.is_some() {
        return Err(cannot(path, config, "has no head of scores, and the model has one"));
    }
    let tensors = plan(path, config, CausalLm::parameters_in(checkpoint)?, dtype)?;
    let mut metadata = config.gguf_metadata();
    metadata.push(("general.file_type".into(), GgufValue::Integer(dtype.file_type())));
    metadata.push(("general.quantization_version".into(), GgufValue::Integer(2)));
    metadata.push(("general.alignment".into(), GgufValue::Integer(DEFAULT_ALIGNMENT as i64)));
    metadata.extend_from_slice(more);
    check_readable(path, config, &metadata, &tensors)?;
    let header = header(&metadata, &tensors);
    atomic_write(path, |file| {
        file.write_all(&header)?;
        file.write_all(&padding(header.len()))?;
        for (at, tensor) in tensors.iter().enumerate() {
            watch(at, tensors.len());
            tensor.write(file, checkpoint)?;
        }
        watch(tensors.len(), tensors.len());
        Ok(())
    })
}

fn plan(path: &Path, config: &ModelConfig, specs: Vec<ParamSpec>, dtype: GgufDtype) -> Result<Vec<Planned>> {
    let names = Names::of(config);
    let mut tensors: Vec<Planned> = Vec::new();
    let mut stacks: HashMap<String, usize> = HashMap::new();
    for spec in specs {
        let Some(place) = names.place_of(&spec.name) else {
            let message = format!("{}: GGUF has no name for the parameter {}", path.display(), spec.name);
            return Err(Error::Invalid(message));
        };
        if let Some(&at) = stacks.get(&place.stored) {
            tensors[at].shape[0] += 1;
            if let Content::Parameters(specs, _) = &mut tensors[at].content {
                specs.push(spec);
            }
            continue;
        }
        let mut shape = spec.shape.clone();
        if place.expert.is_some() {
            shape.insert(0, 1);
            stacks.insert(place.stored.clone(), tensors.len());
        }
        if place.is_row {
            shape.remove(0);
        }
        let dtype = dtype.of(&place.stored, &shape);
        let content = Content::Parameters(vec![spec], place.form);
        tensors.push(Planned { stored: place.stored, shape, dtype, content });
    }
    if config.rope.scaling.is_some() {
        let divisors = config.rope.frequency_divisors(config.head_dim);
        let (stored, shape) = (ROPE_DIVISORS.to_string(), vec![divisors.len()]);
        tensors.push(Planned { stored, shape, dtype: GgufDtype::F32, content: Content::Values(divisors) });
    }
    Ok(tensors)
}

fn cannot(path: &Path, config: &ModelConfig, what: &str) -> Error {
    let (path, architecture) = (path.display(), config.family.gguf.architecture);
    Error::Invalid(format!("{path}: not written: a GGUF file of architecture {architecture} {what}"))
}

/// Refuses what a reader of the file would take for another model.
fn check_readable(
    path: &Path,
    config: &ModelConfig,
    metadata: &[(String, GgufValue)],
    tensors: &[Planned],
) -> Result<()> {
    let cannot = |what: String| cannot(path, config, &what);
    let shapes = tensors.iter().map(|tensor| (tensor.stored.clone(), tensor.shape.clone()));
    let file = Gguf::unwritten(path, metadata.iter().cloned(), shapes);
    let divisors = tensors.iter().find_map(|tensor| match &tensor.content {
        Content::Values(values) => Some(values.as_slice()),
        Content::Parameters(..) => None,
    });
    let read = ModelConfig::from_gguf_header(&file, divisors)
        .map_err(|error| cannot(format!("cannot say all that config.json says: {error}")))?;
    let unlike = config.unlike(&read);
    if unlike.is_empty() {
        return Ok(());
    }
    let message = format!(
        "cannot say what config.json says of {}: readers would take it for another value",
        unlike.join(", ")
    );
    Err(cannot(message))
}

impl Planned {
    fn bytes(&self) -> usize {
        let elements = self.shape.iter().product();
        self.dtype.encoding().bytes(elements).expect("rows are whole blocks, and the sizes were checked")
    }

    fn write(&self, file: &mut dyn Write, checkpoint: &Checkpoint) -> io::Result<()> {
        match &self.content {
            Content::Values(values) => self.write_values(file, &self.stored, values)?,
            Content::Parameters(specs, form) => {
                for spec in specs {
                    let values = checkpoint.read_parameter(spec).map_err(io::Error::other)?;
                    let values = form.stored(values, spec.shape[0]);
                    self.write_values(file, &spec.name, &values)?;
                }
            }
        }
        file.write_all(&padding(self.bytes()))
    }

    fn write_values(&self, file: &mut dyn Write, name: &str, values: &[f32]) -> io::Result<()> {
        if !self.dtype.holds(values) {
            let dtype = self.dtype.encoding();
            let message = format!("not saved: parameter {name} has a value that is not finite in {dtype:?}");
            return Err(io::Error::other(message));
        }
        let mut bytes = Vec::new();
        values.chunks(CHUNK_ELEMENTS).try_for_each(|values| {
            self.dtype.encode(values, &mut bytes);
            file.write_all(&bytes)
        })
    }
}

/// Zeros up to the next multiple of the alignment.
fn padding(bytes: usize) -> Vec<u8> {
    vec![0; bytes.next_multiple_of(DEFAULT_ALIGNMENT as usize) - bytes]
}

fn header(metadata: &[(String, GgufValue)], tensors: &[Planned]) -> Vec<u8> {
    let mut out = Vec::from(*b"GGUF");
    out.extend(3u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        put_text(&mut out, key);
        put_typed(&mut out, value);
    }
    let mut offset = 0;
    for tensor in tensors {
        put_text(&mut out, &tensor.stored);
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        out.extend(tensor.shape.iter().rev().flat_map(|&dim| (dim as u64).to_le_bytes()));
        out.extend(super::number_of(tensor.dtype.encoding()).to_le_bytes());
        out.extend((offset as u64).to_le_bytes());
        offset += tensor.bytes().next_multiple_of(DEFAULT_ALIGNMENT as usize);
    }
    out
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// A value's type and content. Numbers are unsigned of 32 bits, arrays of them signed, as llama.cpp reads them.
fn put_typed(out: &mut Vec<u8>, value: &GgufValue) {
    let kind = |out: &mut Vec<u8>, kind: u32| out.extend(kind.to_le_bytes());
    let list = |out: &mut Vec<u8>, of: u32, count: usize| {
        kind(out, 9);
        kind(out, of);
        out.extend((count as u64).to_le_bytes());
    };
    match value {
        GgufValue::Integer(number) => {
            if let Ok(number) = u32::try_from(*number) {
                kind(out, 4);
                out.extend(number.to_le_bytes());
            } else {
                kind(out, 11);
                out.extend(number.to_le_bytes());
            }
        }
        GgufValue::Float(number) => {
            kind(out, 6);
            out.extend((*number as f32).to_le_bytes());
        }
        GgufValue::Flag(flag) => {
            kind(out, 7);
            out.push(u8::from(*flag));
        }
        GgufValue::Text(text) => {
            kind(out, 8);
            put_text(out, text);
        }
        GgufValue::Bytes(bytes) => {
            list(out, 0, bytes.len());
            out.extend(bytes);
        }
        GgufValue::Integers(numbers) => {
            let small: Option<Vec<i32>> = numbers.iter().map(|&number| i32::try_from(number).ok()).collect();
            list(out, if small.is_some() { 5 } else { 11 }, numbers.len());
            match small {
                Some(small) => out.extend(small.iter().flat_map(|number| number.to_le_bytes())),
                None => out.extend(numbers.iter().flat_map(|number| number.to_le_bytes())),
            }
        }
        GgufValue::Floats(numbers) => {
            list(out, 6, numbers.len());
            out.extend(numbers.iter().flat_map(|&number| (number as f32).to_le_bytes()));
        }
        GgufValue::Flags(flags) => {
            list(out, 7, flags.len());
            out.extend(flags.iter().map(|&flag| u8::from(flag)));
        }
        GgufValue::Texts(texts) => {
            list(out, 8, texts.len());
            for text in texts {
                put_text(out, text);
            }
        }
        GgufValue::Lists(lists) => {
            list(out, 9, lists.len());
            // An array in an array is not announced as one.
            for inner in lists {
                let mut typed = Vec::new();
                put_typed(&mut typed, inner);
                out.extend_from_slice(&typed[4..]);
            }
        }
    }
}
