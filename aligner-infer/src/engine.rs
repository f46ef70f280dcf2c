//! The plain engine: one request at a time, in the order of submission.

use std::collections::VecDeque;

use aligner_core::model::CausalLm;
use aligner_core::ops::host::to_vec;
use aligner_core::rng::{Rng, key_of};
use aligner_core::{
    Engine, Error, Event, FinishReason, ParamSet, Policy, Request, RequestId, Result, Sample, Segment,
};

use crate::cache::Cache;
use crate::sampler::draw;

/// A key-value cached engine on a model's own parameters.
#[derive(Debug)]
pub struct CachedEngine {
    model: CausalLm,
    version: u64,
    waiting: VecDeque<(RequestId, Request)>,
    running: Option<Running>,
    submitted: u64,
}

#[derive(Debug)]
struct Running {
    id: RequestId,
    request: Request,
    cache: Cache,
    /// Tokens whose keys and values the cache holds.
    cached: usize,
    sample: Sample,
    rng: Rng,
}

impl CachedEngine {
    /// An engine on `model`'s parameter handles; nothing is copied.
    pub fn new(model: CausalLm) -> Self {
        Self { model, version: 0, waiting: VecDeque::new(), running: None, submitted: 0 }
    }

    fn start(&self, id: RequestId, request: Request) -> Running {
        let prompt = &request.prompt.tokens;
        let mut sample = Sample::response(prompt, &[]);
        sample.logps = vec![0.0; prompt.len()];
        sample.versions = vec![self.version; prompt.len()];
        let rng = Rng::new(&[request.sampling.seed, key_of(&request.prompt.id), request.sample]);
        Running { id, cache: self.empty_cache(), cached: 0, sample, rng, request }
    }

    fn empty_cache(&self) -> Cache {
        Cache::new(self.model.config().num_layers)
    }

    /// Runs the tokens that the cache does not hold yet and draws the next one.
    fn step(&self, running: &mut Running) -> Result<u32> {
        let prompt_len = running.request.prompt.tokens.len();
        let len = running.sample.tokens.len();
        let first = running.cached;
        let tokens = &running.sample.tokens[first..];
        let positions: Vec<u32> = (first as u32..len as u32).collect();
        let segment = Segment { start: 0, len: tokens.len(), position: first, parent: None };
        let layout = self.model.layout(&positions, &[segment])?;
        let hidden = self.model.hidden(tokens, &layout, &running.cache)?;
        running.cached = len;
        let last = hidden.narrow(0, tokens.len() - 1, 1);
        let logits = to_vec(&self.model.logits(last)?);
        let counter = (len - prompt_len) as u64;
        let drawn = draw(&logits, running.request.sampling.temperature, running.rng, counter);
        if !drawn.logp.is_finite() {
            let samples = vec![running.request.prompt.id.clone()];
            return Err(Error::NotFinite { what: "the log-probability of a drawn token".into(), samples });
        }
        running.sample.tokens.push(drawn.token);
        running.sample.mask.push(true);
        running.sample.logps.push(drawn.logp);
        running.sample.versions.push(self.version);
        Ok(drawn.token)
    }

    fn finished(&self, running: &Running) -> Option<FinishReason> {
        let Running { sample, request, .. } = running;
        let generated = sample.tokens.len() - request.prompt.tokens.len();
        let stopped =
            generated > 0 && sample.tokens.last().is_some_and(|t| request.sampling.stop_tokens.contains(t));
        if stopped {
            return Some(FinishReason::Stop);
        }
        let full = sample.tokens.len() >= self.model.config().max_positions;
        (generated >= request.sampling.max_tokens || full).then_some(FinishReason::Length)
    }
}

impl Engine for CachedEngine {
    fn submit(&mut self, request: Request) -> Result<RequestId> {
        let (id, config) = (&request.prompt.id, self.model.config());
        let tokens = request.prompt.tokens.len();
        if tokens == 0 {
            return Err(Error::Invalid(format!("prompt {id}: no token to start from")));
        }
        if tokens > config.max_positions {
            let limit = config.max_positions;
            return Err(Error::Invalid(format!(
                "prompt {id}: {tokens} tokens, but the model's context is {limit}"
            )));
        }
        if !(request.sampling.temperature >= 0.0 && request.sampling.temperature.is_finite()) {
            let got = request.sampling.temperature;
            return Err(Error::setting("temperature", format!("expected 0 or more, got {got}")));
        }
        let id = RequestId(self.submitted);
        self.submitted += 1;
        self.waiting.push_back((id, request));
        Ok(id)
    }

    fn poll(&mut self) -> Result<Vec<Event>> {
        let mut running = match self.running.take() {
            Some(running) => running,
            None => match self.waiting.pop_front() {
                Some((id, request)) => self.start(id, request),
                None => return Ok(Vec::new()),
            },
        };
        let mut events = Vec::new();
        if self.finished(&running).is_none() {
            let token = self.step(&mut running)?;
            events.push(Event::Token { request: running.id, token });
        }
        match self.finished(&running) {
            Some(reason) => {
                events.push(Event::Finished { request: running.id, sample: running.sample, reason });
            }
            None => self.running = Some(running),
        }
        Ok(events)
    }

    /// A request that is running goes on with the new weights: its next step computes all of its
    /// tokens again, so that no keys and values of the old weights are left.
    fn refit(&mut self, params: &ParamSet, version: u64) -> Result<()> {
        let fits = |(own, new): (&aligner_core::Param, &aligner_core::Param)| {
            own.name == new.name && own.shape == new.shape
        };
        let own = self.model.params();
        if own.len() != params.len() || !own.iter().zip(params.iter()).all(fits) {
            return Err(Error::Invalid("the new parameters are not this model's".into()));
        }
        self.model =
            CausalLm::new(self.model.config().clone(), params.clone(), &self.model.device().clone())?;
        self.version = version;
        if let Some(mut running) = self.running.take() {
            (running.cache, running.cached) = (self.empty_cache(), 0);
            self.running = Some(running);
        }
        Ok(())
    }
}
