//! Writing safetensors: models as Hugging Face directories, and plain sets of tensors.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;

use burn::tensor::{Tensor, TensorData};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use safetensors::tensor::{Dtype, TensorInfo};
use serde_json::{Map, Value, json};

use super::atomic_write;
use super::checkpoint::transposed;
use super::safetensors_file::SafetensorsFile;
use crate::model::{CausalLm, ModelConfig, ParamSpec};
use crate::ops::host::with_slice;
use crate::{Error, Param, ParamSet, Result};

/// Most bytes of tensors in one file, as in `huggingface_hub`.
pub(super) const SHARD_BYTES: usize = 5_000_000_000;
/// Elements converted at a time.
const CHUNK_ELEMENTS: usize = 1 << 16;

/// How a saved model stores its elements.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SaveDtype {
    /// 4 bytes; what was trained, bit for bit.
    F32,
    /// 2 bytes, 8 bits of mantissa, the range of `f32`.
    #[default]
    Bf16,
    /// 2 bytes, 11 bits of mantissa, up to 65504.
    F16,
}

impl SaveDtype {
    fn stored(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::Bf16 => Dtype::BF16,
            Self::F16 => Dtype::F16,
        }
    }

    /// As `config.json` spells it.
    fn torch_name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
        }
    }

    /// Little-endian bytes of `values`, rounded to the nearest.
    pub(super) fn encode(self, values: &[f32], bytes: &mut Vec<u8>) {
        bytes.clear();
        match self {
            Self::F32 => bytes.extend(values.iter().flat_map(|value| value.to_le_bytes())),
            Self::Bf16 => {
                let mut halves = vec![bf16::ZERO; values.len()];
                halves.convert_from_f32_slice(values);
                bytes.extend(halves.iter().flat_map(|value| value.to_le_bytes()));
            }
            Self::F16 => {
                let mut halves = vec![f16::ZERO; values.len()];
                halves.convert_from_f32_slice(values);
                bytes.extend(halves.iter().flat_map(|value| value.to_le_bytes()));
            }
        }
    }

    /// Whether every value is finite, also after rounding.
    pub(super) fn holds(self, values: &[f32]) -> bool {
        // Half way from the largest finite value to the next power of two: from there on, rounding
        // gives infinity.
        let limit = match self {
            Self::F32 => f32::INFINITY,
            Self::Bf16 => f32::from_bits(0x7F7F_8000),
            Self::F16 => 65_520.0,
        };
        values.iter().all(|value| value.abs() < limit)
    }
}

/// Writes a model that `transformers` loads: `config.json` and `model.safetensors`, or shards of
/// at most 5 GB with `model.safetensors.index.json`.
///
/// Each file is written whole or not at all. A tied head is not written twice. The tokenizer is
/// not written here.
///
/// # Errors
/// [`Error::Io`] names the file; [`Error::Invalid`] names a parameter that is not finite, or too
/// large for `dtype`, and refuses a model with an adapter; then nothing has been written.
pub fn save_model(dir: &Path, config: &ModelConfig, params: &ParamSet, dtype: SaveDtype) -> Result<()> {
    if config.adapter.is_some() {
        let message = "not saved: the model has an adapter; merge it, or save the adapter alone";
        return Err(Error::Invalid(format!("{}: {message}", dir.display())));
    }
    if let Some(Param { name, .. }) = params.first_packed() {
        let message = format!("not saved: {name} is held in few bits; load the model without them");
        return Err(Error::Invalid(format!("{}: {message}", dir.display())));
    }
    if let Some(Param { name, .. }) = params.first_unread() {
        let message = format!("not saved: {name} has not been read from its file");
        return Err(Error::Invalid(format!("{}: {message}", dir.display())));
    }
    save_sharded(dir, config, params, dtype, SHARD_BYTES)
}

fn save_sharded(
    dir: &Path,
    config: &ModelConfig,
    params: &ParamSet,
    dtype: SaveDtype,
    shard_bytes: usize,
) -> Result<()> {
    let tied = config.tie_embeddings && config.num_labels.is_none();
    let turned = as_stored(config, params);
    let written = params.iter().filter(|param| !(tied && param.name == "lm_head.weight"));
    let tensors: Vec<NamedTensor<'_>> = written.map(|param| named(param, &turned)).collect();
    check_values(dir, &tensors, dtype)?;
    write_shards(dir, config, &tensors, dtype, shard_bytes)
}

