//! A generation engine, as the rollout loop sees it.

use std::collections::HashMap;

use crate::{Error, ParamSet, Prompt, Result, Sample};

/// How tokens are drawn.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// 0 is greedy; else logits are divided by it before the softmax.
    pub temperature: f32,
    /// Most tokens of a response.
    pub max_tokens: usize,
    /// Token ids that end a response; the one that was drawn is part of it.
    pub stop_tokens: Vec<u32>,
    /// Seed of the counter-based generator.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 1.0, max_tokens: 256, stop_tokens: Vec::new(), seed: 0 }
    }
}

/// One generation job.
#[derive(Debug, Clone)]
pub struct Request {
    /// What to continue.
    pub prompt: Prompt,
    /// How.
    pub sampling: Sampling,
    /// Which of the prompt's responses this is, from 0. Draws are keyed by the seed, the prompt's id
    /// and this number: nothing that ran before changes them.
    pub sample: u64,
}

/// Names a request within its engine; ids grow in the order of submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// Why a response ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token was drawn.
    Stop,
    /// `max_tokens` or the model's context was reached.
    Length,
}

/// What an engine reports.
#[derive(Debug, Clone)]
pub enum Event {
    /// A request has one more token.
    Token {
        /// Whose token.
        request: RequestId,
        /// The token id.
        token: u32,
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
            let request = Request { prompt: prompt.clone(), sampling: sampling.clone(), sample: *count };
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
