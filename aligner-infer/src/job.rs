//! One request on its way through the engine.

use std::sync::Arc;

use aligner_core::rng::{Rng, key_of};
use aligner_core::{
    Detokenize, Drawn, Error, FinishReason, PRIORITY_PLACES, Request, RequestId, Result, Sample,
};

use crate::pages::{Page, Pages, Prefix};
use crate::sampler::{NgramProposer, Row, Sampler, Seen};
use crate::stop::StopText;
use aligner_core::ops::rows::PAGE;

/// The order in which requests are served: that of submission, moved by their priority.
pub(crate) type Order = (i128, RequestId);

pub(crate) struct Job {
    pub(crate) id: RequestId,
    pub(crate) request: Request,
    pub(crate) sample: Sample,
    seen: Seen,
    stop: Option<StopText>,
    rng: Rng,
    /// Tokens whose keys and values its pages hold.
    pub(crate) computed: usize,
    pub(crate) pages: Vec<Page>,
    /// The same for a draft model's; what neither holds is not published.
    pub(crate) drafted: usize,
    has_draft: bool,
    /// Proposed tokens that `seen` counts for the moment.
    drafts_seen: usize,
    /// What the prefix index calls its whole pages, and how many it was told of.
    prefix: Prefix,
    published: usize,
    /// The place of its adapter.
    pub(crate) adapter: Option<usize>,
    /// The version of the weights that it runs on; none before it first ran.
    pub(crate) version: Option<u64>,
    /// Tokens that may follow, to be checked in the next pass.
    pub(crate) proposal: Vec<u32>,
    /// What the last pass drew.
    pub(crate) drawn: Vec<Drawn>,
    /// Why it ended, once it has.
    pub(crate) finish: Option<FinishReason>,
}

impl Job {
    pub(crate) fn new(
        id: RequestId,
        mut request: Request,
        text: Option<&Arc<dyn Detokenize>>,
        has_draft: bool,
        adapter: Option<usize>,
    ) -> Self {
        let begun = request.begun.take();
        let prompt = &request.prompt.tokens;
        let room = request.sampling.max_tokens.min(1 << 12);
        let mut sample = Sample::response(prompt, &[]);
        sample.tokens.reserve(room);
        sample.mask.reserve(room);
        sample.logps = vec![0.0; prompt.len()];
        sample.raw_logps = vec![0.0; prompt.len()];
        sample.versions = vec![0; prompt.len()];
        let key = [request.sampling.seed, request.born, key_of(&request.prompt.id), request.sample];
        let mut stop = text
            .filter(|_| !request.sampling.stop_strings.is_empty())
            .map(|text| StopText::new(Arc::clone(text), &request.sampling));
        let mut seen = Seen::new(prompt, &request.sampling);
        if let Some(begun) = begun {
            for &token in &begun.tokens[prompt.len()..] {
                seen.push(token);
                // It did not stop there, else the request would be complete.
                stop.as_mut().map(|stop| stop.push(token));
            }
            sample = begun;
        }
        Self {
            id,
            seen,
            stop,
            rng: Rng::new(&key),
            computed: 0,
            pages: Vec::new(),
            drafted: 0,
            has_draft,
            drafts_seen: 0,
            prefix: Prefix::root(adapter),
            published: 0,
            adapter,
            version: None,
            proposal: Vec::new(),
            drawn: Vec::new(),
            finish: None,
            sample,
            request,
        }
    }

    /// Runs on this version of the weights from now on, unless it has one.
    pub(crate) fn begin(&mut self, version: u64) {
        if self.version.is_none() {
            self.version = Some(version);
            // What was drawn before a break keeps the version that drew it.
            let prompt_len = self.prompt_len();
            self.sample.versions[..prompt_len].fill(version);
        }
    }

    pub(crate) fn order(&self) -> Order {
        let places = i128::from(self.request.priority) * i128::from(PRIORITY_PLACES);
        (i128::from(self.id.0) - places, self.id)
    }

    pub(crate) fn prompt_len(&self) -> usize {
        self.request.prompt.tokens.len()
    }

    /// Tokens that wait for their keys and values; the last one is there in any case.
    pub(crate) fn pending(&self) -> usize {
        self.sample.tokens.len() - self.computed
    }

