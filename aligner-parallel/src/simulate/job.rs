//! What a simulated step does.

use aligner_core::model::ModelConfig;
use serde::Deserialize;

use super::{Cluster, Order};
use crate::balance::Split;
use crate::mesh::{Axis, Mesh};

/// A kind of step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Workload {
    /// Learns from rows.
    Sft,
    /// Learns from pairs of rows, beside a reference.
    Dpo,
    /// Draws samples, scores them with a reward model and a reference, and learns a policy and a critic.
    Ppo,
    /// Draws several samples for each prompt, scores them by rule and with a reference, and learns a policy.
    #[default]
    Grpo,
}

impl Workload {
    /// Whether it draws samples.
    pub fn draws(self) -> bool {
        matches!(self, Self::Ppo | Self::Grpo)
    }

    /// Forward passes of models over all samples, besides those of learning.
    fn scores(self) -> usize {
        match self {
            Self::Sft => 0,
            Self::Dpo | Self::Grpo => 1,
            // The reference, the reward model and the critic.
            Self::Ppo => 3,
        }
    }
}

/// What a simulated step does, and how.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Job {
    /// Which kind of step.
    pub algorithm: Workload,
    /// Prompts of a step, or rows; pairs of rows for DPO.
    pub prompts: usize,
    /// Samples of each prompt.
    pub num_generations: usize,
    /// Of each prompt.
    pub prompt_tokens: usize,
    /// Of a response, on average.
    pub response_tokens: f64,
    /// The standard deviation of the logarithm of a response's tokens: lengths are log-normal, cut at the most.
    pub response_sigma: f64,
    /// Of the longest response.
    pub max_response_tokens: usize,
    /// Sequences of an update.
    pub batch_sequences: usize,
    /// Sequences of a micro-batch.
    pub micro_batch_sequences: usize,
    /// Of the pipeline.
    pub schedule: Order,
    /// Chunks of layers on each rank of the pipeline.
    pub chunks: usize,
    /// What data-parallel ranks split: nothing, the optimizer's state, gradients too, weights too (Rajbhandari et al. 2020).
    pub zero_stage: usize,
    /// Whether layers are computed again in the backward pass.
    pub recompute: bool,
    /// Forward passes over all samples besides those of learning; by the algorithm where not given.
    pub score_passes: Option<usize>,
    /// Tensor-parallel ranks that draw; those that learn, where not given.
    pub generation_tp: Option<usize>,
    /// Pipeline stages that draw; 1 where every rank gets all layers.
    pub generation_pp: usize,
    /// Responses that an engine draws at once.
    pub max_running: usize,
    /// Whether a response that ends makes room for the next at once, or when all of its batch have ended.
    pub continuous_batching: bool,
    /// How prompts come to engines.
    pub split: Split,
    /// How much of the variance of a response's length its prompt explains: what the history of lengths can know.
    pub known_variance: f64,
    /// Nodes besides the mesh's on which the critic and the reward model run; 0 where they share its ranks.
    pub critic_nodes: usize,
    /// Of the lengths.
    pub seed: u64,
}

impl Default for Job {
    fn default() -> Self {
        Self {
            algorithm: Workload::Grpo,
            prompts: 64,
            num_generations: 16,
            prompt_tokens: 256,
            response_tokens: 512.0,
            response_sigma: 0.8,
            max_response_tokens: 4096,
            batch_sequences: 512,
            micro_batch_sequences: 1,
            schedule: Order::OneForwardOneBackward,
            chunks: 1,
            zero_stage: 1,
            recompute: false,
            score_passes: None,
            generation_tp: None,
            generation_pp: 1,
            max_running: 256,
            continuous_batching: true,
            split: Split::Stealing,
            known_variance: 0.5,
            critic_nodes: 0,
            seed: 0,
        }
    }
}

impl Job {
    /// Sequences of a step.
    pub fn samples(&self) -> usize {
        match self.algorithm {
            Workload::Sft => self.prompts,
            Workload::Dpo => 2 * self.prompts,
            Workload::Ppo | Workload::Grpo => self.prompts * self.num_generations,
        }
    }

    /// Forward passes over all samples besides those of learning.
    pub fn score_passes(&self) -> usize {
        self.score_passes.unwrap_or(self.algorithm.scores())
    }

    /// The ranks of an engine along the tensor axis.
    pub(super) fn generation_tp(&self, mesh: &Mesh) -> usize {
        self.generation_tp.unwrap_or(mesh.axis_size(Axis::Tensor))
    }

