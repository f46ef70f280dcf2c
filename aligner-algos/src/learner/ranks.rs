//! What a step exchanges among ranks. With one rank nothing is exchanged.

use aligner_core::metrics::{DICTIONARY, Kind};
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

/// Combines the metrics of all ranks: means add, extremes stay extremes. Those of the dictionary are
/// exchanged: every rank knows their order, whatever its own batches logged. Others stay as this
/// rank saw them.
pub(super) fn sum_metrics(comm: &dyn Communicator, metrics: &mut Metrics) -> Result<()> {
    if comm.size() == 1 {
        return Ok(());
    }
    let mut sums = vec![0.0; 2 * DICTIONARY.len()];
    // The maximum, and the minimum with its sign changed; a rank without either has the least number.
    let mut extremes = vec![f64::NEG_INFINITY; 2 * DICTIONARY.len()];
    let mut all = Metrics::default();
    for (name, kind, (sum, weight)) in metrics.parts() {
        let place = DICTIONARY.iter().position(|entry| entry.name == name);
        match (place, kind) {
            (Some(at), Kind::Mean) => (sums[2 * at], sums[2 * at + 1]) = (sum, weight),
            (Some(at), Kind::Max) => extremes[2 * at] = sum,
            (Some(at), Kind::Min) => extremes[2 * at + 1] = -sum,
            (None, Kind::Mean) => all.add(name, sum, weight),
            (None, Kind::Max) => all.add_max(name, sum),
            (None, Kind::Min) => all.add_min(name, sum),
        }
    }
    comm.all_reduce_host(&mut sums, Reduce::Sum, METRICS)?;
    comm.all_reduce_host(&mut extremes, Reduce::Max, METRICS)?;
    for (at, entry) in DICTIONARY.iter().enumerate() {
        if sums[2 * at + 1] != 0.0 {
            all.add(entry.name, sums[2 * at], sums[2 * at + 1]);
        }
        if extremes[2 * at] > f64::NEG_INFINITY {
            all.add_max(entry.name, extremes[2 * at]);
        }
        if extremes[2 * at + 1] > f64::NEG_INFINITY {
            all.add_min(entry.name, -extremes[2 * at + 1]);
        }
    }
    *metrics = all;
    Ok(())
}
