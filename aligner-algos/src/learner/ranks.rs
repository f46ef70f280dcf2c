//! What a step exchanges among ranks. With one rank nothing is exchanged.

use aligner_core::metrics::DICTIONARY;
use aligner_core::{Communicator, Error, Gradients, Metrics, ParamSet, Phase, Reduce, Result, Tensor};

const AGREE: Phase = Phase::new("agreeing on a step");
const GRADIENTS: Phase = Phase::new("all-reduce of gradients");
const METRICS: Phase = Phase::new("all-reduce of metrics");

/// Sums `numbers` over ranks, and fails on every rank where one has failed: a rank that left
/// without a word would let the others wait for it.
pub(super) fn agree<T>(comm: &dyn Communicator, work: Result<T>, numbers: &mut [f64]) -> Result<T> {
    if comm.size() == 1 {
        return work;
    }
    let failed = f64::from(u8::from(work.is_err()));
    let mut all = [&[failed], &*numbers].concat();
    comm.all_reduce_host(&mut all, Reduce::Sum, AGREE)?;
    let done = work?;
    if all[0] > 0.0 {
        return Err(Error::Invalid(format!("{} other ranks failed in this step; see their errors", all[0])));
    }
    numbers.copy_from_slice(&all[1..]);
    Ok(done)
}

/// Sums gradients over ranks; one that only some ranks have counts as 0 on the others.
pub(super) fn sum_gradients(
    comm: &dyn Communicator,
    gradients: &mut Gradients,
    params: &ParamSet,
) -> Result<()> {
    gradients.values.resize(params.len(), None);
    if comm.size() == 1 {
        return Ok(());
    }
    let mut present: Vec<f64> =
        gradients.values.iter().map(|grad| f64::from(u8::from(grad.is_some()))).collect();
    comm.all_reduce_host(&mut present, Reduce::Max, GRADIENTS)?;
    for ((grad, param), present) in gradients.values.iter_mut().zip(params.iter()).zip(present) {
        if present > 0.0 {
            let own = grad.take().unwrap_or_else(|| Tensor::zeros(param.value.dims(), &param.value.device()));
            *grad = Some(comm.all_reduce(own, Reduce::Sum, GRADIENTS)?);
        }
    }
    Ok(())
}

/// Adds the metrics of all ranks. Those of the dictionary are exchanged: every rank knows their
/// order, whatever its own batches logged. Others stay as this rank saw them.
pub(super) fn sum_metrics(comm: &dyn Communicator, metrics: &mut Metrics) -> Result<()> {
    if comm.size() == 1 {
        return Ok(());
    }
    let mut sums = vec![0.0; 2 * DICTIONARY.len()];
    let mut all = Metrics::default();
    for (name, &mut (sum, weight)) in metrics.pairs_mut() {
        match DICTIONARY.iter().position(|entry| entry.name == name) {
            Some(at) => (sums[2 * at], sums[2 * at + 1]) = (sum, weight),
            None => all.add(name, sum, weight),
        }
    }
    comm.all_reduce_host(&mut sums, Reduce::Sum, METRICS)?;
    for (entry, pair) in DICTIONARY.iter().zip(sums.chunks_exact(2)) {
        if pair[1] != 0.0 {
            all.add(entry.name, pair[0], pair[1]);
        }
    }
    *metrics = all;
    Ok(())
}
