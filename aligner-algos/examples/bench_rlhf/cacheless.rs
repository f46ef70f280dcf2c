//! Generation without a cache: each new token takes a pass over everything before it.

use aligner_core::{
    Engine, EngineStats, Error, Event, FinishReason, ParamSet, Request, RequestId, Result, Sample,
};

/// Answers all waiting requests as one batch, a token of each at a time: for `engine` that is a new request for one
/// token each time, behind what was drawn before, of which it has to know nothing any more. So the tokens are
/// bitwise the engine's own. Responses have to end by their length.
pub(crate) struct Cacheless<E> {
    engine: E,
    waiting: Vec<(RequestId, Request)>,
    submitted: u64,
}

impl<E: Engine> Cacheless<E> {
    pub(crate) fn new(engine: E) -> Self {
        Self { engine, waiting: Vec::new(), submitted: 0 }
    }

    /// One more token of each request; `begun` holds what there is of each, and is none before the first.
    fn draw(&mut self, requests: &[(RequestId, Request)], begun: Vec<Option<Sample>>) -> Result<Vec<Sample>> {
        let mut places = Vec::new();
        for ((_, request), begun) in requests.iter().zip(begun) {
            let mut request = Request { begun, ..request.clone() };
            let drawn = request.begun.as_ref().map_or(0, Sample::targets);
            request.sampling.max_tokens = drawn + 1;
            places.push(self.engine.submit(request)?);
        }
        let mut samples = vec![None; places.len()];
        while samples.contains(&None) {
            for event in self.engine.poll()? {
                if let Event::Finished { request, sample, .. } = event {
                    let at = places.iter().position(|place| *place == request);
                    let lost = || Error::Invalid("the engine finished what nobody asked for".into());
                    samples[at.ok_or_else(lost)?] = Some(sample);
                }
            }
        }
        Ok(samples.into_iter().flatten().collect())
    }
}

impl<E: Engine> Engine for Cacheless<E> {
    fn submit(&mut self, request: Request) -> Result<RequestId> {
        let id = RequestId(self.submitted);
        self.submitted += 1;
        self.waiting.push((id, request));
        Ok(id)
    }

    fn poll(&mut self) -> Result<Vec<Event>> {
        let requests = std::mem::take(&mut self.waiting);
        let longest = requests.iter().map(|(_, request)| request.sampling.max_tokens).max().unwrap_or(0);
        let mut samples: Vec<Option<Sample>> = vec![None; requests.len()];
        for drawn in 0..longest {
            if drawn % 16 == 0 {
                eprintln!("  without a cache: token {drawn} of {longest}");
            }
            samples = self.draw(&requests, samples)?.into_iter().map(Some).collect();
        }
        let finished = |((request, _), sample)| {
            Some(Event::Finished { request, sample: sample?, reason: FinishReason::Length })
        };
        Ok(requests.into_iter().zip(samples).filter_map(finished).collect())
    }

    fn cancel(&mut self, request: RequestId) -> bool {
        let before = self.waiting.len();
        self.waiting.retain(|(id, _)| *id != request);
        self.waiting.len() < before
    }

    fn stats(&self) -> EngineStats {
        self.engine.stats()
    }

    fn refit(&mut self, params: &ParamSet, version: u64) -> Result<()> {
        self.engine.refit(params, version)
    }
}
