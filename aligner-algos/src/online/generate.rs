//! Draws the responses of a step's prompts; those that are not complete in time are carried on.

use std::collections::HashMap;

use aligner_core::{
    Detokenize, Engine, Error, Event, FinishReason, Group, Prompt, Request, RequestId, Result, Sample,
    Sampling,
};
use aligner_parallel::balance::PromptServer;
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

    pub(super) fn id(&self) -> &str {
        &self.prompt.id
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

/// Draws until `wanted` of the prompts are complete, or all that `server` gives this rank, where ranks share them.
/// `complete` is told of each, in the order in which they are; what is on the way then stays in `open`, for a later
/// call.
pub(super) fn generate(
    engine: &mut dyn Engine,
    sampling: &Sampling,
    open: &mut [Open],
    wanted: usize,
    mut server: Option<&mut PromptServer<'_>>,
    complete: &mut dyn FnMut(usize, &Open),
    watch: &mut Watch,
) -> Result<()> {
    let mut round = Round { places: HashMap::new(), done: 0, asked: 0 };
    if server.is_none() {
        for (at, one) in open.iter_mut().enumerate() {
            if one.is_complete() && round.done < wanted {
                round.done += 1;
                complete(at, one);
            }
            round.submit(engine, sampling, at, one)?;
        }
    }
    while round.done < wanted {
        if let Some(server) = &mut server {
            // One prompt for each pass: else the first to ask takes the longest of all.
            if engine.stats().waiting == 0
                && let Some(at) = server.take()?
            {
                round.submit(engine, sampling, at, &mut open[at])?;
            }
            server.attend()?;
        }
        if round.places.is_empty() {
            break;
        }
        for at in round.poll(engine, open)?.into_iter().take(wanted - round.done) {
            round.done += 1;
            complete(at, &open[at]);
        }
        watch("generating", round.asked - round.places.len(), round.asked);
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
    /// Requests that were made.
    asked: usize,
}

impl Round {
    /// Asks for what a prompt lacks.
    fn submit(
        &mut self,
        engine: &mut dyn Engine,
        sampling: &Sampling,
        at: usize,
        one: &mut Open,
    ) -> Result<()> {
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
            self.places.insert(engine.submit(request)?, (at, index));
            self.asked += 1;
        }
        Ok(())
    }

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
