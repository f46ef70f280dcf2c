//! Checks before step 1 that take seconds and spare hours.

use std::fmt;

use aligner_core::ops::host::to_vec;
use aligner_core::optim::{Norm, first_not_finite, global_norm};
use aligner_core::{Algorithm, Batch, Error, Group, Needs, Policy, Result, StepBatch};
use serde::{Deserialize, Serialize};

use crate::gradients::gradients;
use crate::guarded::Guarded;

/// What the checks hold the run to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PreflightConfig {
    /// Most tokens that the checked batch computes.
    pub tokens: usize,
    /// Most that the first loss may differ from the expected one, in nats.
    pub max_loss_error: f64,
    /// Farthest that a policy that starts from its reference may be from it: the mean over targets of
    /// |policy − reference log-probability| in nats, which is at least the |KL| estimated from them.
    pub max_kl: f64,
    /// The same for a policy that starts elsewhere; only reported where it is absent.
    pub max_kl_elsewhere: Option<f64>,
    /// Most that packed and unpacked log-probabilities (or scores) may differ.
    pub max_packing_error: f64,
}

impl Default for PreflightConfig {
    fn default() -> Self {
        Self {
            tokens: 512,
            max_loss_error: 1e-5,
            max_kl: 1e-5,
            max_kl_elsewhere: None,
            max_packing_error: 1e-4,
        }
    }
}

impl PreflightConfig {
    /// Everything that is wrong with the limits: a comparison with NaN would let everything pass.
    pub fn errors(&self) -> Vec<Error> {
        let limits = [
            ("max_loss_error", Some(self.max_loss_error)),
            ("max_kl", Some(self.max_kl)),
            ("max_kl_elsewhere", self.max_kl_elsewhere),
            ("max_packing_error", Some(self.max_packing_error)),
        ];
        let wrong = limits.into_iter().filter_map(|(key, limit)| Some((key, limit?)));
        let wrong = wrong.filter(|(_, limit)| !(limit.is_finite() && *limit >= 0.0));
        wrong
            .map(|(key, limit)| Error::setting(key, format!("must be finite and not negative, got {limit}")))
            .collect()
    }
}

/// What the checks know of the run.
#[derive(Debug, Clone, Copy, Default)]
pub struct PreflightInput<'a> {
    /// Some of the run's groups, with reference log-probabilities where the algorithm needs them.
    pub groups: &'a [Group],
    /// The loss where the run starts from its reference; none where it starts elsewhere, or where
    /// the loss is not known in advance.
    pub expected_loss: Option<f64>,
    /// The token that must not begin a sample twice.
    pub bos: Option<u32>,
}

/// The figures that the checks found.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct PreflightReport {
    /// Samples that were checked.
    pub samples: usize,
    /// Tokens that were computed.
    pub tokens: usize,
    /// Share of tokens that are targets.
    pub target_share: f64,
    /// The loss as the learner divides it, in nats.
    pub loss: f64,
    /// Mean difference of policy and reference log-probability per target, in nats.
    pub kl: Option<f64>,
    /// Mean magnitude of that difference: no target's excess hides another's lack.
    pub reference_distance: Option<f64>,
    /// Largest difference of packed and unpacked log-probabilities (or scores).
    pub packing_error: f64,
    /// Global norm of the gradient.
    pub grad_norm: f64,
}

impl fmt::Display for PreflightReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} samples, {} tokens, {:.1} % targets; ",
            self.samples,
            self.tokens,
            100.0 * self.target_share
        )?;
        write!(f, "loss {:.6}", self.loss)?;
        if let (Some(kl), Some(distance)) = (self.kl, self.reference_distance) {
            write!(f, ", KL {kl:.1e}, distance to the reference {distance:.1e}")?;
        }
        write!(f, ", packing error {:.1e}, gradient norm {:.4}", self.packing_error, self.grad_norm)
    }
}