pub(super) fn write_shards(
    dir: &Path,
    config: &ModelConfig,
    tensors: &[NamedTensor<'_>],
    dtype: SaveDtype,
    shard_bytes: usize,
) -> Result<()> {
    std::fs::create_dir_all(dir).map_err(Error::io(dir))?;
    let shards = plan_shards(tensors, dtype, shard_bytes);
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    let (single, index) = (dir.join("model.safetensors"), dir.join("model.safetensors.index.json"));
    // A loader prefers the single file: the layout that is not written now must not stay behind.
    let stale = if let [shard] = shards.as_slice() {
        atomic_write(&single, |file| write_tensors(file, &tensors[shard.clone()], dtype, &metadata))?;
        index
    } else {
        for (at, shard) in shards.iter().enumerate() {
            let path = dir.join(shard_name(at, shards.len()));
            atomic_write(&path, |file| write_tensors(file, &tensors[shard.clone()], dtype, &metadata))?;
        }
        write_json(&index, &shard_index(tensors, &shards, dtype))?;
        single
    };
    write_config(dir, config, dtype)?;
    match std::fs::remove_file(&stale) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::io(&stale)(error)),
        _ => Ok(()),
    }
}

/// Parameters as files have them, by name.
type Turned = BTreeMap<String, (Vec<usize>, Tensor<1>)>;

fn named<'a>(param: &'a Param, turned: &'a Turned) -> NamedTensor<'a> {
    let (shape, value) =
        turned.get(&param.name).map_or((&param.shape, &param.value), |(shape, value)| (shape, value));
    NamedTensor { name: &param.name, shape, value: Elements::Held(value) }
}

/// The parameters that files have transposed, as files have them.
fn as_stored(config: &ModelConfig, params: &ParamSet) -> Turned {
    if !config.has_transposed_weights() {
        return Turned::new();
    }
    let turned = |spec: ParamSpec| {
        let param = params.by_name(&spec.name).filter(|_| spec.transposed)?;
        let values = with_slice(&param.value, |values| transposed(values, param.shape[1]));
        let data = TensorData::new(values, [param.elements()]);
        let value = Tensor::from_data(data, &param.value.device());
        Some((spec.name, (param.shape.iter().rev().copied().collect(), value)))
    };
    CausalLm::parameters(config).into_iter().filter_map(turned).collect()
}

/// Writes `f32` tensors, bit for bit, with string metadata.
///
/// # Errors
/// [`Error::Shape`] for a tensor that is not its shape's size, [`Error::Invalid`] for a doubled
/// name, [`Error::Io`] where the file cannot be written; the old file is untouched then.
pub fn save_tensors(
    path: &Path,
    tensors: &[(String, Vec<usize>, Tensor<1>)],
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    let named: Vec<_> = tensors
        .iter()
        .map(|(name, shape, value)| NamedTensor { name, shape, value: Elements::Held(value) })
        .collect();
    check_names_and_shapes(&named)?;
    atomic_write(path, |file| write_tensors(file, &named, SaveDtype::F32, metadata))
}

/// A tensor on the host: its shape, and its elements in row-major order.
pub type HostTensor = (Vec<usize>, Vec<f32>);

/// Reads every tensor of a safetensors file.
///
/// # Errors
/// A file that is missing, truncated or inconsistent, with the tensor at fault.
pub fn read_tensors(path: &Path) -> Result<BTreeMap<String, HostTensor>> {
    let file = SafetensorsFile::open(path)?;
    file.names().map(|name| Ok((name.to_string(), file.read(name)?))).collect()
}

/// Reads the string metadata of a safetensors file.
///
/// # Errors
/// As [`read_tensors`].
pub fn read_metadata(path: &Path) -> Result<BTreeMap<String, String>> {
    Ok(SafetensorsFile::open(path)?.metadata().clone())
}

pub(super) struct NamedTensor<'a> {
    pub(super) name: &'a str,
    pub(super) shape: &'a [usize],
    pub(super) value: Elements<'a>,
}

/// Where a tensor's elements come from.
pub(super) enum Elements<'a> {
    Held(&'a Tensor<1>),
    /// They are read when they are written.
    Read(&'a ParamSpec, &'a dyn Fn(&ParamSpec) -> Result<Vec<f32>>),
}

impl NamedTensor<'_> {
    fn elements(&self) -> usize {
        match self.value {
            Elements::Held(value) => value.dims()[0],
            Elements::Read(..) => self.shape.iter().product(),
        }
    }

    fn write(&self, file: &mut dyn Write, dtype: SaveDtype) -> io::Result<()> {
        let mut bytes = Vec::new();
        let mut write = |values: &[f32]| {
            values.chunks(CHUNK_ELEMENTS).try_for_each(|values| {
                dtype.encode(values, &mut bytes);
                file.write_all(&bytes)
            })
        };
        match &self.value {
            Elements::Held(value) => with_slice(value, write),
            Elements::Read(spec, read) => {
                let values = read(spec).map_err(io::Error::other)?;
                if !dtype.holds(&values) {
                    return Err(io::Error::other(not_finite(self.name, dtype)));
                }
                write(&values)
            }
        }
    }
}

