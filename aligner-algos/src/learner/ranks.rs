//! What a step exchanges among ranks. With one rank nothing is exchanged.

use std::collections::BTreeMap;
use std::sync::Arc;

use aligner_core::metrics::{DICTIONARY, Kind};
use aligner_core::optim::{AdamW, Norm, Optimizer, OptimizerState, global_norm};
use aligner_core::weights::UnreadTensor;
use aligner_core::{Communicator, Error, Metrics, ParamSet, Phase, Reduce, Result, Tensor};
use aligner_parallel::all_reduce_together;

const AGREE: Phase = Phase::new("agreeing on a step");
const GRADIENTS: Phase = Phase::new("all-reduce of gradients");
const METRICS: Phase = Phase::new("all-reduce of metrics");

/// The ranks of a run, as its learner sees them.
#[derive(Clone)]
pub struct TrainingRanks {
    /// All of them.
    pub all: Arc<dyn Communicator>,
    /// This one with those that have batches of their own: over them losses, counts and metrics add up. The
    /// ranks that share a model have the same batches.
    pub batches: Arc<dyn Communicator>,
}

/// Sums `numbers` over the ranks with batches of their own, and fails on every rank where one has failed: a
/// rank that left without a word would let the others wait for it.
pub(super) fn agree<T>(ranks: &TrainingRanks, work: Result<T>, numbers: &mut [f64]) -> Result<T> {
    if ranks.all.size() == 1 {
        return work;
    }
    let mut failed = [f64::from(u8::from(work.is_err()))];
    ranks.all.all_reduce_host(&mut failed, Reduce::Sum, AGREE)?;
    let done = work?;
    if failed[0] > 0.0 {
        let message = format!("{} other ranks failed in this step; see their errors", failed[0]);
        return Err(Error::Invalid(message));
    }
    if !numbers.is_empty() && ranks.batches.size() > 1 {
        ranks.batches.all_reduce_host(numbers, Reduce::Sum, AGREE)?;
    }
    Ok(done)
}

/// `AdamW` on parameters that every rank has whole.
pub(super) struct Replicated {
    comm: Arc<dyn Communicator>,
    adamw: AdamW,
}

impl Replicated {
    pub(super) fn new(comm: Arc<dyn Communicator>, adamw: AdamW) -> Self {
        Self { comm, adamw }
    }
}

impl Optimizer for Replicated {
    fn sum(&mut self, params: &ParamSet, gradients: &mut Vec<Option<Tensor<1>>>) -> Result<f64> {
        gradients.resize(params.len(), None);
        all_reduce_together(self.comm.as_ref(), gradients, params, |_| true, GRADIENTS)?;
        Ok(global_norm(gradients, Norm::L2))
    }

    fn step(
        &mut self,
        params: &mut ParamSet,
        gradients: &[Option<Tensor<1>>],
        learning_rate: f64,
        scale: f64,
    ) -> Result<()> {
        self.adamw.step(params, gradients, learning_rate, scale)
    }

    fn state(&self, params: &ParamSet) -> Result<OptimizerState> {
        Ok(OptimizerState { tensors: self.adamw.tensors(params), steps: self.adamw.steps(params) })
    }

    fn restore(
        &mut self,
        params: &ParamSet,
        tensors: BTreeMap<String, UnreadTensor>,
        steps: &BTreeMap<String, u64>,
    ) -> Result<()> {
        self.adamw.restore(params, tensors, steps)
    }
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