/// Runs all checks on a prefix of the groups and returns the figures.
///
/// # Errors
/// The first check that fails, with what to look at.
pub fn preflight(
    policy: &dyn Policy,
    algorithm: &dyn Algorithm,
    input: PreflightInput<'_>,
    config: &PreflightConfig,
) -> Result<PreflightReport> {
    if let Some(error) = config.errors().into_iter().next() {
        return Err(error);
    }
    if let Some(name) = policy.params().first_not_finite() {
        return Err(failed(format!("parameter {name} has a NaN or an infinity; the checkpoint is damaged")));
    }
    let groups = prefix(input.groups, config.tokens)?;
    groups.iter().try_for_each(check_targets)?;
    if let Some(bos) = input.bos {
        check_bos(&groups, bos)?;
    }
    let mut step = StepBatch::new(groups);
    let algorithm = &Guarded::new(algorithm, "the checks before step 1");
    algorithm.credit(&mut step)?;
    let batch = Batch::collate(&step.groups)?;
    let mut report = PreflightReport {
        samples: batch.sequences.len(),
        tokens: batch.tokens.len(),
        target_share: batch.targets.len() as f64 / batch.tokens.len().max(1) as f64,
        ..PreflightReport::default()
    };
    let needs = algorithm.needs();
    let packed = outputs(policy, &batch, needs)?;
    if let Some(gaps) = reference_gaps(&packed, &batch, needs) {
        report.kl = Some(gaps.iter().sum::<f64>() / gaps.len() as f64);
        report.reference_distance = Some(gaps.iter().map(|gap| gap.abs()).sum::<f64>() / gaps.len() as f64);
    }
    report.packing_error = packing_error(policy, &step.groups, &packed, needs)?;
    let count = algorithm.per().count(&step.groups);
    let gradients = gradients(policy, algorithm, std::slice::from_ref(&batch), &step.groups)?;
    report.loss = gradients.loss_sum / count;
    report.grad_norm = global_norm(&gradients.values, Norm::L2) / count;
    if let Some(name) = first_not_finite(policy.params(), &gradients.values) {
        return Err(Error::NotFinite {
            what: format!("the gradient of {name}"),
            samples: batch.sample_ids(),
        });
    }
    judge(&report, input.expected_loss, config)?;
    Ok(report)
}

/// Holds the figures to the limits.
fn judge(report: &PreflightReport, expected_loss: Option<f64>, config: &PreflightConfig) -> Result<()> {
    if report.packing_error > config.max_packing_error {
        return Err(failed(format!(
            "packed and unpacked outputs differ by {:e}, more than {:e}; look at the attention's segments and \
             positions",
            report.packing_error, config.max_packing_error
        )));
    }
    let max_kl = if expected_loss.is_some() { Some(config.max_kl) } else { config.max_kl_elsewhere };
    if let (Some(distance), Some(limit)) = (report.reference_distance, max_kl)
        && (distance.is_nan() || distance > limit)
    {
        return Err(failed(format!(
            "the policy starts {distance:e} nats a token from its reference, more than {limit:e}; look at whether both \
             are the same checkpoint in the same precision"
        )));
    }
    if let Some(expected) = expected_loss.filter(|loss| (report.loss - loss).abs() > config.max_loss_error) {
        return Err(failed(format!(
            "the first loss is {}, not within {:e} of {expected}; look at the reference log-probabilities",
            report.loss, config.max_loss_error
        )));
    }
    Ok(())
}

fn failed(message: impl std::fmt::Display) -> Error {
    Error::Invalid(format!("preflight: {message}"))
}

/// Whole groups up to the token budget; at least two where there are two, as one sample alone
/// packs nothing.
fn prefix(groups: &[Group], budget: usize) -> Result<Vec<Group>> {
    let mut used = 0;
    let fits = |group: &&Group| {
        used += group.packed_tokens();
        used <= budget
    };
    let count = groups.iter().take_while(fits).count().max(groups.len().clamp(1, 2));
    match groups.get(..count) {
        Some(groups) => Ok(groups.to_vec()),
        None => Err(failed("there is no group to check; look at the data set's filters")),
    }
}

/// Every sample has a target.
fn check_targets(group: &Group) -> Result<()> {
    group.check()?;
    for (at, sample) in group.samples.iter().enumerate() {
        if sample.targets() == 0 {
            return Err(failed(format!(
                "{}#{at} has no target token; look at its mask (`aligner inspect`) and the length limit",
                group.id
            )));
        }
    }
    Ok(())
}

