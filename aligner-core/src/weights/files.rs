//! The weights of a Hugging Face directory: one file or shards with an index, safetensors or pickles, and the scales of those in
//! eight bits.

mod scales;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Component, Path};

use self::scales::Scales;
use super::pytorch::PytorchFile;
use super::safetensors_file::SafetensorsFile;
use super::unique::UniqueMap;
use super::whole::read_whole;
use crate::model::config::Grid;
use crate::{Error, Result};

/// Files of weights in a directory, of which the first that is there is read: one whole file wins over an index, as
/// in transformers, and safetensors over pickles.
pub const WEIGHT_FILES: [&str; 4] = [
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
];
/// Largest index that is read: that of a safetensors file.
const MAX_INDEX_BYTES: u64 = 100_000_000;

/// Open files of weights under one set of names.
#[derive(Debug)]
pub(super) struct Files {
    opened: Vec<TensorFile>,
    /// The file of each tensor; scales are not among them.
    owners: BTreeMap<String, usize>,
    scales: Scales,
}

/// A file of tensors under Hugging Face's names.
#[derive(Debug)]
enum TensorFile {
    Safetensors(SafetensorsFile),
    Pytorch(PytorchFile),
}

impl TensorFile {
    /// Its name says which it is.
    fn open(path: &Path) -> Result<Self> {
        if path.extension().is_some_and(|extension| extension == "bin") {
            return Ok(Self::Pytorch(PytorchFile::open(path)?));
        }
        Ok(Self::Safetensors(SafetensorsFile::open(path)?))
    }

    fn path(&self) -> &Path {
        match self {
            Self::Safetensors(file) => file.path(),
            Self::Pytorch(file) => file.path(),
        }
    }

    fn names(&self) -> Vec<String> {
        match self {
            Self::Safetensors(file) => file.names().map(str::to_string).collect(),
            Self::Pytorch(file) => file.names().map(str::to_string).collect(),
        }
    }

    fn shape(&self, name: &str) -> Option<&[usize]> {
        match self {
            Self::Safetensors(file) => file.shape(name),
            Self::Pytorch(file) => file.shape(name),
        }
    }

    fn read(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>)> {
        match self {
            Self::Safetensors(file) => file.read(name),
            Self::Pytorch(file) => file.read(name),
        }
    }

    /// Ranges of a tensor's elements, one after the other; of a pickle's, all are read.
    fn read_pieces(&self, name: &str, pieces: &[Range<usize>]) -> Result<Vec<f32>> {
        match self {
            Self::Safetensors(file) => file.read_pieces(name, pieces),
            Self::Pytorch(file) => {
                let (_, whole) = file.read(name)?;
                Ok(pieces.iter().flat_map(|piece| &whole[piece.clone()]).copied().collect())
            }
        }
    }

    fn bytes_read(&self) -> u64 {
        match self {
            Self::Safetensors(file) => file.bytes_read(),
            Self::Pytorch(_) => 0,
        }
    }
}

impl Files {
    /// Opens the weights beside a `config.json`, which says which of these scales they have; none where they have none.
    ///
    /// # Errors
    /// No weights there; a file that is truncated or inconsistent; an index that names a file or tensor that is not there; scales
    /// that do not fit their weights, and weights of eight bits that should have some.
    pub(super) fn open(directory: &Path, grids: Option<&[Grid]>) -> Result<Self> {
        let found = WEIGHT_FILES.iter().map(|name| directory.join(name)).find(|file| file.exists());
        let Some(path) = found else {
            let known = WEIGHT_FILES.join(", ");
            return Err(Error::format(
                directory,
                format!("expected a file of weights beside config.json, one of {known}"),
            ));
        };
        let (opened, owners) = if path.extension().is_some_and(|extension| extension == "json") {
            open_shards(directory, &path)?
        } else {
            let file = TensorFile::open(&path)?;
            let owners = file.names().into_iter().map(|name| (name, 0)).collect();
            (vec![file], owners)
        };
        let mut files = Self { opened, owners, scales: Scales::default() };
        if let Some(grids) = grids {
            files.scales = files.take_scales(&path, grids)?;
        }
        Ok(files)
    }

    pub(super) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.opened.iter().map(TensorFile::path)
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.owners.keys().map(String::as_str)
    }

    pub(super) fn shape(&self, name: &str) -> Option<&[usize]> {
        self.opened[*self.owners.get(name)?].shape(name)
    }

    /// The tensor's shape and its elements, scaled; none where there is no such tensor.
    pub(super) fn read(&self, name: &str) -> Option<Result<(Vec<usize>, Vec<f32>)>> {
        let owner = *self.owners.get(name)?;
        Some(self.opened[owner].read(name).and_then(|(shape, mut values)| {
            let all = 0..values.len();
            self.scale(name, std::slice::from_ref(&all), &mut values)?;
            Ok((shape, values))
        }))
    }

    /// Ranges of the tensor's elements, one after the other, scaled; none where there is no such tensor.
    pub(super) fn read_pieces(&self, name: &str, pieces: &[Range<usize>]) -> Option<Result<Vec<f32>>> {
        let owner = *self.owners.get(name)?;
        Some(self.opened[owner].read_pieces(name, pieces).and_then(|mut values| {
            self.scale(name, pieces, &mut values)?;
            Ok(values)
        }))
    }

    /// Bytes of tensors that have been read from safetensors files.
    pub(super) fn bytes_read(&self) -> u64 {
        self.opened.iter().map(TensorFile::bytes_read).sum()
    }

    /// Multiplies elements by their scales, of which no others are read.
    fn scale(&self, name: &str, pieces: &[Range<usize>], values: &mut [f32]) -> Result<()> {
        let Some(scale) = self.scales.of(name) else { return Ok(()) };
        let own = scale.places(pieces);
        let scales = self.opened[scale.owner].read_pieces(&scale.name, std::slice::from_ref(&own))?;
        scale.apply(pieces, values, own.start, &scales);
        Ok(())
    }
}

#[derive(serde::Deserialize)]
struct Index {
    weight_map: UniqueMap<String>,
}

fn open_shards(directory: &Path, index_path: &Path) -> Result<(Vec<TensorFile>, BTreeMap<String, usize>)> {
    let text = read_whole(index_path, MAX_INDEX_BYTES)?;
    let index: Index = serde_json::from_slice(&text)
        .map_err(|error| Error::format(index_path, format!("bad index: {error}")))?;
    let mut shards: BTreeMap<String, usize> = BTreeMap::new();
    let mut files = Vec::new();
    let mut owners = BTreeMap::new();
    for (tensor, shard) in index.weight_map.0 {
        let owner = if let Some(&owner) = shards.get(&shard) {
            owner
        } else {
            check_shard_name(index_path, &tensor, &shard)?;
            files.push(TensorFile::open(&directory.join(&shard))?);
            shards.insert(shard.clone(), files.len() - 1);
            files.len() - 1
        };
        if files[owner].shape(&tensor).is_none() {
            return Err(Error::format(index_path, format!("tensor {tensor} is not in {shard}")));
        }
        owners.insert(tensor, owner);
    }
    Ok((files, owners))
}

/// An index may only name files beside itself.
fn check_shard_name(index_path: &Path, tensor: &str, shard: &str) -> Result<()> {
    let mut components = Path::new(shard).components();
    let plain = matches!((components.next(), components.next()), (Some(Component::Normal(_)), None));
    if plain && !shard.contains(['/', '\\']) {
        return Ok(());
    }
    let message = format!("tensor {tensor} is said to be in {shard:?}; expected a file name without a path");
    Err(Error::format(index_path, message))
}
