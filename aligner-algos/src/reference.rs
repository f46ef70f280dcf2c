//! Log-probabilities under a frozen reference, computed live or once and for all.

mod cache;

use std::path::Path;

use aligner_core::weights::checksum;
use aligner_core::{Forward, Group, Needs, Policy, Result, Sample};
use sha2::{Digest, Sha256};

use crate::ops::targets::scatter;
use crate::per_target::{Answer, Question};
use cache::{Cache, Key};

/// A frozen policy that fills in `ref_logps`.
///
/// With a cache on disk each sample is computed once: records are keyed by a hash of the reference's
/// weights, of the sample's tokens and mask and of the length of its group's common prefix, so other
/// weights, other data or another template never find a stale value, and what is found is bitwise
/// what would be computed.
pub struct Reference {
    policy: Box<dyn Policy>,
    micro_batch_tokens: usize,
    cached: Option<(Cache, [u8; 32])>,
}

impl Reference {
    /// A reference that computes every log-probability again.
    pub fn live(policy: Box<dyn Policy>, micro_batch_tokens: usize) -> Self {
        Self { policy, micro_batch_tokens, cached: None }
    }

    /// A reference that keeps what it computes in the file `path`, which is created where needed.
    ///
    /// # Errors
    /// A file that cannot be read or written, or that is something else.
    pub fn cached(policy: Box<dyn Policy>, micro_batch_tokens: usize, path: &Path) -> Result<Self> {
        let cache = Cache::open(path)?;
        let weights = Sha256::digest(checksum(policy.params())).into();
        Ok(Self { policy, micro_batch_tokens, cached: Some((cache, weights)) })
    }

    /// The frozen policy.
    pub fn policy(&self) -> &dyn Policy {
        self.policy.as_ref()
    }

    /// Sets every sample's `ref_logps` `[tokens]`, in nats; 0 where the token is no target.
    ///
    /// # Errors
    /// Samples that the model cannot take, or a cache that cannot be read or written.
    pub fn fill(&mut self, groups: &mut [Group]) -> Result<()> {
        self.fill_watched(groups, &mut |_| {})
    }

    /// As [`Reference::fill`]; `watch` is told after each pass how many of the groups are filled.
    ///
    /// # Errors
    /// As [`Reference::fill`].
    pub fn fill_watched(&mut self, groups: &mut [Group], watch: &mut dyn FnMut(usize)) -> Result<()> {
        let mut absent = Vec::new();
        for (at, group) in groups.iter_mut().enumerate() {
            group.check()?;
            if !self.look_up(group)? {
                absent.push(at);
            }
        }
        let asked: Vec<Group> = absent.iter().map(|&at| groups[at].clone()).collect();
        let question = Question {
            policy: self.policy.as_ref(),
            micro_batch_tokens: self.micro_batch_tokens,
            needs: Needs::NOTHING,
            pick: Forward::logps,
        };
        let mut filled = groups.len() - absent.len();
        let cached = &mut self.cached;
        question.ask(&asked, &mut |answers| {
            let mut records = Vec::new();
            for Answer { group, sample, values } in answers {
                filled += usize::from(sample == 0);
                let group = &mut groups[absent[group]];
                let prefix = group.shared_prefix();
                let sample = &mut group.samples[sample];
                sample.ref_logps = scatter(sample, &values);
                if let Some((_, weights)) = &cached {
                    records.push((key(weights, prefix, sample), values));
                }
            }
            if let Some((cache, _)) = cached {
                cache.append(records)?;
            }
            watch(filled);
            Ok(())
        })
    }

    /// Fills a group from the cache; false where one of its samples is not there.
    fn look_up(&mut self, group: &mut Group) -> Result<bool> {
        let Some((cache, weights)) = &mut self.cached else { return Ok(false) };
        let prefix = group.shared_prefix();
        for sample in &mut group.samples {
            let Some(values) = cache.get(&key(weights, prefix, sample))? else { return Ok(false) };
            if values.len() != sample.targets() {
                return Ok(false);
            }
            sample.ref_logps = scatter(sample, &values);
        }
        Ok(true)
    }
}

/// The hash of the weights, the prefix length, the tokens and the mask: all that the
/// log-probabilities depend on. Where the prefix ends, attention is summed in two parts, so its
/// length decides their last bits.
fn key(weights: &[u8; 32], shared_prefix: usize, sample: &Sample) -> Key {
    let mut hash = Sha256::new();
    hash.update(weights);
    hash.update((shared_prefix as u64).to_le_bytes());
    hash.update((sample.tokens.len() as u64).to_le_bytes());
    sample.tokens.iter().for_each(|token| hash.update(token.to_le_bytes()));
    sample.mask.iter().for_each(|&target| hash.update([u8::from(target)]));
    hash.finalize().into()
}