/// No sample has two BOS tokens in a row, and either all begin with one or none does: the template
/// and the tokenizer must not both write it, nor only for some rows.
fn check_bos(groups: &[Group], bos: u32) -> Result<()> {
    let samples = groups.iter().flat_map(|group| {
        group.samples.iter().enumerate().map(|(at, sample)| (format!("{}#{at}", group.id), &sample.tokens))
    });
    let mut first: Option<(String, bool)> = None;
    for (id, tokens) in samples {
        if let Some(at) = tokens.windows(2).position(|pair| pair == [bos, bos]) {
            return Err(failed(format!(
                "{id} has the BOS token {bos} twice in a row, at token {at}; look at the chat template, which may \
                 write it too"
            )));
        }
        let begins = tokens.first() == Some(&bos);
        match &first {
            None => first = Some((id, begins)),
            Some((other, other_begins)) if *other_begins != begins => {
                let (with, without) = if begins { (&id, other) } else { (other, &id) };
                return Err(failed(format!(
                    "{with} begins with the BOS token {bos}, {without} does not; look at the chat template"
                )));
            }
            Some(_) => {}
        }
    }
    Ok(())
}

/// What the algorithm sees of each sample: its targets' log-probabilities, or its scores.
fn outputs(policy: &dyn Policy, batch: &Batch, needs: Needs) -> Result<Vec<Vec<f32>>> {
    let out = policy.forward(batch, needs)?;
    if needs.contains(Needs::SCORES) {
        let scores = out.scores()?;
        let [_, outputs] = scores.dims();
        let flat = to_vec(scores);
        return Ok(flat.chunks(outputs.max(1)).map(<[f32]>::to_vec).collect());
    }
    let logps = to_vec(out.logps()?);
    Ok(batch.sequences.iter().map(|sequence| logps[sequence.targets.clone()].to_vec()).collect())
}

/// Policy minus reference log-probability of each target; their mean is the k1 estimate on the data.
fn reference_gaps(logps: &[Vec<f32>], batch: &Batch, needs: Needs) -> Option<Vec<f64>> {
    if needs.contains(Needs::SCORES) || batch.ref_logps.is_empty() {
        return None;
    }
    let pairs = logps.iter().flatten().zip(&batch.ref_logps);
    Some(pairs.map(|(own, other)| f64::from(own - other)).collect())
}

