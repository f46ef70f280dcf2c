//! A generation engine, as the rollout loop sees it.

use crate::{ParamSet, Prompt, Result, Sample};

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

    /// Generates one response for each prompt, in the prompts' order.
    ///
    /// # Errors
    /// Those of `submit` and `poll`.
    fn generate(&mut self, prompts: &[Prompt], sampling: &Sampling) -> Result<Vec<Sample>> {
        let submit =
            |prompt: &Prompt| self.submit(Request { prompt: prompt.clone(), sampling: sampling.clone() });
        let ids = prompts.iter().map(submit).collect::<Result<Vec<_>>>()?;
        let mut done = std::collections::HashMap::new();
        while done.len() < ids.len() {
            for event in self.poll()? {
                if let Event::Finished { request, sample, .. } = event {
                    done.insert(request, sample);
                }
            }
        }
        Ok(ids.iter().filter_map(|id| done.remove(id)).collect())
    }
}
