//! The engine: requests come at any time, every pass through the model serves as many as fit.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use aligner_core::model::CausalLm;
use aligner_core::ops::rows::PAGE;
use aligner_core::weights::{AdapterCheckpoint, checksum};
use aligner_core::{
    Detokenize, Engine, EngineStats, Error, Event, FinishReason, ParamSet, Policy as _, Request, RequestId,
    Result, Sample,
};
use rayon::prelude::*;

use crate::accelerator::{self, DeviceWeights};
use crate::adapters::Adapters;
use crate::config::{CacheSize, EngineConfig, InFlight, Speculation};
use crate::draft::Draft;
use crate::host::{Batch, Buffers, Store};
use crate::job::Job;
use crate::logits::{Logits, forward};
use crate::pages::Pages;
use crate::sampler::{NgramProposer, Sampler};
use crate::schedule::{Memory, Part, Queue};
use crate::weights::Weights;

/// Generation with continuous batching over a paged key-value cache, on the trainer's own weights.
///
/// A request's tokens depend on its seed, step of birth, prompt id and sample number, and on the weights:
/// not on what else runs, in what order, in what chunks, nor on whether it gave way in between.
pub struct PagedEngine {
    config: EngineConfig,
    /// The newest first; others are there for as long as requests end on them.
    pub(crate) weights: Vec<Weights>,
    pages: Pages,
    /// The model's keys and values, then a draft model's; none while unloaded.
    stores: Vec<Store>,
    draft: Option<Draft>,
    adapters: Adapters,
    queue: Queue,
    text: Option<Arc<dyn Detokenize>>,
    ready: Vec<Event>,
    submitted: u64,
    computed_tokens: u64,
    plan: Vec<Part>,
    batch: Batch,
    buffers: Buffers,
}

impl std::fmt::Debug for PagedEngine {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("PagedEngine")
            .field("config", &self.config)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

thread_local! {
    static SAMPLER: RefCell<Sampler> = RefCell::new(Sampler::new());
}

impl PagedEngine {
    /// An engine on `model`'s parameters: on their own device nothing is copied, unless the configuration
    /// asks for smaller copies.
    ///
    /// # Errors
    /// A setting out of range, a device that is not there, a cache without room for a page, a model without
    /// a language-model head.
    pub fn new(model: CausalLm, mut config: EngineConfig) -> Result<Self> {
        config.check()?;
        let accelerator = accelerator::choose(config.device, model.device())?;
        if let (Some(own), CacheSize::Share(share)) = (&accelerator, config.cache) {
            config.cache = CacheSize::Bytes((own.memory_bytes() as f64 * f64::from(share)) as usize);
        }
        let pages = config.pages(model.config());
        if pages < 2 {
            let bytes = 2 * Store::page_bytes(model.config());
            return Err(Error::setting("cache", format!("too small for two pages, {bytes} bytes")));
        }
        let draft = match &config.speculation {
            Some(Speculation::Draft { model: draft, .. }) => {
                Some(Draft::new((**draft).clone(), &model, accelerator.clone())?)
            }
            _ => None,
        };
        let weights = Weights::new(model, 0, config.packed, accelerator)?;
        let mut engine = Self {
            config,
            weights: vec![weights],
            pages: Pages::new(pages),
            stores: Vec::new(),
            draft,
            adapters: Adapters::default(),
            queue: Queue::default(),
            text: None,
            ready: Vec::new(),
            submitted: 0,
            computed_tokens: 0,
            plan: Vec::new(),
            batch: Batch::default(),
            buffers: Buffers::default(),
        };
        engine.load();
        Ok(engine)
    }

    /// Gives the engine a tokenizer: requests with stop strings need one.
    #[must_use]
    pub fn with_text(self, text: Arc<dyn Detokenize>) -> Self {
        Self { text: Some(text), ..self }
    }

    /// Adds an adapter of the model, which requests name ([`Request::adapter`]): a pass serves requests of all
    /// adapters and of the base alone, and reads the base's weights once. Cached prompts are an adapter's own.
    ///
    /// # Errors
    /// A name that is taken; an adapter of another model, or with a linear of its own in place of the base's; a model that has an
    /// adapter already, or that runs on an accelerator.
    pub fn add_adapter(&mut self, name: &str, file: &AdapterCheckpoint) -> Result<()> {
        let Some(weights) = self.weights.first() else { return Ok(()) };
        if weights.model.config().adapter.is_some() {
            return Err(Error::Invalid("the engine's model has an adapter of its own already".into()));
        }
        if weights.on_device().is_some() {
            return Err(Error::Invalid("the engine runs no adapter on an accelerator yet".into()));
        }
        self.adapters.add(name, file, weights)
    }

