//! How long the responses to a prompt are expected to be.

use std::collections::BTreeMap;

use aligner_core::{Communicator, Error, Phase, Reduce, Result};

const PHASE: Phase = Phase::new("sharing the lengths of responses");

/// The lengths of earlier responses, by prompt: of each an exponential average.
///
/// It only says in which order prompts are asked, which changes no sample; so a run that begins with an empty history
/// after a restart draws the same as one that was not stopped.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct LengthHistory {
    /// The weight of the newest length.
    weight: f64,
    /// By prompt: the average, in tokens.
    lengths: BTreeMap<String, f64>,
}

impl Default for LengthHistory {
    /// Half of the newest length, half of all before.
    fn default() -> Self {
        Self { weight: 0.5, lengths: BTreeMap::new() }
    }
}

impl LengthHistory {
    /// A history in which the newest length has this weight.
    ///
    /// # Errors
    /// A weight that is not above 0 and at most 1.
    pub fn new(weight: f64) -> Result<Self> {
        if weight > 0.0 && weight <= 1.0 {
            return Ok(Self { weight, lengths: BTreeMap::new() });
        }
        Err(Error::setting("weight", format!("expected above 0 and at most 1, got {weight}")))
    }

    /// Notes how many tokens the responses to a prompt had on average.
    pub fn observe(&mut self, prompt: &str, tokens: f64) {
        let weight = self.weight;
        let mix = |average: &mut f64| *average += weight * (tokens - *average);
        self.lengths.entry(prompt.to_owned()).and_modify(mix).or_insert(tokens);
    }

    /// Notes on every rank what the ranks have drawn. `drawn` has this rank's prompts, as places in `prompts`, with
    /// their tokens; `prompts` is the same on all ranks, which call this together.
    ///
    /// # Errors
    /// A place outside `prompts`, a prompt of two ranks, and what the communicator reports.
    pub fn share(
        &mut self,
        comm: &dyn Communicator,
        prompts: &[String],
        drawn: &[(usize, f64)],
    ) -> Result<()> {
        let mut tokens = vec![0.0; 2 * prompts.len()];
        for &(place, length) in drawn {
            let Some(own) = tokens.get_mut(2 * place..2 * place + 2) else {
                let count = prompts.len();
                return Err(Error::Invalid(format!("prompt {place} of a step of {count} prompts")));
            };
            own[0] += length;
            own[1] += 1.0;
        }
        comm.all_reduce_host(&mut tokens, Reduce::Sum, PHASE)?;
        for (prompt, sum) in prompts.iter().zip(tokens.chunks_exact(2)) {
            if sum[1] > 1.0 {
                return Err(Error::Invalid(format!("{} ranks have drawn for the prompt {prompt}", sum[1])));
            }
            if sum[1] > 0.0 {
                self.observe(prompt, sum[0]);
            }
        }
        Ok(())
    }

    /// The tokens that a response to a prompt is expected to have; of a new prompt, the mean over all known ones.
    pub fn expected(&self, prompt: &str) -> f64 {
        self.lengths.get(prompt).copied().unwrap_or_else(|| self.mean())
    }

    /// The places in `prompts`, those of the longest expected responses first; of equal ones the first.
    pub fn longest_first(&self, prompts: &[String]) -> Vec<usize> {
        let mean = self.mean();
        let expected: Vec<f64> =
            prompts.iter().map(|prompt| self.lengths.get(prompt).copied().unwrap_or(mean)).collect();
        let mut order: Vec<usize> = (0..prompts.len()).collect();
        order.sort_by(|&a, &b| expected[b].total_cmp(&expected[a]));
        order
    }

    fn mean(&self) -> f64 {
        self.lengths.values().sum::<f64>() / self.lengths.len().max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Solo, ThreadComm};

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn new_lengths_count_half_and_new_prompts_get_the_mean() {
        let mut history = LengthHistory::default();
        assert!(history.expected("a").abs() < 1e-12);
        history.observe("a", 100.0);
        history.observe("a", 300.0);
        history.observe("b", 50.0);
        assert!((history.expected("a") - 200.0).abs() < 1e-12);
        assert!((history.expected("new") - 125.0).abs() < 1e-12);
        assert_eq!(history.longest_first(&names(&["b", "new", "a", "newer"])), [2, 1, 3, 0]);
    }

    #[test]
    fn ranks_share_what_they_have_drawn() {
        let prompts = names(&["a", "b", "c"]);
        let histories = ThreadComm::run(2, |comm| {
            let drawn = if comm.rank() == 0 { vec![(2, 30.0)] } else { vec![(0, 10.0)] };
            let mut history = LengthHistory::default();
            history.share(&comm, &prompts, &drawn)?;
            Ok(history)
        });
        for history in histories {
            let history = history.unwrap();
            assert_eq!(
                prompts.iter().map(|p| history.expected(p) as usize).collect::<Vec<_>>(),
                [10, 20, 30]
            );
        }
    }

    #[test]
    fn weights_and_places_that_cannot_be_are_named() {
        for weight in [0.0, 1.5, f64::NAN] {
            assert!(LengthHistory::new(weight).unwrap_err().to_string().contains("weight"));
        }
        let mut history = LengthHistory::new(1.0).unwrap();
        let message = history.share(&Solo, &names(&["a"]), &[(1, 5.0)]).unwrap_err().to_string();
        assert_eq!(message, "prompt 1 of a step of 1 prompts");
        let twice = [(0, 5.0), (0, 6.0)];
        assert!(history.share(&Solo, &names(&["a"]), &twice).unwrap_err().to_string().contains("2 ranks"));
    }
}
