//! Scores by a trained reward model.

use aligner_core::model::CausalLm;
use aligner_core::ops::host::to_vec;
use aligner_core::{Error, Group, Needs, Policy, Result, Reward, Sample, Score};
use aligner_data::Tokenizer;
use serde::{Deserialize, Serialize};

use super::sample_name;
use crate::micro_batch::micro_batches;

/// Settings of [`ModelReward`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelRewardConfig {
    /// Which of the scalar head's outputs is the score, from 0.
    pub output: usize,
    /// Most tokens that one pass computes.
    pub micro_batch_tokens: usize,
}

impl Default for ModelRewardConfig {
    fn default() -> Self {
        Self { output: 0, micro_batch_tokens: 2048 }
    }
}

/// The score that a model with a scalar head has at a sample's last token.
///
/// It reads the samples' tokens as they are: a policy with another chat template, or another tokenizer, needs its
/// texts rendered and encoded again before. Neighbours with the same prompt share its computation.
pub struct ModelReward {
    policy: Box<dyn Policy + Send>,
    vocab_size: usize,
    config: ModelRewardConfig,
}

impl ModelReward {
    /// The reward of a model that knows `vocab_size` tokens.
    ///
    /// # Errors
    /// [`Error::Setting`] for no token a pass.
    pub fn new(policy: Box<dyn Policy + Send>, vocab_size: usize, config: ModelRewardConfig) -> Result<Self> {
        if config.micro_batch_tokens == 0 {
            return Err(Error::setting("micro_batch_tokens", "must be at least 1"));
        }
        Ok(Self { policy, vocab_size, config })
    }

    /// The reward of a model of our own.
    ///
    /// # Errors
    /// [`Error::Head`] for a model without a scalar head, [`Error::Setting`] for an output that the head does not have
    /// or no token a pass.
    pub fn of_model(model: CausalLm, config: ModelRewardConfig) -> Result<Self> {
        let Some(outputs) = model.config().num_labels else {
            return Err(Error::Head { field: "scores", head: "scalar head" });
        };
        check_output(config.output, outputs)?;
        let vocab_size = model.config().vocab_size;
        Self::new(Box::new(model), vocab_size, config)
    }

    /// The model.
    pub fn policy(&self) -> &dyn Policy {
        self.policy.as_ref()
    }

    /// Checks that the policy's token ids mean the same to the reward model.
    ///
    /// # Errors
    /// [`Error::Invalid`] names the first token that differs.
    pub fn check_vocabulary(policy: &Tokenizer, reward: &Tokenizer) -> Result<()> {
        let size = policy.vocab_size().max(reward.vocab_size()) as u32;
        let differs = |id: &u32| policy.id_token(*id) != reward.id_token(*id);
        let Some(id) = (0..size).find(differs) else { return Ok(()) };
        let name =
            |token: Option<String>| token.map_or_else(|| "no token".into(), |token| format!("{token:?}"));
        Err(Error::Invalid(format!(
            "token {id} is {} to the policy and {} to the reward model: their vocabularies differ, so that the \
             policy's tokens cannot be scored as they are",
            name(policy.id_token(id)),
            name(reward.id_token(id))
        )))
    }

    fn check(&self, samples: &[Sample]) -> Result<()> {
        for (at, sample) in samples.iter().enumerate() {
            let name = || sample_name(at, sample);
            if sample.tokens.is_empty() {
                return Err(Error::Invalid(format!("{}: no token to score", name())));
            }
            if let Some(token) = sample.tokens.iter().find(|token| **token as usize >= self.vocab_size) {
                return Err(Error::Invalid(format!(
                    "{}: token {token} is past the reward model's vocabulary of {}; the policy's tokenizer is another",
                    name(),
                    self.vocab_size
                )));
            }
        }
        Ok(())
    }

    /// Neighbours with the same prompt, as groups that fit a pass together. A group's id is its first sample's place.
    fn groups(&self, samples: &[Sample]) -> Vec<Group> {
        let mut groups: Vec<Group> = Vec::new();
        let mut used = 0;
        for (at, sample) in samples.iter().enumerate() {
            let prompt = sample.prompt_len();
            let own = sample.tokens.len() - prompt;
            let bare = Sample::new(sample.tokens.clone(), sample.mask.clone());
            let joins = |group: &&mut Group| {
                let first = &group.samples[0];
                first.tokens.get(..first.prompt_len()) == sample.tokens.get(..prompt)
                    && used + own <= self.config.micro_batch_tokens
            };
            if let Some(group) = groups.last_mut().filter(joins) {
                group.samples.push(bare);
                used += own;
            } else {
                groups.push(Group::single(at.to_string(), bare));
                used = sample.tokens.len();
            }
        }
        groups
    }
}

fn check_output(output: usize, outputs: usize) -> Result<()> {
    if output < outputs {
        return Ok(());
    }
    Err(Error::setting("output", format!("must be below the head's {outputs} outputs, got {output}")))
}

impl Reward for ModelReward {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        self.check(samples)?;
        let mut scores = vec![Score::None; samples.len()];
        for batch in micro_batches(&self.groups(samples), self.config.micro_batch_tokens, false)? {
            let out = self.policy.forward(&batch, Needs::SCORES)?;
            let values = out.scores()?;
            let [_, outputs] = values.dims();
            check_output(self.config.output, outputs)?;
            let values = to_vec(values);
            for (sequence, values) in batch.sequences.iter().zip(values.chunks(outputs)) {
                let first: usize =
                    batch.groups[sequence.group].parse().expect("ids that `groups` has written");
                scores[first + sequence.sample] = Score::Sample(values[self.config.output]);
            }
        }
        Ok(scores)
    }
}
