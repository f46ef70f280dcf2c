//! Context parallelism: each rank has some rows of every sequence, and keys and values go round the ranks.
//!
//! Ring attention (Liu et al. 2023, arXiv:2310.01889) with an online softmax over the ranks' parts, on
//! packed batches. Each segment is cut into two chunks a rank, the i-th and the i-th from the end for the
//! same rank: under a causal mask all then have about the same work (Megatron-LM's zig-zag). The order of
//! ranks rotates from segment to segment, so that short segments do not all fall to one.
//!
//! On an accelerator, where attention is a composition of Burn operations, keys and values of all rows come to every
//! rank at once (Dubey et al. 2024, arXiv:2407.21783, section 3.3.2), and their gradients add up over the ranks.

mod partition;

use std::sync::Arc;

use aligner_core::ops::host::{HostTensor, on_host, to_vec};
use aligner_core::ops::{Attended, AttentionPart, AttentionShape, external, planned_attention};
use aligner_core::{Communicator, Device, Error, Phase, Result, Segment, Tensor};
use burn::tensor::TensorData;

use crate::differentiable::{Readers, place_rows};
use partition::Partition;

const FORWARD: Phase = Phase::new("keys and values round the ring");
const BACKWARD: Phase = Phase::new("gradients of keys and values round the ring");
const COLLECT: Phase = Phase::new("values of all rows");

/// The ranks that share each sequence.
#[derive(Clone)]
pub(crate) struct Ring {
    comm: Arc<dyn Communicator>,
}

impl Ring {
    pub(crate) fn new(comm: Arc<dyn Communicator>) -> Self {
        Self { comm }
    }

    pub(crate) fn size(&self) -> usize {
        self.comm.size()
    }

    /// The rows of a batch that this rank computes, ascending.
    pub(crate) fn rows(&self, segments: &[Segment]) -> Result<Arc<[u32]>> {
        Ok(Partition::new(segments, self.size())?.rows(self.comm.rank()))
    }

    /// Attention of this rank's rows over those of all.
    pub(crate) fn attend(
        &self,
        qkv: &[Tensor<2>; 3],
        segments: &Arc<[Segment]>,
        shape: AttentionShape,
    ) -> Result<Tensor<2>> {
        let partition = Partition::new(segments, self.size())?;
        let rows = partition.count(self.comm.rank());
        for (what, tensor, heads) in
            [("q", &qkv[0], shape.heads), ("k", &qkv[1], shape.kv_heads), ("v", &qkv[2], shape.kv_heads)]
        {
            let expected = [rows, heads * shape.head_dim];
            if tensor.dims() != expected {
                let what = format!("{what} of a rank's attention");
                return Err(Error::shape(what, format!("{expected:?}"), &tensor.dims()));
            }
        }
        if !qkv.iter().all(on_host) {
            return self.gathered(qkv, &partition, shape);
        }
        let round = Round { comm: self.comm.clone(), partition, shape };
        let host = qkv.each_ref().map(HostTensor::without_graph);
        let [q, k, v] = host.each_ref().map(HostTensor::as_slice);
        let Attended { out, log_sums } = round.forward(q, [k, v].concat())?;
        let out = flat(out);
        let output = HostTensor::new(&out);
        let pullback = move |grad: Tensor<1>| {
            let (inputs, grad) = (host.each_ref().map(HostTensor::as_slice), HostTensor::new(&grad));
            let grads = round.backward(inputs, (output.as_slice(), &log_sums), grad.as_slice())?;
            Ok(grads.into_iter().map(flat).collect())
        };
        external(qkv, &out, qkv[0].dims(), Box::new(pullback))
    }

    /// The same with the keys and values of all rows on every rank.
    fn gathered(
        &self,
        [q, k, v]: &[Tensor<2>; 3],
        partition: &Partition,
        shape: AttentionShape,
    ) -> Result<Tensor<2>> {
        let rank = self.comm.rank();
        let plan = partition.plan_of_all(rank);
        // Both at once.
        let (rows, own) = (partition.rows(rank), Tensor::cat(vec![k.clone(), v.clone()], 1));
        let all = place_rows(own, &rows, plan.keys, Readers::Own, &self.comm, [FORWARD, BACKWARD])?;
        let columns = k.dims()[1];
        let (k, v) = (all.clone().narrow(1, 0, columns), all.narrow(1, columns, columns));
        planned_attention(q.clone(), k, v, plan, shape)
    }

