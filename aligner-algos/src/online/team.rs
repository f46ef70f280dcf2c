//! The ranks that share a model: each draws a part of a step's samples, and all learn from the whole.
//!
//! For generation the ranks of a tensor- and pipeline-parallel group are so many data-parallel ones, each with
//! the whole weights. Draws are keyed by seed, step, prompt and sample, so a response is the same whichever rank
//! draws it.

use std::sync::Arc;

use aligner_core::{Communicator, Error, Group, Phase, Result};

const SAMPLES: Phase = Phase::new("samples of the ranks that share a model");

/// This rank among those with the same batches.
pub(super) struct Team {
    comm: Option<Arc<dyn Communicator>>,
}

impl Team {
    pub(super) fn new(comm: Option<Arc<dyn Communicator>>) -> Self {
        Self { comm: comm.filter(|comm| comm.size() > 1) }
    }

    /// How many of `all` things are this rank's: of the i-th, i modulo the ranks says whose it is.
    pub(super) fn share(&self, all: usize) -> usize {
        let Some(comm) = &self.comm else { return all };
        (all + comm.size() - 1 - comm.rank()) / comm.size()
    }

    /// The groups of all ranks, dealt out in turn, in their order.
    pub(super) fn together(&self, own: Vec<Group>) -> Result<Vec<Group>> {
        let Some(comm) = &self.comm else { return Ok(own) };
        let garbled = |error: serde_json::Error| Error::Invalid(format!("samples of another rank: {error}"));
        let bytes = serde_json::to_vec(&own).map_err(garbled)?;
        let all = comm.all_gather_bytes(&bytes, SAMPLES)?;
        let parts = all.iter().map(|bytes| serde_json::from_slice::<Vec<Group>>(bytes).map_err(garbled));
        let mut parts =
            parts.collect::<Result<Vec<_>>>()?.into_iter().map(Vec::into_iter).collect::<Vec<_>>();
        let mut groups = Vec::new();
        loop {
            let before = groups.len();
            groups.extend(parts.iter_mut().filter_map(Iterator::next));
            if groups.len() == before {
                return Ok(groups);
            }
        }
    }
}
