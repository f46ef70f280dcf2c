//! What a learner asks of an optimizer, on one rank or many.

use std::collections::BTreeMap;

use burn::tensor::Tensor;

use crate::weights::UnreadTensor;
use crate::{ParamSet, Result};

/// An optimizer's state: names, shapes and values of its tensors, and the updates of each parameter. It is
/// that of whole parameters, whatever the layout of ranks.
#[derive(Debug, Clone, Default)]
pub struct OptimizerState {
    /// Named as [`AdamW::tensors`](super::AdamW::tensors) says.
    pub tensors: Vec<(String, Vec<usize>, Tensor<1>)>,
    /// How many updates each parameter has had; one that has had none is absent.
    pub steps: BTreeMap<String, u64>,
}

/// Turns the gradients of all ranks into an update of the parameters. All ranks call each method together.
pub trait Optimizer: Send {
    /// Sums the gradients, one for each parameter, over the ranks that have the same parameter, and
    /// returns the L2 norm of the whole gradient. What is left of `gradients` is for [`Optimizer::step`].
    ///
    /// # Errors
    /// A failed collective.
    fn sum(&mut self, params: &ParamSet, gradients: &mut Vec<Option<Tensor<1>>>) -> Result<f64>;

    /// Moves `params` against `gradients`, as [`Optimizer::sum`] left them, multiplied by `scale`.
    ///
    /// # Errors
    /// Gradients that do not fit the parameters; a failed collective.
    fn step(
        &mut self,
        params: &mut ParamSet,
        gradients: &[Option<Tensor<1>>],
        learning_rate: f64,
        scale: f64,
    ) -> Result<()>;

    /// The state, of whole parameters.
    ///
    /// # Errors
    /// A failed collective.
    fn state(&self, params: &ParamSet) -> Result<OptimizerState>;

    /// Takes over the state that [`Optimizer::state`] gave, on this layout of ranks or another.
    ///
    /// # Errors
    /// A tensor that is absent, not one of the model's parameters', or of another shape. The optimizer is
    /// then as it was.
    fn restore(
        &mut self,
        params: &ParamSet,
        tensors: BTreeMap<String, UnreadTensor>,
        steps: &BTreeMap<String, u64>,
    ) -> Result<()>;
}
