//! One value at each target of each sample, from a policy that does not learn.

use aligner_core::ops::host::to_vec;
use aligner_core::{Batch, Forward, Group, Needs, Policy, Result, Sample, Tensor};

use crate::micro_batch::micro_batches;

/// What is asked of a policy.
#[derive(Clone, Copy)]
pub(crate) struct Question<'a> {
    pub(crate) policy: &'a dyn Policy,
    /// Most tokens of a pass.
    pub(crate) micro_batch_tokens: usize,
    pub(crate) needs: Needs,
    /// Takes the values `[targets]` out of a pass.
    pub(crate) pick: fn(&Forward) -> Result<&Tensor<1>>,
}

/// What a pass said of one sample.
pub(crate) struct Answer {
    /// The place of its group among those that were asked about.
    pub(crate) group: usize,
    /// Its place in the group.
    pub(crate) sample: usize,
    /// A value for each of its targets.
    pub(crate) values: Vec<f32>,
}

impl Question<'_> {
    /// Asks about `groups` in packed passes; `each` gets a pass's answers, those of a group in one pass.
    pub(crate) fn ask(
        &self,
        groups: &[Group],
        each: &mut dyn FnMut(Vec<Answer>) -> Result<()>,
    ) -> Result<()> {
        let bare: Vec<Group> = groups.iter().enumerate().map(|(at, group)| bare(at, group)).collect();
        let batches = micro_batches(&bare, self.micro_batch_tokens, false)?;
        // A model refuses a batch without targets, and there is nothing to ask it for.
        let (asked, empty): (Vec<Batch>, Vec<Batch>) =
            batches.into_iter().partition(|batch| !batch.targets.is_empty());
        let mut answer = |batch: &Batch, values: &[f32]| {
            let answer = |sequence: &aligner_core::Sequence| Answer {
                group: batch.groups[sequence.group].parse().expect("ids that `bare` has written"),
                sample: sequence.sample,
                values: values[sequence.targets.clone()].to_vec(),
            };
            each(batch.sequences.iter().map(answer).collect())
        };
        empty.iter().try_for_each(|batch| answer(batch, &[]))?;
        self.policy
            .forward_each(&asked, self.needs, &mut |at, out| answer(&asked[at], &to_vec((self.pick)(&out)?)))
    }
}

/// Tokens and masks alone, for what else a group carries may be there for some samples only; its id leads
/// back to its place.
fn bare(at: usize, group: &Group) -> Group {
    let samples = group.samples.iter().map(|sample| Sample::new(sample.tokens.clone(), sample.mask.clone()));
    Group { id: at.to_string(), samples: samples.collect(), ..Group::default() }
}
