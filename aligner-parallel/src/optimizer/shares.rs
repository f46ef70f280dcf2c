//! Which elements of which parameters a data-parallel rank updates.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use aligner_core::weights::UnreadTensor;
use aligner_core::{Communicator, Param, ParamSet, Phase, Result, Tensor};

use crate::cut::{share, zeros};
use crate::flat::{buckets, elements, present, sum_of_parts};
use crate::parts::slice_shape;

const SCATTER: Phase = Phase::new("sums of gradients, shared out");
const GATHER: Phase = Phase::new("updated parameters");
const STATE: Phase = Phase::new("the optimizer's state");

/// A state's tensor: name, shape, values.
pub(super) type Named = (String, Vec<usize>, Tensor<1>);
/// Shapes and values of a state's tensors, by name.
type Restored = BTreeMap<String, UnreadTensor>;

/// The trained parameters, end to end in buckets, of each of which every rank has an equal part.
pub(super) struct Shares {
    ranks: Arc<dyn Communicator>,
    /// By bucket: the parameters in it, with their ranges in it.
    buckets: Vec<Vec<(usize, Range<usize>)>>,
}

impl Shares {
    pub(super) fn new(params: &ParamSet, ranks: Arc<dyn Communicator>) -> Self {
        let all: Vec<&Param> = params.iter().collect();
        let trained: Vec<usize> = (0..all.len()).filter(|&at| all[at].trainable).collect();
        let bucket = |places: &[usize]| {
            let mut start = 0;
            let range = |&at: &usize| {
                start += all[at].elements();
                (at, start - all[at].elements()..start)
            };
            places.iter().map(range).collect()
        };
        let buckets = buckets(&trained, |at| all[at].elements()).into_iter().map(bucket).collect();
        Self { ranks, buckets }
    }

    /// Elements of a bucket, and a rank's part of it.
    fn part(&self, bucket: &[(usize, Range<usize>)], rank: usize) -> Range<usize> {
        let elements = bucket.last().map_or(0, |(_, range)| range.end);
        share(elements, rank, self.ranks.size())
    }

    /// What a rank has of each parameter of a bucket: the parameter, where in it, and where in the bucket.
    fn held(
        &self,
        bucket: &[(usize, Range<usize>)],
        rank: usize,
    ) -> Vec<(usize, Range<usize>, Range<usize>)> {
        let part = self.part(bucket, rank);
        let held = |(at, range): &(usize, Range<usize>)| {
            let both = range.start.max(part.start)..range.end.min(part.end);
            (!both.is_empty()).then(|| (*at, both.start - range.start..both.end - range.start, both))
        };
        bucket.iter().filter_map(held).collect()
    }

