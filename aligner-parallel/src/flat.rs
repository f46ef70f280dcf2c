//! Many small tensors in one collective.

use std::ops::Range;

use aligner_core::{Communicator, Error, Param, ParamSet, Phase, Reduce, Result, Tensor};

use crate::cut::zeros;

/// Elements that one collective takes at a time: 64 MiB.
const BUCKET: usize = 1 << 24;

/// Which gradients some rank has, this one or another; `own` says which ones this rank has.
pub(crate) fn present(
    comm: &dyn Communicator,
    own: impl Iterator<Item = bool>,
    phase: Phase,
) -> Result<Vec<bool>> {
    let mut present: Vec<f64> = own.map(|own| f64::from(u8::from(own))).collect();
    comm.all_reduce_host(&mut present, Reduce::Max, phase)?;
    Ok(present.into_iter().map(|present| present > 0.0).collect())
}

/// Sums the gradients of the parameters that `chosen` chooses over the ranks, as many in one collective as a
/// bucket takes; one that some ranks lack counts as 0 there.
///
/// # Errors
/// What the communicator reports.
pub fn all_reduce_together(
    comm: &dyn Communicator,
    gradients: &mut [Option<Tensor<1>>],
    params: &ParamSet,
    chosen: impl Fn(&Param) -> bool,
    phase: Phase,
) -> Result<()> {
    if comm.size() == 1 || !params.iter().any(&chosen) {
        return Ok(());
    }
    let chosen: Vec<usize> =
        params.iter().enumerate().filter(|(_, param)| chosen(param)).map(|(at, _)| at).collect();
    let present = present(comm, chosen.iter().map(|&at| gradients[at].is_some()), phase)?;
    let places: Vec<usize> =
        chosen.into_iter().zip(present).filter(|(_, present)| *present).map(|(at, _)| at).collect();
    let all: Vec<&Param> = params.iter().collect();
    for bucket in buckets(&places, |at| all[at].elements()) {
        let own = bucket
            .iter()
            .map(|&at| gradients[at].take().unwrap_or_else(|| zeros(all[at], &all[at].value.device())));
        let sum = comm.all_reduce(Tensor::cat(own.collect(), 0), Reduce::Sum, phase)?;
        let mut start = 0;
        for &at in bucket {
            let elements = all[at].elements();
            gradients[at] = Some(sum.clone().narrow(0, start, elements));
            start += elements;
        }
    }
    Ok(())
}

/// The sum over the ranks of the part that each has for this one; `parts` has one for each rank.
pub(crate) fn sum_of_parts(
    comm: &dyn Communicator,
    parts: Vec<Tensor<1>>,
    phase: Phase,
) -> Result<Tensor<1>> {
    let sum = comm.all_to_all(parts, phase)?.into_iter().reduce(|sum, part| sum + part);
    sum.ok_or_else(|| Error::Invalid(format!("{}: a group without ranks", phase.name)))
}

/// Some of the elements, or none.
pub(crate) fn elements(values: &Tensor<1>, range: Range<usize>) -> Tensor<1> {
    if range.is_empty() {
        // Burn narrows to no less than one.
        return Tensor::zeros([0], &values.device());
    }
    values.clone().narrow(0, range.start, range.len())
}

/// Consecutive runs of `places` whose elements fit a bucket; what does not has one of its own.
pub(crate) fn buckets(places: &[usize], elements: impl Fn(usize) -> usize) -> Vec<&[usize]> {
    let mut buckets = Vec::new();
    let (mut start, mut sum) = (0, 0);
    for (end, &at) in places.iter().enumerate() {
        if end > start && sum + elements(at) > BUCKET {
            buckets.push(&places[start..end]);
            (start, sum) = (end, 0);
        }
        sum += elements(at);
    }
    if start < places.len() {
        buckets.push(&places[start..]);
    }
    buckets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_holds_as_many_as_fit() {
        let sizes = [BUCKET / 2, BUCKET / 2, 1, BUCKET * 2, 5];
        let runs = buckets(&[0, 1, 2, 3, 4], |at| sizes[at]);
        assert_eq!(runs, [&[0, 1][..], &[2], &[3], &[4]]);
        assert!(buckets(&[], |_| 0).is_empty());
    }
}