    /// Frees the cache and copied weights; running requests wait and are computed again after
    /// [`Self::load`].
    pub fn unload(&mut self) {
        while let Some(mut job) = self.queue.running.pop() {
            job.forget(&mut self.pages);
            self.queue.waiting.insert(job.order(), job);
        }
        self.pages.forget_all();
        self.stores.clear();
        self.buffers = Buffers::default();
        self.weights.iter_mut().for_each(Weights::unpack);
    }

    /// Takes the memory that [`Self::unload`] gave back.
    pub fn load(&mut self) {
        if !self.stores.is_empty() {
            return;
        }
        let pages = self.pages.len();
        for weights in self.weights.iter_mut().filter(|weights| !weights.is_packed()) {
            // It succeeded before, with the same settings; where it does not, the next pass says so.
            let _ = weights.pack(self.config.packed);
        }
        self.stores.extend(self.weights.first().map(|weights| Store::new(weights, pages)));
        self.stores.extend(self.draft.as_ref().map(|draft| draft.store(pages)));
    }

    /// Bytes of the copied weights, and how long the last copy took.
    pub fn packed(&self) -> (usize, std::time::Duration) {
        let all = self.weights.iter().flat_map(Weights::copies);
        let apart: HashMap<_, usize> = all.map(|copy| (Arc::as_ptr(copy), copy.bytes())).collect();
        let there = self.weights.iter().filter_map(Weights::on_device).map(DeviceWeights::packed_bytes);
        let bytes = apart.values().sum::<usize>() + there.sum::<usize>();
        (bytes, self.weights.first().map_or_else(Default::default, |weights| weights.packing))
    }

    /// A hash of the newest weights, [`aligner_core::weights::checksum`]: equal to the trainer's where a
    /// refit took place.
    pub fn checksum(&self) -> String {
        self.weights.first().map(|weights| checksum(weights.model.params())).unwrap_or_default()
    }

    fn context(&self) -> usize {
        self.weights.first().map_or(0, |weights| weights.model.config().max_positions)
    }

    /// One pass through the model, or one for each version that has requests.
    fn step(&mut self, events: &mut Vec<Event>) -> Result<()> {
        if self.stores.is_empty() {
            return Err(Error::Invalid("the engine is unloaded".into()));
        }
        let context = self.context();
        let jobs = self.queue.running.iter_mut();
        match self.config.speculation {
            Some(Speculation::Ngram { max_n, tokens }) => {
                let proposer = NgramProposer { max_n, min_n: 1, tokens };
                jobs.for_each(|job| job.propose(proposer, context));
            }
            Some(Speculation::Draft { tokens, .. }) => jobs.for_each(|job| job.plan_draft(tokens, context)),
            None => {}
        }
        let newest = self.weights.first().map_or(0, |weights| weights.version);
        let mut memory = Memory { pages: &mut self.pages, stores: &mut self.stores };
        self.queue.plan(&self.config, newest, &mut memory, &mut self.plan);
        if let (Some(draft), Some(store)) = (&mut self.draft, self.stores.get_mut(1)) {
            draft.propose(&mut self.queue.running, &self.plan, store)?;
        }
        let mut failed = None;
        for at in 0..self.weights.len() {
            if let Err(error) = self.pass(at) {
                failed.get_or_insert(error);
            }
        }
        self.report(events);
        failed.map_or(Ok(()), Err)
    }

    /// Runs the planned requests of one version.
    fn pass(&mut self, at: usize) -> Result<()> {
        let (weights, Some(store)) = (&self.weights[at], self.stores.first_mut()) else { return Ok(()) };
        self.batch.clear();
        for part in &self.plan {
            let job = &self.queue.running[part.job];
            if job.version == Some(weights.version) {
                let complete = part.rows >= job.pending();
                let wanted = if complete { 1 + job.proposal.len() } else { 0 };
                let tokens = job.next_tokens().take(part.rows);
                self.batch.push(tokens, job.computed, &job.pages, wanted, job.adapter);
            }
        }
        if self.batch.tokens.is_empty() {
            return Ok(());
        }
        self.computed_tokens += self.batch.tokens.len() as u64;
        let (batch, buffers) = (&self.batch, &mut self.buffers);
        let logits = forward(weights, &self.adapters, store, batch, buffers)?;
        let context = weights.model.config().max_positions;
        let vocab = weights.model.config().vocab_size;
        let mut first = 0;
        let mut draws: Vec<(&mut Job, Range<usize>)> = Vec::with_capacity(self.plan.len());
        let mut jobs = self.queue.running.iter_mut().enumerate();
        for part in &self.plan {
            let Some((_, job)) = jobs.find(|(index, _)| *index == part.job) else { break };
            if job.version != Some(weights.version) {
                continue;
            }
            if part.rows < job.pending() {
                job.computed += part.rows;
                continue;
            }
            let rows = 1 + job.proposal.len();
            draws.push((job, first..first + rows));
            first += rows;
        }
        let results = draw(draws, logits, vocab, context)?;
        let publishes = self.config.prefix_cache && at == 0;
        if publishes {
            for part in &self.plan {
                let job = &mut self.queue.running[part.job];
                if job.version == Some(weights.version) {
                    job.publish(&mut self.pages);
                }
            }
        }
        results.into_iter().collect()
    }