fn not_finite(name: &str, dtype: SaveDtype) -> String {
    format!("not saved: parameter {name} has a value that is not finite in {}", dtype.torch_name())
}

fn check_names_and_shapes(tensors: &[NamedTensor<'_>]) -> Result<()> {
    let mut seen = std::collections::BTreeSet::new();
    for tensor in tensors {
        if tensor.shape.iter().product::<usize>() != tensor.elements() {
            let expected = format!("{:?}, flat", tensor.shape);
            return Err(Error::shape(format!("tensor {}", tensor.name), expected, &[tensor.elements()]));
        }
        if !seen.insert(tensor.name) {
            return Err(Error::Invalid(format!("tensor {} is there twice", tensor.name)));
        }
    }
    Ok(())
}

/// Consecutive tensors for each file. One tensor alone may be larger than a shard should be.
fn plan_shards(tensors: &[NamedTensor<'_>], dtype: SaveDtype, shard_bytes: usize) -> Vec<Range<usize>> {
    let mut shards = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for (at, tensor) in tensors.iter().enumerate() {
        let own = tensor.elements() * dtype.stored().bitsize() / 8;
        if at > start && bytes + own > shard_bytes {
            shards.push(start..at);
            (start, bytes) = (at, 0);
        }
        bytes += own;
    }
    shards.push(start..tensors.len());
    shards
}

fn shard_name(at: usize, count: usize) -> String {
    format!("model-{:05}-of-{count:05}.safetensors", at + 1)
}

fn shard_index(tensors: &[NamedTensor<'_>], shards: &[Range<usize>], dtype: SaveDtype) -> Value {
    let total: usize = tensors.iter().map(|tensor| tensor.elements() * dtype.stored().bitsize() / 8).sum();
    let mut map = Map::new();
    for (at, shard) in shards.iter().enumerate() {
        for tensor in &tensors[shard.clone()] {
            map.insert(tensor.name.to_string(), json!(shard_name(at, shards.len())));
        }
    }
    json!({"metadata": {"total_size": total}, "weight_map": map})
}

fn write_config(dir: &Path, config: &ModelConfig, dtype: SaveDtype) -> Result<()> {
    let mut value = config.to_json();
    if let Value::Object(object) = &mut value {
        // transformers 4 and 5 read different keys.
        object.insert("torch_dtype".into(), json!(dtype.torch_name()));
        object.insert("dtype".into(), json!(dtype.torch_name()));
    }
    write_json(&dir.join("config.json"), &value)
}

pub(super) fn write_json(path: &Path, value: &Value) -> Result<()> {
    atomic_write(path, |file| {
        serde_json::to_writer_pretty(&mut *file, value)?;
        file.write_all(b"\n")
    })
}

/// Refuses values that the file could not hold, before the first file is touched.
pub(super) fn check_values(dir: &Path, tensors: &[NamedTensor<'_>], dtype: SaveDtype) -> Result<()> {
    let is_lost = |tensor: &&NamedTensor<'_>| match tensor.value {
        Elements::Held(value) => !with_slice(value, |values| dtype.holds(values)),
        Elements::Read(..) => false,
    };
    let Some(tensor) = tensors.iter().find(is_lost) else { return Ok(()) };
    Err(Error::Invalid(format!("{}: {}", dir.display(), not_finite(tensor.name, dtype))))
}

pub(super) fn write_tensors(
    file: &mut dyn Write,
    tensors: &[NamedTensor<'_>],
    dtype: SaveDtype,
    metadata: &BTreeMap<String, String>,
) -> io::Result<()> {
    let header = header(tensors, dtype, metadata)?;
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    tensors.iter().try_for_each(|tensor| tensor.write(file, dtype))
}

/// The JSON header, padded so that the data starts at a multiple of eight. The same tensors give
/// the same bytes.
fn header(
    tensors: &[NamedTensor<'_>],
    dtype: SaveDtype,
    metadata: &BTreeMap<String, String>,
) -> io::Result<Vec<u8>> {
    let mut object = Map::new();
    if !metadata.is_empty() {
        object.insert("__metadata__".into(), json!(metadata));
    }
    let mut start = 0;
    for tensor in tensors {
        let end = start + tensor.elements() * dtype.stored().bitsize() / 8;
        let (dtype, shape) = (dtype.stored(), tensor.shape.to_vec());
        let info = TensorInfo { dtype, shape, data_offsets: (start, end) };
        object.insert(tensor.name.to_string(), serde_json::to_value(info)?);
        start = end;
    }
    let mut header = serde_json::to_vec(&object)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok(header)
}

#[cfg(test)]
#[path = "save_tests.rs"]
mod tests;
