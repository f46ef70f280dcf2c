//! Parameters that are shared out over data-parallel ranks and gathered by layer as they are used (`ZeRO`
//! stage 3, Rajbhandari et al. 2020, arXiv:1910.02054; `PyTorch`'s FSDP).

use std::ops::Range;
use std::sync::Arc;

use aligner_core::model::{Part, PartSource};
use aligner_core::ops::host::with_slice;
use aligner_core::weights::{Unread, UnreadTensor};
use aligner_core::{Communicator, Param, ParamSet, Phase, Reduce, Result, Tensor};

use crate::cut::share;
use crate::flat::{elements, present, sum_of_parts};

const GATHER: Phase = Phase::new("parameters of a layer");
const SCATTER: Phase = Phase::new("gradients of a layer");

/// How the parameters of a rank's part of a model are shared out.
#[derive(Clone)]
pub(crate) struct SharedOut {
    ranks: Arc<dyn Communicator>,
    /// Shapes of the parameters.
    shapes: Arc<Vec<Vec<usize>>>,
}

/// The shared parameters as the source of a model's parts.
pub(crate) struct Gathering<'a> {
    pub(crate) how: &'a SharedOut,
    /// This rank's elements of each parameter.
    pub(crate) own: &'a ParamSet,
}

impl SharedOut {
    /// Shares out `params`; returns what this rank keeps.
    pub(crate) fn new(params: &ParamSet, ranks: Arc<dyn Communicator>) -> Result<(Self, ParamSet)> {
        let how = Self { shapes: Arc::new(params.iter().map(|param| param.shape.clone()).collect()), ranks };
        let mut own = ParamSet::default();
        for param in params.iter() {
            let range = how.range(param.elements(), how.ranks.rank());
            let slice = match &param.unread {
                Some(unread) => unread.part(&[range]).read()?,
                None => with_slice(&param.value, |values| values[range].to_vec()),
            };
            let shape = slice_shape(param, slice.len());
            own.insert_data(param.name.as_str(), &shape, slice, &param.value.device())?;
            if let Some(added) = own.iter_mut().last() {
                added.trainable = param.trainable;
            }
        }
        Ok((how, own))
    }

    pub(crate) fn ranks(&self) -> usize {
        self.ranks.size()
    }

    fn range(&self, elements: usize, rank: usize) -> Range<usize> {
        share(elements, rank, self.ranks.size())
    }

    fn elements(&self, at: usize) -> usize {
        self.shapes[at].iter().product()
    }

    /// The whole tensors, cut like the parameters at `places`, of which this rank has `own`.
    pub(crate) fn assemble(&self, places: &[usize], own: Vec<Tensor<1>>) -> Result<Vec<Tensor<1>>> {
        if own.is_empty() {
            return Ok(Vec::new());
        }
        let parts = self.ranks.all_gather_uneven(Tensor::cat(own, 0), GATHER)?;
        let mut starts = vec![0; parts.len()];
        let whole = places.iter().map(|&at| {
            let of_rank = |(rank, (values, start)): (usize, (&Tensor<1>, &mut usize))| {
                let len = self.range(self.elements(at), rank).len();
                *start += len;
                elements(values, *start - len..*start)
            };
            Tensor::cat(parts.iter().zip(&mut starts).enumerate().map(of_rank).collect(), 0)
        });
        Ok(whole.collect())
    }

    /// This rank's elements of a tensor like the parameter at `at`, with their shape.
    pub(crate) fn part(&self, param: &Param, at: usize, whole: &Unread) -> UnreadTensor {
        let part = whole.part(&[self.range(self.elements(at), self.ranks.rank())]);
        (slice_shape(param, part.len()), part)
    }

    /// The shape of the whole parameter at `at`.
    pub(crate) fn shape(&self, at: usize) -> &[usize] {
        &self.shapes[at]
    }

    /// `own` with the parameters that `chosen` chooses whole.
    pub(crate) fn gather(&self, own: &ParamSet, chosen: impl Fn(&Param) -> bool) -> Result<ParamSet> {
        let places: Vec<usize> =
            own.iter().enumerate().filter(|(_, param)| chosen(param)).map(|(at, _)| at).collect();
        let all: Vec<&Param> = own.iter().collect();
        let slices = places.iter().map(|&at| all[at].value.clone()).collect();
        let mut whole = places.iter().zip(self.assemble(&places, slices)?).peekable();
        let mut set = ParamSet::default();
        for (at, param) in own.iter().enumerate() {
            match whole.next_if(|(place, _)| **place == at) {
                Some((_, value)) => set.insert(param.name.as_str(), self.shape(at), value)?,
                None => set.insert(param.name.as_str(), &param.shape, param.value.clone())?,
            };
            if let Some(added) = set.iter_mut().last() {
                added.trainable = param.trainable;
            }
        }
        Ok(set)
    }
}

impl PartSource for Gathering<'_> {
    fn gather(&self, part: Part) -> Result<ParamSet> {
        self.how.gather(self.own, |param| part.has(&param.name))
    }

    fn reduce(&self, part: Part, mut gradients: Vec<Option<Tensor<1>>>) -> Result<Vec<Option<Tensor<1>>>> {
        let ranks = &self.how.ranks;
        gradients.resize(self.own.len(), None);
        let of_part: Vec<usize> = (self.own.iter().enumerate())
            .filter(|(_, param)| part.has(&param.name))
            .map(|(at, _)| at)
            .collect();
        let present = present(ranks.as_ref(), of_part.iter().map(|&at| gradients[at].is_some()), SCATTER)?;
        let places: Vec<usize> =
            of_part.into_iter().zip(present).filter(|(_, present)| *present).map(|(at, _)| at).collect();
        let mut kept = vec![None; gradients.len()];
        if places.is_empty() {
            return Ok(kept);
        }
        let own: Vec<&Param> = self.own.iter().collect();
        let whole: Vec<Tensor<1>> = (places.iter())
            .map(|&at| {
                let zeros = || Tensor::zeros([self.how.elements(at)], &own[at].value.device());
                gradients[at].take().unwrap_or_else(zeros)
            })
            .collect();
        let of_rank = |rank: usize| {
            let slices = places.iter().zip(&whole);
            let slice = |(&at, whole): (&usize, &Tensor<1>)| {
                elements(whole, self.how.range(self.how.elements(at), rank))
            };
            Tensor::cat(slices.map(slice).collect(), 0)
        };
        let parts = (0..ranks.size()).map(of_rank).collect();
        let sum = sum_of_parts(ranks.as_ref(), parts, SCATTER)?;
        let mut start = 0;
        for at in places {
            let len = self.how.range(self.how.elements(at), ranks.rank()).len();
            kept[at] = Some(elements(&sum, start..start + len));
            start += len;
        }
        Ok(kept)
    }

    fn passes(&self, own: usize) -> Result<usize> {
        let mut most = [own as f64];
        self.how.ranks.all_reduce_host(&mut most, Reduce::Max, SCATTER)?;
        Ok(most[0] as usize)
    }
}

/// A slice of a parameter has the parameter's rank: whether it decays hangs on that.
pub(crate) fn slice_shape(param: &Param, len: usize) -> Vec<usize> {
    let mut shape = vec![1; param.shape.len()];
    if let Some(last) = shape.last_mut() {
        *last = len;
    }
    shape
}