    /// Reports what was drawn, and takes out what is complete.
    fn report(&mut self, events: &mut Vec<Event>) {
        for job in &mut self.queue.running {
            let request = job.id;
            events.extend(job.drawn.drain(..).map(|drawn| Event::Token { request, drawn }));
        }
        let pages = &mut self.pages;
        let done = self.queue.running.extract_if(.., |job| job.finish.is_some());
        events.extend(done.map(|mut job| {
            job.forget(pages);
            finished(job)
        }));
        let queue = &self.queue;
        let used = |version| {
            let mut jobs = queue.running.iter().chain(queue.waiting.values());
            jobs.any(|job| job.version == Some(version))
        };
        let newest = self.weights.first().map(|weights| weights.version);
        self.weights.retain(|weights| Some(weights.version) == newest || used(weights.version));
    }

    fn is_idle(&self) -> bool {
        self.queue.running.is_empty() && self.queue.waiting.is_empty()
    }

    fn check(&self, request: &Request) -> Result<()> {
        let Some(weights) = self.weights.first() else { return Ok(()) };
        let (id, config) = (&request.prompt.id, weights.model.config());
        let tokens = request.prompt.tokens.len();
        let refuse = |message: String| Err(Error::Invalid(format!("prompt {id}: {message}")));
        if let Some(name) = request.adapter.as_ref().filter(|name| self.adapters.find(name).is_none()) {
            let known: Vec<&str> = self.adapters.names().collect();
            return refuse(format!("no adapter is called `{name}`; there are {known:?}"));
        }
        if tokens == 0 {
            return refuse("no token to start from".into());
        }
        if tokens >= config.max_positions {
            return refuse(format!("{tokens} tokens, but the model's context is {}", config.max_positions));
        }
        if let Some(token) = request.prompt.tokens.iter().find(|&&t| t as usize >= config.vocab_size) {
            return refuse(format!("token {token} is outside of the vocabulary of {}", config.vocab_size));
        }
        if let Some(begun) = &request.begun {
            check_begun(begun, request, config.vocab_size).or_else(refuse)?;
        }
        request.sampling.check(config.vocab_size)?;
        if !request.sampling.stop_strings.is_empty() && self.text.is_none() {
            return Err(Error::setting("stop_strings", "the engine was given no tokenizer"));
        }
        // One page more than it fills: a shared one is copied while it is still held.
        let longest = config.max_positions.min(tokens.saturating_add(request.sampling.max_tokens));
        let (needs, has) = (longest.div_ceil(PAGE) + 1, self.pages.len());
        if needs > has {
            return refuse(format!("up to {longest} tokens need {needs} cache pages, but there are {has}"));
        }
        Ok(())
    }
}

/// Whether a response can go on behind `begun`.
fn check_begun(begun: &Sample, request: &Request, vocab: usize) -> std::result::Result<(), String> {
    let (prompt, len) = (&request.prompt.tokens, begun.tokens.len());
    if !begun.tokens.starts_with(prompt) {
        return Err("what was drawn before is of another prompt".into());
    }
    let lengths = [begun.mask.len(), begun.logps.len(), begun.raw_logps.len(), begun.versions.len()];
    if lengths.iter().any(|&got| got != len) {
        return Err(format!("what was drawn before has {len} tokens, and not as many entries of each field"));
    }
    if let Some(token) = begun.tokens.iter().find(|&&token| token as usize >= vocab) {
        return Err(format!("token {token} is outside of the vocabulary of {vocab}"));
    }
    let (drawn, most) = (len - prompt.len(), request.sampling.max_tokens);
    if drawn > 0 && drawn >= most {
        return Err(format!("{drawn} tokens were drawn before, and max_tokens is {most}"));
    }
    Ok(())
}

/// Draws each request's tokens from its rows of the logits: on the accelerator where the logits lie there
/// and its sampler knows the request's settings, else on the host.
fn draw(
    jobs: Vec<(&mut Job, Range<usize>)>,
    logits: Logits<'_>,
    vocab: usize,
    context: usize,
) -> Result<Vec<Result<()>>> {
    let mut results = Vec::new();
    let (jobs, logits) = match logits {
        Logits::Host(logits) => (jobs, Cow::Borrowed(logits)),
        Logits::Device(logits) => {
            let count = jobs.last().map_or(0, |(_, rows)| rows.end);
            let (there, here): (Vec<_>, Vec<_>) =
                jobs.into_iter().partition(|(job, _)| accelerator::draws(&job.request.sampling));
            let mut settings = vec![None; count];
            for (job, rows) in &there {
                for (at, row) in rows.clone().enumerate() {
                    settings[row] = Some((&job.request.sampling, job.uniform(at)));
                }
            }
            let drawn = logits.draw(&settings)?;
            results.extend(there.into_iter().map(|(job, rows)| job.take(&drawn[rows], context)));
            let host = if here.is_empty() { Vec::new() } else { logits.read()? };
            (here, Cow::Owned(host))
        }
    };
    let draw = |(job, rows): (&mut Job, Range<usize>)| {
        let logits = &logits[rows.start * vocab..rows.end * vocab];
        SAMPLER.with_borrow_mut(|sampler| job.draw(sampler, logits, vocab, context))
    };
    results.par_extend(jobs.into_par_iter().map(draw));
    Ok(results)
}

/// The event of a request that is over.
fn finished(job: Job) -> Event {
    let reason = job.finish.unwrap_or(FinishReason::Cancelled);
    Event::Finished { request: job.id, sample: job.sample, reason }
}

impl Engine for PagedEngine {
    fn submit(&mut self, request: Request) -> Result<RequestId> {
        self.check(&request)?;
        let id = RequestId(self.submitted);
        self.submitted += 1;
        let adapter = request.adapter.as_deref().and_then(|name| self.adapters.find(name));
        let mut job = Job::new(id, request, self.text.as_ref(), self.draft.is_some(), adapter);
        if job.request.sampling.max_tokens == 0 {
            job.finish = Some(FinishReason::Length);
            self.ready.push(finished(job));
        } else {
            self.queue.waiting.insert(job.order(), job);
        }
        Ok(id)
    }

