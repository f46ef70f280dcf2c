//! Forward and backward passes through a pipeline, with the communication that no overlap hides.

use aligner_core::Result;
use aligner_core::model::ModelConfig;

use super::model::{HALF, embedding_params, head_flops, layer_flops, layer_params};
use super::{Cluster, Costs, Job, Phase, Spread, Timeline, Work, replay};
use crate::mesh::{Axis, Mesh};

/// Bytes of a gradient, which is summed in f32.
const GRADIENT: f64 = 4.0;
/// Bytes that an update reads and writes for a parameter: the gradient, both moments and the f32 weight twice, the
/// weight in bf16.
const UPDATE: f64 = GRADIENT + 6.0 * 4.0 + HALF;

/// A model on ranks, learning from or looking at sequences of one length.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout<'a> {
    pub(super) cluster: &'a Cluster,
    pub(super) mesh: Mesh,
    pub(super) model: &'a ModelConfig,
    pub(super) job: &'a Job,
    /// Tokens of an average sequence.
    pub(super) length: f64,
}

impl Layout<'_> {
    pub(super) fn axis(&self, axis: Axis) -> f64 {
        self.mesh.axis_size(axis) as f64
    }

    fn spread(&self, axes: &[Axis]) -> Result<Spread> {
        self.cluster.spread(&self.mesh, axes)
    }

    /// Layers of one chunk on one rank.
    pub(super) fn layers(&self, chunks: usize) -> f64 {
        self.model.num_layers as f64 / (self.axis(Axis::Pipeline) * chunks as f64)
    }

    /// Parameters of the rank that has most: an end of the pipeline has the embedding or the head, or both.
    pub(super) fn params(&self) -> f64 {
        let ends = if self.mesh.axis_size(Axis::Pipeline) == 1 { 2.0 } else { 1.0 };
        (self.layers(1) * layer_params(self.model) + ends * embedding_params(self.model))
            / self.axis(Axis::Tensor)
    }

    /// Seconds of a chunk's forward pass over `tokens` tokens: computing, and the sums and exchanges inside its layers.
    fn chunk(&self, tokens: f64, chunks: usize, rate: f64) -> Result<(f64, f64)> {
        let (tp, cp) = (self.axis(Axis::Tensor), self.axis(Axis::Context));
        let speed = tp * self.cluster.peak_flops * rate;
        let (own, layers) = (tokens / cp, self.layers(chunks));
        let hidden = self.model.hidden_size as f64;
        // A sum after attention and one after the MLP; a gather and a scatter each, where sequences are split too.
        let sums = 2.0 * self.cluster.all_reduce(self.spread(&[Axis::Tensor])?, own * hidden * HALF);
        let keys = 2.0 * HALF * own * (self.model.num_kv_heads * self.model.head_dim) as f64 / tp;
        let rounds = cp - 1.0;
        let travel = rounds * self.cluster.send(self.spread(&[Axis::Context])?, keys);
        let width = (self.model.num_heads * self.model.head_dim) as f64;
        // Keys and values travel while attention to those that are there is computed.
        let ring = (travel - rounds / cp * own * 2.0 * self.length * width / speed).max(0.0);
        Ok((layers * layer_flops(self.model, own, self.length) / speed, layers * (sums + ring)))
    }

    /// Runs `micros` micro-batches, forward alone or with backward passes.
    fn run(&self, works: &[Vec<Work>], chunks: usize, rate: f64, backward: bool) -> Result<(Timeline, f64)> {
        let tokens = self.length * self.job.micro_batch_sequences as f64;
        let (compute, exchange) = self.chunk(tokens, chunks, rate)?;
        let stages = self.mesh.axis_size(Axis::Pipeline);
        let (tp, cp) = (self.axis(Axis::Tensor), self.axis(Axis::Context));
        let parts = stages * chunks;
        let mut forward = vec![compute + exchange; parts];
        let head = head_flops(self.model, tokens / cp) / (tp * self.cluster.peak_flops * rate);
        let again = if self.job.recompute { compute + exchange } else { 0.0 };
        let mut input = vec![compute + exchange + again; parts];
        let mut weight = vec![compute; parts];
        for part in [&mut forward, &mut input, &mut weight] {
            part[parts - 1] += head;
        }
        let bytes = tokens / cp * self.model.hidden_size as f64 * HALF / tp;
        let transfer = self.cluster.send(self.spread(&[Axis::Pipeline])?, bytes);
        let timeline = replay(works, &Costs { forward, input, weight, transfer })?;
        let exchanges = if !backward {
            1.0
        } else if self.job.recompute {
            3.0
        } else {
            2.0
        };
        let count = works.first().map_or(0, |works| works.iter().filter(|work| work.is_forward()).count());
        Ok((timeline, exchanges * exchange * count as f64))
    }

    /// A forward pass over `sequences` sequences.
    pub(super) fn score(&self, name: &'static str, sequences: usize) -> Result<Phase> {
        let stages = self.mesh.axis_size(Axis::Pipeline);
        let micros = sequences.div_ceil(self.mesh.axis_size(Axis::Data) * self.job.micro_batch_sequences);
        let forward = |micro| Work { piece: super::Piece::Forward, chunk: 0, micro };
        let works = vec![(0..micros).map(forward).collect::<Vec<_>>(); stages];
        let (timeline, exchange) = self.run(&works, 1, self.cluster.rates.score, false)?;
        Ok(Phase::of_pipeline(name, &timeline, exchange))
    }

    /// `updates` updates of `batch` sequences each, whose fullest rank has `skew` times the mean of tokens.
    pub(super) fn train(
        &self,
        name: &'static str,
        updates: usize,
        batch: usize,
        skew: f64,
    ) -> Result<(Phase, Timeline)> {
        let stages = self.mesh.axis_size(Axis::Pipeline);
        let micros = batch / (self.mesh.axis_size(Axis::Data) * self.job.micro_batch_sequences);
        let works = self.job.schedule.works(stages, micros, self.job.chunks)?;
        let (timeline, exchange) = self.run(&works, self.job.chunks, self.cluster.rates.train, true)?;
        let mut phase = Phase::of_pipeline(name, &timeline, exchange);
        phase.wait((skew - 1.0).max(0.0) * timeline.seconds);
        let one_micro = timeline.busy.iter().sum::<f64>() / (stages * micros) as f64;
        phase.communicate(self.data_parallel(micros as f64, one_micro)?);
        phase.compute(self.params() * UPDATE / self.shards() / self.cluster.memory_bytes_per_sec);
        Ok((phase.times(updates as f64), timeline))
    }

    /// Into how many parts the optimizer's state and what else is split are.
    pub(super) fn shards(&self) -> f64 {
        if self.job.zero_stage == 0 { 1.0 } else { self.axis(Axis::Data) * self.axis(Axis::Context) }
    }

    /// Exposed seconds of an update's sums of gradients and gathers of weights. The sums hide behind the backward pass of
    /// the last micro-batch, the gathers behind the forward pass of the first; with weights split, behind each.
    fn data_parallel(&self, micros: f64, one_micro: f64) -> Result<f64> {
        let group = self.spread(&[Axis::Context, Axis::Data])?;
        let (gradients, weights) = (self.params() * GRADIENT, self.params() * HALF);
        let (forward, backward) = (one_micro / 3.0, one_micro * 2.0 / 3.0);
        let exposed = |seconds: f64, beside: f64| (seconds - self.cluster.rates.overlap * beside).max(0.0);
        let (sum, gather) =
            (self.cluster.all_gather(group, gradients), self.cluster.all_gather(group, weights));
        Ok(match self.job.zero_stage {
            0 => exposed(self.cluster.all_reduce(group, gradients), backward),
            1 | 2 => exposed(sum, backward) + exposed(gather, forward),
            _ => exposed(sum, backward) + micros * (exposed(gather, forward) + exposed(gather, backward)),
        })
    }
}
