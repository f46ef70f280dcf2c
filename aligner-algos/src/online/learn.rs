//! What a step learns from its samples: reference, values, credit, updates.

use std::time::{Duration, Instant};

use aligner_core::rng::{Rng, key_of};
use aligner_core::{Algorithm, Error, Forward, Group, Metrics, Needs, Result, Sample, StepBatch};

use super::config::{OldLogps, RolloutConfig};
use super::critic::Critic;
use super::measures;
use crate::learner::Learner;
use crate::ops::importance;
use crate::ops::kl::KlController;
use crate::ops::targets::{gather, scatter};
use crate::per_target::{Answer, Question};
use crate::reference::Reference;

/// Models of fewer parameters are updated beside each other: they have too little to do in an operation for all cores.
/// A larger one's step gains nothing from that, and takes the memory of both (docs/benchmarks.md).
const SMALL: usize = 1 << 24;

/// Everything beside the learner that a step is learned with.
pub(super) struct Teacher {
    pub(super) config: RolloutConfig,
    pub(super) reference: Option<Reference>,
    pub(super) critic: Option<Critic>,
    pub(super) kl: Option<KlController>,
    pub(super) seed: u64,
    /// Steps that were learned.
    pub(super) step: u64,
}

/// A step that was learned.
pub(super) struct Learned {
    pub(super) metrics: Metrics,
    pub(super) groups: Vec<Group>,
    /// Log-probabilities and values of frozen weights.
    pub(super) judging: Duration,
    pub(super) updating: Duration,
}

impl Teacher {
    /// Credit for the whole step, then its updates.
    pub(super) fn learn(
        &mut self,
        algorithm: &dyn Algorithm,
        learner: &mut Learner,
        mut groups: Vec<Group>,
    ) -> Result<Learned> {
        let began = Instant::now();
        let mut metrics = Metrics::default();
        measures::of_responses(&groups, &mut metrics);
        self.judge(learner, &mut groups)?;
        if self.step == 0 {
            self.check_ratios(learner, &groups, &mut metrics)?;
        }
        let judging = began.elapsed();
        let updating = Instant::now();
        let mut step = StepBatch::new(groups);
        step.kl_coef = self.kl.as_ref().map(KlController::coef);
        let kl = measures::divergence(&step.groups, &mut metrics);
        let kl = learner.mean_over_ranks(kl, step.groups.iter().map(|group| group.samples.len()).sum())?;
        self.check_kl(kl.map(|(kl, _)| kl))?;
        let mut step = learner.credit(algorithm, step)?;
        if let Some(importance) = &self.config.importance {
            importance::correct(&mut step.groups, importance, &mut metrics)?;
        }
        metrics.merge(&step.metrics);
        self.update(algorithm, learner, &step.groups, &mut metrics)?;
        if let (Some(controller), Some((kl, samples))) = (&mut self.kl, kl) {
            metrics.set("kl_coef", controller.coef());
            controller.update(kl, samples)?;
        }
        learner.share_metrics(&mut metrics)?;
        Ok(Learned { metrics, groups: step.groups, judging, updating: updating.elapsed() })
    }

    /// What frozen weights say of the samples.
    fn judge(&mut self, learner: &Learner, groups: &mut [Group]) -> Result<()> {
        if let Some(reference) = &mut self.reference {
            reference.fill(groups)?;
        }
        if let Some(critic) = &self.critic {
            critic.fill(groups)?;
        }
        if self.config.old_logps == OldLogps::Trainer {
            for (at, sample, values) in logps(learner, groups)? {
                let sample = &mut groups[at].samples[sample];
                sample.old_logps = scatter(sample, &values);
            }
        }
        Ok(())
    }

    /// Fresh samples of the trainer's own weights have the ratio 1: what draws and what learns must be the same
    /// model.
    fn check_ratios(&self, learner: &Learner, groups: &[Group], metrics: &mut Metrics) -> Result<()> {
        if self.config.importance.is_some() {
            return Ok(());
        }
        let mut farthest = (0.0, String::new());
        for (at, sample, values) in logps(learner, groups)? {
            let (id, sample_of) = (&groups[at].id, &groups[at].samples[sample]);
            let drawn = gather(sample_of, &sample_of.logps);
            for (new, old) in values.iter().zip(drawn) {
                let error = f64::from((new - old).exp() - 1.0).abs();
                if error > farthest.0 || error.is_nan() {
                    farthest = (error, format!("{id}#{sample}"));
                }
            }
        }
        metrics.set("sampling/max_ratio_error", farthest.0);
        let limit = self.config.max_ratio_error;
        if farthest.0 <= limit {
            return Ok(());
        }
        let (error, sample) = farthest;
        Err(Error::Invalid(format!(
            "on the first step the ratio of the trainer's to the engine's probability is {error:.1e} from 1 in sample {sample}, \
             more than rollout.max_ratio_error = {limit:.1e}: what draws is not what learns; smaller weights in the engine \
             need [rollout.importance]"
        )))
    }

