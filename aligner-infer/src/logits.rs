//! The forward pass where the weights are, and the logits that it leaves.

use std::borrow::Cow;

use aligner_core::{Error, Result};

use crate::accelerator::{self, DeviceLogits};
use crate::adapters::Adapters;
use crate::host::{self, Batch, Buffers, Store};
use crate::weights::Weights;

/// Logits of a batch's wanted rows, `[wanted, vocab]`.
pub(crate) enum Logits<'a> {
    Host(&'a [f32]),
    Device(DeviceLogits),
}

impl<'a> Logits<'a> {
    /// The values in host memory.
    ///
    /// # Errors
    /// A failure of the device.
    pub(crate) fn into_host(self) -> Result<Cow<'a, [f32]>> {
        match self {
            Self::Host(values) => Ok(Cow::Borrowed(values)),
            Self::Device(values) => values.read().map(Cow::Owned),
        }
    }
}

/// Runs a batch.
///
/// # Errors
/// A token outside of the vocabulary, a failure of the device.
pub(crate) fn forward<'a>(
    weights: &Weights,
    adapters: &Adapters,
    store: &mut Store,
    batch: &Batch,
    buffers: &'a mut Buffers,
) -> Result<Logits<'a>> {
    match (weights.on_device(), store) {
        (None, Store::Host(store)) => {
            // Inside of the thread pool each kernel starts without waking another thread first.
            rayon::scope(|_| host::forward(weights, adapters, store, batch, buffers)).map(Logits::Host)
        }
        (Some(own), Store::Device(store)) => {
            accelerator::forward(weights, own, store, batch).map(Logits::Device)
        }
        _ => Err(Error::Invalid("the engine's weights and cache lie on two devices".into())),
    }
}
