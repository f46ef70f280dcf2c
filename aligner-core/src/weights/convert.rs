//! A checkpoint as a Hugging Face directory of another number type, one tensor at a time.

use std::cell::RefCell;
use std::path::Path;

use super::checkpoint::transposed;
use super::save::{Elements, NamedTensor, SHARD_BYTES, write_shards};
use super::{Checkpoint, SaveDtype};
use crate::Result;
use crate::model::{CausalLm, ParamSpec};

/// Writes a checkpoint as [`save_model`](super::save_model) writes a model, without the whole of it in memory: each tensor is read,
/// converted and written. `watch` is told how many parameters are read, of how many.
///
/// # Errors
/// [`Error::Io`](crate::Error::Io) names the file that was written, also where a parameter cannot be read or is not finite in `dtype`:
/// files that were written before it stay.
pub fn save_checkpoint(
    dir: &Path,
    checkpoint: &Checkpoint,
    dtype: SaveDtype,
    watch: &mut dyn FnMut(usize, usize),
) -> Result<()> {
    let specs = CausalLm::parameters_in(checkpoint)?;
    let shapes: Vec<Vec<usize>> = specs
        .iter()
        .map(|spec| {
            let mut shape = spec.shape.clone();
            if spec.transposed {
                shape.reverse();
            }
            shape
        })
        .collect();
    let counter = RefCell::new((0, watch));
    let read = |spec: &ParamSpec| {
        let (read, watch) = &mut *counter.borrow_mut();
        watch(*read, specs.len());
        *read += 1;
        let values = checkpoint.read_parameter(spec)?;
        Ok(if spec.transposed { transposed(&values, spec.shape[1]) } else { values })
    };
    let tensors: Vec<NamedTensor<'_>> = specs
        .iter()
        .zip(&shapes)
        .map(|(spec, shape)| NamedTensor { name: &spec.name, shape, value: Elements::Read(spec, &read) })
        .collect();
    write_shards(dir, checkpoint.config(), &tensors, dtype, SHARD_BYTES)
}
