//! The flags that say how tokens are drawn, and when an answer ends.

use aligner_core::{Error, Sampling};

use crate::Usage;
use crate::wire::LoadedModel;

/// Shared by the commands that answer.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct SamplingFlags {
    /// 0 is greedy; else logits are divided by it.
    #[arg(short, long, default_value_t = 0.0)]
    temperature: f32,
    /// Most tokens of an answer.
    #[arg(short = 'n', long, default_value_t = 256)]
    max_tokens: usize,
    /// No stop token and no stop text counts before an answer has so many tokens.
    #[arg(long, default_value_t = 0)]
    min_tokens: usize,
    /// Keep the k most likely tokens; 0 is off.
    #[arg(long, default_value_t = 0)]
    top_k: usize,
    /// Keep the most likely tokens up to this probability together; 1 is off.
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,
    /// Keep tokens that have at least this part of the largest probability; 0 is off.
    #[arg(long, default_value_t = 0.0)]
    min_p: f32,
    /// Keep the tokens of the most typical surprise up to this probability; 1 is off.
    #[arg(long, default_value_t = 1.0)]
    typical_p: f32,
    /// Make tokens of prompt and answer less likely, by division; 1 is off.
    #[arg(long, default_value_t = 1.0)]
    repetition_penalty: f32,
    /// Make tokens of the answer less likely, by subtraction; 0 is off.
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    presence_penalty: f32,
    /// Make tokens of the answer less likely with each time they come; 0 is off.
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    frequency_penalty: f32,
    /// Add to the logit of a token id, as in `--logit-bias 42=-100`; may be repeated.
    #[arg(long, value_name = "TOKEN=BIAS", value_parser = bias)]
    logit_bias: Vec<(u32, f32)>,
    /// A text that ends an answer; may be repeated.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Seed of the draw.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

impl SamplingFlags {
    /// The settings for a model.
    ///
    /// # Errors
    /// [`Usage`] names the flag that is out of range.
    pub(crate) fn sampling(&self, model: &LoadedModel) -> anyhow::Result<Sampling> {
        let sampling = Sampling {
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: self.logit_bias.clone(),
            allowed: None,
            min_tokens: self.min_tokens,
            max_tokens: self.max_tokens,
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            typical_p: self.typical_p,
            stop_tokens: model.stop_tokens(),
            stop_strings: self.stop.clone(),
            top_logprobs: 0,
            seed: self.seed,
        };
        sampling.check(model.checkpoint.config().vocab_size).map_err(|error| match error {
            Error::Setting { key, message } => {
                let flag = if key == "stop_strings" { "stop".into() } else { key.replace('_', "-") };
                anyhow::Error::new(Usage(format!("--{flag}: {message}")))
            }
            error => error.into(),
        })?;
        Ok(sampling)
    }
}

fn bias(text: &str) -> Result<(u32, f32), String> {
    let parsed =
        text.split_once('=').and_then(|(token, bias)| Some((token.parse().ok()?, bias.parse().ok()?)));
    parsed.ok_or_else(|| "expected a token id and a number, as in 42=-100".into())
}
