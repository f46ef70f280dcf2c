//! The samples of one optimizer step, as an algorithm's credit sees them.

use std::fmt;
use std::sync::Arc;

use crate::{Communicator, Error, Group, Metrics, Phase, Reduce, Result};

const CREDIT: Phase = Phase::new("summing a step's statistics for credit");

/// The samples of one optimizer step, before they are packed.
#[derive(Clone, Default)]
pub struct StepBatch {
    /// All groups of the step on this rank.
    pub groups: Vec<Group>,
    /// The coefficient of the KL penalty in this step's rewards, where a controller sets it; else the
    /// algorithm's own holds.
    pub kl_coef: Option<f64>,
    /// What credit logs.
    pub metrics: Metrics,
    /// The ranks that share the step; none where it is this rank's alone.
    pub comm: Option<Arc<dyn Communicator>>,
}

impl StepBatch {
    /// A step of these groups on one rank.
    pub fn new(groups: Vec<Group>) -> Self {
        Self { groups, ..Self::default() }
    }

    /// Sums numbers over the ranks that share the step, for a statistic of the whole step.
    ///
    /// Every rank has to call it equally often. A rank whose own part has failed says so here, and
    /// then all of them fail: one that left without a word would let the others wait for it.
    ///
    /// # Errors
    /// The one that came in; [`Error::Invalid`] where only other ranks failed.
    pub fn sum_over_ranks<const N: usize>(&self, own: Result<[f64; N]>) -> Result<[f64; N]> {
        let Some(comm) = self.comm.as_ref().filter(|comm| comm.size() > 1) else { return own };
        let mut all = vec![f64::from(u8::from(own.is_err()))];
        all.extend(own.as_ref().map_or([0.0; N], |own| *own));
        comm.all_reduce_host(&mut all, Reduce::Sum, CREDIT)?;
        own?;
        if all[0] > 0.0 {
            let message = format!("{} other ranks failed in this step's credit; see their errors", all[0]);
            return Err(Error::Invalid(message));
        }
        Ok(std::array::from_fn(|at| all[1 + at]))
    }
}

impl fmt::Debug for StepBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StepBatch")
            .field("groups", &self.groups)
            .field("kl_coef", &self.kl_coef)
            .field("metrics", &self.metrics)
            .field("ranks", &self.comm.as_ref().map_or(1, |comm| comm.size()))
            .finish()
    }
}