    fn poll(&mut self) -> Result<Vec<Event>> {
        let mut events = std::mem::take(&mut self.ready);
        while events.is_empty() && !self.is_idle() {
            if let Err(error) = self.step(&mut events) {
                // What else happened is told next time.
                self.ready = events;
                return Err(error);
            }
        }
        Ok(events)
    }

    fn cancel(&mut self, request: RequestId) -> bool {
        let waiting = self.queue.waiting.extract_if(.., |_, job| job.id == request).next();
        let running = self.queue.running.iter().position(|job| job.id == request);
        let job = waiting.map(|(_, job)| job).or_else(|| running.map(|at| self.queue.running.remove(at)));
        let Some(mut job) = job else { return false };
        job.forget(&mut self.pages);
        self.ready.push(finished(job));
        true
    }

    fn stats(&self) -> EngineStats {
        EngineStats {
            waiting: self.queue.waiting.len(),
            running: self.queue.running.len(),
            pages: self.pages.len(),
            free_pages: self.pages.available(),
            computed_tokens: self.computed_tokens,
            reused_tokens: self.queue.reused_tokens,
            preemptions: self.queue.preemptions,
            version: self.weights.first().map_or(0, |weights| weights.version),
        }
    }

    /// By handle on the CPU device, by conversion from others. What the cache knew of the old weights is
    /// dropped; requests that run follow [`EngineConfig::in_flight`].
    fn refit(&mut self, params: &ParamSet, version: u64) -> Result<()> {
        if !self.adapters.is_empty() {
            return Err(Error::Invalid("an engine with named adapters keeps its weights".into()));
        }
        let Some(newest) = self.weights.first_mut() else { return Ok(()) };
        let packed = self.config.packed.filter(|_| !self.stores.is_empty());
        let is_last = self.config.in_flight == InFlight::Continue;
        let weights = newest.refit(params, version, packed, is_last)?;
        match self.config.in_flight {
            InFlight::Continue => {
                self.weights.clear();
                for job in &mut self.queue.running {
                    job.forget(&mut self.pages);
                }
                let jobs = self.queue.running.iter_mut().chain(self.queue.waiting.values_mut());
                jobs.filter(|job| job.version.is_some()).for_each(|job| job.version = Some(version));
            }
            InFlight::Finish => {
                let queue = &self.queue;
                let jobs = || queue.running.iter().chain(queue.waiting.values());
                self.weights.retain(|old| jobs().any(|job| job.version == Some(old.version)));
            }
        }
        self.pages.forget_all();
        self.weights.insert(0, weights);
        Ok(())
    }
}
