//! Gradients of an algorithm's loss: the one place where policy and algorithm meet.

use aligner_core::{Algorithm, Batch, Gradients, Policy, Result};

/// Gradients of the loss's sum over `batches`, not divided by anything yet.
pub(crate) fn gradients(
    policy: &dyn Policy,
    algorithm: &dyn Algorithm,
    batches: &[Batch],
) -> Result<Gradients> {
    policy.accumulate(batches, algorithm.needs(), &|out, batch| algorithm.loss(out, batch))
}
