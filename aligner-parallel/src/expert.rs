//! Expert parallelism: rows go to the ranks that have their experts, and back (`GShard`, Lepikhin et al. 2020,
//! arXiv:2006.16668; Megatron-LM's all-to-all dispatcher).

use std::ops::Range;
use std::sync::Arc;

use aligner_core::ops::host::{to_vec, with_slice, without_graph};
use aligner_core::ops::{Backward, external};
use aligner_core::shard::Dispatched;
use aligner_core::{Communicator, Device, Phase, Reduce, Result, Tensor};

use crate::cut::share;

const COUNTS: Phase = Phase::new("how many rows each expert gets");
const THERE: Phase = Phase::new("rows to their experts");
const BACK: Phase = Phase::new("rows back from their experts");

/// The ranks that share the experts of a layer.
#[derive(Clone)]
pub(crate) struct ExpertRanks {
    comm: Arc<dyn Communicator>,
}

/// One layer's exchange, as this rank sees it.
#[derive(Clone)]
struct Exchange {
    comm: Arc<dyn Communicator>,
    /// Rows of this rank for each expert of the layer.
    counts: Vec<usize>,
    /// Rows from each rank for each of this rank's experts.
    by_rank: Vec<Vec<usize>>,
    hidden: usize,
}

impl ExpertRanks {
    pub(crate) fn new(comm: Arc<dyn Communicator>) -> Self {
        Self { comm }
    }

    pub(crate) fn size(&self) -> usize {
        self.comm.size()
    }

    /// This rank's experts, of `count` in a layer.
    pub(crate) fn share(&self, count: usize) -> Range<usize> {
        share(count, self.comm.rank(), self.size())
    }

    /// The most passes that any of the ranks has.
    pub(crate) fn most(&self, own: usize) -> Result<usize> {
        if self.size() == 1 {
            return Ok(own);
        }
        let mut most = [own as f64];
        self.comm.all_reduce_host(&mut most, Reduce::Max, COUNTS)?;
        Ok(most[0] as usize)
    }

    /// Rows `[slots, hidden]`, sorted by expert, to the ranks that have the experts.
    pub(crate) fn dispatch(&self, rows: Tensor<2>, counts: &[usize]) -> Result<Dispatched> {
        let own = self.share(counts.len());
        let numbers: Vec<f32> = counts.iter().map(|&count| count as f32).collect();
        let all = self.comm.all_gather(Tensor::from_floats(numbers.as_slice(), &Device::flex()), COUNTS)?;
        let all: Vec<usize> = to_vec(&all).into_iter().map(|count| count as usize).collect();
        let of_rank = |of_rank: &[usize]| of_rank[own.clone()].to_vec();
        let by_rank: Vec<Vec<usize>> = all.chunks_exact(counts.len()).map(of_rank).collect();
        let hidden = rows.dims()[1];
        let exchange = Exchange { comm: self.comm.clone(), counts: counts.to_vec(), by_rank, hidden };
        let there = exchange.there(&without_graph(&rows))?;
        let shape = [there.len() / hidden.max(1), hidden];
        let back = exchange.clone();
        let pullback = move |pass: Backward<'_>| {
            let grad = Tensor::from_floats(pass.grad, &Device::flex());
            vec![back.back(&grad).unwrap_or_else(|_| vec![0.0; pass.inputs[0].len()])]
        };
        let by_expert = |expert: usize| exchange.by_rank.iter().map(|of_rank| of_rank[expert]).sum();
        Ok(Dispatched {
            rows: external(vec![rows], there, shape, Box::new(pullback))?,
            counts: (0..own.len()).map(by_expert).collect(),
            by_rank: exchange.by_rank,
        })
    }

    /// What experts made of the rows, back to the ranks that they came from, in the order in which they went.
    pub(crate) fn combine(
        &self,
        rows: Tensor<2>,
        dispatched: &Dispatched,
        counts: &[usize],
    ) -> Result<Tensor<2>> {
        let hidden = rows.dims()[1];
        let by_rank = dispatched.by_rank.clone();
        let exchange = Exchange { comm: self.comm.clone(), counts: counts.to_vec(), by_rank, hidden };
        let back = exchange.back(&without_graph(&rows))?;
        let shape = [back.len() / hidden.max(1), hidden];
        let pullback = move |pass: Backward<'_>| {
            let grad = Tensor::from_floats(pass.grad, &Device::flex());
            vec![exchange.there(&grad).unwrap_or_else(|_| vec![0.0; pass.inputs[0].len()])]
        };
        external(vec![rows], back, shape, Box::new(pullback))
    }
}

impl Exchange {
    /// Elements of this rank's rows for each rank, end to end.
    fn sent(&self) -> Vec<Range<usize>> {
        let ranks = self.comm.size();
        let rows = |experts: Range<usize>| self.counts[experts].iter().sum::<usize>() * self.hidden;
        let mut start = 0;
        let of_rank = |rank| {
            start += rows(share(self.counts.len(), rank, ranks));
            start - rows(share(self.counts.len(), rank, ranks))..start
        };
        (0..ranks).map(of_rank).collect()
    }

    /// Elements of each rank's rows for this rank, end to end.
    fn received(&self) -> Vec<Range<usize>> {
        let mut start = 0;
        let of_rank = |of_rank: &Vec<usize>| {
            let elements = of_rank.iter().sum::<usize>() * self.hidden;
            start += elements;
            start - elements..start
        };
        self.by_rank.iter().map(of_rank).collect()
    }

    /// Where rows that came by rank go to be sorted by expert: pairs of ranges of elements.
    fn order(&self) -> Vec<(Range<usize>, Range<usize>)> {
        let mut next: Vec<usize> = self.received().iter().map(|range| range.start).collect();
        let experts = self.by_rank.first().map_or(0, Vec::len);
        let (mut pairs, mut to) = (Vec::new(), 0);
        for expert in 0..experts {
            for (rank, of_rank) in self.by_rank.iter().enumerate() {
                let elements = of_rank[expert] * self.hidden;
                pairs.push((next[rank]..next[rank] + elements, to..to + elements));
                next[rank] += elements;
                to += elements;
            }
        }
        pairs
    }

    /// Rows of this rank, sorted by expert, as the rows of all ranks for this rank's experts.
    fn there(&self, rows: &Tensor<1>) -> Result<Vec<f32>> {
        let came = self.exchange(rows, &self.sent(), THERE)?;
        let mut sorted = vec![0.0; came.len()];
        for (from, to) in self.order() {
            sorted[to].copy_from_slice(&came[from]);
        }
        Ok(sorted)
    }

    /// The inverse of [`Exchange::there`].
    fn back(&self, rows: &Tensor<1>) -> Result<Vec<f32>> {
        let by_rank = with_slice(rows, |sorted| {
            let mut by_rank = vec![0.0; sorted.len()];
            for (from, to) in self.order() {
                by_rank[from].copy_from_slice(&sorted[to]);
            }
            by_rank
        });
        let by_rank = Tensor::from_floats(by_rank.as_slice(), &Device::flex());
        self.exchange(&by_rank, &self.received(), BACK)
    }

    /// Sends a part to each rank; what came, end to end in the order of ranks.
    fn exchange(&self, rows: &Tensor<1>, parts: &[Range<usize>], phase: Phase) -> Result<Vec<f32>> {
        let parts = with_slice(rows, |rows| {
            parts.iter().map(|part| Tensor::from_floats(&rows[part.clone()], &Device::flex())).collect()
        });
        let came = self.comm.all_to_all(parts, phase)?;
        Ok(came.iter().flat_map(to_vec).collect())
    }
}
