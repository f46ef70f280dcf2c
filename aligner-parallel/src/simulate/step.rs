//! A whole step: its phases, one after the other.

use aligner_core::model::ModelConfig;
use aligner_core::{Error, Result};

use super::memory::{Others, estimate};
use super::model::{HALF, cache_bytes, forward_flops};
use super::passes::Layout;
use super::rollout::{self, Passes};
use super::{Cluster, Job, Lengths, Memory, Phase, Rollout, Workload};
use crate::balance::{Split, contiguous, longest_first, most_tokens};
use crate::mesh::{Axis, Mesh};

/// A step to simulate.
#[derive(Debug, Clone, PartialEq)]
pub struct Scenario {
    /// Where it runs.
    pub cluster: Cluster,
    /// How the ranks that learn are laid out.
    pub mesh: Mesh,
    /// What learns.
    pub model: ModelConfig,
    /// What it does.
    pub job: Job,
}

/// What a step is predicted to take.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// In their order; they do not overlap.
    pub phases: Vec<Phase>,
    /// Of the rank that has most.
    pub memory: Memory,
    /// How responses were drawn, where some were.
    pub rollout: Option<Rollout>,
}

impl Report {
    /// Seconds of the step.
    pub fn seconds(&self) -> f64 {
        self.phases.iter().map(Phase::seconds).sum()
    }

    /// Seconds of a phase; 0 where there is none of this name.
    pub fn phase(&self, name: &str) -> f64 {
        self.phases.iter().filter(|phase| phase.name == name).map(Phase::seconds).sum()
    }
}

impl Job {
    /// Whether engines use the weights where they lie for learning.
    pub(super) fn generates_in_place(&self, mesh: &Mesh) -> bool {
        let same = self.generation_tp(mesh) == mesh.axis_size(Axis::Tensor)
            && self.generation_pp == mesh.axis_size(Axis::Pipeline);
        same && self.zero_stage < 3
    }
}

impl Scenario {
    /// Everything that keeps it from running; empty where nothing does.
    pub fn check(&self) -> Vec<String> {
        self.job.check(&self.cluster, &self.mesh, &self.model)
    }

    /// Predicts what the step takes.
    ///
    /// # Errors
    /// [`Error::Invalid`] lists all that [`Scenario::check`] finds.
    pub fn simulate(&self) -> Result<Report> {
        let problems = self.check();
        if !problems.is_empty() {
            return Err(Error::Invalid(problems.join("; ")));
        }
        let job = &self.job;
        let lengths = Lengths::draw(job);
        let length = job.prompt_tokens as f64 + lengths.mean();
        let actor = Layout { cluster: &self.cluster, mesh: self.mesh, model: &self.model, job, length };
        let critic = Layout { mesh: self.critic_mesh()?, ..actor };
        let apart = job.critic_nodes > 0;
        let ppo = job.algorithm == Workload::Ppo;
        let mut phases = Vec::new();
        let drawn = job.algorithm.draws().then(|| self.draw(&lengths)).transpose()?;
        let rollout = drawn.map(|(phase, rollout)| {
            phases.push(phase);
            rollout
        });
        // The critic's nodes look at samples while others are drawn, and learn while the policy learns.
        let beside = |phases: &[Phase], at: usize| if apart { phases[at].seconds() } else { 0.0 };
        let samples = job.samples();
        let of_critic = if ppo { job.score_passes().min(2) } else { 0 };
        if of_critic > 0 {
            let judged = critic.score("reward and values", samples)?.times(of_critic as f64);
            let hidden = beside(&phases, 0);
            phases.push(judged.beyond(hidden));
        }
        let own = job.score_passes() - of_critic;
        if own > 0 {
            phases.push(actor.score("log-probabilities", samples)?.times(own as f64));
        }
        let batch = job.batch_sequences.min(samples);
        let updates = samples / batch;
        let (train, timeline) = actor.train("train", updates, batch, self.skew(&lengths, batch))?;
        phases.push(train);
        if ppo {
            let skew = self.skew(&lengths, batch);
            let learned = critic.train("train critic", updates, batch, skew)?.0;
            let hidden = beside(&phases, phases.len() - 1);
            phases.push(learned.beyond(hidden));
        }
        if job.algorithm.draws() {
            phases.push(self.refit(&actor)?);
        }
        let others =
            Others { frozen: own.min(1) + usize::from(ppo && !apart), trained: usize::from(ppo && !apart) };
        let longest = job.prompt_tokens + lengths.tokens.iter().copied().max().unwrap_or(0);
        let memory = estimate(&actor, others, longest as f64, &timeline, rollout.as_ref());
        Ok(Report { phases, memory, rollout })
    }

