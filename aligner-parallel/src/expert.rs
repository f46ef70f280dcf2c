//! Expert parallelism: rows go to the ranks that have their experts, and back (`GShard`, Lepikhin et al. 2020,
//! arXiv:2006.16668; Megatron-LM's all-to-all dispatcher).

use std::ops::Range;
use std::sync::Arc;

use aligner_core::ops::host::to_vec;
use aligner_core::ops::index;
use aligner_core::shard::Dispatched;
use aligner_core::{Communicator, Device, Phase, Reduce, Result, Tensor};

use crate::cut::share;
use crate::differentiable::apply;
use crate::flat::elements;

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
        let back = exchange.clone();
        let there = apply(rows, |rows| exchange.there(&rows), move |grad| back.back(&grad))?;
        let by_expert = |expert: usize| exchange.by_rank.iter().map(|of_rank| of_rank[expert]).sum();
        Ok(Dispatched {
            rows: there,
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
        let there = exchange.clone();
        apply(rows, |rows| exchange.back(&rows), move |grad| there.there(&grad))
    }
}

impl Exchange {
    /// This rank's rows for each rank, end to end.
    fn sent(&self) -> Vec<Range<usize>> {
        let ranks = self.comm.size();
        end_to_end((0..ranks).map(|rank| self.counts[share(self.counts.len(), rank, ranks)].iter().sum()))
    }

    /// Each rank's rows for this rank, end to end.
    fn received(&self) -> Vec<Range<usize>> {
        end_to_end(self.by_rank.iter().map(|of_rank| of_rank.iter().sum()))
    }

    /// Sorted by expert, the rows that came by rank: where each of them was.
    fn order(&self) -> Vec<u32> {
        let mut next: Vec<usize> = self.received().iter().map(|range| range.start).collect();
        let experts = self.by_rank.first().map_or(0, Vec::len);
        let mut order = Vec::new();
        for expert in 0..experts {
            for (next, of_rank) in next.iter_mut().zip(&self.by_rank) {
                order.extend((*next..*next + of_rank[expert]).map(|row| row as u32));
                *next += of_rank[expert];
            }
        }
        order
    }

    /// Rows of this rank, sorted by expert, as the rows of all ranks for this rank's experts.
    fn there(&self, rows: &Tensor<1>) -> Result<Tensor<1>> {
        Ok(self.select(self.exchange(rows, &self.sent(), THERE)?, &self.order()))
    }

    /// The inverse of [`Exchange::there`].
    fn back(&self, rows: &Tensor<1>) -> Result<Tensor<1>> {
        let order = self.order();
        let mut places = vec![0; order.len()];
        order.iter().zip(0..).for_each(|(&row, place)| places[row as usize] = place);
        self.exchange(&self.select(rows.clone(), &places), &self.received(), BACK)
    }

    /// These of the rows.
    fn select(&self, rows: Tensor<1>, chosen: &[u32]) -> Tensor<1> {
        if chosen.is_empty() {
            return rows;
        }
        let device = rows.device();
        let rows = rows.reshape([chosen.len(), self.hidden]);
        rows.select(0, index(chosen, &device)).reshape([chosen.len() * self.hidden])
    }

    /// Sends a part to each rank; what came, end to end in the order of ranks.
    fn exchange(&self, rows: &Tensor<1>, parts: &[Range<usize>], phase: Phase) -> Result<Tensor<1>> {
        let of_rank =
            |of_rank: &Range<usize>| elements(rows, of_rank.start * self.hidden..of_rank.end * self.hidden);
        Ok(Tensor::cat(self.comm.all_to_all(parts.iter().map(of_rank).collect(), phase)?, 0))
    }
}

/// Ranges of these lengths, one after the other.
fn end_to_end(lengths: impl Iterator<Item = usize>) -> Vec<Range<usize>> {
    let mut start = 0;
    let range = |length| {
        start += length;
        start - length..start
    };
    lengths.map(range).collect()
}
