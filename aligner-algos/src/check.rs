//! Checks that every algorithm has to pass, for the tests of those who write one.
//!
//! ```
//! use aligner_algos::{Sft, check::check_algorithm};
//! use aligner_core::{Group, Sample};
//!
//! let group = |id: &str, answer: &[u32]| Group::single(id, Sample::response(&[1, 2], answer));
//! let report = check_algorithm(&Sft::default(), &[group("a", &[3]), group("b", &[4, 5])])?;
//! assert!(report.micro_batch_error < 1e-5);
//! # Ok::<(), aligner_core::Error>(())
//! ```

mod bigram;
mod ranks;

use aligner_core::ops::host::to_vec;
use aligner_core::{
    Algorithm, Batch, Error, Gradients, Group, Needs, Policy, Result, Sample, StepBatch, finite_sum,
};

pub use bigram::BigramPolicy;

use crate::gradients::gradients;
use crate::guarded::Guarded;
use crate::learner::check_finite;
use ranks::credit_apart;

/// Largest difference of a derivative and its finite difference, over the gradient's length.
const MAX_DIFFERENCE_ERROR: f64 = 2e-3;
/// Largest difference of gradients that should be equal, over the largest magnitude.
const MAX_GRADIENT_ERROR: f64 = 1e-5;

/// How far the checked properties were from exact.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct AlgorithmReport {
    /// Loss per unit of [`Algorithm::per`].
    pub loss: f64,
    /// Worst error of a directional derivative against a central finite difference.
    pub finite_difference_error: f64,
    /// Worst gradient error of one group a micro-batch against all in one.
    pub micro_batch_error: f64,
    /// Worst gradient error of two ranks' summed gradients against one rank's.
    pub two_rank_error: f64,
    /// What samples without a target changed in the gradient; 0 or an error.
    pub empty_sample_error: f64,
}

/// Tries an algorithm on a [`BigramPolicy`] with the given groups, at least two.
///
/// Checks that the gradient is the derivative of the loss; that neither micro-batches nor ranks
/// change it beyond rounding; and that samples without a target contribute exactly 0. Reference and
/// sampling log-probabilities and critic's values that the algorithm needs and the groups lack are
/// made up.
///
/// # Errors
/// The first property that does not hold, with figures; what the algorithm itself reports; and with the sample, where it
/// can be told, a panic, a wrong shape, and a number that is not finite.
pub fn check_algorithm(algorithm: &dyn Algorithm, groups: &[Group]) -> Result<AlgorithmReport> {
    let algorithm = &Guarded::new(algorithm, "the check");
    let mut step = StepBatch::new(groups.to_vec());
    let vocab =
        groups.iter().flat_map(|g| &g.samples).flat_map(|s| &s.tokens).max().map_or(1, |&t| t as usize + 1);
    let policy = BigramPolicy::new(vocab, 1);
    fill_logps(&mut step.groups, vocab, algorithm.needs())?;
    if algorithm.needs().contains(Needs::VALUES) {
        fill_values(&mut step.groups);
    }
    let uncredited = step.groups.clone();
    algorithm.credit(&mut step)?;
    let groups = step.groups;
    groups.iter().try_for_each(check_finite)?;
    if groups.len() < 2 {
        return Err(Error::Invalid(format!(
            "the check needs at least 2 groups after credit, got {}",
            groups.len()
        )));
    }
    let trial = Trial { algorithm, policy: &policy };
    let whole = trial.gradients(&[&groups])?;
    let mut report = AlgorithmReport {
        loss: whole.loss_sum / algorithm.per().count(&groups),
        ..AlgorithmReport::default()
    };
    report.finite_difference_error = trial.finite_difference_error(&groups, &whole)?;
    report.micro_batch_error = gap(&whole, &trial.gradients(&groups.chunks(1).collect::<Vec<_>>())?);
    report.two_rank_error = trial.two_rank_error(&whole, &groups, &uncredited)?;
    if !algorithm.needs().contains(Needs::SCORES) {
        report.empty_sample_error = trial.empty_sample_error(&whole, &groups)?;
    }
    judge(&report)?;
    Ok(report)
}

