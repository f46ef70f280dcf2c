//! What an algorithm is: credit plus loss.

use burn::tensor::Tensor;

use crate::{Batch, Error, Group, Metrics, Result, StepBatch};

/// What a loss needs beside the log-probabilities of the targets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Needs(u8);

impl Needs {
    /// Log-probabilities only.
    pub const NOTHING: Self = Self(0);
    /// Log-probabilities under the policy as it was when it sampled.
    pub const OLD_LOGPS: Self = Self(1);
    /// Log-probabilities under the frozen reference.
    pub const REF_LOGPS: Self = Self(2);
    /// A critic's value at each target. A policy with a scalar head gives them; one with a
    /// language-model head does not, and its batch carries those of the critic.
    pub const VALUES: Self = Self(4);
    /// Entropy of the distribution at each target.
    pub const ENTROPY: Self = Self(8);
    /// Scalar scores at the last token of each sample, in place of log-probabilities.
    pub const SCORES: Self = Self(16);

    /// Whether all of `other` is asked for.
    pub fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl std::ops::BitOr for Needs {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// The unit that a loss is averaged over: what the learner divides its sum by, once a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Per {
    /// The number of targets.
    Token,
    /// The number of samples that have a target.
    Sequence,
    /// The number of groups: pairs, for preferences.
    Group,
    /// A number of the algorithm's own.
    Constant(f64),
}

impl Per {
    /// How many units `groups` hold.
    pub fn count<'a>(self, groups: impl IntoIterator<Item = &'a Group>) -> f64 {
        let groups = groups.into_iter();
        match self {
            Self::Token => groups.flat_map(|g| &g.samples).map(crate::Sample::targets).sum::<usize>() as f64,
            Self::Sequence => groups.flat_map(|g| &g.samples).filter(|s| s.targets() > 0).count() as f64,
            Self::Group => groups.count() as f64,
            Self::Constant(count) => count,
        }
    }
}

/// How errors name the head that gives log-probabilities and logits.
pub(crate) const LANGUAGE_HEAD: &str = "language-model head";

/// What one pass of a policy gives a loss. Never logits: `[tokens, vocab]` stays in the kernel.
#[derive(Debug, Clone, Default)]
pub struct Forward {
    /// Log-probability of each target, `[targets]`, in nats.
    pub logps: Option<Tensor<1>>,
    /// Entropy of the distribution at each target, `[targets]`, in nats.
    pub entropy: Option<Tensor<1>>,
    /// 1 where the target is the most likely token, else 0, `[targets]`; no gradient.
    pub correct: Option<Tensor<1>>,
    /// The scalar head at each sample's last token, `[sequences, outputs]`.
    pub scores: Option<Tensor<2>>,
    /// The value head at each target's row, `[targets]`.
    pub values: Option<Tensor<1>>,
    /// The loss on an uneven use of experts, `[1]`, with its weight in it, for each unit that the loss is
    /// averaged over; in training, where the model asks for it. Learners add it, losses need not.
    pub balance_loss: Option<Tensor<1>>,
}

impl Forward {
    /// Log-probability of each target, `[targets]`.
    ///
    /// # Errors
    /// [`Error::Head`] where the model has no language-model head.
    pub fn logps(&self) -> Result<&Tensor<1>> {
        self.logps.as_ref().ok_or(Error::Head { field: "logps", head: LANGUAGE_HEAD })
    }

    /// The scalar head at each sample's last token, `[sequences, outputs]`.
    ///
    /// # Errors
    /// [`Error::Missing`] where they were not asked for.
    pub fn scores(&self) -> Result<&Tensor<2>> {
        self.scores.as_ref().ok_or(Error::Missing { field: "scores", need: "Needs::SCORES" })
    }

    /// The value head at each target's row, `[targets]`.
    ///
    /// # Errors
    /// [`Error::Head`] where the model has no scalar head.
    pub fn values(&self) -> Result<&Tensor<1>> {
        self.values.as_ref().ok_or(Error::Head { field: "values", head: "scalar head" })
    }

    /// Entropy at each target, `[targets]`.
    ///
    /// # Errors
    /// [`Error::Missing`] where it was not asked for.
    pub fn entropy(&self) -> Result<&Tensor<1>> {
        self.entropy.as_ref().ok_or(Error::Missing { field: "entropy", need: "Needs::ENTROPY" })
    }
}

/// A loss summed over one micro-batch, with what is worth logging.
#[derive(Debug, Clone)]
pub struct LossOutput {
    /// The sum, `[1]`. The learner divides it once, by the step's count.
    pub sum: Tensor<1>,
    /// Means over the micro-batch.
    pub metrics: Metrics,
}

impl LossOutput {
    /// A loss without metrics.
    pub fn new(sum: Tensor<1>) -> Self {
        Self { sum, metrics: Metrics::default() }
    }

    /// Logs the mean of `values` under `name`.
    #[must_use]
    pub fn mean<const D: usize>(mut self, name: &str, values: &Tensor<D>) -> Self {
        self.metrics.add_all(name, values);
        self
    }
}

/// The algorithm's loss as a policy sees it.
pub type LossFn<'a> = dyn Fn(&Forward, &Batch) -> Result<LossOutput> + 'a;

/// An alignment algorithm: who gets which credit, and which scalar is minimised.
///
/// One method is required. `credit` sees a whole step without gradient; `loss` sees a micro-batch
/// with gradient and returns a *sum*, so that neither the micro-batch size nor the number of ranks
/// changes a gradient beyond rounding.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an algorithm",
    note = "implement `Algorithm::loss`; everything else has a default"
)]
pub trait Algorithm {
    /// Sum over the micro-batch of the per-token, per-sequence or per-group loss, in nats.
    ///
    /// # Errors
    /// What the loss needs and the batch does not carry.
    fn loss(&self, out: &Forward, batch: &Batch) -> Result<LossOutput>;

    /// Writes each sample's `weights` for the whole step, without gradient, and logs into the step's
    /// metrics.
    ///
    /// # Errors
    /// Samples that the algorithm cannot give credit to.
    fn credit(&self, step: &mut StepBatch) -> Result<()> {
        let _ = step;
        Ok(())
    }

    /// What the loss needs beside log-probabilities.
    fn needs(&self) -> Needs {
        Needs::NOTHING
    }

    /// The unit that the loss is averaged over.
    fn per(&self) -> Per {
        Per::Token
    }
}
