//! An algorithm of one's own in a binary of one's own: `SimPO` (Meng et al. 2024, arXiv:2405.14734),
//! a preference loss without a reference, from its config to its command line.

use std::process::ExitCode;

use aligner_algos::ops::preference::{Pairs, log_sigmoid};
use aligner_cli::Registry;
use aligner_core::{Algorithm, Batch, Forward, LossOutput, Per, Result, StepBatch, constant};
use serde::{Deserialize, Serialize};

/// `[algorithm.simpo]`
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SimpoConfig {
    /// Scale of the mean log-probabilities.
    beta: f64,
    /// By how much the chosen answer should win.
    gamma: f64,
}

struct Simpo(SimpoConfig);

impl Algorithm for Simpo {
    /// Equation 6: `−log σ(β·(mean log p(chosen) − mean log p(rejected)) − γ)`, summed over pairs.
    fn loss(&self, out: &Forward, batch: &Batch) -> Result<LossOutput> {
        let sums = batch.sum_per_sequence(out.logps()?.clone());
        let lengths: Vec<f32> = batch.sequences.iter().map(|s| s.targets.len().max(1) as f32).collect();
        let rewards = sums.clone() / constant(&lengths, &sums) * self.0.beta;
        let margins = Pairs::split(&rewards, batch)?.difference();
        let wins = (margins.clone().sign() + 1.0) / 2.0;
        let losses =
            -log_sigmoid(margins.clone() - self.0.gamma) * constant(&says_something(batch), &margins);
        let loss = LossOutput::new(losses.sum());
        Ok(loss.mean("rewards/margins", &margins).mean("rewards/accuracies", &wins))
    }

    /// Does not count pairs in which one side is empty.
    fn credit(&self, step: &mut StepBatch) -> Result<()> {
        step.groups.retain(|pair| pair.samples.iter().all(|sample| sample.targets() > 0));
        Ok(())
    }

    fn per(&self) -> Per {
        Per::Group
    }
}

/// 1 for each pair that can be compared, 0 where one side is empty.
fn says_something(batch: &Batch) -> Vec<f32> {
    let pairs = batch.sequences.chunks(2);
    pairs.map(|pair| if pair.iter().any(|s| s.targets.is_empty()) { 0.0 } else { 1.0 }).collect()
}

fn main() -> ExitCode {
    aligner_cli::run(&Registry::built_in().with("simpo", |config| Ok(Simpo(config))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use aligner_algos::check::check_algorithm;
    use aligner_core::{Group, Sample};

    #[test]
    fn gradients_do_not_depend_on_micro_batches_or_ranks() {
        let answer = |tokens: &[u32]| Sample::response(&[1, 2], tokens);
        let pairs = [
            Group::pair("a", answer(&[3, 4]), answer(&[5])),
            Group::pair("b", answer(&[4]), answer(&[3, 3, 5])),
        ];
        check_algorithm(&Simpo(SimpoConfig { beta: 2.0, gamma: 1.0 }), &pairs).unwrap();
    }
}
