//! A model on disk: a Hugging Face directory or a GGUF file, behind one set of names.

use std::ops::Range;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::files::Files;
use super::gguf::{Gguf, GgufNames};
use crate::model::config::{grids, read_json};
use crate::model::{ModelConfig, ParamSpec};
use crate::{Error, Result};

/// An open checkpoint: configuration, names, shapes, and tensors on demand.
///
/// Names, shapes and the order of rotary dimensions are those of Hugging Face, whichever the
/// format: `model.layers.0.self_attn.q_proj.weight`, `[out, in]`, halves.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    config: ModelConfig,
    store: Store,
}

#[derive(Debug)]
enum Store {
    Files(Files),
    Gguf { file: Gguf, names: GgufNames },
}

impl Checkpoint {
    /// Opens a directory with `config.json` and `model.safetensors` or `pytorch_model.bin` (or the index of
    /// shards of either), or a `.gguf` file, of several the first. Headers are read and checked; tensors are not read yet.
    ///
    /// # Errors
    /// A missing file, a configuration that is not supported, and a file that is truncated or
    /// inconsistent, each with its path and the key or tensor at fault.
    pub fn open(path: &Path) -> Result<Self> {
        let metadata = std::fs::metadata(path).map_err(Error::io(path))?;
        if metadata.is_dir() {
            return Self::open_directory(path);
        }
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            let message = "expected the directory with config.json, or a .gguf file";
            return Err(Error::format(path, message));
        }
        let file = Gguf::open(path)?;
        let config = ModelConfig::from_gguf(&file)?;
        let names = GgufNames::new(&file, &config)?;
        Ok(Self { path: path.to_path_buf(), config, store: Store::Gguf { file, names } })
    }

    fn open_directory(path: &Path) -> Result<Self> {
        let file = path.join("config.json");
        let json = read_json(&file)?;
        let config = ModelConfig::from_json(&file, &json)?;
        let grids =
            json.as_object().map(grids).transpose().map_err(|message| Error::format(&file, message))?;
        let files = Files::open(path, grids.flatten().as_deref())?;
        Ok(Self { path: path.to_path_buf(), config, store: Store::Files(files) })
    }

    /// Where it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The GGUF file behind it, for its tokenizer and chat template.
    pub fn gguf(&self) -> Option<&Gguf> {
        match &self.store {
            Store::Gguf { file, .. } => Some(file),
            Store::Files(_) => None,
        }
    }

    /// The files of weights that are read.
    pub fn files(&self) -> Vec<&Path> {
        match &self.store {
            Store::Gguf { file, .. } => file.files().collect(),
            Store::Files(files) => files.paths().collect(),
        }
    }

    /// The tensors' names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let (owned, mapped) = match &self.store {
            Store::Files(files) => (Some(files.names()), None),
            Store::Gguf { names, .. } => (None, Some(names.iter())),
        };
        owned.into_iter().flatten().chain(mapped.into_iter().flatten())
    }

    /// A tensor's shape; none where there is no such tensor.
    pub fn shape(&self, name: &str) -> Option<Vec<usize>> {
        match &self.store {
            Store::Files(files) => files.shape(name).map(<[_]>::to_vec),
            Store::Gguf { file, names } => {
                let place = names.place(name)?;
                let mut shape = file.parameter_shape(place)?;
                if place.transposed {
                    shape.reverse();
                }
                Some(shape)
            }
        }
    }

    /// A tensor's shape and its elements as `f32`, in row-major order; those of eight bits times their scales.
    ///
    /// # Errors
    /// A name that is not there, a dtype that is not supported, a failed read.
    pub fn read(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>)> {
        let absent = || Error::format(&self.path, format!("the checkpoint has no tensor named {name}"));
        match &self.store {
            Store::Files(files) => files.read(name).ok_or_else(absent)?,
            Store::Gguf { file, names } => {
                let place = names.place(name).ok_or_else(absent)?;
                let (mut shape, mut elements) = file.read_parameter(place)?;
                if place.transposed {
                    elements = transposed(&elements, shape.last().copied().unwrap_or(1));
                    shape.reverse();
                }
                Ok((shape, elements))
            }
        }
    }

    /// As [`Checkpoint::read`], for a tensor whose shape is known beforehand: nothing is read where
    /// it differs.
    ///
    /// # Errors
    /// [`Error::Shape`] with both shapes, and those of [`Checkpoint::read`].
    pub fn read_shaped(&self, name: &str, expected: &[usize]) -> Result<Vec<f32>> {
        self.check_shape(name, expected)?;
        Ok(self.read(name)?.1)
    }

    fn check_shape(&self, name: &str, expected: &[usize]) -> Result<()> {
        let Some(shape) = self.shape(name).filter(|shape| shape != expected) else { return Ok(()) };
        let what = format!("{}: tensor {name}", self.path.display());
        Err(Error::shape(what, format!("{expected:?}"), &shape))
    }

    /// A model's parameter, in the shape that the model has it. Where there is none of its name, it may stand
    /// under the name without what all the family's begin with.
    ///
    /// # Errors
    /// As [`Checkpoint::read_shaped`].
    pub fn read_parameter(&self, spec: &ParamSpec) -> Result<Vec<f32>> {
        let name = self.stored_name(spec);
        match spec.shape.as_slice() {
            &[outputs, inputs] if spec.transposed => {
                Ok(transposed(&self.read_shaped(name, &[inputs, outputs])?, outputs))
            }
            shape => self.read_shaped(name, shape),
        }
    }

    /// Ranges of a model's parameter, in the order of the elements that the model has, one after the other. Of a
    /// safetensors file only these bytes are read, where it has the parameter as the model does, and of scales beside
    /// it those of the rows of blocks that the ranges lie in.
    ///
    /// # Errors
    /// As [`Checkpoint::read_parameter`]; a range past the parameter's end.
    pub fn read_pieces(&self, spec: &ParamSpec, pieces: &[Range<usize>]) -> Result<Vec<f32>> {
        let (name, elements) = (self.stored_name(spec), spec.shape.iter().product());
        if let Some(piece) = pieces.iter().find(|piece| piece.start > piece.end || piece.end > elements) {
            return Err(Error::shape(spec.name.as_str(), format!("elements {piece:?} within"), &spec.shape));
        }
        if let Store::Files(files) = &self.store
            && !spec.transposed
        {
            self.check_shape(name, &spec.shape)?;
            if let Some(values) = files.read_pieces(name, pieces) {
                return values;
            }
        }
        let whole = self.read_parameter(spec)?;
        Ok(pieces.iter().flat_map(|piece| &whole[piece.clone()]).copied().collect())
    }

    /// Bytes of tensors that have been read from safetensors files so far.
    pub fn bytes_read(&self) -> u64 {
        match &self.store {
            Store::Files(files) => files.bytes_read(),
            Store::Gguf { .. } => 0,
        }
    }

    /// The name that a model's parameter has here.
    fn stored_name<'a>(&self, spec: &'a ParamSpec) -> &'a str {
        let short = spec.name.split_once('.').map_or("", |(_, rest)| rest);
        let is_short = self.shape(&spec.name).is_none() && self.shape(short).is_some();
        if is_short { short } else { &spec.name }
    }
}

/// A row-major matrix of so many columns, transposed.
pub(super) fn transposed(values: &[f32], columns: usize) -> Vec<f32> {
    let rows = values.len() / columns.max(1);
    let mut out = vec![0.0; values.len()];
    out.par_chunks_mut(rows.max(1)).enumerate().for_each(|(column, out)| {
        out.iter_mut().enumerate().for_each(|(row, out)| *out = values[row * columns + column]);
    });
    out
}