    fn mine(&self) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        let rank = self.ranks.rank();
        self.buckets.iter().flat_map(move |bucket| self.held(bucket, rank)).map(|(at, range, _)| (at, range))
    }

    pub(super) fn elements(&self) -> usize {
        self.mine().map(|(_, range)| range.len()).sum()
    }

    /// Sums gradients over the ranks; what is left is this rank's own elements of each parameter.
    pub(super) fn reduce(
        &self,
        params: &ParamSet,
        gradients: &mut [Option<Tensor<1>>],
    ) -> Result<Vec<Option<Tensor<1>>>> {
        let present = present(self.ranks.as_ref(), gradients.iter().map(Option::is_some), SCATTER)?;
        let all: Vec<&Param> = params.iter().collect();
        let mut own = vec![None; all.len()];
        for bucket in &self.buckets {
            let parts = bucket.iter().map(|(at, _)| {
                gradients[*at].take().unwrap_or_else(|| zeros(all[*at], &all[*at].value.device()))
            });
            let flat = Tensor::cat(parts.collect(), 0);
            let of_rank = |rank| elements(&flat, self.part(bucket, rank));
            let parts = (0..self.ranks.size()).map(of_rank).collect();
            let sum = sum_of_parts(self.ranks.as_ref(), parts, SCATTER)?;
            let start = self.part(bucket, self.ranks.rank()).start;
            for (at, _, place) in self.held(bucket, self.ranks.rank()) {
                own[at] = present[at].then(|| sum.clone().narrow(0, place.start - start, place.len()));
            }
        }
        Ok(own)
    }

    /// This rank's elements of the parameters, under the parameters' names.
    pub(super) fn own(&self, params: &ParamSet) -> Result<ParamSet> {
        let all: Vec<&Param> = params.iter().collect();
        let mut own = ParamSet::default();
        for (at, range) in self.mine() {
            let shape = slice_shape(all[at], range.len());
            own.insert(all[at].name.as_str(), &shape, elements(&all[at].value, range))?;
        }
        Ok(own)
    }

    /// Of gradients for all parameters those for [`Shares::own`].
    pub(super) fn of_own(&self, gradients: &[Option<Tensor<1>>]) -> Vec<Option<Tensor<1>>> {
        self.mine().map(|(at, _)| gradients[at].clone()).collect()
    }

    /// Writes every rank's elements to every rank's parameters.
    pub(super) fn spread(&self, own: &ParamSet, params: &mut ParamSet) -> Result<()> {
        for bucket in &self.buckets {
            let value = |at| own.by_name(&name(params, at)).map(|param| param.value.clone());
            let parts = self.collect(params, bucket, value)?;
            let mut all: Vec<&mut Param> = params.iter_mut().collect();
            for (rank, values) in parts.iter().enumerate() {
                let start = self.part(bucket, rank).start;
                for (at, range, place) in self.held(bucket, rank) {
                    let new = elements(values, place.start - start..place.end - start);
                    // In place, unless somebody else has the parameter too.
                    all[at].value.inplace(|value| value.slice_assign([range], new));
                }
            }
        }
        Ok(())
    }

    /// Every rank's elements of a bucket.
    fn collect(
        &self,
        params: &ParamSet,
        bucket: &[(usize, Range<usize>)],
        own: impl Fn(usize) -> Option<Tensor<1>>,
    ) -> Result<Vec<Tensor<1>>> {
        let device = params.device();
        let zeros = |len| Tensor::zeros([len], &device);
        let held = self.held(bucket, self.ranks.rank());
        let mut values: Vec<Tensor<1>> =
            held.into_iter().map(|(at, range, _)| own(at).unwrap_or_else(|| zeros(range.len()))).collect();
        if values.is_empty() {
            values.push(zeros(0));
        }
        self.ranks.all_gather_uneven(Tensor::cat(values, 0), GATHER)
    }

    /// The state of this rank's elements as that of its whole parameters.
    pub(super) fn gather(
        &self,
        params: &ParamSet,
        kinds: &[&str],
        tensors: Vec<Named>,
        steps: &BTreeMap<String, u64>,
    ) -> Result<(Vec<Named>, BTreeMap<String, u64>)> {
        let own: BTreeMap<String, Tensor<1>> =
            tensors.into_iter().map(|(name, _, tensor)| (name, tensor)).collect();
        let all: Vec<&Param> = params.iter().collect();
        let mut counts: Vec<f64> =
            all.iter().map(|param| steps.get(&param.name).map_or(0.0, |&steps| steps as f64)).collect();
        self.ranks.all_reduce_host(&mut counts, aligner_core::Reduce::Max, STATE)?;
        let mut whole = Vec::new();
        for bucket in &self.buckets {
            for kind in kinds {
                let full = |at: usize| format!("{kind}.{}", all[at].name);
                let flat = Tensor::cat(self.collect(params, bucket, |at| own.get(&full(at)).cloned())?, 0);
                for (at, range) in bucket.iter().filter(|(at, _)| counts[*at] > 0.0) {
                    let tensor = flat.clone().narrow(0, range.start, range.len());
                    whole.push((full(*at), all[*at].shape.clone(), tensor));
                }
            }
        }
        let counts = all.iter().zip(counts).filter(|(_, count)| *count > 0.0);
        Ok((whole, counts.map(|(param, count)| (param.name.clone(), count as u64)).collect()))
    }

    /// Of the state of whole parameters that of this rank's elements.
    pub(super) fn pick(
        &self,
        params: &ParamSet,
        kinds: &[&str],
        tensors: &Restored,
        steps: &BTreeMap<String, u64>,
    ) -> (Restored, BTreeMap<String, u64>) {
        let all: Vec<&Param> = params.iter().collect();
        let (mut own, mut counts) = (BTreeMap::new(), BTreeMap::new());
        for (at, range) in self.mine() {
            let param = all[at];
            if let Some(&count) = steps.get(&param.name) {
                counts.insert(param.name.clone(), count);
            }
            for kind in kinds {
                let full = format!("{kind}.{}", param.name);
                if let Some((_, unread)) = tensors.get(&full) {
                    let part = unread.part(std::slice::from_ref(&range));
                    own.insert(full, (slice_shape(param, part.len()), part));
                }
            }
        }
        (own, counts)
    }
}

fn name(params: &ParamSet, at: usize) -> String {
    params.iter().nth(at).map_or_else(String::new, |param| param.name.clone())
}
