//! The only training step: credit, micro-batches, gradients, one division, clipping, `AdamW`.

mod config;
mod ranks;
mod state;

use std::sync::Arc;

use aligner_core::optim::{AdamW, LearningRate, Optimizer, clip_coefficient, first_not_finite};
use aligner_core::{
    Algorithm, Batch, Communicator, Error, Gradients, Group, Metrics, Needs, Per, Phase, Policy, Reduce,
    Result, StepBatch, finite_sum,
};

use crate::gradients::{first_alone, gradients};
use crate::guarded::Guarded;
use crate::micro_batch::micro_batches;
use ranks::{Replicated, agree, sum_metrics};

pub use config::LearnerConfig;
pub use ranks::TrainingRanks;

const SAMPLES: Phase = Phase::new("sums over the samples of a step");

/// Trains a policy with any [`Algorithm`], on one rank or many.
///
/// Every rank calls [`Learner::step`] with its own groups; parameters stay equal on all of them. The
/// sum of the losses is divided once, by the number of units on all ranks ([`Per`]), so that neither
/// the micro-batch size nor the number of ranks changes a gradient beyond rounding.
pub struct Learner {
    policy: Box<dyn Policy>,
    config: LearnerConfig,
    rate: LearningRate,
    optimizer: Box<dyn Optimizer>,
    ranks: TrainingRanks,
    step: u64,
    tokens: u64,
}

/// A step's groups after credit, packed.
struct Packed {
    groups: Vec<Group>,
    batches: Vec<Batch>,
    /// Units that the loss is averaged over.
    count: f64,
    /// Tokens that are computed.
    tokens: f64,
}

impl Learner {
    /// A learner at step 0 of a run of `total_steps`.
    ///
    /// # Errors
    /// [`Error::Setting`] for settings out of range.
    pub fn new(
        policy: Box<dyn Policy>,
        config: LearnerConfig,
        total_steps: u64,
        comm: Arc<dyn Communicator>,
    ) -> Result<Self> {
        check(&config)?;
        let optimizer = Box::new(Replicated::new(comm.clone(), AdamW::new(config.adamw())?));
        let ranks = TrainingRanks { all: comm.clone(), batches: comm };
        Self::on_ranks(policy, config, total_steps, ranks, optimizer)
    }

    /// A learner of a policy that several ranks hold parts of, with the optimizer that knows the parts.
    ///
    /// # Errors
    /// As [`Learner::new`].
    pub fn on_ranks(
        policy: Box<dyn Policy>,
        config: LearnerConfig,
        total_steps: u64,
        ranks: TrainingRanks,
        optimizer: Box<dyn Optimizer>,
    ) -> Result<Self> {
        check(&config)?;
        let rate = config.rate(total_steps)?;
        Ok(Self { policy, config, rate, optimizer, ranks, step: 0, tokens: 0 })
    }

    /// The policy with its parameters as they are now. An engine that keeps a clone of the
    /// parameters keeps this version: the next step writes a copy.
    pub fn policy(&self) -> &dyn Policy {
        self.policy.as_ref()
    }

    /// The settings.
    pub fn config(&self) -> &LearnerConfig {
        &self.config
    }

    /// Optimizer steps done.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// One optimizer step on this rank's `groups`: credit, then [`Learner::update`].
    ///
    /// Logs `loss`, `grad_norm` (before clipping), `learning_rate`, `num_tokens`, and what the
    /// algorithm logs.
    ///
    /// # Errors
    /// Groups that the algorithm or the model cannot take; [`Error::NotFinite`] for a reward, a loss
    /// or a gradient, with the samples that caused it. The parameters have not moved then.
    pub fn step(&mut self, algorithm: &dyn Algorithm, groups: Vec<Group>) -> Result<Metrics> {
        let credited = self.credit(algorithm, StepBatch::new(groups));
        self.apply(algorithm, credited)
    }

    /// One optimizer step on groups that have their credit already: several epochs and minibatches
    /// may follow one rollout. Logs as [`Learner::step`], without what credit logs.
    ///
    /// # Errors
    /// As [`Learner::step`].
    pub fn update(&mut self, algorithm: &dyn Algorithm, groups: Vec<Group>) -> Result<Metrics> {
        self.apply(algorithm, Ok(StepBatch::new(groups)))
    }