    /// The tokens of the next pass: the pending ones, then the proposal.
    pub(crate) fn next_tokens(&self) -> impl Iterator<Item = u32> + '_ {
        self.sample.tokens[self.computed..].iter().chain(&self.proposal).copied()
    }

    /// What the prefix index calls its empty beginning.
    pub(crate) fn root(&self) -> Prefix {
        Prefix::root(self.adapter)
    }

    /// Takes what the prefix index knows of its tokens.
    pub(crate) fn find_prefix(&mut self, pages: &mut Pages) {
        // The last token goes through the model in any case: its logits are asked for.
        let found = pages.find(self.root(), &self.sample.tokens, self.sample.tokens.len() - 1);
        self.published = found.tokens / PAGE;
        (self.computed, self.drafted) = (found.tokens, found.tokens);
        self.pages = found.pages;
        self.prefix = found.prefix.unwrap_or(self.root());
    }

    /// Tells the prefix index what the pages hold.
    pub(crate) fn publish(&mut self, pages: &mut Pages) {
        let tokens = &self.sample.tokens;
        let prompt_len = self.request.prompt.tokens.len();
        let computed = if self.has_draft { self.computed.min(self.drafted) } else { self.computed };
        loop {
            let (start, page) = (self.published * PAGE, self.pages.get(self.published));
            let Some(&page) = page else { return };
            // The end of the prompt is known as soon as it is there: samples of one prompt share it.
            if (start + 1..start + PAGE).contains(&prompt_len) && computed >= prompt_len {
                pages.publish(self.prefix, &tokens[start..prompt_len], page);
            }
            if computed < start + PAGE {
                return;
            }
            self.prefix = pages.publish(self.prefix, &tokens[start..start + PAGE], page);
            self.published += 1;
        }
    }

    /// How many of `tokens` proposed ones the response has room for: the token after them is drawn too.
    fn room_for(&self, tokens: usize, context: usize) -> usize {
        let of_request = self.request.sampling.max_tokens - self.seen.len();
        let left = of_request.min(context - self.sample.tokens.len());
        if self.pending() == 1 { tokens.min(left.saturating_sub(1)) } else { 0 }
    }

    /// Looks up in its own text what may follow.
    pub(crate) fn propose(&mut self, proposer: NgramProposer, context: usize) {
        self.proposal.clear();
        let tokens = self.room_for(proposer.tokens, context);
        if tokens > 0 {
            NgramProposer { tokens, ..proposer }.propose(&self.sample.tokens, &mut self.proposal);
        }
    }

    /// Makes room for a draft model's proposal.
    pub(crate) fn plan_draft(&mut self, tokens: usize, context: usize) {
        let tokens = self.room_for(tokens, context);
        self.proposal.clear();
        self.proposal.resize(tokens, 0);
    }

    /// Draws the proposal's token `index` from a draft model's logits; the proposal ends before it where
    /// they cannot be drawn from.
    pub(crate) fn draft(&mut self, sampler: &mut Sampler, logits: &[f32], index: usize) {
        let row =
            Row { logits, sampling: &self.request.sampling, seen: &self.seen, id: &self.request.prompt.id };
        let Ok(drawn) = sampler.sample(&row, self.rng) else { return self.proposal.truncate(index) };
        self.proposal[index] = drawn.token;
        self.seen.push(drawn.token);
        self.drafts_seen += 1;
    }

    /// Takes the proposal out of what was seen: none of it is drawn yet.
    pub(crate) fn end_draft(&mut self) {
        for &token in self.proposal[..self.drafts_seen].iter().rev() {
            self.seen.pop(token);
        }
        self.drafts_seen = 0;
    }

    /// Gives the pages back; everything is to be computed again.
    pub(crate) fn forget(&mut self, pages: &mut Pages) {
        pages.release_all(&mut self.pages);
        (self.computed, self.drafted, self.published, self.prefix) = (0, 0, 0, self.root());
        self.proposal.clear();
    }

    /// The draw in [0, 1) of the `row`-th token from here.
    pub(crate) fn uniform(&self, row: usize) -> f64 {
        self.rng.uniform((self.seen.len() + row) as u64)
    }

    /// Draws from the logits of the last pending token and of the proposal, `[rows, vocab]`, for as long
    /// as the proposal is what was drawn.
    pub(crate) fn draw(
        &mut self,
        sampler: &mut Sampler,
        logits: &[f32],
        vocab: usize,
        context: usize,
    ) -> Result<()> {
        self.draw_rows(logits.len() / vocab, context, |job, row| {
            let row = Row {
                logits: &logits[row * vocab..(row + 1) * vocab],
                sampling: &job.request.sampling,
                seen: &job.seen,
                id: &job.request.prompt.id,
            };
            sampler.sample(&row, job.rng)
        })
    }

    /// Takes what was drawn of the last pending token and of the proposal, likewise; none where a row's
    /// logits were not finite.
    pub(crate) fn take(&mut self, drawn: &[Option<Drawn>], context: usize) -> Result<()> {
        self.draw_rows(drawn.len(), context, |job, row| {
            let what = || Error::NotFinite {
                what: "a row of logits".into(),
                samples: vec![job.request.prompt.id.clone()],
            };
            drawn[row].clone().ok_or_else(what)
        })
    }

    fn draw_rows(
        &mut self,
        rows: usize,
        context: usize,
        mut draw: impl FnMut(&Self, usize) -> Result<Drawn>,
    ) -> Result<()> {
        self.drawn.clear();
        let mut proposal = std::mem::take(&mut self.proposal);
        let mut result = Ok(());
        for row in 0..rows {
            match draw(self, row) {
                Ok(drawn) => self.push(drawn, context),
                Err(error) => {
                    self.finish = Some(FinishReason::Cancelled);
                    result = Err(error);
                    break;
                }
            }
            let drawn = self.sample.tokens.last();
            if self.finish.is_some() || proposal.get(row) != drawn {
                break;
            }
        }
        proposal.clear();
        self.proposal = proposal;
        // All but the last went through the model, as pending tokens or as part of the proposal.
        self.computed = self.sample.tokens.len() - 1;
        self.drafted = self.drafted.min(self.computed);
        result
    }

    fn push(&mut self, drawn: Drawn, context: usize) {
        let token = drawn.token;
        self.sample.tokens.push(token);
        self.sample.mask.push(true);
        self.sample.logps.push(drawn.logp);
        self.sample.raw_logps.push(drawn.raw_logp);
        self.sample.versions.push(self.version.unwrap_or(0));
        self.seen.push(token);
        let text_stops = self.stop.as_mut().is_some_and(|stop| stop.push(token));
        let sampling = &self.request.sampling;
        let generated = self.seen.len();
        if generated >= sampling.min_tokens && (text_stops || sampling.stop_tokens.contains(&token)) {
            self.finish = Some(FinishReason::Stop);
        } else if generated >= sampling.max_tokens || self.sample.tokens.len() >= context {
            self.finish = Some(FinishReason::Length);
        }
        self.drawn.push(drawn);
    }
}
