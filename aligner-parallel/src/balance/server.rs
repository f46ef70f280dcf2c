//! The prompt server: who draws responses to which prompt of a step.

use aligner_core::{Communicator, Error, Phase, Result};

use super::{LengthHistory, contiguous};

const PHASE: Phase = Phase::new("asking for the next prompt");

/// How the prompts of a step are split over data-parallel ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// Each rank has a contiguous part of the prompts, of equal size.
    Static,
    /// Each rank asks for the next prompt when it has room for one.
    #[default]
    Stealing,
}

/// Gives the prompts of one step to the ranks of a group: each prompt to one of them.
///
/// All ranks know the order of the prompts, as all have the same history. So the first rank of the group has only to
/// count: what a rank asks for is a number, [`Communicator::take`], and no list of prompts travels. Between processes
/// the first rank answers when it calls the communicator; where its own work lasts, it calls
/// [`PromptServer::attend`] once for each pass of its engine.
pub struct PromptServer<'a> {
    comm: &'a dyn Communicator,
    step: u64,
    /// What is given out: prompts, as places in the step.
    order: Vec<usize>,
    split: Split,
    /// How many this rank has had.
    taken: usize,
    done: bool,
}

impl<'a> PromptServer<'a> {
    /// The server of a step, whose `prompts` are the same on all ranks of `comm`, as is what they know of lengths.
    ///
    /// `step` counts up: no rank may ask for a prompt of a step once another rank has asked for one of a later step.
    pub fn new(
        comm: &'a dyn Communicator,
        step: u64,
        prompts: &[String],
        history: &LengthHistory,
        split: Split,
    ) -> Self {
        let order = match split {
            Split::Static => contiguous(prompts.len(), comm.size()).swap_remove(comm.rank()).collect(),
            Split::Stealing => history.longest_first(prompts),
        };
        Self { comm, step, order, split, taken: 0, done: false }
    }

    /// The next prompt of this rank, as its place in the step; nothing when there is none left.
    ///
    /// # Errors
    /// What the communicator reports.
    pub fn take(&mut self) -> Result<Option<usize>> {
        if self.done {
            return Ok(None);
        }
        let number = match self.split {
            Split::Static => self.taken,
            Split::Stealing => self.number()?,
        };
        self.taken += 1;
        let prompt = self.order.get(number).copied();
        self.done = prompt.is_none();
        Ok(prompt)
    }

    fn number(&self) -> Result<usize> {
        let number = self.comm.take(self.step, self.taken as u64, PHASE)?;
        usize::try_from(number).map_err(|_| Error::Invalid(format!("{number} prompts have been given out")))
    }

    /// Answers what other ranks have asked meanwhile, and waits for nobody.
    ///
    /// # Errors
    /// A failure of the run.
    pub fn attend(&self) -> Result<()> {
        self.comm.attend(PHASE)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use aligner_core::rng::Rng;

    use super::*;
    use crate::{Solo, ThreadComm};

    fn prompts(count: usize) -> Vec<String> {
        (0..count).map(|at| format!("row {at}")).collect()
    }

    /// A history in which each prompt but the last has a length of its own.
    fn history(prompts: &[String]) -> LengthHistory {
        let mut history = LengthHistory::default();
        for (at, prompt) in prompts.iter().enumerate().skip(1) {
            history.observe(prompt, Rng::new(&[9]).uniform(at as u64) * 100.0);
        }
        history
    }

    /// By rank: the prompts that it was given in this step, in order, each rank being slow in its own way.
    fn given(ranks: usize, count: usize, split: Split, steps: u64) -> Vec<Vec<Vec<usize>>> {
        let prompts = prompts(count);
        let results = ThreadComm::run(ranks, |comm| {
            let mut all = Vec::new();
            for step in 0..steps {
                let mut history = history(&prompts);
                let mut server = PromptServer::new(&comm, step, &prompts, &history, split);
                let mut own = Vec::new();
                while let Some(prompt) = server.take()? {
                    own.push(prompt);
                    let slow = Rng::new(&[step, comm.rank() as u64]).below(prompt as u64, 300);
                    std::thread::sleep(Duration::from_micros(slow));
                }
                assert_eq!(server.take()?, None, "it stays done");
                // All ranks meet before the next step.
                let drawn: Vec<(usize, f64)> = own.iter().map(|&prompt| (prompt, 1.0)).collect();
                history.share(&comm, &prompts, &drawn)?;
                all.push(own);
            }
            Ok(all)
        });
        results.into_iter().map(Result::unwrap).collect()
    }

    #[test]
    fn each_prompt_is_given_once_in_every_step() {
        for (ranks, count) in [(1, 5), (2, 7), (4, 33), (5, 3)] {
            for split in [Split::Static, Split::Stealing] {
                let all = given(ranks, count, split, 3);
                for step in 0..3 {
                    let mut seen: Vec<usize> = all.iter().flat_map(|rank| rank[step].clone()).collect();
                    seen.sort_unstable();
                    assert_eq!(seen, (0..count).collect::<Vec<_>>(), "{ranks} {count} {split:?}");
                }
            }
        }
    }

    #[test]
    fn static_split_is_contiguous_and_the_same_in_every_run() {
        let all = given(4, 10, Split::Static, 1);
        assert_eq!(all.concat(), [vec![0, 1], vec![2, 3, 4], vec![5, 6], vec![7, 8, 9]]);
    }

    #[test]
    fn longest_expected_prompts_come_first_on_every_rank() {
        let prompts = prompts(30);
        let order = history(&prompts).longest_first(&prompts);
        let place = |prompt: &usize| order.iter().position(|other| other == prompt).unwrap();
        for rank in given(3, 30, Split::Stealing, 1) {
            assert!(rank[0].is_sorted_by_key(place), "{rank:?}");
        }
        let mut server = PromptServer::new(&Solo, 7, &prompts, &history(&prompts), Split::Stealing);
        let alone: Vec<usize> = std::iter::from_fn(|| server.take().unwrap()).collect();
        assert_eq!(alone, order);
    }

    /// What an engine draws for a prompt: a token follows from seed, step, prompt, sample and position.
    fn samples(step: u64, prompt: usize) -> Vec<Vec<u64>> {
        let sample = |sample: u64| {
            let rng = Rng::new(&[42, step, prompt as u64, sample]);
            (0..=rng.below(u64::MAX, 9)).map(|token| rng.below(token, 1000)).collect()
        };
        (0..3).map(sample).collect()
    }

    #[test]
    fn who_draws_changes_no_sample() {
        let drawn = |ranks, split| {
            let mut all = BTreeMap::new();
            for rank in given(ranks, 17, split, 2) {
                for (step, own) in rank.into_iter().enumerate() {
                    all.extend(own.into_iter().map(|prompt| ((step, prompt), samples(step as u64, prompt))));
                }
            }
            all
        };
        let alone = drawn(1, Split::Static);
        assert_eq!(alone.len(), 34);
        for ranks in [2, 3, 4] {
            assert_eq!(drawn(ranks, Split::Static), alone);
            assert_eq!(drawn(ranks, Split::Stealing), alone);
        }
    }
}
