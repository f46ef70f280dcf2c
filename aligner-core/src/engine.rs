//! A generation engine, as the rollout loop sees it.

use std::collections::HashMap;

use crate::{Error, ParamSet, Prompt, Result, Sample, Sampling};

/// How many earlier requests a step of [`Request::priority`] overtakes.
pub const PRIORITY_PLACES: u64 = 64;

/// One generation job.
#[derive(Debug, Clone)]
pub struct Request {
    /// What to continue.
    pub prompt: Prompt,
    /// How.
    pub sampling: Sampling,
    /// Which of the prompt's responses this is, from 0. Draws are keyed by the seed, the step of birth,
    /// the prompt's id and this number: nothing that ran before changes them.
    pub sample: u64,
    /// The training step in which it was made; 0 outside of training.
    pub born: u64,
    /// Requests are served in the order of submission; each step of priority puts one [`PRIORITY_PLACES`]
    /// places forward. So nothing waits for ever.
    pub priority: i32,
    /// The adapter that answers, by its name; the base alone where there is none.
    pub adapter: Option<String>,
    /// What was drawn of this response before, as a cancelled request's [`Event::Finished`] gave it: it is
    /// kept, and draws go on behind it as if there had been no break.
    pub begun: Option<Sample>,
}

impl Request {
    /// The first response to `prompt`.
    pub fn new(prompt: Prompt, sampling: Sampling) -> Self {
        Self { prompt, sampling, sample: 0, born: 0, priority: 0, adapter: None, begun: None }
    }
}

/// Names a request within its engine; ids grow in the order of submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// Why a response ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token was drawn, or a stop string is complete.
    Stop,
    /// `max_tokens` or the model's context was reached.
    Length,
    /// The caller did not want it any more.
    Cancelled,
}

/// One drawn token.
#[derive(Debug, Clone, PartialEq)]
pub struct Drawn {
    /// The token id.
    pub token: u32,
    /// Its log-probability under the distribution it was drawn from, in nats. A greedy draw has that of
    /// the model's own distribution, after penalties, bias and masks.
    pub logp: f32,
    /// Its log-probability under the model alone: no temperature, no penalty, no truncation.
    pub raw_logp: f32,
    /// The most likely tokens of the model alone with their log-probabilities, most likely first; as
    /// many as `top_logprobs` asks for.
    pub top: Vec<(u32, f32)>,
}

/// What an engine reports.
#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "a sample is moved once out of hundreds of tokens")]
pub enum Event {
    /// A request has one more token.
    Token {
        /// Whose token.
        request: RequestId,
        /// The token.
        drawn: Drawn,
    },
    /// A request is complete.
    Finished {
        /// Which request.
        request: RequestId,
        /// Prompt and response; its text is left empty.
        sample: Sample,
        /// Why it ended.
        reason: FinishReason,
    },
}

/// What an engine is doing, for a monitor.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Requests that wait for a place.
    pub waiting: usize,
    /// Requests that hold cache pages.
    pub running: usize,
    /// Pages of the key-value cache.
    pub pages: usize,
    /// Pages that no request and no cached prefix holds.
    pub free_pages: usize,
    /// Tokens that went through the model, prompts and recomputations included.
    pub computed_tokens: u64,
    /// Prompt tokens that were taken from the prefix cache instead.
    pub reused_tokens: u64,
    /// Times a running request gave its pages up for an older one.
    pub preemptions: u64,
    /// Version of the weights.
    pub version: u64,
}

/// Text of tokens, for stop strings; a tokenizer.
pub trait Detokenize: Send + Sync {
    /// The text of `tokens`. An incomplete character at the end comes as U+FFFD.
    fn text(&self, tokens: &[u32]) -> String;
}

/// Generates responses with the policy's own weights.
pub trait Engine {
    /// Takes a request; it runs as `poll` is called.
    ///
    /// # Errors
    /// A prompt that the model cannot take.
    fn submit(&mut self, request: Request) -> Result<RequestId>;

    /// Runs the engine one step and returns what happened; empty when there is nothing to do.
    ///
    /// # Errors
    /// A failed forward pass.
    fn poll(&mut self) -> Result<Vec<Event>>;

    /// Ends a request early: its next event is [`Event::Finished`] with what it has. Says whether the
    /// request was there.
    fn cancel(&mut self, request: RequestId) -> bool;

    /// What it is doing.
    fn stats(&self) -> EngineStats {
        EngineStats::default()
    }

    /// Puts new weights under the engine, by handle.
    ///
    /// # Errors
    /// Parameters that are not this model's.
    fn refit(&mut self, params: &ParamSet, version: u64) -> Result<()>;

    /// Generates one response for each prompt, in the prompts' order. A prompt that is there several
    /// times gets as many samples, numbered from 0.
    ///
    /// # Errors
    /// Those of `submit` and `poll`; [`Error::Invalid`] where the engine stops with requests open.
    fn generate(&mut self, prompts: &[Prompt], sampling: &Sampling) -> Result<Vec<Sample>> {
        let mut repeats: HashMap<&str, u64> = HashMap::new();
        let mut places = HashMap::new();
        for (at, prompt) in prompts.iter().enumerate() {
            let count = repeats.entry(&prompt.id).or_default();
            let request = Request { sample: *count, ..Request::new(prompt.clone(), sampling.clone()) };
            *count += 1;
            places.insert(self.submit(request)?, at);
        }
        let mut done: Vec<Option<Sample>> = vec![None; prompts.len()];
        while !places.is_empty() {
            let events = self.poll()?;
            if events.is_empty() {
                let (open, all) = (places.len(), prompts.len());
                return Err(Error::Invalid(format!("the engine stopped with {open} of {all} requests open")));
            }
            for event in events {
                // Requests that others submitted, or that an earlier failed call left, are not counted.
                if let Event::Finished { request, sample, .. } = event
                    && let Some(at) = places.remove(&request)
                {
                    done[at] = Some(sample);
                }
            }
        }
        Ok(done.into_iter().flatten().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Finishes a request that nobody waits for, then stops.
    struct Stalled(Vec<Event>);

    impl Engine for Stalled {
        fn submit(&mut self, _: Request) -> Result<RequestId> {
            Ok(RequestId(7))
        }

        fn poll(&mut self) -> Result<Vec<Event>> {
            Ok(std::mem::take(&mut self.0))
        }

        fn cancel(&mut self, _: RequestId) -> bool {
            false
        }

        fn refit(&mut self, _: &ParamSet, _: u64) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn an_engine_that_stops_early_is_an_error_and_others_requests_do_not_count() {
        let foreign =
            Event::Finished { request: RequestId(1), sample: Sample::default(), reason: FinishReason::Stop };
        let prompt = Prompt { id: "a".into(), tokens: vec![1], metadata: serde_json::Value::Null };
        let result = Stalled(vec![foreign]).generate(&[prompt], &Sampling::default());
        assert!(result.unwrap_err().to_string().contains("1 of 1 requests open"));
    }
}
