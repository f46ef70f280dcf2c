//! Draws the responses of a step's prompts; those that are not complete in time are carried on.

use std::collections::HashMap;

use aligner_core::{
    Detokenize, Engine, Error, Event, FinishReason, Group, Prompt, Request, RequestId, Result, Sample,
    Sampling,
};
use serde::{Deserialize, Serialize};

use super::Watch;

/// A prompt with its responses on the way.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Open {
    prompt: Prompt,
    /// The step in which it was asked first: a part of its draws' key.
    born: u64,
    responses: Vec<Response>,
}

/// One response.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Response {
    /// What was drawn so far; none before it began.
    sample: Option<Sample>,
    complete: bool,
}

impl Open {
    pub(super) fn new(prompt: Prompt, born: u64, responses: usize) -> Self {
        Self { prompt, born, responses: vec![Response::default(); responses] }
    }

    pub(super) fn is_complete(&self) -> bool {
        self.responses.iter().all(|response| response.complete)
    }

    /// The group of the responses that are there, each with its text and its prompt's metadata.
    pub(super) fn group(&self, text: &dyn Detokenize, stop_tokens: &[u32]) -> Group {
        let prompt_len = self.prompt.tokens.len();
        let samples = self.responses.iter().filter_map(|response| response.sample.clone()).map(|sample| {
            let response = sample.tokens.get(prompt_len..).unwrap_or_default();
            let spoken = match response.split_last() {
                Some((last, rest)) if sample.ended == Some(true) && stop_tokens.contains(last) => rest,
                _ => response,
            };
            Sample { text: text.text(spoken), metadata: self.prompt.metadata.clone(), ..sample }
        });
        let samples = samples.collect();
        Group { id: self.prompt.id.clone(), samples, metadata: self.prompt.metadata.clone() }
    }
}

/// Draws until `wanted` of the prompts are complete. `complete` is told of each, in the order in which they are;
/// what is on the way then stays in `open`, for a later call.
pub(super) fn generate(
    engine: &mut dyn Engine,
    sampling: &Sampling,
    open: &mut [Open],
    wanted: usize,
    complete: &mut dyn FnMut(usize, &Open),
    watch: &mut Watch,
) -> Result<()> {
    let mut round = Round { places: HashMap::new(), done: 0 };
    for (at, one) in open.iter_mut().enumerate() {
        if one.is_complete() && round.done < wanted {
            round.done += 1;
            complete(at, one);
        }
        for (index, response) in one.responses.iter_mut().enumerate().filter(|(_, r)| !r.complete) {
            let request = Request {
                prompt: one.prompt.clone(),
                sampling: sampling.clone(),
                sample: index as u64,
                born: one.born,
                priority: 0,
                adapter: None,
                begun: response.sample.take(),
            };
            round.places.insert(engine.submit(request)?, (at, index));
        }
    }
    let all = round.places.len();
    while round.done < wanted && !round.places.is_empty() {
        for at in round.poll(engine, open)?.into_iter().take(wanted - round.done) {
            round.done += 1;
            complete(at, &open[at]);
        }
        watch("generating", all - round.places.len(), all);
    }
    let rest: Vec<RequestId> = round.places.keys().copied().collect();
    for request in rest {
        engine.cancel(request);
    }
    while !round.places.is_empty() {
        round.poll(engine, open)?;
    }
    Ok(())
}

/// Requests in the engine.
struct Round {
    /// Prompt and response of each.
    places: HashMap<RequestId, (usize, usize)>,
    /// Prompts that are complete.
    done: usize,
}

impl Round {
    /// Lets the engine go on and puts what ended in its place; returns the prompts that are complete by it, each once.
    fn poll(&mut self, engine: &mut dyn Engine, open: &mut [Open]) -> Result<Vec<usize>> {
        let events = engine.poll()?;
        if events.is_empty() {
            let left = self.places.len();
            return Err(Error::Invalid(format!("the engine stopped with {left} responses open")));
        }
        let mut prompts = Vec::new();
        for event in events {
            let Event::Finished { request, mut sample, reason } = event else { continue };
            let Some((at, index)) = self.places.remove(&request) else { continue };
            let complete = reason != FinishReason::Cancelled;
            sample.ended = complete.then_some(reason == FinishReason::Stop);
            open[at].responses[index] = Response { sample: Some(sample), complete };
            prompts.extend(open[at].is_complete().then_some(at));
        }
        Ok(prompts)
    }
}