fn judge(report: &AlgorithmReport) -> Result<()> {
    let limits = [
        ("the gradient is not the loss's derivative", report.finite_difference_error, MAX_DIFFERENCE_ERROR),
        ("micro-batches change the gradient", report.micro_batch_error, MAX_GRADIENT_ERROR),
        ("ranks change the gradient", report.two_rank_error, MAX_GRADIENT_ERROR),
        ("samples without a target change the gradient", report.empty_sample_error, 0.0),
    ];
    match limits.iter().find(|(_, error, limit)| error.is_nan() || error > limit) {
        Some((what, error, limit)) => {
            Err(Error::Invalid(format!("algorithm check: {what}: error {error:e}, limit {limit:e}")))
        }
        None => Ok(()),
    }
}

struct Trial<'a> {
    algorithm: &'a dyn Algorithm,
    policy: &'a BigramPolicy,
}

impl Trial<'_> {
    /// Gradients of the loss's sum, one micro-batch for each slice of groups.
    fn gradients(&self, micro: &[&[Group]]) -> Result<Gradients> {
        let batches = micro.iter().map(|groups| Batch::collate(*groups)).collect::<Result<Vec<_>>>()?;
        gradients(self.policy, self.algorithm, &batches, micro.iter().copied().flatten())
    }

    /// Compares slopes along a few fixed directions with differences of the loss.
    fn finite_difference_error(&self, groups: &[Group], gradients: &Gradients) -> Result<f64> {
        // Large enough for f32 losses, small enough for the curvature's third order.
        const STEP: f32 = 1e-2;
        let batch = Batch::collate(groups)?;
        let mut worst = 0.0_f64;
        for seed in 0..4 {
            let (mut slope, mut length) = (0.0, 0.0_f64);
            let direction = BigramPolicy::new(self.policy.vocab(), 100 + seed);
            let loss_at = |distance: f32| {
                let mut moved = self.policy.params().clone();
                for (param, along) in moved.iter_mut().zip(direction.params().iter()) {
                    param.value = param.value.clone() + along.value.clone() * distance;
                }
                let out = self.policy.with_params(moved).forward(&batch, self.algorithm.needs())?;
                finite_sum(&self.algorithm.loss(&out, &batch)?.sum, &batch)
            };
            let difference = (loss_at(STEP)? - loss_at(-STEP)?) / f64::from(2.0 * STEP);
            for (grad, along) in gradients.values.iter().zip(direction.params().iter()) {
                let Some(grad) = grad else { continue };
                for (g, d) in to_vec(grad).into_iter().zip(to_vec(&along.value)) {
                    slope += f64::from(g) * f64::from(d);
                    length += f64::from(g).powi(2);
                }
            }
            let error = (difference - slope).abs() / length.sqrt().max(f64::MIN_POSITIVE);
            // A NaN must not look like agreement.
            worst = if error.is_nan() { f64::INFINITY } else { worst.max(error) };
        }
        Ok(worst)
    }

    /// Each of two ranks gives credit to half of the groups, counts it and sums its gradients, as a
    /// learner does that knows no more of the other rank's groups than sums.
    fn two_rank_error(&self, whole: &Gradients, all: &[Group], uncredited: &[Group]) -> Result<f64> {
        let per = self.algorithm.per();
        let (mut sum, mut apart) = (Gradients::default(), 0.0);
        let (one, other) = uncredited.split_at(uncredited.len() / 2);
        for groups in credit_apart(self.algorithm, [one, other])? {
            if groups.is_empty() {
                continue;
            }
            apart += per.count(&groups);
            let gradients = self.gradients(&[&groups])?;
            sum.add(gradients.values, gradients.loss_sum, &gradients.metrics);
        }
        if !matches!(per, aligner_core::Per::Constant(_)) {
            let counted = per.count(all);
            if (counted - apart).abs() > 0.0 {
                return Err(Error::Invalid(format!(
                    "algorithm check: {counted} units, but {apart} on two ranks"
                )));
            }
        }
        Ok(gap(whole, &sum))
    }

    /// Adds copies of the groups whose masks are empty.
    fn empty_sample_error(&self, whole: &Gradients, groups: &[Group]) -> Result<f64> {
        let mut silent = groups.to_vec();
        for sample in silent.iter_mut().flat_map(|group| &mut group.samples) {
            sample.mask.fill(false);
        }
        let with_silent = [groups, &silent].concat();
        let gradients = self.gradients(&[&with_silent])?;
        Ok(gap(whole, &gradients) + (whole.loss_sum - gradients.loss_sum).abs())
    }
}

