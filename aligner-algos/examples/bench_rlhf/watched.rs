//! The step's own parts, telling the clock when their phase begins.

use aligner_core::{Algorithm, Batch, Forward, LossOutput, Needs, ParamSet, Per, Policy, Result, StepBatch};

use crate::clock::{Clock, Phase};

/// A policy whose passes are timed and whose rows are counted.
pub(crate) struct Watched {
    pub(crate) policy: Box<dyn Policy>,
    pub(crate) clock: Clock,
    /// The phase of its passes.
    pub(crate) asks: Phase,
    /// The phase of passes with gradients, from other handles.
    pub(crate) learns: Phase,
}

impl Policy for Watched {
    fn forward(&self, batch: &Batch, needs: Needs) -> Result<Forward> {
        self.clock.enter(self.asks);
        self.clock.count(self.asks, batch.tokens.len() as u64);
        self.policy.forward(batch, needs)
    }

    fn params(&self) -> &ParamSet {
        self.policy.params()
    }

    fn params_mut(&mut self) -> &mut ParamSet {
        self.policy.params_mut()
    }

    fn with_params(&self, params: ParamSet) -> Box<dyn Policy> {
        let (policy, clock) = (self.policy.with_params(params), self.clock.clone());
        Box::new(Self { policy, clock, asks: self.learns, learns: self.learns })
    }
}

/// An algorithm whose credit is timed.
pub(crate) struct Credited<A> {
    pub(crate) algorithm: A,
    pub(crate) clock: Clock,
}

impl<A: Algorithm> Algorithm for Credited<A> {
    fn loss(&self, out: &Forward, batch: &Batch) -> Result<LossOutput> {
        self.algorithm.loss(out, batch)
    }

    fn credit(&self, step: &mut StepBatch) -> Result<()> {
        self.clock.enter(Phase::Credit);
        self.algorithm.credit(step)
    }

    fn needs(&self) -> Needs {
        self.algorithm.needs()
    }

    fn per(&self) -> Per {
        self.algorithm.per()
    }
}