/// Largest difference between the packed outputs and those of each sample on its own.
fn packing_error(policy: &dyn Policy, groups: &[Group], packed: &[Vec<f32>], needs: Needs) -> Result<f64> {
    let samples = groups.iter().flat_map(|group| group.samples.iter().map(|sample| (&group.id, sample)));
    let mut most = 0.0_f64;
    for ((id, sample), packed) in samples.zip(packed) {
        let alone = Batch::collate([&Group::single(id.as_str(), sample.clone())])?;
        for (one, other) in outputs(policy, &alone, needs)?.iter().flatten().zip(packed) {
            let gap = f64::from((one - other).abs());
            if gap.is_nan() {
                return Err(Error::NotFinite {
                    what: "the model's output".into(),
                    samples: alone.sample_ids(),
                });
            }
            most = most.max(gap);
        }
    }
    Ok(most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::BigramPolicy;
    use crate::reference::Reference;
    use crate::{Dpo, Sft, fixture};

    const VOCAB: usize = 12;

    fn pairs() -> Vec<Group> {
        let mut groups = fixture::pairs(4);
        Reference::live(Box::new(BigramPolicy::new(VOCAB, 3)), 64).fill(&mut groups).expect("valid");
        groups
    }

    fn run(seed: u64, groups: &[Group], bos: Option<u32>) -> Result<PreflightReport> {
        let input = PreflightInput { groups, expected_loss: Some(Dpo::LOSS_AT_REFERENCE), bos };
        preflight(&BigramPolicy::new(VOCAB, seed), &Dpo::default(), input, &PreflightConfig::default())
    }

    #[test]
    fn a_fresh_run_passes_and_reports_its_figures() {
        let report = run(3, &pairs(), Some(1)).expect("a sound run");
        assert_eq!(report.samples, 8);
        assert!(report.kl.expect("a reference").abs() < 1e-6 && report.grad_norm > 0.0, "{report}");
    }

    #[test]
    fn a_start_elsewhere_is_held_to_its_own_limit() {
        let groups = pairs();
        let elsewhere = |limit| {
            let config = PreflightConfig { max_kl_elsewhere: limit, ..PreflightConfig::default() };
            let input = PreflightInput { groups: &groups, ..PreflightInput::default() };
            preflight(&BigramPolicy::new(VOCAB, 4), &Dpo::default(), input, &config)
        };
        let distance = elsewhere(None).expect("only reported").reference_distance.expect("a reference");
        assert!(distance > 1e-3 && elsewhere(Some(2.0 * distance)).is_ok());
        assert!(elsewhere(Some(0.5 * distance)).is_err());
    }

    #[test]
    fn another_starting_point_is_caught_by_its_kl() {
        let message = run(4, &pairs(), None).expect_err("not the reference").to_string();
        assert!(message.contains("nats a token"), "{message}");
    }

    #[test]
    fn errors_that_cancel_are_caught() {
        let mut groups = pairs();
        for (sample, change) in groups[0].samples[0].ref_logps[2..].iter_mut().zip([0.25, -0.25]) {
            *sample += change;
        }
        // The sums of the pair are as before, so the loss says nothing.
        let message = run(3, &groups, None).expect_err("not the reference").to_string();
        assert!(message.contains("nats a token"), "{message}");
    }

    #[test]
    fn a_bos_of_some_samples_only_names_both_kinds() {
        let mut groups = pairs();
        groups[2].samples[1].tokens[0] = 9;
        let message = run(3, &groups, Some(1)).expect_err("mixed").to_string();
        assert!(message.contains("row 0#0 begins") && message.contains("row 2#1 does not"), "{message}");
    }

    #[test]
    fn two_groups_are_checked_whatever_the_budget() {
        let groups = pairs();
        let config = PreflightConfig { tokens: 1, ..PreflightConfig::default() };
        let input = PreflightInput { groups: &groups, ..PreflightInput::default() };
        let policy = BigramPolicy::new(VOCAB, 3);
        assert_eq!(preflight(&policy, &Dpo::default(), input, &config).expect("sound").samples, 4);
    }

    #[test]
    fn a_doubled_bos_and_an_empty_mask_name_their_sample() {
        let mut groups = pairs();
        groups[1].samples[1].tokens[1] = 1;
        assert!(run(3, &groups, Some(1)).expect_err("twice").to_string().contains("row 1#1"));
        let mut groups = pairs();
        groups[2].samples[0].mask.fill(false);
        let message = run(3, &groups, None).expect_err("no target").to_string();
        assert!(message.contains("row 2#0") && message.contains("mask"), "{message}");
    }

    #[test]
    fn nothing_to_check_is_an_error() {
        assert!(run(3, &[], None).expect_err("empty").to_string().contains("no group"));
    }

    #[test]
    fn a_limit_that_nothing_exceeds_is_refused() {
        let groups = pairs();
        let refused = |config: PreflightConfig| {
            let input = PreflightInput { groups: &groups, ..PreflightInput::default() };
            let report = preflight(&BigramPolicy::new(VOCAB, 3), &Dpo::default(), input, &config);
            report.expect_err("no limit").to_string()
        };
        let base = PreflightConfig::default;
        for limit in [f64::NAN, f64::INFINITY, -1.0] {
            let refusals = [
                ("max_kl: ", refused(PreflightConfig { max_kl: limit, ..base() })),
                ("max_kl_elsewhere: ", refused(PreflightConfig { max_kl_elsewhere: Some(limit), ..base() })),
                ("max_loss_error: ", refused(PreflightConfig { max_loss_error: limit, ..base() })),
                ("max_packing_error: ", refused(PreflightConfig { max_packing_error: limit, ..base() })),
            ];
            for (key, message) in refusals {
                assert!(message.starts_with(key), "{message}");
            }
        }
    }

    #[test]
    fn damaged_weights_are_named() {
        let policy = BigramPolicy::new(VOCAB, 3);
        let mut params = policy.params().clone();
        let value = &mut params.iter_mut().next().expect("a parameter").value;
        *value = value.clone() * f32::NAN;
        let input = PreflightInput { groups: &pairs(), ..PreflightInput::default() };
        let damaged = policy.with_params(params);
        let result = preflight(damaged.as_ref(), &Sft::default(), input, &PreflightConfig::default());
        assert!(result.expect_err("NaN").to_string().contains("logits"), "names the parameter");
    }
}