    /// Values of this rank's entries as those of all, `[total, columns]`.
    pub(crate) fn collect(&self, values: Tensor<2>, entries: &[u32], total: usize) -> Result<Tensor<2>> {
        place_rows(values, entries, total, Readers::Alike, &self.comm, [COLLECT; 2])
    }
}

/// The elements as a tensor of the CPU device.
fn flat(elements: Vec<f32>) -> Tensor<1> {
    let shape = [elements.len()];
    Tensor::from_data(TensorData::new(elements, shape), &Device::flex())
}

/// One attention's way round the ranks.
struct Round {
    comm: Arc<dyn Communicator>,
    partition: Partition,
    shape: AttentionShape,
}

impl Round {
    /// The rank whose keys are here at `step`.
    fn owner(&self, step: usize) -> usize {
        let size = self.comm.size();
        (self.comm.rank() + size - step) % size
    }

    fn part(&self, owner: usize) -> AttentionPart {
        AttentionPart::new(self.partition.plan(self.comm.rank(), owner), self.shape)
    }

    /// Elements of a rank's keys, or values.
    fn elements(&self, rank: usize) -> usize {
        self.partition.count(rank) * self.shape.kv_heads * self.shape.head_dim
    }

    fn next(&self) -> usize {
        (self.comm.rank() + 1) % self.comm.size()
    }

    fn previous(&self) -> usize {
        self.owner(1)
    }

    fn send(&self, values: &[f32], phase: Phase) -> Result<()> {
        self.comm.send(flat(values.to_vec()), self.next(), phase)
    }

    fn receive(&self, elements: usize, phase: Phase) -> Result<Vec<f32>> {
        Ok(to_vec(&self.comm.recv(elements, self.previous(), phase)?))
    }

    fn forward(&self, q: &[f32], mut kv: Vec<f32>) -> Result<Attended> {
        let mut all: Option<Attended> = None;
        for step in 0..self.comm.size() {
            let is_last = step + 1 == self.comm.size();
            if !is_last {
                self.send(&kv, FORWARD)?;
            }
            let owner = self.owner(step);
            let (k, v) = kv.split_at(self.elements(owner));
            let part = self.part(owner).forward([q, k, v]);
            match &mut all {
                None => all = Some(part),
                Some(all) => merge(all, &part, self.shape),
            }
            if !is_last {
                kv = self.receive(2 * self.elements(self.owner(step + 1)), FORWARD)?;
            }
        }
        Ok(all.unwrap_or(Attended { out: Vec::new(), log_sums: Vec::new() }))
    }

    /// The gradients of q, k and v. Those of keys and values go round with them, and one step further home.
    fn backward(
        &self,
        [q, k, v]: [&[f32]; 3],
        (output, log_sums): (&[f32], &[f32]),
        grad: &[f32],
    ) -> Result<Vec<Vec<f32>>> {
        let mut kv = [k, v].concat();
        let mut of_kv = vec![0.0; kv.len()];
        let mut of_q = vec![0.0; q.len()];
        for step in 0..self.comm.size() {
            let is_last = step + 1 == self.comm.size();
            if !is_last {
                self.send(&kv, BACKWARD)?;
            }
            let owner = self.owner(step);
            let (k, v) = kv.split_at(self.elements(owner));
            let part = self.part(owner).backward([q, k, v], output, log_sums, grad);
            let [part_q, part_k, part_v] = part;
            add(&mut of_q, &part_q);
            let (of_k, of_v) = of_kv.split_at_mut(self.elements(owner));
            add(of_k, &part_k);
            add(of_v, &part_v);
            self.send(&of_kv, BACKWARD)?;
            let next = 2 * self.elements(self.owner(step + 1));
            if !is_last {
                kv = self.receive(next, BACKWARD)?;
            }
            of_kv = self.receive(next, BACKWARD)?;
        }
        let of_v = of_kv.split_off(self.elements(self.comm.rank()));
        Ok(vec![of_q, of_kv, of_v])
    }
}

