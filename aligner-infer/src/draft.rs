//! A smaller model that proposes tokens.
//!
//! It draws with the request's own random numbers, as the model itself will: where the two agree on a
//! distribution they draw the same token, and a proposal is kept where the model draws it too. So the
//! samples are those that the model alone would give, bitwise.

use std::cell::RefCell;

use aligner_core::model::CausalLm;
use aligner_core::{Error, Result};

use crate::accelerator::Accelerator;
use crate::adapters::Adapters;
use crate::host::{Batch, Buffers, Store};
use crate::job::Job;
use crate::logits::forward;
use crate::sampler::Sampler;
use crate::schedule::Part;
use crate::weights::Weights;

/// The drafting model. Its keys and values lie in pages of the same numbers as the model's.
pub(crate) struct Draft {
    weights: Weights,
    /// It has none: what it proposes is checked by the model with the request's own.
    none: Adapters,
    batch: Batch,
    buffers: Buffers,
    /// The running requests that this pass proposes for.
    drafting: Vec<usize>,
}

impl Draft {
    /// # Errors
    /// Another vocabulary or a shorter context than the model's.
    pub(crate) fn new(draft: CausalLm, model: &CausalLm, accelerator: Option<Accelerator>) -> Result<Self> {
        let (own, target) = (draft.config(), model.config());
        if own.vocab_size != target.vocab_size {
            let (own, target) = (own.vocab_size, target.vocab_size);
            return Err(Error::Invalid(format!(
                "the draft model has a vocabulary of {own} tokens, the model one of {target}"
            )));
        }
        if own.max_positions < target.max_positions {
            let (own, target) = (own.max_positions, target.max_positions);
            return Err(Error::Invalid(format!(
                "the draft model has a context of {own} tokens, the model one of {target}"
            )));
        }
        Ok(Self {
            weights: Weights::new(draft, 0, None, accelerator)?,
            none: Adapters::default(),
            batch: Batch::default(),
            buffers: Buffers::default(),
            drafting: Vec::new(),
        })
    }

    pub(crate) fn store(&self, pages: usize) -> Store {
        Store::new(&self.weights, pages)
    }

    /// Computes the planned tokens, and fills the proposals, whose lengths are planned, with tokens.
    ///
    /// # Errors
    /// Those of the forward pass.
    pub(crate) fn propose(&mut self, jobs: &mut [Job], plan: &[Part], store: &mut Store) -> Result<()> {
        self.batch.clear();
        self.drafting.clear();
        for part in plan {
            let job = &mut jobs[part.job];
            let drafts = usize::from(!job.proposal.is_empty());
            let end = if drafts == 1 { job.sample.tokens.len() } else { job.computed + part.rows };
            let tokens = job.sample.tokens[job.drafted..end].iter().copied();
            self.batch.push(tokens, job.drafted, &job.pages, drafts, None);
            job.drafted = end;
            if drafts == 1 {
                self.drafting.push(part.job);
            }
        }
        let mut index = 0;
        while !self.batch.tokens.is_empty() {
            let vocab = self.weights.model.config().vocab_size;
            let (weights, batch, buffers) = (&self.weights, &self.batch, &mut self.buffers);
            let logits = forward(weights, &self.none, store, batch, buffers)?.into_host()?;
            for (&job, logits) in self.drafting.iter().zip(logits.chunks_exact(vocab)) {
                SAMPLER.with_borrow_mut(|sampler| jobs[job].draft(sampler, logits, index));
            }
            index += 1;
            self.drafting.retain(|&job| index < jobs[job].proposal.len());
            self.batch.clear();
            for &job in &self.drafting {
                let job = &mut jobs[job];
                let token = job.proposal[index - 1];
                self.batch.push(std::iter::once(token), job.drafted, &job.pages, 1, None);
                job.drafted += 1;
            }
        }
        jobs.iter_mut().for_each(Job::end_draft);
        Ok(())
    }
}

thread_local! {
    static SAMPLER: RefCell<Sampler> = RefCell::new(Sampler::new());
}