    /// Credit over a whole step on all ranks, after a check that its numbers are finite.
    ///
    /// # Errors
    /// [`Error::NotFinite`] for numbers that came with a sample; samples that the algorithm cannot
    /// give credit to.
    pub fn credit(&self, algorithm: &dyn Algorithm, mut step: StepBatch) -> Result<StepBatch> {
        // Whoever fails here has to tell the others, which may be on their way into a sum.
        let finite = step.groups.iter().try_for_each(check_finite);
        step.comm = Some(self.ranks.batches.clone());
        step.sum_over_ranks(finite.map(|()| []))?;
        self.guarded(algorithm).credit(&mut step)?;
        Ok(step)
    }

    fn apply(&mut self, algorithm: &dyn Algorithm, credited: Result<StepBatch>) -> Result<Metrics> {
        self.policy.begin_step(self.step);
        let algorithm = &self.guarded(algorithm);
        let mut logged = Metrics::default();
        let packed = credited.and_then(|step| {
            logged = step.metrics;
            self.pack(algorithm, step.groups)
        });
        let local = packed.and_then(|packed| {
            let gradients = gradients(self.policy.as_ref(), algorithm, &packed.batches, &packed.groups)?;
            Ok((packed, gradients))
        });
        let mut totals = local.as_ref().map_or([0.0; 2], |(packed, _)| [packed.count, packed.tokens]);
        let (packed, mut gradients) = agree(&self.ranks, local, &mut totals)?;
        let [count, tokens] = totals;
        check_count(count)?;
        let grad_norm = self.optimizer.sum(self.policy.params(), &mut gradients.values)? / count;
        if !grad_norm.is_finite() {
            return Err(self.blame(algorithm, &packed.groups, &gradients));
        }
        let learning_rate = self.rate.at(self.step);
        let scale = clip_coefficient(grad_norm, self.config.max_grad_norm) / count;
        self.optimizer.step(self.policy.params_mut(), &gradients.values, learning_rate, scale)?;
        self.step += 1;
        self.tokens += tokens as u64;
        let mut metrics = gradients.metrics;
        metrics.merge(&logged);
        metrics.add("loss", gradients.loss_sum, packed.count);
        sum_metrics(self.ranks.batches.as_ref(), &mut metrics)?;
        metrics.set("grad_norm", grad_norm);
        metrics.set("learning_rate", learning_rate);
        metrics.set("num_tokens", self.tokens as f64);
        add_perplexity(&mut metrics);
        Ok(metrics)
    }

    /// The loss and the algorithm's metrics on `groups`, without gradient; names carry no prefix.
    ///
    /// # Errors
    /// As [`Learner::step`].
    pub fn evaluate(&self, algorithm: &dyn Algorithm, groups: &[Group]) -> Result<Metrics> {
        let algorithm = &self.guarded(algorithm);
        let credited = self.credit(algorithm, StepBatch::new(groups.to_vec()));
        let work = credited.and_then(|step| {
            let packed = self.pack(algorithm, step.groups)?;
            let mut metrics = step.metrics;
            let mut loss_sum = 0.0;
            self.policy.forward_each(&packed.batches, algorithm.needs(), &mut |at, out| {
                let batch = &packed.batches[at];
                let out = algorithm.loss(&out, batch)?;
                loss_sum += finite_sum(&out.sum, batch)?;
                metrics.merge(&out.metrics);
                Ok(())
            })?;
            metrics.add("loss", loss_sum, packed.count);
            Ok(metrics)
        });
        let mut metrics = agree(&self.ranks, work, &mut [])?;
        sum_metrics(self.ranks.batches.as_ref(), &mut metrics)?;
        add_perplexity(&mut metrics);
        Ok(metrics)
    }

    /// The mean over the samples of all ranks with batches of their own, of which this one has `count` with the
    /// mean `own`, and how many there are; none where no rank has one.
    ///
    /// # Errors
    /// A failed collective.
    pub(crate) fn mean_over_ranks(&self, own: Option<f64>, count: usize) -> Result<Option<(f64, usize)>> {
        let count = if own.is_some() { count } else { 0 };
        if self.ranks.batches.size() == 1 {
            return Ok(own.map(|own| (own, count)));
        }
        let mut sums = [own.unwrap_or(0.0) * count as f64, count as f64];
        self.ranks.batches.all_reduce_host(&mut sums, Reduce::Sum, SAMPLES)?;
        Ok((sums[1] > 0.0).then(|| (sums[0] / sums[1], sums[1] as usize)))
    }