    /// The critic's ranks: the policy's, or those of its own nodes in the same layout.
    fn critic_mesh(&self) -> Result<Mesh> {
        if self.job.critic_nodes == 0 {
            return Ok(self.mesh);
        }
        let mut sizes = Axis::ALL.map(|axis| self.mesh.axis_size(axis));
        let part = self.mesh.size() / sizes[Axis::Data as usize];
        sizes[Axis::Data as usize] = self.job.critic_nodes * self.cluster.ranks_per_node / part;
        Mesh::new(sizes)
    }

    fn draw(&self, lengths: &Lengths) -> Result<(Phase, Rollout)> {
        let (cluster, model, job) = (&self.cluster, &self.model, &self.job);
        let (tp, pp) = (job.generation_tp(&self.mesh), job.generation_pp);
        let engines = self.mesh.size() / (tp * pp);
        let layout = Mesh::new([tp, 1, 1, engines, pp])?;
        let (sums, stages) =
            (cluster.spread(&layout, &[Axis::Tensor])?, cluster.spread(&layout, &[Axis::Pipeline])?);
        let bytes = job.max_running.min(lengths.tokens.len().div_ceil(engines)) as f64
            * HALF
            * model.hidden_size as f64;
        // Stages work one after the other, so a pass reads all weights whatever their number.
        let read = tp as f64 * cluster.memory_bytes_per_sec * cluster.rates.decode;
        let speed = tp as f64 * cluster.peak_flops * cluster.rates.score;
        let hops = (pp - 1) as f64 * cluster.send(stages, bytes / tp as f64);
        let exchange = 2.0 * model.num_layers as f64 * cluster.all_reduce(sums, bytes) + hops;
        let prompt = forward_flops(model, job.prompt_tokens as f64, job.prompt_tokens as f64) / speed;
        let passes = Passes {
            fixed: cluster.rates.pass_secs + exchange,
            weights: HALF * model.num_params() as f64 / read,
            cached: cache_bytes(model) / read,
            running: forward_flops(model, 1.0, 0.0) / speed,
            prompt: prompt / job.num_generations.max(1) as f64,
        };
        let rollout = rollout::simulate(job, lengths, engines, &passes);
        let busy = rollout.seconds * (1.0 - rollout.idle());
        let mut phase = Phase::new("generate");
        phase.communicate(exchange * rollout.mean_passes());
        phase.compute(busy - phase.communication);
        phase.wait(rollout.seconds - busy);
        Ok((phase, rollout))
    }

    /// Brings each engine the weights that its rank does not have.
    fn refit(&self, actor: &Layout<'_>) -> Result<Phase> {
        let mut phase = Phase::new("refit");
        let (job, cluster) = (&self.job, &self.cluster);
        if !job.generates_in_place(&self.mesh) {
            let ranks = (job.generation_tp(&self.mesh) * job.generation_pp) as f64;
            let wanted = HALF * self.model.num_params() as f64 / ranks;
            let held = HALF * actor.params() / if job.zero_stage < 3 { 1.0 } else { actor.shards() };
            let spread = cluster.spread(&self.mesh, &[Axis::Context, Axis::Data, Axis::Pipeline])?;
            phase.communicate(cluster.send(spread, (wanted - held).max(0.0)));
        }
        Ok(phase)
    }

    /// Over the updates: the tokens of the fullest data-parallel rank, over the mean.
    fn skew(&self, lengths: &Lengths, batch: usize) -> f64 {
        let dp = self.mesh.axis_size(Axis::Data);
        let (mut most, mut all) = (0, 0);
        for update in lengths.tokens.chunks(batch) {
            let tokens: Vec<usize> = update.iter().map(|&tokens| tokens + self.job.prompt_tokens).collect();
            let parts = match self.job.split {
                Split::Static => contiguous(tokens.len(), dp).into_iter().map(Vec::from_iter).collect(),
                Split::Stealing => longest_first(&tokens, dp),
            };
            most += most_tokens(&tokens, &parts);
            all += tokens.iter().sum::<usize>();
        }
        most as f64 * dp as f64 / all.max(1) as f64
    }
}
