//! Gradients of an algorithm's loss: the one place where policy and algorithm meet.

use std::mem::discriminant;
use std::panic::{AssertUnwindSafe, catch_unwind};

use aligner_core::{Algorithm, Batch, Error, Forward, Gradients, Group, LossOutput, Per, Policy, Result};

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
        if policy.needs_others() {
            return error;
        }
        let again = |batch: &Batch| {
            let again = accumulated(policy, algorithm, std::slice::from_ref(batch)).err()?;
            (discriminant(&again) == discriminant(&error)).then_some(again)
        };
        first_alone(algorithm.per(), groups, again).unwrap_or(error)
    })
}

fn accumulated(policy: &dyn Policy, algorithm: &dyn Algorithm, batches: &[Batch]) -> Result<Gradients> {
    let accumulate = || {
        policy.accumulate(batches, algorithm.needs(), &|out, batch| {
            let loss = algorithm.loss(out, batch)?;
            Ok(with_balance(loss, out, units(algorithm.per(), batch, batches.len())))
        })
    };
    // A loss may also be wrong in ways that only its backward pass notices.
    catch_unwind(AssertUnwindSafe(accumulate)).unwrap_or_else(|panic| {
        let samples: Vec<String> = batches.iter().flat_map(Batch::sample_ids).collect();
        let (said, samples) = (panic_message(panic.as_ref()), samples.join(", "));
        Err(Error::Invalid(format!("the pass over the samples {samples} panicked: {said}")))
    })
}

/// The loss with that on an uneven use of experts, which is a mean, as often as the sum will be divided by. So
/// with one micro-batch it is transformers' `loss + router_aux_loss_coef * aux_loss`; with several, each has its
/// own, and the mean over all units counts.
fn with_balance(mut loss: LossOutput, out: &Forward, units: f64) -> LossOutput {
    let Some(uneven) = &out.balance_loss else { return loss };
    let value: f32 = uneven.clone().into_scalar();
    loss.metrics.add("router_aux_loss", f64::from(value) * units, units);
    loss.sum = loss.sum + uneven.clone() * units;
    loss
}

/// What a micro-batch contributes to the count that the loss is divided by.
fn units(per: Per, batch: &Batch, batches: usize) -> f64 {
    match per {
        Per::Token => batch.targets.len() as f64,
        Per::Sequence => {
            batch.sequences.iter().filter(|sequence| !sequence.targets.is_empty()).count() as f64
        }
        Per::Group => batch.groups.len() as f64,
        Per::Constant(count) => count / batches as f64,
    }
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