    fn check_kl(&self, kl: Option<f64>) -> Result<()> {
        match (self.config.max_kl, kl) {
            (Some(limit), Some(kl)) if kl.is_nan() || kl > limit => Err(Error::Invalid(format!(
                "the policy is {kl:.3} nats a response from its reference, more than rollout.max_kl = {limit}: \
                 raise the KL coefficient or lower learner.learning_rate"
            ))),
            _ => Ok(()),
        }
    }

    /// Passes over the step's samples in minibatches, each pass in an order of its own.
    fn update(
        &mut self,
        algorithm: &dyn Algorithm,
        learner: &mut Learner,
        groups: &[Group],
        metrics: &mut Metrics,
    ) -> Result<()> {
        let mut skipped = 0;
        let warm = self.step >= self.config.critic_warmup_steps as u64;
        for pass in 0..self.config.num_iterations {
            let order = self.order(groups.len(), pass);
            // Ranks with fewer groups have fewer minibatches, and take part in the others with nothing.
            let parts: Vec<&[usize]> = chunks(&order, self.config.num_minibatches).collect();
            for at in 0..learner.most_over_ranks(parts.len())? {
                let chunk = parts.get(at).copied().unwrap_or_default();
                let chunk: Vec<Group> = chunk.iter().map(|&at| groups[at].clone()).collect();
                let targets = chunk.iter().flat_map(|group| &group.samples).map(Sample::targets).sum();
                if learner.most_over_ranks(targets)? == 0 {
                    skipped += 1;
                    continue;
                }
                match &mut self.critic {
                    // Ranks call their collectives in one order.
                    Some(critic)
                        if warm && learner.is_alone() && is_small(learner) && is_small(critic.learner()) =>
                    {
                        let [of_critic, own] = update_both(critic, algorithm, learner, chunk)?;
                        metrics.merge(&of_critic);
                        metrics.merge(&own);
                        continue;
                    }
                    Some(critic) => metrics.merge(&critic.update(&chunk)?),
                    None => {}
                }
                if warm {
                    metrics.merge(&learner.update(algorithm, chunk)?);
                }
            }
        }
        if skipped > 0 {
            let step = self.step + 1;
            tracing::warn!(
                "step {step}: {skipped} updates are skipped, for they have no sample left to learn from"
            );
            metrics.set("skipped_updates", f64::from(skipped));
        }
        Ok(())
    }

    /// A permutation by seed, step and pass; the first pass of a single minibatch keeps the order.
    fn order(&self, len: usize, pass: usize) -> Vec<usize> {
        let rng = Rng::new(&[self.seed, self.step, pass as u64, key_of("order")]);
        let mut order: Vec<usize> = (0..len).collect();
        if self.config.num_minibatches > 1 {
            for last in (1..len).rev() {
                order.swap(last, rng.below(last as u64, last as u64 + 1) as usize);
            }
        }
        order
    }
}

fn is_small(learner: &Learner) -> bool {
    learner.policy().params().elements(false) < SMALL
}

/// An update of the critic beside one of the policy: neither reads what the other moves.
fn update_both(
    critic: &mut Critic,
    algorithm: &dyn Algorithm,
    learner: &mut Learner,
    groups: Vec<Group>,
) -> Result<[Metrics; 2]> {
    let of_critic = groups.clone();
    std::thread::scope(|threads| {
        let beside = threads.spawn(move || critic.update(&of_critic));
        let own = learner.update(algorithm, groups);
        let panicked = |_| Err(Error::Invalid("the thread that updates the critic panicked".into()));
        Ok([beside.join().unwrap_or_else(panicked)?, own?])
    })
}

/// The learner's log-probabilities: group, sample in it, and a value for each target.
fn logps(learner: &Learner, groups: &[Group]) -> Result<Vec<(usize, usize, Vec<f32>)>> {
    let question = Question {
        policy: learner.policy(),
        micro_batch_tokens: learner.config().micro_batch_tokens,
        needs: Needs::NOTHING,
        pick: Forward::logps,
    };
    let mut all = Vec::new();
    question.ask(groups, &mut |answers| {
        all.extend(answers.into_iter().map(|Answer { group, sample, values }| (group, sample, values)));
        Ok(())
    })?;
    Ok(all)
}

/// `all` in `count` parts whose lengths differ by one at most; fewer where there is not enough.
fn chunks(all: &[usize], count: usize) -> impl Iterator<Item = &[usize]> {
    let count = count.min(all.len()).max(1);
    (0..count).map(move |at| &all[at * all.len() / count..(at + 1) * all.len() / count])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minibatches_hold_every_group_once() {
        let all: Vec<usize> = (0..10).collect();
        for count in [1, 3, 4, 10, 99] {
            let parts: Vec<&[usize]> = chunks(&all, count).collect();
            assert_eq!(parts.concat(), all);
            let lengths: Vec<usize> = parts.iter().map(|part| part.len()).collect();
            assert!(lengths.iter().max().unwrap() - lengths.iter().min().unwrap() <= 1, "{lengths:?}");
        }
    }
}