/// Largest difference of two gradients over the first one's largest magnitude.
fn gap(expected: &Gradients, got: &Gradients) -> f64 {
    let (mut most, mut scale) = (0.0_f64, 0.0_f64);
    for (expected, got) in expected.values.iter().zip(&got.values) {
        let (expected, got) = (expected.as_ref().map(to_vec), got.as_ref().map(to_vec));
        let len = expected.as_ref().or(got.as_ref()).map_or(0, Vec::len);
        let value = |values: &Option<Vec<f32>>, at: usize| {
            values.as_ref().map_or(0.0, |values| f64::from(values[at]))
        };
        for at in 0..len {
            scale = scale.max(value(&expected, at).abs());
            let gap = (value(&expected, at) - value(&got, at)).abs();
            // A NaN must not look like agreement.
            most = if gap.is_nan() { f64::INFINITY } else { most.max(gap) };
        }
    }
    if most == 0.0 { 0.0 } else { most / scale.max(f64::MIN_POSITIVE) }
}

/// Log-probabilities of other models over the same tokens, where the algorithm wants some.
fn fill_logps(groups: &mut [Group], vocab: usize, needs: Needs) -> Result<()> {
    let fill = |groups: &mut [Group], seed: u64, field: fn(&mut Sample) -> &mut Vec<f32>| {
        if groups.iter_mut().flat_map(|g| &mut g.samples).any(|sample| !field(sample).is_empty()) {
            return Ok(());
        }
        let mut copy = groups.to_vec();
        crate::Reference::live(Box::new(BigramPolicy::new(vocab, seed)), usize::MAX).fill(&mut copy)?;
        let made_up = copy.into_iter().flat_map(|g| g.samples);
        for (sample, made_up) in groups.iter_mut().flat_map(|g| &mut g.samples).zip(made_up) {
            *field(sample) = made_up.ref_logps;
        }
        Ok::<(), Error>(())
    };
    if needs.contains(Needs::REF_LOGPS) {
        fill(groups, 2, |sample| &mut sample.ref_logps)?;
    }
    if needs.contains(Needs::OLD_LOGPS) {
        fill(groups, 3, |sample| &mut sample.logps)?;
    }
    Ok(())
}