fn add(sum: &mut [f32], values: &[f32]) {
    for (sum, value) in sum.iter_mut().zip(values) {
        *sum += value;
    }
}

/// Adds what the same queries get from further keys.
fn merge(all: &mut Attended, part: &Attended, AttentionShape { heads, head_dim, .. }: AttentionShape) {
    let queries = all.log_sums.len() / heads;
    for head in 0..heads {
        for query in 0..queries {
            let (sum, new) =
                (&mut all.log_sums[head * queries + query], part.log_sums[head * queries + query]);
            if new == f32::NEG_INFINITY {
                continue;
            }
            let largest = sum.max(new);
            let (old_weight, new_weight) = ((*sum - largest).exp(), (new - largest).exp());
            let total = old_weight + new_weight;
            *sum = largest + total.ln();
            let at = (query * heads + head) * head_dim;
            for (old, new) in all.out[at..at + head_dim].iter_mut().zip(&part.out[at..at + head_dim]) {
                *old = (*old * old_weight + new * new_weight) / total;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ThreadComm;

    fn wave(len: usize, seed: usize) -> Vec<f32> {
        (0..len).map(|at| ((at * 37 + seed * 11) % 101) as f32 / 50.0 - 1.0).collect()
    }

    /// Output and gradients of an attention, weighted so that none cancels.
    fn outcome(
        inputs: &[Tensor<2>; 3],
        attend: impl Fn(&[Tensor<2>; 3]) -> Result<Tensor<2>>,
    ) -> Result<Vec<Vec<f32>>> {
        let leaves = inputs.each_ref().map(|x| Tensor::from_inner(x.clone()).require_grad());
        let out = attend(&leaves)?;
        let weights =
            Tensor::<1>::from_floats(wave(out.dims().iter().product(), 9).as_slice(), &out.device());
        let grads = (out.clone() * weights.reshape(out.dims())).sum().backward();
        let of_leaves =
            leaves.iter().map(|leaf| leaf.grad(&grads).map_or_else(Vec::new, |grad| to_vec(&grad)));
        Ok(std::iter::once(to_vec(&out)).chain(of_leaves).collect())
    }

    #[test]
    fn with_all_keys_at_once_attention_is_that_of_the_ring() {
        let segment = |start, len, position, parent| Segment { start, len, position, parent };
        let segments: Arc<[Segment]> = [
            segment(0, 9, 0, None),
            segment(9, 5, 9, Some(0)),
            segment(14, 1, 9, Some(0)),
            segment(15, 12, 0, None),
        ]
        .into();
        for (softcap, window) in [(None, None), (Some(1.5), Some(4))] {
            let shape = AttentionShape { softcap, window, ..AttentionShape::new(4, 2, 6, 0.4) };
            let results = ThreadComm::run(3, |comm| {
                let ring = Ring::new(Arc::new(comm));
                let rows = ring.rows(&segments)?;
                let partition = Partition::new(&segments, 3)?;
                let own = |columns: usize, seed: usize| {
                    let all = wave(27 * columns, seed);
                    let own = rows.iter().flat_map(|&row| &all[row as usize * columns..][..columns]);
                    flat(own.copied().collect()).reshape([rows.len(), columns])
                };
                let inputs = [own(24, 1), own(12, 2), own(12, 3)];
                let round = outcome(&inputs, |qkv| ring.attend(qkv, &segments, shape))?;
                Ok((round, outcome(&inputs, |qkv| ring.gathered(qkv, &partition, shape))?))
            });
            for result in results {
                let (round, at_once) = result.unwrap();
                for (expected, got) in round.iter().zip(&at_once) {
                    assert_eq!(expected.len(), got.len());
                    let gaps = expected.iter().zip(got).map(|(a, b)| (a - b).abs());
                    assert!(!got.is_empty() && gaps.fold(0.0, f32::max) < 1e-5);
                }
            }
        }
    }
}
