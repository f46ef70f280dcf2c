//! Reference log-probabilities: the cache gives what the model gives.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use aligner_algos::Reference;
use aligner_algos::check::BigramPolicy;
use aligner_core::{Batch, Forward, Group, Needs, ParamSet, Policy, Result, Sample};

/// Counts the batches that it is asked for.
struct Counting {
    policy: BigramPolicy,
    passes: Arc<AtomicUsize>,
}

impl Policy for Counting {
    fn forward(&self, batch: &Batch, needs: Needs) -> Result<Forward> {
        self.passes.fetch_add(1, Ordering::Relaxed);
        self.policy.forward(batch, needs)
    }
    fn params(&self) -> &ParamSet {
        self.policy.params()
    }
    fn params_mut(&mut self) -> &mut ParamSet {
        self.policy.params_mut()
    }
    fn with_params(&self, params: ParamSet) -> Box<dyn Policy> {
        self.policy.with_params(params)
    }
}

fn counting(seed: u64) -> (Box<dyn Policy>, Arc<AtomicUsize>) {
    let passes = Arc::new(AtomicUsize::new(0));
    (Box::new(Counting { policy: BigramPolicy::new(20, seed), passes: passes.clone() }), passes)
}

fn pairs(from: u32, to: u32) -> Vec<Group> {
    let answer = |tokens: &[u32]| Sample::response(&[1, 2], tokens);
    (from..to)
        .map(|at| Group::pair(format!("row {at}"), answer(&[3 + at, 4]), answer(&[5, 6 + at, 7])))
        .collect()
}

fn logps(groups: &[Group]) -> Vec<Vec<f32>> {
    groups.iter().flat_map(|group| &group.samples).map(|sample| sample.ref_logps.clone()).collect()
}

#[test]
fn cached_and_live_values_are_bitwise_equal() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("reference.cache");
    let (mut live, mut first, mut second) = (pairs(0, 6), pairs(0, 6), pairs(0, 6));
    Reference::live(counting(1).0, 16).fill(&mut live).unwrap();
    Reference::cached(counting(1).0, 64, &path).unwrap().fill(&mut first).unwrap();
    let (policy, passes) = counting(1);
    Reference::cached(policy, 16, &path).unwrap().fill(&mut second).unwrap();
    assert_eq!(passes.load(Ordering::Relaxed), 0, "everything was in the cache");
    assert_eq!(logps(&live), logps(&first));
    assert_eq!(logps(&live), logps(&second));
    let sample = &live[0].samples[0];
    assert!(sample.ref_logps[..2].iter().all(|&logp| logp == 0.0), "the prompt is no target");
    assert!(sample.ref_logps[2..].iter().all(|&logp| logp < 0.0));
}

#[test]
fn only_absent_groups_are_computed() {
    let dir = tempfile::tempdir().unwrap();
    let (policy, passes) = counting(1);
    let mut reference = Reference::cached(policy, 1000, &dir.path().join("reference.cache")).unwrap();
    reference.fill(&mut pairs(0, 3)).unwrap();
    assert_eq!(passes.load(Ordering::Relaxed), 1);
    reference.fill(&mut pairs(1, 3)).unwrap();
    assert_eq!(passes.load(Ordering::Relaxed), 1);
    reference.fill(&mut pairs(2, 5)).unwrap();
    assert_eq!(passes.load(Ordering::Relaxed), 2);
}

#[test]
fn a_long_filling_can_be_watched() {
    let dir = tempfile::tempdir().unwrap();
    // So few tokens a pass that each pair has its own.
    let mut reference = Reference::cached(counting(1).0, 1, &dir.path().join("reference.cache")).unwrap();
    let filled = |reference: &mut Reference, from: u32, to: u32| {
        let mut told = Vec::new();
        reference.fill_watched(&mut pairs(from, to), &mut |filled| told.push(filled)).unwrap();
        told
    };
    assert_eq!(filled(&mut reference, 0, 3), [1, 2, 3]);
    assert_eq!(filled(&mut reference, 1, 5), [3, 4], "what the cache has is filled at once");
}

#[test]
fn other_weights_and_other_masks_are_other_entries() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("reference.cache");
    Reference::cached(counting(1).0, 1000, &path).unwrap().fill(&mut pairs(0, 3)).unwrap();
    let (policy, passes) = counting(2);
    let mut other_weights = Reference::cached(policy, 1000, &path).unwrap();
    other_weights.fill(&mut pairs(0, 3)).unwrap();
    assert_eq!(passes.load(Ordering::Relaxed), 1);
    let mut other_mask = pairs(0, 1);
    other_mask[0].samples[0].mask[2] = false;
    other_weights.fill(&mut other_mask).unwrap();
    assert_eq!(passes.load(Ordering::Relaxed), 2);
}

#[test]
fn a_sample_in_other_company_is_another_entry() {
    let dir = tempfile::tempdir().unwrap();
    let (policy, passes) = counting(1);
    let mut reference = Reference::cached(policy, 1000, &dir.path().join("reference.cache")).unwrap();
    let mut pair = pairs(0, 1);
    reference.fill(&mut pair).unwrap();
    let sample = pair[0].samples.remove(0);
    let mut alone = [Group::single("alone", sample.clone())];
    reference.fill(&mut alone).unwrap();
    assert_eq!(
        passes.load(Ordering::Relaxed),
        2,
        "alone, the sample shares no prefix: its last bits may differ"
    );
    let mut again = [Group::single("again", sample)];
    reference.fill(&mut again).unwrap();
    assert_eq!(passes.load(Ordering::Relaxed), 2);
}

#[test]
fn samples_without_targets_get_zeros() {
    let mut groups = pairs(0, 1);
    groups[0].samples.iter_mut().for_each(|sample| sample.mask.fill(false));
    Reference::live(counting(1).0, 1000).fill(&mut groups).unwrap();
    assert!(logps(&groups).iter().flatten().all(|&logp| logp == 0.0));
}