/// Values of some critic, where there are none.
fn fill_values(groups: &mut [Group]) {
    let mut samples = groups.iter_mut().flat_map(|group| &mut group.samples);
    if samples.any(|sample| !sample.values.is_empty()) {
        return;
    }
    for sample in groups.iter_mut().flat_map(|group| &mut group.samples) {
        let value = |(at, token): (usize, &u32)| ((at * 5 + *token as usize * 3) % 7) as f32 / 7.0 - 0.5;
        sample.values = sample.tokens.iter().enumerate().map(value).collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::pairs;
    use crate::{Average, Dpo, DpoConfig, DpoLoss, RewardModel, RewardModelConfig, Sft, SftConfig};
    use aligner_core::{Forward, LossOutput};

    fn singles() -> Vec<Group> {
        let sample = |len: u32| Sample::response(&[1, 2], &(3..3 + len).collect::<Vec<_>>());
        (1..5).map(|len| Group::single(format!("row {len}"), sample(len))).collect()
    }

    #[test]
    fn the_algorithms_of_this_crate_pass() {
        for average in [Average::Token, Average::Sample] {
            check_algorithm(&Sft::new(SftConfig { average }), &singles()).expect("sound");
        }
        for loss_type in [DpoLoss::Sigmoid, DpoLoss::Robust] {
            let config = DpoConfig { beta: 0.5, label_smoothing: 0.1, loss_type };
            check_algorithm(&Dpo::new(config).expect("valid"), &pairs(5)).expect("sound");
        }
        let config = RewardModelConfig { center_rewards_coefficient: 0.01, margin: true };
        check_algorithm(&RewardModel::new(config).expect("valid"), &pairs(5)).expect("sound");
    }

    /// Divides by the micro-batch's own count: the classic mistake.
    struct MeanOfMeans;

    impl Algorithm for MeanOfMeans {
        fn loss(&self, out: &Forward, batch: &Batch) -> Result<LossOutput> {
            let sum = out.logps()?.clone().sum().neg();
            Ok(LossOutput::new(sum / batch.targets.len() as f64))
        }
    }

    #[test]
    fn a_mean_of_means_is_found_out() {
        let message = check_algorithm(&MeanOfMeans, &singles()).expect_err("unsound").to_string();
        assert!(message.contains("micro-batches change the gradient"), "{message}");
    }

    /// Credit that depends on which other groups this rank has.
    struct SharedCredit;

    impl Algorithm for SharedCredit {
        fn loss(&self, out: &Forward, batch: &Batch) -> Result<LossOutput> {
            let logps = out.logps()?;
            Ok(LossOutput::new((logps.clone() * batch.weights(logps)).sum().neg()))
        }

        fn credit(&self, step: &mut StepBatch) -> Result<()> {
            let share = 1.0 / step.groups.len() as f32;
            for sample in step.groups.iter_mut().flat_map(|group| &mut group.samples) {
                sample.weights = vec![share; sample.tokens.len()];
            }
            Ok(())
        }
    }

    #[test]
    fn credit_that_differs_between_ranks_is_found_out() {
        let message = check_algorithm(&SharedCredit, &singles()).expect_err("unsound").to_string();
        assert!(message.contains("ranks change the gradient"), "{message}");
    }

    /// Fails on the sample whose answer begins with token 5.
    enum Faulty {
        NotFinite,
        NotFiniteCredit,
        Panics,
        WrongShape,
    }

    impl Algorithm for Faulty {
        fn loss(&self, out: &Forward, batch: &Batch) -> Result<LossOutput> {
            let (logps, hit) = (out.logps()?.clone(), batch.targets.contains(&5));
            match self {
                Self::NotFinite if hit => Ok(LossOutput::new(logps.sum() / 0.0)),
                Self::Panics if hit => panic!("no such word"),
                Self::WrongShape if hit => Ok(LossOutput::new(logps)),
                _ => Ok(LossOutput::new(logps.sum().neg())),
            }
        }

        fn credit(&self, step: &mut StepBatch) -> Result<()> {
            let samples = step.groups.iter_mut().flat_map(|group| &mut group.samples);
            for sample in samples.filter(|_| matches!(self, Self::NotFiniteCredit)) {
                sample.weights =
                    vec![if sample.tokens.contains(&5) { f32::NAN } else { 1.0 }; sample.tokens.len()];
            }
            Ok(())
        }
    }

    #[test]
    fn what_fails_outright_is_an_error_with_the_sample() {
        let mut groups = singles();
        groups[2].samples[0] = Sample::response(&[1, 2], &[5, 3]);
        groups[3].samples[0] = Sample::response(&[1, 2], &[3]);
        for (faulty, said) in [
            (Faulty::NotFinite, "the loss is not finite"),
            (Faulty::NotFiniteCredit, "a weight is not finite"),
            (Faulty::Panics, "panicked: no such word"),
            (Faulty::WrongShape, "expected shape [1], got [2]"),
        ] {
            let message = check_algorithm(&faulty, &groups).expect_err("faulty").to_string();
            assert!(message.contains(said) && message.contains("row 3#0"), "{message}");
            assert!(!message.contains("row 2#0"), "{message}");
        }
    }

    /// Its value moves with the parameters in a way that its gradient does not see.
    struct Detached;

    impl Algorithm for Detached {
        fn loss(&self, out: &Forward, _: &Batch) -> Result<LossOutput> {
            let logps = out.logps()?;
            Ok(LossOutput::new((logps.clone() * logps.clone().detach()).sum()))
        }
    }

    #[test]
    fn a_wrong_gradient_is_found_out() {
        let message = check_algorithm(&Detached, &singles()).expect_err("unsound").to_string();
        assert!(message.contains("derivative"), "{message}");
    }
}
