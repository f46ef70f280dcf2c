//! Ranks with an accelerator of their own.

use std::sync::Arc;

use aligner_core::{Communicator, Result};

use crate::collectives::Ranks;
use crate::transport::Transport;

/// A rank whose tensors lie on the CUDA device at `cuda`, if it has one: with the feature `nccl` they go from device to
/// device, else over the host's memory. All ranks of the run call it.
///
/// # Errors
/// Those of `NcclComm::on_cuda`.
pub fn with_device<T: Transport>(ranks: Ranks<T>, cuda: Option<usize>) -> Result<Arc<dyn Communicator>> {
    #[cfg(feature = "nccl")]
    if let Some(index) = cuda {
        return Ok(Arc::new(crate::NcclComm::on_cuda(ranks, index)?));
    }
    let _ = cuda;
    Ok(Arc::new(ranks))
}
