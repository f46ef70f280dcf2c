//! What a rank of a mesh does at a model's seams: tensor, sequence and context parallelism.

use std::fmt;
use std::sync::Arc;

use aligner_core::ops::host::to_vec;
use aligner_core::ops::{
    AttentionShape, LogitCap, TargetScores, Vocabulary, attention, capped_linear_cross_entropy, embedding,
    linear_cross_entropy_part,
};
use aligner_core::shard::{Dispatched, Projection, Reader, Shard};
use aligner_core::{Communicator, Device, Error, Phase, Result, Segment, Tensor};

use crate::context::Ring;
use crate::cut::share;
use crate::differentiable::{copy_in, gather_rows, gather_rows_to_all, scatter_rows, sum_out};
use crate::expert::ExpertRanks;

const HEAD: Phase = Phase::new("log-sum-exp over the vocabulary's parts");

/// Column- and row-parallel linears, a head and an embedding in parts (Megatron-LM), with
/// `sequence` the norms on parts of the rows; ring attention over parts of each sequence.
#[derive(Clone)]
pub(crate) struct Seams {
    /// The ranks that share each matrix.
    tensor: Arc<dyn Communicator>,
    /// The ranks that share each sequence.
    ring: Ring,
    /// The ranks that share the experts.
    experts: ExpertRanks,
    /// Whether the residual stream's rows are split over the tensor-parallel ranks.
    sequence: bool,
    /// Tokens of the whole vocabulary.
    vocab: usize,
}

impl Seams {
    pub(crate) fn new(
        tensor: Arc<dyn Communicator>,
        context: Arc<dyn Communicator>,
        experts: ExpertRanks,
        sequence: bool,
        vocab: usize,
    ) -> Self {
        Self { sequence: sequence && tensor.size() > 1, tensor, ring: Ring::new(context), experts, vocab }
    }

    fn is_whole(&self) -> bool {
        self.tensor.size() == 1
    }

    /// Partial sums of this rank as what the residual stream takes.
    fn sum(&self, partial: Tensor<2>) -> Result<Tensor<2>> {
        if self.sequence { scatter_rows(partial, &self.tensor) } else { sum_out(partial, &self.tensor) }
    }
}

impl fmt::Debug for Seams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tensor, context) = (self.tensor.size(), self.ring.size());
        write!(f, "Seams {{ tp: {tensor}, cp: {context}, sequence: {} }}", self.sequence)
    }
}

impl Shard for Seams {
    fn rows(&self, segments: &Arc<[Segment]>) -> Result<Option<Arc<[u32]>>> {
        if self.ring.size() == 1 {
            return Ok(None);
        }
        self.ring.rows(segments).map(Some)
    }

    fn splits_stream(&self) -> bool {
        self.sequence
    }

    fn embed(&self, table: Tensor<2>, tokens: &[u32]) -> Result<Tensor<2>> {
        if self.is_whole() {
            return embedding(table, tokens);
        }
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= self.vocab) {
            return Err(Error::Invalid(format!("token {token} is out of range: there are {}", self.vocab)));
        }
        let own = share(self.vocab, self.tensor.rank(), self.tensor.size());
        let place = |&token: &u32| own.contains(&(token as usize)).then(|| token - own.start as u32);
        let places: Vec<Option<u32>> = tokens.iter().map(place).collect();
        // Other ranks' tokens look up a row that is then multiplied by 0.
        let rows: Vec<u32> = places.iter().map(|place| place.unwrap_or(0)).collect();
        let factors: Vec<f32> = places.iter().map(|place| f32::from(u8::from(place.is_some()))).collect();
        let embedded = embedding(table, &rows)?;
        let factors = Tensor::<1>::from_floats(factors.as_slice(), &embedded.device());
        self.sum(embedded * factors.unsqueeze_dim::<2>(1))
    }

    fn enter(&self, x: Tensor<2>, rows: usize) -> Result<Tensor<2>> {
        match (self.is_whole(), self.sequence) {
            (true, _) => Ok(x),
            (false, true) => gather_rows(x, rows, &self.tensor),
            (false, false) => copy_in(x, &self.tensor),
        }
    }

    fn exit(
        &self,
        residual: Tensor<2>,
        bias: Option<Tensor<1>>,
        project: &Projection<'_>,
    ) -> Result<Tensor<2>> {
        if self.is_whole() {
            return project(Some(residual), bias);
        }
        let sum = residual + self.sum(project(None, None)?)?;
        Ok(match bias {
            Some(bias) => sum + bias.unsqueeze::<2>(),
            None => sum,
        })
    }

    fn attend(
        &self,
        [q, k, v]: [Tensor<2>; 3],
        segments: &Arc<[Segment]>,
        shape: AttentionShape,
    ) -> Result<Tensor<2>> {
        if self.ring.size() == 1 {
            return attention(q, k, v, segments, shape);
        }
        self.ring.attend(&[q, k, v], segments, shape)
    }

    fn leave(&self, x: Tensor<2>, rows: usize, reader: Reader) -> Result<Tensor<2>> {
        match (self.sequence, reader) {
            (false, Reader::Score) => Ok(x),
            (true, Reader::Score) => gather_rows_to_all(x, rows, &self.tensor),
            (_, Reader::Vocabulary) => self.enter(x, rows),
        }
    }

    fn scores(
        &self,
        hidden: Tensor<2>,
        weight: Tensor<2>,
        rows: &[u32],
        targets: &[u32],
        cap: Option<LogitCap>,
    ) -> Result<TargetScores> {
        if self.is_whole() {
            return capped_linear_cross_entropy(hidden, weight, rows, targets, cap);
        }
        let exchange = |own: Vec<f32>| {
            let own = Tensor::from_floats(own.as_slice(), &Device::flex());
            let parts = self.tensor.all_gather_uneven(own, HEAD)?;
            Ok(parts.iter().map(to_vec).collect())
        };
        let first = share(self.vocab, self.tensor.rank(), self.tensor.size()).start;
        let vocabulary = Vocabulary { size: self.vocab, first, exchange: &exchange };
        linear_cross_entropy_part(hidden, weight, &vocabulary, rows, targets, cap)
    }

    fn dispatch(&self, rows: Tensor<2>, counts: &[usize]) -> Result<Dispatched> {
        if self.experts.size() == 1 {
            return Ok(Dispatched::here(rows, counts));
        }
        self.experts.dispatch(rows, counts)
    }

    fn combine(&self, rows: Tensor<2>, dispatched: &Dispatched, counts: &[usize]) -> Result<Tensor<2>> {
        if self.experts.size() == 1 {
            return Ok(rows);
        }
        self.experts.combine(rows, dispatched, counts)
    }

    fn collect(&self, values: Tensor<2>, entries: &[u32], total: usize) -> Result<Tensor<2>> {
        if self.ring.size() == 1 {
            return Ok(values);
        }
        self.ring.collect(values, entries, total)
    }
}
