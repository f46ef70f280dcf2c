//! What both forms of a request have in common: sampling, limits, streaming.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;

use aligner_core::{Sampling, TokenMask};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::Settings;
use super::failure::Failure;
use super::fields::Fields;

/// Most samples of one prompt.
const MAX_SAMPLES: usize = 128;
/// Most stop strings, and most bytes of one: their search is paid for each token.
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 1024;
/// Most alternatives that are reported beside a token.
const MAX_TOP_LOGPROBS: usize = 20;

/// A request without its prompt.
#[derive(Debug)]
pub(super) struct Options {
    pub(super) sampling: Sampling,
    /// Samples of each prompt.
    pub(super) samples: usize,
    pub(super) stream: bool,
    /// Whether a stream ends with the token counts.
    pub(super) include_usage: bool,
    /// Whether log-probabilities are reported.
    pub(super) logprobs: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Stops {
    One(String),
    Several(Vec<String>),
}

#[derive(Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: Option<bool>,
}

impl Options {
    /// Takes the common fields; `max_tokens` holds where the request names no limit.
    pub(super) fn take(fields: &mut Fields, settings: &Settings, max_tokens: usize) -> Result<Self, Failure> {
        fields.refuse_unsupported()?;
        let samples = samples(fields)?;
        let mut sampling = Sampling {
            max_tokens: limit(fields, settings, max_tokens)?,
            stop_strings: stops(fields)?,
            logit_bias: bias(fields)?,
            seed: fields.take::<i64>("seed")?.map_or_else(any_seed, |seed| seed as u64),
            ..Sampling::default()
        };
        fields.set("temperature", &mut sampling.temperature)?;
        fields.set("top_p", &mut sampling.top_p)?;
        // -1 turns it off in other servers.
        let top_k = fields.take::<i64>("top_k")?.unwrap_or(0);
        sampling.top_k = if top_k == -1 {
            0
        } else {
            usize::try_from(top_k)
                .map_err(|_| Failure::field("top_k", format!("expected 0 or more, got {top_k}")))?
        };
        fields.set("min_p", &mut sampling.min_p)?;
        fields.set("typical_p", &mut sampling.typical_p)?;
        fields.set("repetition_penalty", &mut sampling.repetition_penalty)?;
        fields.set("presence_penalty", &mut sampling.presence_penalty)?;
        fields.set("frequency_penalty", &mut sampling.frequency_penalty)?;
        fields.set("min_tokens", &mut sampling.min_tokens)?;
        if fields.take::<bool>("ignore_eos")? != Some(true) {
            sampling.stop_tokens.clone_from(&settings.stop_tokens);
        }
        sampling.stop_tokens.extend(fields.take::<Vec<u32>>("stop_token_ids")?.unwrap_or_default());
        let allowed: Option<Vec<u32>> = fields.take("allowed_token_ids")?;
        sampling.allowed = allowed.map(|tokens| allowed_mask(&tokens, settings.vocab_size)).transpose()?;
        sampling.check(settings.vocab_size).map_err(|error| Failure::of_setting(&error))?;
        let stream = fields.take("stream")?.unwrap_or(false);
        let stream_options: Option<StreamOptions> = fields.take("stream_options")?;
        if stream_options.is_some() && !stream {
            return Err(Failure::field("stream_options", "only taken where `stream` is true"));
        }
        let include_usage = stream_options.and_then(|options| options.include_usage).unwrap_or(false);
        Ok(Self { sampling, samples, stream, include_usage, logprobs: false })
    }

    /// Reports log-probabilities, with `top` alternatives each.
    pub(super) fn report(&mut self, name: &str, top: usize) -> Result<(), Failure> {
        if top > MAX_TOP_LOGPROBS {
            return Err(Failure::field(name, format!("expected at most {MAX_TOP_LOGPROBS}, got {top}")));
        }
        self.logprobs = true;
        self.sampling.top_logprobs = top;
        Ok(())
    }
}

fn samples(fields: &mut Fields) -> Result<usize, Failure> {
    let samples = fields.take("n")?.unwrap_or(1);
    if !(1..=MAX_SAMPLES).contains(&samples) {
        return Err(Failure::field("n", format!("expected 1 to {MAX_SAMPLES}, got {samples}")));
    }
    match fields.take::<usize>("best_of")? {
        Some(best_of) if best_of != samples => Err(Failure::unsupported("best_of")),
        _ => Ok(samples),
    }
}

/// `max_completion_tokens` is the newer name.
fn limit(fields: &mut Fields, settings: &Settings, default: usize) -> Result<usize, Failure> {
    let most = settings.max_tokens_limit;
    let older: Option<usize> = fields.take("max_tokens")?;
    let newer: Option<usize> = fields.take("max_completion_tokens")?;
    let (name, asked) = match (newer, older) {
        (Some(newer), _) => ("max_completion_tokens", newer),
        (None, Some(older)) => ("max_tokens", older),
        (None, None) => return Ok(default.min(most)),
    };
    if (1..=most).contains(&asked) {
        return Ok(asked);
    }
    Err(Failure::field(name, format!("expected 1 to {most}, got {asked}")))
}

fn stops(fields: &mut Fields) -> Result<Vec<String>, Failure> {
    let stops = match fields.take::<Value>("stop")? {
        None => return Ok(Vec::new()),
        Some(value) => serde_json::from_value(value)
            .map_err(|_| Failure::field("stop", "expected a text or a list of texts"))?,
    };
    let stops = match stops {
        Stops::One(stop) => vec![stop],
        Stops::Several(stops) => stops,
    };
    if stops.len() > MAX_STOPS || stops.iter().any(|stop| stop.len() > MAX_STOP_BYTES) {
        let what = format!("expected at most {MAX_STOPS} texts of at most {MAX_STOP_BYTES} bytes");
        return Err(Failure::field("stop", what));
    }
    Ok(stops)
}

fn bias(fields: &mut Fields) -> Result<Vec<(u32, f32)>, Failure> {
    let entries: Map<String, Value> = fields.take("logit_bias")?.unwrap_or_default();
    let entry = |(token, bias): (String, Value)| match (token.parse(), bias.as_f64()) {
        (Ok(token), Some(bias)) => Ok((token, bias as f32)),
        _ => {
            Err(Failure::field("logit_bias", format!("expected token ids with numbers, got {token}: {bias}")))
        }
    };
    entries.into_iter().map(entry).collect()
}

/// Ids that the vocabulary does not have would make the mask as large as the largest of them.
fn allowed_mask(tokens: &[u32], vocab: usize) -> Result<Arc<TokenMask>, Failure> {
    if let Some(unknown) = tokens.iter().find(|&&token| token as usize >= vocab) {
        let what = format!("token {unknown} is outside of the vocabulary of {vocab}");
        return Err(Failure::field("allowed_token_ids", what));
    }
    Ok(Arc::new(tokens.iter().copied().collect()))
}

/// A number that nobody chose: the standard library seeds its hash maps from the system.
pub(super) fn any_seed() -> u64 {
    RandomState::new().hash_one(0)
}
