//! Log-probabilities under a frozen reference, computed live or once and for all.

mod cache;

use std::path::Path;

use aligner_core::ops::host::to_vec;
use aligner_core::weights::checksum;
use aligner_core::{Batch, Group, Needs, Policy, Result, Sample};
use sha2::{Digest, Sha256};

use crate::micro_batch::micro_batches;
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
        // Without the old values: half of a group may have been found.
        let bare = |&at: &usize| {
            let mut group = groups[at].clone();
            group.samples.iter_mut().for_each(|sample| sample.ref_logps.clear());
            // The batch's groups lead back to `groups` by their place in it.
            group.id = at.to_string();
            group
        };
        let bare: Vec<Group> = absent.iter().map(bare).collect();
        let mut filled = groups.len() - absent.len();
        for batch in micro_batches(&bare, self.micro_batch_tokens, false)? {
            self.compute(&batch, groups)?;
            filled += batch.groups.len();
            watch(filled);
        }
        Ok(())
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
            scatter(sample, &values);
        }
        Ok(true)
    }

    fn compute(&mut self, batch: &Batch, groups: &mut [Group]) -> Result<()> {
        // A model refuses a batch without targets, and there is nothing to ask it for.
        let logps = if batch.targets.is_empty() {
            Vec::new()
        } else {
            to_vec(self.policy.forward(batch, Needs::NOTHING)?.logps()?)
        };
        let mut records = Vec::new();
        for sequence in &batch.sequences {
            let at: usize = batch.groups[sequence.group].parse().expect("ids that `fill` has written");
            let prefix = groups[at].shared_prefix();
            let sample = &mut groups[at].samples[sequence.sample];
            let values = &logps[sequence.targets.clone()];
            scatter(sample, values);
            if let Some((_, weights)) = &self.cached {
                records.push((key(weights, prefix, sample), values.to_vec()));
            }
        }
        match &mut self.cached {
            Some((cache, _)) => cache.append(records),
            None => Ok(()),
        }
    }
}

/// Puts one value on each target of the sample, 0 elsewhere.
fn scatter(sample: &mut Sample, values: &[f32]) {
    sample.ref_logps = vec![0.0; sample.tokens.len()];
    let targets = (1..sample.tokens.len()).filter(|&at| sample.mask[at]);
    for (at, value) in targets.zip(values) {
        sample.ref_logps[at] = *value;
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