    /// Micro-batches of an update on each data-parallel rank.
    pub(super) fn micros(&self, mesh: &Mesh) -> usize {
        self.batch_sequences.min(self.samples())
            / (mesh.axis_size(Axis::Data) * self.micro_batch_sequences).max(1)
    }

    /// Everything that keeps this job from running on these ranks; empty where nothing does.
    pub fn check(&self, cluster: &Cluster, mesh: &Mesh, model: &ModelConfig) -> Vec<String> {
        let mut problems = cluster.check();
        problems.extend(mesh.check(model, 0).err().map(|error| error.to_string()));
        problems.extend(self.numbers());
        let ranks = cluster.nodes.saturating_sub(self.critic_nodes) * cluster.ranks_per_node;
        if ranks != mesh.size() {
            let nodes = cluster.nodes.saturating_sub(self.critic_nodes);
            problems.push(format!(
                "the mesh {mesh} has {} ranks, but {nodes} nodes of {} have {ranks}",
                mesh.size(),
                cluster.ranks_per_node
            ));
        }
        let (stages, dp) = (mesh.axis_size(Axis::Pipeline), mesh.axis_size(Axis::Data));
        let mut divides = |what: &str, divisor: usize, of: &str, value: usize| {
            if divisor == 0 || !value.is_multiple_of(divisor) {
                problems.push(format!("{what} {divisor} does not divide {of} {value}"));
            }
        };
        divides("pp times chunks", stages * self.chunks, "num_hidden_layers", model.num_layers);
        let batch = self.batch_sequences.min(self.samples());
        divides("dp times micro_batch_sequences", dp * self.micro_batch_sequences, "batch_sequences", batch);
        divides("batch_sequences", batch, "the samples of a step", self.samples());
        if self.algorithm.draws() {
            let tp = self.generation_tp(mesh);
            divides("generation_tp", tp, "num_attention_heads", model.num_heads);
            divides("generation_tp", tp, "num_key_value_heads", model.num_kv_heads);
            divides("generation_pp", self.generation_pp, "num_hidden_layers", model.num_layers);
            divides("generation_tp times generation_pp", tp * self.generation_pp, "the ranks", mesh.size());
        }
        if self.critic_nodes > 0 {
            let part: usize = [Axis::Tensor, Axis::Context, Axis::Pipeline]
                .map(|axis| mesh.axis_size(axis))
                .iter()
                .product();
            divides(
                "tp times cp times pp",
                part,
                "the critic's ranks",
                self.critic_nodes * cluster.ranks_per_node,
            );
        }
        problems.extend(self.schedule.check(stages, self.micros(mesh).max(1), self.chunks));
        problems
    }

    /// Numbers that cannot be, whatever the ranks.
    fn numbers(&self) -> Vec<String> {
        let counts = [
            ("prompts", self.prompts),
            ("num_generations", self.num_generations),
            ("max_response_tokens", self.max_response_tokens),
            ("batch_sequences", self.batch_sequences),
            ("micro_batch_sequences", self.micro_batch_sequences),
            ("max_running", self.max_running),
        ];
        let zero = counts.into_iter().filter(|&(_, count)| count == 0);
        let mut problems: Vec<String> =
            zero.map(|(key, _)| format!("job.{key}: expected at least 1, got 0")).collect();
        let most = self.max_response_tokens as f64;
        if !(self.response_tokens >= 1.0 && self.response_tokens <= most) {
            let got = self.response_tokens;
            problems
                .push(format!("job.response_tokens: expected 1 to max_response_tokens, {most}, got {got}"));
        }
        if !(0.0..=4.0).contains(&self.response_sigma) {
            problems.push(format!("job.response_sigma: expected 0 to 4, got {}", self.response_sigma));
        }
        if !(0.0..=1.0).contains(&self.known_variance) {
            problems.push(format!(
                "job.known_variance: expected a share from 0 to 1, got {}",
                self.known_variance
            ));
        }
        if self.zero_stage > 3 {
            problems.push(format!("job.zero_stage: expected 0 to 3, got {}", self.zero_stage));
        }
        if self.critic_nodes > 0 && self.algorithm != Workload::Ppo {
            problems.push(format!("job.critic_nodes: {:?} has no critic", self.algorithm).to_lowercase());
        }
        problems
    }
}
