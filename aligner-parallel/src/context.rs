//! Context parallelism: each rank has some rows of every sequence, and keys and values go round the ranks.
//!
//! Ring attention (Liu et al. 2023, arXiv:2310.01889) with an online softmax over the ranks' parts, on
//! packed batches. Each segment is cut into two chunks a rank, the i-th and the i-th from the end for the
//! same rank: under a causal mask all then have about the same work (Megatron-LM's zig-zag). The order of
//! ranks rotates from segment to segment, so that short segments do not all fall to one.

mod partition;

use std::sync::Arc;

use aligner_core::ops::host::{HostTensor, to_vec};
use aligner_core::ops::{Attended, AttentionPart, AttentionShape, Backward, external};
use aligner_core::{Communicator, Device, Error, Phase, Reduce, Result, Segment, Tensor};

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
        let round = Round { comm: self.comm.clone(), partition, shape };
        let host = qkv.each_ref().map(HostTensor::without_graph);
        let [q, k, v] = host.each_ref().map(HostTensor::as_slice);
        let Attended { out, log_sums } = round.forward(q, [k, v].concat())?;
        let shape = qkv[0].dims();
        let pullback = move |pass: Backward<'_>| {
            let lens = pass.inputs.iter().map(|input| input.len());
            round.backward(&pass, &log_sums).unwrap_or_else(|_| lens.map(|len| vec![0.0; len]).collect())
        };
        external(qkv.to_vec(), out, shape, Box::new(pullback))
    }

    /// Values of this rank's entries as those of all, `[total, columns]`.
    pub(crate) fn collect(&self, values: Tensor<2>, entries: &[u32], total: usize) -> Result<Tensor<2>> {
        let columns = values.dims()[1];
        let own = HostTensor::without_graph(&values);
        let mut all = vec![0.0; total * columns];
        for (row, &entry) in own.as_slice().chunks_exact(columns).zip(entries) {
            all[entry as usize * columns..][..columns].copy_from_slice(row);
        }
        // Every entry is one rank's; to the others it is 0.
        let all = Tensor::from_floats(all.as_slice(), &Device::flex());
        let all = to_vec(&self.comm.all_reduce(all, Reduce::Sum, COLLECT)?);
        let entries = entries.to_vec();
        let pullback = move |pass: Backward<'_>| {
            let mut grad = vec![0.0; pass.inputs[0].len()];
            for (row, &entry) in grad.chunks_exact_mut(columns).zip(&entries) {
                row.copy_from_slice(&pass.grad[entry as usize * columns..][..columns]);
            }
            vec![grad]
        };
        external(vec![values], all, [total, columns], Box::new(pullback))
    }
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
        self.comm.send(Tensor::from_floats(values, &Device::flex()), self.next(), phase)
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
    fn backward(&self, pass: &Backward<'_>, log_sums: &[f32]) -> Result<Vec<Vec<f32>>> {
        let q = pass.inputs[0];
        let mut kv = [pass.inputs[1], pass.inputs[2]].concat();
        let mut of_kv = vec![0.0; kv.len()];
        let mut of_q = vec![0.0; q.len()];
        for step in 0..self.comm.size() {
            let is_last = step + 1 == self.comm.size();
            if !is_last {
                self.send(&kv, BACKWARD)?;
            }
            let owner = self.owner(step);
            let (k, v) = kv.split_at(self.elements(owner));
            let part = self.part(owner).backward([q, k, v], pass.output, log_sums, pass.grad);
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
