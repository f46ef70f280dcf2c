//! Credit as two ranks give it, one after the other in one thread.

use std::sync::{Arc, Mutex};

use aligner_core::{Algorithm, Communicator, Error, Group, Phase, Reduce, Result, StepBatch, Tensor};

/// Credit on two ranks, each with its own groups, which exchange sums.
///
/// An algorithm need not be `Sync`, so the ranks are not threads: each runs up to its first sum that
/// is not known yet, and starts again once both parts of that sum are.
///
/// # Errors
/// What credit reports, and ranks that do not sum equally often.
pub(super) fn credit_apart(algorithm: &dyn Algorithm, ranks: [&[Group]; 2]) -> Result<[Vec<Group>; 2]> {
    let mut known: Vec<Vec<f64>> = Vec::new();
    loop {
        let one = attempt(algorithm, ranks[0], 0, &known)?;
        let other = attempt(algorithm, ranks[1], 1, &known)?;
        match (one, other) {
            (Attempt::Done(one), Attempt::Done(other)) => return Ok([one, other]),
            (Attempt::Waits(one), Attempt::Waits(other)) if one.len() == other.len() => {
                known.push(one.iter().zip(&other).map(|(a, b)| a + b).collect());
            }
            _ => {
                let at = known.len() + 1;
                return Err(Error::Invalid(format!(
                    "algorithm check: two ranks' credit does not agree on sum {at} over ranks"
                )));
            }
        }
    }
}

enum Attempt {
    Done(Vec<Group>),
    /// This rank's part of the first sum that is not known.
    Waits(Vec<f64>),
}

fn attempt(algorithm: &dyn Algorithm, groups: &[Group], rank: usize, known: &[Vec<f64>]) -> Result<Attempt> {
    let replay =
        Arc::new(Replay { rank, known: known.to_vec(), calls: Mutex::new(0), waits: Mutex::new(None) });
    let mut step = StepBatch { comm: Some(replay.clone()), ..StepBatch::new(groups.to_vec()) };
    let done = algorithm.credit(&mut step);
    match replay.waits.lock().ok().and_then(|mut waits| waits.take()) {
        Some(part) => Ok(Attempt::Waits(part)),
        None => done.map(|()| Attempt::Done(step.groups)),
    }
}

/// A rank of two that answers from what is known, and stops where nothing is.
struct Replay {
    rank: usize,
    known: Vec<Vec<f64>>,
    calls: Mutex<usize>,
    waits: Mutex<Option<Vec<f64>>>,
}

fn refused<T>() -> Result<T> {
    Err(Error::Invalid("credit sums over ranks by `StepBatch::sum_over_ranks` alone".into()))
}

impl Communicator for Replay {
    fn rank(&self) -> usize {
        self.rank
    }
    fn size(&self) -> usize {
        2
    }
    fn all_reduce_host(&self, values: &mut [f64], op: Reduce, _: Phase) -> Result<()> {
        let (Ok(mut calls), Ok(mut waits)) = (self.calls.lock(), self.waits.lock()) else { return refused() };
        if op != Reduce::Sum {
            return refused();
        }
        *calls += 1;
        match self.known.get(*calls - 1) {
            Some(sum) if sum.len() == values.len() => values.copy_from_slice(sum),
            Some(_) => return Err(Error::Invalid("credit does not sum the same numbers twice".into())),
            None => {
                *waits = Some(values.to_vec());
                return Err(Error::Invalid("this rank waits for the other".into()));
            }
        }
        Ok(())
    }
    fn all_reduce(&self, _: Tensor<1>, _: Reduce, _: Phase) -> Result<Tensor<1>> {
        refused()
    }
    fn all_gather(&self, _: Tensor<1>, _: Phase) -> Result<Tensor<1>> {
        refused()
    }
    fn reduce_scatter(&self, _: Tensor<1>, _: Phase) -> Result<Tensor<1>> {
        refused()
    }
    fn broadcast(&self, _: Tensor<1>, _: usize, _: Phase) -> Result<Tensor<1>> {
        refused()
    }
    fn all_to_all(&self, _: Vec<Tensor<1>>, _: Phase) -> Result<Vec<Tensor<1>>> {
        refused()
    }
    fn send(&self, _: Tensor<1>, _: usize, _: Phase) -> Result<()> {
        refused()
    }
    fn recv(&self, _: usize, _: usize, _: Phase) -> Result<Tensor<1>> {
        refused()
    }
    fn split(&self, _: usize, _: usize, _: Phase) -> Result<Arc<dyn Communicator>> {
        refused()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aligner_core::{Forward, LossOutput, Sample};

    /// Each sample's share of all rewards, in two sums.
    struct Share {
        sums_by_rank: bool,
    }

    impl Algorithm for Share {
        fn loss(&self, out: &Forward, _: &aligner_core::Batch) -> Result<LossOutput> {
            Ok(LossOutput::new(out.logps()?.clone().sum()))
        }

        fn credit(&self, step: &mut StepBatch) -> Result<()> {
            let [count] = step.sum_over_ranks(Ok([step.groups.len() as f64]))?;
            if self.sums_by_rank && step.comm.as_ref().is_some_and(|comm| comm.rank() == 1) {
                return Ok(());
            }
            let own = step.groups.iter().flat_map(|group| &group.samples);
            let own = own.map(|sample| f64::from(sample.reward.unwrap_or_default())).sum::<f64>();
            let [sum] = step.sum_over_ranks(Ok([own]))?;
            for sample in step.groups.iter_mut().flat_map(|group| &mut group.samples) {
                sample.weights = vec![(sum * count) as f32; sample.tokens.len()];
            }
            Ok(())
        }
    }

    fn groups() -> Vec<Group> {
        let sample = |reward| Sample { reward: Some(reward), ..Sample::response(&[1], &[2]) };
        [1.0, 2.0, 4.0].map(|reward| Group::single(reward.to_string(), sample(reward))).to_vec()
    }

    #[test]
    fn both_ranks_see_the_sums_of_both() {
        let groups = groups();
        let credited = credit_apart(&Share { sums_by_rank: false }, [&groups[..1], &groups[1..]]);
        let weights: Vec<f32> = (credited.expect("sound").iter().flatten())
            .flat_map(|group| group.samples[0].weights.clone())
            .collect();
        assert_eq!(weights, [21.0; 6]);
    }

    #[test]
    fn ranks_that_do_not_sum_equally_often_are_found_out() {
        let groups = groups();
        let uneven = credit_apart(&Share { sums_by_rank: true }, [&groups[..1], &groups[1..]]);
        let message = uneven.expect_err("uneven").to_string();
        assert!(message.contains("sum 2 over ranks"), "{message}");
    }
}
