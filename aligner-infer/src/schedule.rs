//! Which requests take part in the next pass, and with how many tokens.

use std::collections::BTreeMap;

use crate::config::EngineConfig;
use crate::host::Store;
use crate::job::{Job, Order};
use crate::pages::Pages;
use aligner_core::ops::rows::PAGE;

/// The requests and the pages that they share.
///
/// Older requests come first, and a page that is missing is taken from the youngest: so the oldest one
/// always goes on, and every request becomes the oldest.
#[derive(Default)]
pub(crate) struct Queue {
    pub(crate) waiting: BTreeMap<Order, Job>,
    /// In their order; these hold pages.
    pub(crate) running: Vec<Job>,
    pub(crate) preemptions: u64,
    pub(crate) reused_tokens: u64,
}

/// A request's part in a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    /// Index among the running ones.
    pub(crate) job: usize,
    /// How many of its next tokens.
    pub(crate) rows: usize,
}

/// What a schedule works on beside the queue.
pub(crate) struct Memory<'a> {
    pub(crate) pages: &'a mut Pages,
    pub(crate) stores: &'a mut [Store],
}

impl Queue {
    /// Plans the next pass: tokens of running requests, then chunks of prompts, then waiting requests.
    /// `version` is that of the newest weights.
    pub(crate) fn plan(
        &mut self,
        config: &EngineConfig,
        version: u64,
        memory: &mut Memory<'_>,
        plan: &mut Vec<Part>,
    ) {
        plan.clear();
        let mut budget = config.max_batch_tokens;
        for prompts in [false, true] {
            let mut at = 0;
            while at < self.running.len() && budget > 0 {
                let job = &mut self.running[at];
                if (job.pending() > 1) == prompts {
                    let rows = job.pending().min(budget);
                    job.proposal.truncate(if rows == job.pending() { budget - rows } else { 0 });
                    let rows = rows + job.proposal.len();
                    if self.secure(at, rows, memory, plan, &mut budget) {
                        plan.push(Part { job: at, rows });
                        budget -= rows;
                    }
                }
                at += 1;
            }
        }
        if budget > 0 {
            self.admit(config, version, memory, plan, budget);
        }
        // One pass reads a sequence's pages in the order of the running requests.
        plan.sort_unstable_by_key(|part| part.job);
    }

    /// Sees to it that a running request may write its next `rows` tokens, at the cost of younger ones.
    /// Says whether it may; else it waits itself.
    fn secure(
        &mut self,
        at: usize,
        rows: usize,
        memory: &mut Memory<'_>,
        plan: &mut Vec<Part>,
        budget: &mut usize,
    ) -> bool {
        while !grow(&mut self.running[at], rows, memory) {
            let last = self.running.len() - 1;
            if let Some(index) = plan.iter().position(|part| part.job == last) {
                *budget += plan.swap_remove(index).rows;
            }
            self.preempt(memory.pages);
            if last == at {
                return false;
            }
        }
        true
    }

    /// The youngest running request waits again.
    fn preempt(&mut self, pages: &mut Pages) {
        if let Some(mut job) = self.running.pop() {
            job.forget(pages);
            self.preemptions += 1;
            self.waiting.insert(job.order(), job);
        }
    }

    /// Starts waiting requests while there is room.
    fn admit(
        &mut self,
        config: &EngineConfig,
        version: u64,
        memory: &mut Memory<'_>,
        plan: &mut Vec<Part>,
        mut budget: usize,
    ) {
        let mut after = None;
        while budget > 0 && self.running.len() < config.max_running {
            let Some(order) = self.next_waiting(after) else { return };
            after = Some(order);
            let Some(job) = self.waiting.get(&order) else { return };
            let shares = config.prefix_cache && job.version.is_none_or(|own| own == version);
            if shares && self.prompt_is_on_its_way(job, memory.pages, version) {
                continue;
            }
            let Some(mut job) = self.waiting.remove(&order) else { return };
            if shares {
                job.find_prefix(memory.pages);
            }
            let rows = job.pending().min(budget);
            let first = job.pages.len();
            // Every running request may need a page before this one is done.
            let wanted = (job.computed + rows).div_ceil(PAGE) - first + 1 + self.running.len();
            if (memory.pages.available() < wanted && !self.running.is_empty())
                || !grow(&mut job, rows, memory)
            {
                job.forget(memory.pages);
                self.waiting.insert(order, job);
                return;
            }
            self.reused_tokens += job.computed as u64;
            job.begin(version);
            let at = self.running.partition_point(|other| other.order() < order);
            plan.iter_mut().filter(|part| part.job >= at).for_each(|part| part.job += 1);
            plan.push(Part { job: at, rows });
            self.running.insert(at, job);
            budget -= rows;
        }
    }

    fn next_waiting(&self, after: Option<Order>) -> Option<Order> {
        use std::ops::Bound::{Excluded, Unbounded};
        match after {
            Some(order) => self.waiting.range((Excluded(order), Unbounded)).next(),
            None => self.waiting.iter().next(),
        }
        .map(|(&order, _)| order)
    }

    /// Whether a running request is about to compute a beginning of this one's tokens that the index does
    /// not know yet: waiting for it costs less than computing it twice.
    fn prompt_is_on_its_way(&self, job: &Job, pages: &Pages, version: u64) -> bool {
        let tokens = &job.sample.tokens;
        let limit = tokens.len() - 1;
        let common = |other: &Job| {
            let prompt = &other.sample.tokens[..other.prompt_len()];
            prompt.iter().zip(&tokens[..limit]).take_while(|(a, b)| a == b).count()
        };
        let prefills = self
            .running
            .iter()
            .filter(|other| other.version == Some(version) && other.computed < other.prompt_len())
            .filter(|other| other.adapter == job.adapter);
        let coming = prefills.map(common).max().unwrap_or(0);
        coming >= PAGE.min(limit) && coming > 0 && coming > pages.known(job.root(), tokens, limit)
    }
}

/// Makes the pages of a request's next `rows` tokens its own to write. Says whether there were enough;
/// those that it got stay.
fn grow(job: &mut Job, rows: usize, memory: &mut Memory<'_>) -> bool {
    let (start, end) = (job.computed, job.computed + rows);
    for index in start / PAGE..end.div_ceil(PAGE) {
        let Some(&page) = job.pages.get(index) else {
            let Some(page) = memory.pages.take() else { return false };
            job.pages.push(page);
            continue;
        };
        let offset = start.saturating_sub(index * PAGE);
        if !memory.pages.writable(page, offset) {
            let Some(own) = memory.pages.take() else { return false };
            memory.stores.iter_mut().for_each(|store| store.copy(page, own));
            memory.pages.release(page);
            job.pages[index] = own;
        }
    }
    true
}
