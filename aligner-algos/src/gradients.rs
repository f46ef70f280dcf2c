//! Gradients of an algorithm's loss: the one place where policy and algorithm meet.

use std::mem::discriminant;
use std::panic::{AssertUnwindSafe, catch_unwind};

use aligner_core::{Algorithm, Batch, Error, Gradients, Group, Per, Policy, Result};

use crate::guarded::panic_message;

/// Gradients of the loss's sum over `batches`, not divided by anything yet.
///
/// # Errors
/// Those of [`Policy::accumulate`]; one that a sample, or a group, of `groups` shows alone names that one only.
pub(crate) fn gradients<'a>(
    policy: &dyn Policy,
    algorithm: &dyn Algorithm,
    batches: &[Batch],
    groups: impl IntoIterator<Item = &'a Group>,
) -> Result<Gradients> {
    accumulated(policy, algorithm, batches).map_err(|error| {
        let again = |batch: &Batch| {
            let again = accumulated(policy, algorithm, std::slice::from_ref(batch)).err()?;
            (discriminant(&again) == discriminant(&error)).then_some(again)
        };
        first_alone(algorithm.per(), groups, again).unwrap_or(error)
    })
}

fn accumulated(policy: &dyn Policy, algorithm: &dyn Algorithm, batches: &[Batch]) -> Result<Gradients> {
    let accumulate =
        || policy.accumulate(batches, algorithm.needs(), &|out, batch| algorithm.loss(out, batch));
    // A loss may also be wrong in ways that only its backward pass notices.
    catch_unwind(AssertUnwindSafe(accumulate)).unwrap_or_else(|panic| {
        let samples: Vec<String> = batches.iter().flat_map(Batch::sample_ids).collect();
        let (said, samples) = (panic_message(panic.as_ref()), samples.join(", "));
        Err(Error::Invalid(format!("the pass over the samples {samples} panicked: {said}")))
    })
}

/// What `find` says of the first sample, packed alone, of which it says something; of the group, where it says something of
/// that only, or where the loss compares a group's samples.
pub(crate) fn first_alone<'a, T>(
    per: Per,
    groups: impl IntoIterator<Item = &'a Group>,
    find: impl Fn(&Batch) -> Option<T>,
) -> Option<T> {
    let (group, found) = groups.into_iter().find_map(|group| {
        let batch = Batch::collate([group]).ok()?;
        Some((group, find(&batch)?))
    })?;
    let of_sample = |at: usize| {
        let samples = vec![group.samples[at].clone()];
        let alone = Group { id: group.id.clone(), samples, metadata: group.metadata.clone() };
        let mut batch = Batch::collate([&alone]).ok()?;
        // By its place in the group as it was.
        batch.sequences.iter_mut().for_each(|sequence| sequence.sample = at);
        find(&batch)
    };
    let samples = if per == Per::Group { 0..0 } else { 0..group.samples.len() };
    samples.into_iter().find_map(of_sample).or(Some(found))
}
