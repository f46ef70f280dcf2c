//! Greedy answers to a run's sample prompts.

use aligner_core::model::CausalLm;
use aligner_core::ops::rows::PAGE;
use aligner_core::{Engine as _, Prompt, Sample, Sampling};
use aligner_data::{Message, Tokenizer};
use aligner_infer::{CacheSize, EngineConfig};

use super::session::Session;
use crate::progress::Count;
use crate::rundir::{self, Answer};
use crate::wire;

impl Session {
    /// Answers the prompts with the weights of this step and keeps the answers.
    pub(super) fn answer(&self) -> anyhow::Result<()> {
        if self.prompts.is_empty() {
            return Ok(());
        }
        let sampling = Sampling {
            temperature: 0.0,
            max_tokens: self.run.config.run.sample_tokens,
            stop_tokens: self.model.stop_tokens(),
            ..Sampling::default()
        };
        let params = self.learner.policy().whole()?;
        if !self.ranks.is_main() {
            return Ok(());
        }
        let device = wire::device(&self.run.config.model.device)?;
        let model = CausalLm::new(self.model_config.clone(), params, &device)?;
        let config = engine_config(&self.prompts, sampling.max_tokens);
        let mut engine = wire::engine(model, &self.model.tokenizer, config)?;
        let answering = Count::start("answering the sample prompts", 0);
        let samples = engine.generate(&self.prompts, &sampling)?;
        drop(answering);
        let (step, tokenizer) = (self.steps_done(), &self.model.tokenizer);
        let frame = Frame::of(tokenizer);
        let answer = |(prompt, sample): (&Prompt, &Sample)| {
            let response = sample.tokens.get(prompt.tokens.len()..).unwrap_or_default();
            let asked = frame.strip(&tokenizer.decode(&prompt.tokens)?).to_string();
            Ok(Answer { step, id: prompt.id.clone(), prompt: asked, text: tokenizer.decode(response)? })
        };
        let answers: aligner_core::Result<Vec<Answer>> =
            self.prompts.iter().zip(&samples).map(answer).collect();
        Ok(rundir::write_answers(&self.dir.samples(), step, &answers?)?)
    }
}

/// Training has the memory: a cache for these answers and no more, with each one's last page and the one
/// beside it.
pub(crate) fn engine_config(prompts: &[Prompt], max_tokens: usize) -> EngineConfig {
    let room = |prompt: &Prompt| prompt.tokens.len() + max_tokens + 2 * PAGE;
    let cache = CacheSize::Tokens(prompts.iter().map(room).sum());
    EngineConfig { cache, ..EngineConfig::default() }
}

/// What a chat template writes around a single question, special tokens left out: a reader of
/// samples wants to see the question alone.
#[derive(Debug, Default, PartialEq)]
struct Frame {
    before: String,
    after: String,
}

impl Frame {
    /// The frame of the tokenizer's template; empty where there is none, or none that can be told.
    fn of(tokenizer: &Tokenizer) -> Self {
        const QUESTION: &str = "QUESTION";
        let rendered = tokenizer
            .template()
            .and_then(|template| template.render(&[Message::new("user", QUESTION)], true).ok());
        let plain = |text: &str| tokenizer.encode(text).and_then(|tokens| tokenizer.decode(&tokens)).ok();
        let sides = rendered.as_deref().and_then(|text| text.split_once(QUESTION));
        let sides = sides.and_then(|(before, after)| Some((plain(before)?, plain(after)?)));
        sides.map_or_else(Self::default, |(before, after)| Self { before, after })
    }

    /// The question in a prompt of one turn; longer prompts lose their outer frame only.
    fn strip<'a>(&self, prompt: &'a str) -> &'a str {
        let rest = prompt.strip_prefix(self.before.as_str()).unwrap_or(prompt);
        rest.strip_suffix(self.after.as_str()).unwrap_or(rest).trim()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_is_shown_without_its_frame() {
        let frame = Frame { before: "user\n".into(), after: "\nassistant\n".into() };
        assert_eq!(frame.strip("user\nWhy?\nassistant\n"), "Why?");
        assert_eq!(frame.strip("system\nBe kind.\nuser\nWhy?\nassistant\n"), "system\nBe kind.\nuser\nWhy?");
        assert_eq!(Frame::default().strip("Why?"), "Why?");
    }
}