    /// Whether there are no other ranks.
    pub(crate) fn is_alone(&self) -> bool {
        self.ranks.all.size() == 1
    }

    /// The largest of a count over the ranks with batches of their own.
    ///
    /// # Errors
    /// A failed collective.
    pub(crate) fn most_over_ranks(&self, own: usize) -> Result<usize> {
        let mut most = [own as f64];
        self.ranks.batches.all_reduce_host(&mut most, Reduce::Max, SAMPLES)?;
        Ok(most[0] as usize)
    }

    /// Adds up what ranks with batches of their own have measured.
    ///
    /// # Errors
    /// A failed collective.
    pub(crate) fn share_metrics(&self, metrics: &mut Metrics) -> Result<()> {
        sum_metrics(self.ranks.batches.as_ref(), metrics)
    }

    /// Groups that have their credit in micro-batches by token budget.
    fn pack(&self, algorithm: &dyn Algorithm, mut groups: Vec<Group>) -> Result<Packed> {
        groups.iter().try_for_each(check_finite)?;
        if !algorithm.needs().contains(Needs::SCORES) {
            // They would contribute exactly 0, at the price of a pass.
            groups.retain(|group| group.samples.iter().any(|sample| sample.targets() > 0));
        }
        let may_split = algorithm.per() != Per::Group;
        let batches = micro_batches(&groups, self.config.micro_batch_tokens, may_split)?;
        let tokens = batches.iter().map(|batch| batch.tokens.len()).sum::<usize>() as f64;
        let mut count = algorithm.per().count(&groups);
        if matches!(algorithm.per(), Per::Constant(_)) {
            // The counts of all ranks are summed: a constant is shared among them.
            count /= self.ranks.batches.size() as f64;
        }
        Ok(Packed { groups, batches, count, tokens })
    }

    /// The algorithm with errors in place of panics.
    fn guarded<'a>(&self, algorithm: &'a dyn Algorithm) -> Guarded<'a> {
        Guarded::new(algorithm, format!("update {}", self.step + 1))
    }

    /// Names the parameter and the sample behind a gradient that is not finite.
    fn blame(&self, algorithm: &dyn Algorithm, groups: &[Group], gradients: &Gradients) -> Error {
        let params = self.policy.params();
        let broken = |gradients: &Gradients| first_not_finite(params, &gradients.values).map(str::to_owned);
        let breaks = |batch: &Batch| {
            let batches = std::slice::from_ref(batch);
            let again = self::gradients(self.policy.as_ref(), algorithm, batches, []).ok()?;
            broken(&again).map(|_| batch.sample_ids())
        };
        let looks_again = !self.policy.needs_others();
        let samples = looks_again.then(|| first_alone(algorithm.per(), groups, breaks)).flatten();
        let name = broken(gradients).unwrap_or_else(|| "all parameters together".into());
        let samples = samples.unwrap_or_else(|| vec!["none of this rank's alone".into()]);
        Error::NotFinite { what: format!("the gradient of {name}"), samples }
    }
}

/// Rewards, credit and log-probabilities that came with a group have to be numbers.
pub(crate) fn check_finite(group: &Group) -> Result<()> {
    for (at, sample) in group.samples.iter().enumerate() {
        let fields = [
            ("the reward", sample.reward.as_slice()),
            ("a weight", &sample.weights),
            ("a sampling log-probability", &sample.logps),
            ("an old log-probability", &sample.old_logps),
            ("a reference log-probability", &sample.ref_logps),
            ("a value", &sample.values),
            ("a return", &sample.returns),
            ("a token's reward", &sample.token_rewards),
        ];
        for (what, values) in fields {
            if values.iter().any(|value| !value.is_finite()) {
                return Err(Error::NotFinite {
                    what: what.into(),
                    samples: vec![format!("{}#{at}", group.id)],
                });
            }
        }
    }
    Ok(())
}

fn check(config: &LearnerConfig) -> Result<()> {
    config.errors().into_iter().next().map_or(Ok(()), Err)
}

fn check_count(count: f64) -> Result<()> {
    if count > 0.0 && count.is_finite() {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "the step has nothing to learn from: the loss would be divided by {count}; check the masks of its samples"
    )))
}

fn add_perplexity(metrics: &mut Metrics) {
    if let Some(nll) = metrics.get("nll") {
        metrics.set("perplexity", nll.exp());
    }
}
