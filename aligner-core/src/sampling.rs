//! How a generation engine turns logits into tokens.

use std::sync::Arc;

use crate::{Error, Result};

/// How tokens are drawn, and when a response ends.
///
/// The transformations apply in the order of the fields, as in `transformers` and vLLM: penalties and
/// bias to the logits, then the masks, then the temperature, then the truncations (`top_k`, `top_p`,
/// `min_p`, `typical_p`). The default draws from the model's own distribution.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// Divides the positive logits of tokens that prompt or response hold, and multiplies the negative
    /// ones (Keskar et al. 2019, arXiv:1909.05858). 1 is off; above 0.
    pub repetition_penalty: f32,
    /// Is subtracted from the logits of tokens that the response holds. 0 is off.
    pub presence_penalty: f32,
    /// Is subtracted from a token's logit once for each time that the response holds it. 0 is off.
    pub frequency_penalty: f32,
    /// What is added to the logits of some tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// The only tokens that may be drawn; absent, all may. A stop token that is not allowed cannot end
    /// the response.
    pub allowed: Option<Arc<TokenMask>>,
    /// Stop tokens are not drawn before the response has this many tokens, and stop strings not heeded.
    pub min_tokens: usize,
    /// Most tokens of a response.
    pub max_tokens: usize,
    /// 0 is greedy; else logits are divided by it before the softmax.
    pub temperature: f32,
    /// Keeps the k most likely tokens. 0 is off.
    pub top_k: usize,
    /// Keeps the smallest set of most likely tokens whose probability reaches this (Holtzman et al. 2020,
    /// arXiv:1904.09751). 1 is off; in (0, 1].
    pub top_p: f32,
    /// Keeps tokens whose probability is at least this part of the largest (Nguyen et al. 2024,
    /// arXiv:2407.01082). 0 is off; in [0, 1].
    pub min_p: f32,
    /// Keeps the tokens whose surprise is closest to the entropy, until their probability reaches this
    /// (Meister et al. 2023, arXiv:2202.00666). 1 is off; in (0, 1].
    pub typical_p: f32,
    /// Token ids that end a response; the one that was drawn is part of it.
    pub stop_tokens: Vec<u32>,
    /// Texts that end a response as soon as it holds one, wherever token borders fall. The tokens that
    /// were drawn stay in the sample.
    pub stop_strings: Vec<String>,
    /// How many of the most likely tokens are reported beside the drawn one.
    pub top_logprobs: usize,
    /// Seed of the counter-based generator.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            allowed: None,
            min_tokens: 0,
            max_tokens: 256,
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            typical_p: 1.0,
            stop_tokens: Vec::new(),
            stop_strings: Vec::new(),
            top_logprobs: 0,
            seed: 0,
        }
    }
}

impl Sampling {
    /// Checks every range, and that token ids are below `vocab`.
    ///
    /// # Errors
    /// [`Error::setting`] names the first field that is out of range.
    pub fn check(&self, vocab: usize) -> Result<()> {
        let finite = |name: &str, value: f32, from: f32, to: f32| {
            let what = || format!("expected a number from {from} to {to}, got {value}");
            if (from..=to).contains(&value) { Ok(()) } else { Err(Error::setting(name, what())) }
        };
        let positive = |name: &str, value: f32, to: f32| {
            let what = || format!("expected a number above 0, at most {to}, got {value}");
            if value > 0.0 && value <= to { Ok(()) } else { Err(Error::setting(name, what())) }
        };
        positive("repetition_penalty", self.repetition_penalty, 100.0)?;
        finite("presence_penalty", self.presence_penalty, -100.0, 100.0)?;
        finite("frequency_penalty", self.frequency_penalty, -100.0, 100.0)?;
        finite("temperature", self.temperature, 0.0, 1e6)?;
        positive("top_p", self.top_p, 1.0)?;
        finite("min_p", self.min_p, 0.0, 1.0)?;
        positive("typical_p", self.typical_p, 1.0)?;
        for &(token, bias) in &self.logit_bias {
            known("logit_bias", token, vocab)?;
            if !bias.is_finite() {
                return Err(Error::setting("logit_bias", format!("token {token} has bias {bias}")));
            }
        }
        self.stop_tokens.iter().try_for_each(|&token| known("stop_tokens", token, vocab))?;
        if self.stop_strings.iter().any(String::is_empty) {
            return Err(Error::setting("stop_strings", "an empty text would end every response"));
        }
        if self.min_tokens > self.max_tokens {
            let (min, max) = (self.min_tokens, self.max_tokens);
            return Err(Error::setting("min_tokens", format!("{min} is more than max_tokens = {max}")));
        }
        if let Some(allowed) = &self.allowed
            && !(0..vocab as u32).any(|token| allowed.contains(token))
        {
            return Err(Error::setting("allowed", format!("no token below {vocab} may be drawn")));
        }
        Ok(())
    }

