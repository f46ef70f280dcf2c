//! A model with its parameters, as the learner sees it.

use burn::tensor::Tensor;

use crate::{Batch, Error, Forward, LossFn, Metrics, Needs, ParamSet, Result};

/// Gradients of a loss sum with respect to each parameter of a set, in the set's order.
#[derive(Debug, Clone, Default)]
pub struct Gradients {
    /// One flat gradient `[elements]` for each parameter; none where it is not trained or not used.
    pub values: Vec<Option<Tensor<1>>>,
    /// The loss summed over all micro-batches.
    pub loss_sum: f64,
    /// The loss's metrics over all micro-batches.
    pub metrics: Metrics,
}

impl Gradients {
    /// Adds the gradients of one micro-batch to those of the earlier ones.
    pub fn add(&mut self, values: Vec<Option<Tensor<1>>>, loss_sum: f64, metrics: &Metrics) {
        self.loss_sum += loss_sum;
        self.metrics.merge(metrics);
        if self.values.is_empty() {
            self.values = values;
            return;
        }
        for (sum, value) in self.values.iter_mut().zip(values) {
            *sum = match (sum.take(), value) {
                (Some(sum), Some(value)) => Some(sum + value),
                (one, other) => one.or(other),
            };
        }
    }
}

/// Takes a batch's place among several, and what a pass says of it.
pub type EachForward<'a> = dyn FnMut(usize, Forward) -> Result<()> + 'a;

/// A model that gives log-probabilities of a packed batch, and gradients of a loss on them.
pub trait Policy: Send {
    /// One pass over `batch`; differentiable where the parameters are tracked.
    ///
    /// # Errors
    /// A batch that the model cannot take: token ids past the vocabulary, too many positions.
    fn forward(&self, batch: &Batch, needs: Needs) -> Result<Forward>;

    /// A pass over each of `batches` in turn; `each` is given the batch's place and what the pass says.
    ///
    /// Ranks whose passes need each other call it together, each with as many batches as it has.
    ///
    /// # Errors
    /// Those of [`Policy::forward`] and of `each`.
    fn forward_each(&self, batches: &[Batch], needs: Needs, each: &mut EachForward<'_>) -> Result<()> {
        batches.iter().enumerate().try_for_each(|(at, batch)| each(at, self.forward(batch, needs)?))
    }

    /// Whether a pass needs ranks that have other batches: then nobody can look again at a batch alone.
    fn needs_others(&self) -> bool {
        false
    }

    /// The parameters.
    fn params(&self) -> &ParamSet;

    /// The parameters, for an optimizer.
    fn params_mut(&mut self) -> &mut ParamSet;

    /// The parameters of the whole model: what an engine generates with and a checkpoint holds. Ranks that
    /// have parts of one model call it together.
    ///
    /// # Errors
    /// A failed collective.
    fn whole(&self) -> Result<ParamSet> {
        Ok(self.params().clone())
    }

    /// The same model on other parameter handles: a frozen reference, an autodiff copy.
    fn with_params(&self, params: ParamSet) -> Box<dyn Policy>;

    /// Says which optimizer step, from 0, the next gradients are for: what a policy draws at random in
    /// training, such as dropout, is keyed by it, so that a resumed run draws the same.
    fn begin_step(&mut self, step: u64) {
        let _ = step;
    }

    /// Sums the gradients of `loss` over micro-batches.
    ///
    /// The default runs them in turn; a pipeline overrides it with its schedule.
    ///
    /// # Errors
    /// Those of the forward pass and of the loss, and [`Error::NotFinite`] with the micro-batch's
    /// sample ids where the loss is NaN or infinite.
    fn accumulate(&self, micro: &[Batch], needs: Needs, loss: &LossFn<'_>) -> Result<Gradients> {
        accumulate_in_turn(self, micro, needs, loss)
    }
}

/// The default of [`Policy::accumulate`]: one micro-batch after the other, each with a graph of its own.
///
/// # Errors
/// As [`Policy::accumulate`].
pub fn accumulate_in_turn<P: Policy + ?Sized>(
    policy: &P,
    micro: &[Batch],
    needs: Needs,
    loss: &LossFn<'_>,
) -> Result<Gradients> {
    let mut gradients = Gradients::default();
    for batch in micro {
        let tracked = policy.with_params(policy.params().tracked());
        let out = loss(&tracked.forward(batch, needs)?, batch)?;
        let sum = finite_sum(&out.sum, batch)?;
        let mut grads = out.sum.backward();
        let values = tracked.params().iter().map(|p| p.value.grad_remove(&mut grads)).collect();
        gradients.add(values, sum, &out.metrics);
    }
    Ok(gradients)
}

/// A loss sum on the host, checked to be finite.
///
/// # Errors
/// [`Error::NotFinite`] names the batch's samples.
pub fn finite_sum(sum: &Tensor<1>, batch: &Batch) -> Result<f64> {
    let sum: f32 = sum.clone().into_scalar();
    if sum.is_finite() {
        return Ok(f64::from(sum));
    }
    Err(Error::NotFinite { what: "the loss".into(), samples: batch.sample_ids() })
}