    /// Whether the drawn distribution is the model's own: no penalty, bias, mask or truncation, and
    /// temperature 1.
    pub fn is_plain(&self) -> bool {
        let own = Self::default();
        (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
            == (own.repetition_penalty, own.presence_penalty, own.frequency_penalty)
            && (self.temperature, self.top_k, self.top_p, self.min_p, self.typical_p)
                == (own.temperature, own.top_k, own.top_p, own.min_p, own.typical_p)
            && self.logit_bias.is_empty()
            && self.allowed.is_none()
            && self.min_tokens == 0
    }
}

fn known(name: &str, token: u32, vocab: usize) -> Result<()> {
    if (token as usize) < vocab {
        return Ok(());
    }
    Err(Error::setting(name, format!("token {token} is outside of the vocabulary of {vocab}")))
}

/// A set of token ids, one bit each.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TokenMask {
    words: Vec<u64>,
}

impl TokenMask {
    /// Whether `token` is in the set.
    pub fn contains(&self, token: u32) -> bool {
        self.words.get(token as usize / 64).is_some_and(|word| word >> (token % 64) & 1 == 1)
    }

    /// Adds `token`.
    pub fn insert(&mut self, token: u32) {
        let word = token as usize / 64;
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        self.words[word] |= 1 << (token % 64);
    }
}

impl FromIterator<u32> for TokenMask {
    fn from_iter<I: IntoIterator<Item = u32>>(tokens: I) -> Self {
        let mut mask = Self::default();
        tokens.into_iter().for_each(|token| mask.insert(token));
        mask
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_out_of_range_are_named() {
        let wrong: [(&str, Sampling); 7] = [
            ("temperature", Sampling { temperature: f32::NAN, ..Sampling::default() }),
            ("top_p", Sampling { top_p: 0.0, ..Sampling::default() }),
            ("repetition_penalty", Sampling { repetition_penalty: 0.0, ..Sampling::default() }),
            ("logit_bias", Sampling { logit_bias: vec![(10, 1.0)], ..Sampling::default() }),
            ("min_tokens", Sampling { min_tokens: 300, ..Sampling::default() }),
            ("stop_strings", Sampling { stop_strings: vec![String::new()], ..Sampling::default() }),
            (
                "allowed",
                Sampling { allowed: Some(Arc::new([10].into_iter().collect())), ..Sampling::default() },
            ),
        ];
        for (name, sampling) in wrong {
            let message = sampling.check(10).unwrap_err().to_string();
            assert!(message.contains(name), "{name}: {message}");
        }
        assert!(Sampling::default().check(10).is_ok());
    }

    #[test]
    fn masks_hold_what_was_put_in() {
        let mask: TokenMask = [0, 63, 64, 200].into_iter().collect();
        let held: Vec<u32> = (0..300).filter(|&token| mask.contains(token)).collect();
        assert_eq!(held, [0, 63, 64, 200]);
    }
}
