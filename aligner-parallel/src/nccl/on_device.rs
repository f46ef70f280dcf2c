//! One collective of a group on its devices: the meeting before, and NCCL's part.

use std::sync::{Arc, PoisonError};

use aligner_core::{Phase, Result, Tensor};
use burn::tensor::{DType, TensorData};

use super::NcclComm;
use super::library::{ID_WORDS, Id, Span, Told, Work, new_id};
use super::memory::{Chunk, Memory, element};
use super::rank::{Line, Rank, Trouble, Watch};
use crate::call::{Call, Element, ON_DEVICE, Op, name_ranks};
use crate::collectives::call;
use crate::failure::Failure;
use crate::part::{Part, Parts};
use crate::transport::{Deadline, Met, Transport};

/// A tensor that NCCL can have.
#[derive(Clone)]
pub(super) struct OnDevice {
    /// Outside of any graph.
    pub(super) plain: Tensor<1>,
    pub(super) is_autodiff: bool,
    pub(super) element: Element,
    pub(super) dtype: DType,
    pub(super) elements: usize,
}

impl OnDevice {
    pub(super) fn new(values: &Tensor<1>, memory: &dyn Memory) -> Option<Self> {
        let (dtype, is_autodiff) = (values.dtype(), values.is_autodiff());
        let element = element(dtype).filter(|_| memory.has(&values.device()))?;
        let plain = if is_autodiff { values.clone().inner() } else { values.clone() };
        Some(Self { elements: plain.dims()[0], plain, is_autodiff, element, dtype })
    }

    /// In f32 where it was in halves, as whoever receives a letter expects.
    pub(super) fn without_halves(self) -> Self {
        if matches!(self.element, Element::F32 | Element::F64) {
            return self;
        }
        Self { plain: self.plain.cast(DType::F32), element: Element::F32, dtype: DType::F32, ..self }
    }

    /// No elements, where and as these are.
    pub(super) fn nothing(&self) -> Tensor<1> {
        let none = TensorData::new(Vec::<f32>::new(), [0]);
        Tensor::from_data(none, (&self.plain.device(), self.dtype))
    }

    /// A result as the values were.
    pub(super) fn like(&self, result: Tensor<1>) -> Tensor<1> {
        if self.is_autodiff { Tensor::from_inner(result) } else { result }
    }

    /// What the other ranks see of an operation on it.
    pub(super) fn call(&self, op: Op, phase: Phase) -> Call {
        Call { stage: ON_DEVICE, ..call(op, self.element, self.elements, phase) }
    }
}

/// A meeting that has taken place: all ranks are there, with calls that agree.
pub(super) struct Meeting<'a> {
    rank: &'a Rank,
    line: &'a Line,
    watch: Watch<'a>,
    /// Elements that each rank brings for this one, where it was asked.
    pub(super) sizes: Vec<usize>,
}

impl Meeting<'_> {
    pub(super) fn hold(&self, tensor: &Tensor<1>) -> Told<Chunk> {
        self.rank.memory.hold(tensor.clone())
    }

    pub(super) fn room(&self, elements: usize, dtype: DType) -> Told<Chunk> {
        self.rank.memory.room(elements, dtype)
    }

    /// Does the work with these chunks.
    pub(super) fn run(&self, work: Work<'_>, chunks: Vec<Chunk>) -> Result<Vec<Chunk>, Trouble> {
        self.rank.run(self.line, work, chunks, self.watch)
    }
}

impl<T: Transport> NcclComm<T> {
    /// A collective from all of `own` to `elements` of the same type; where there are none, the ranks meet alone.
    pub(super) fn combined(
        &self,
        own: &OnDevice,
        op: Op,
        elements: usize,
        phase: Phase,
        work: impl FnOnce(Span, Span) -> Work<'static>,
    ) -> Result<Tensor<1>> {
        self.collective(&own.call(op, phase), phase, None, |meeting| {
            if own.elements == 0 {
                return Ok(own.plain.clone());
            }
            let (from, to) = (meeting.hold(&own.plain)?, meeting.room(elements, own.dtype)?);
            Ok(meeting.run(work(from.span, to.span), vec![from, to])?.remove(1).into_tensor())
        })
    }

    /// Meets all ranks of the group for a call, with a number for each of them, and then does its work.
    pub(super) fn collective<R>(
        &self,
        call: &Call,
        phase: Phase,
        sizes: Option<Vec<u64>>,
        work: impl FnOnce(&Meeting<'_>) -> Result<R, Trouble>,
    ) -> Result<R> {
        let transport = &self.control.transport;
        let done = self.control.perform(call, None, phase, |deadline| {
            let attend = || transport.attend_to(&self.control.group, call);
            let watch = Watch { attend: &attend, is_late: &|| deadline.left().is_zero() };
            let mut line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
            let (sizes, id) = self.meet(call, deadline, sizes, line.is_none())?;
            let explain = |trouble| self.explain(call, deadline, trouble);
            let line = match &*line {
                Some(line) => line.clone(),
                None => line.insert(self.form(id, watch).map_err(explain)?).clone(),
            };
            work(&Meeting { rank: &self.rank, line: &line, watch, sizes }).map_err(explain)
        });
        self.guard(done)
    }

    /// The meeting: a number of each rank and, from the first, the identity of a communicator that is new.
    fn meet(
        &self,
        call: &Call,
        deadline: Deadline,
        sizes: Option<Vec<u64>>,
        is_new: bool,
    ) -> Met<(Vec<usize>, Option<Id>)> {
        let (transport, group) = (&self.control.transport, &self.control.group);
        let id = (is_new && group.place == 0).then(new_id).transpose();
        let id = id.map_err(|text| transport.fail(self.device_failure(call, &text)))?;
        let sizes = sizes.unwrap_or_else(|| vec![0; group.ranks.len()]);
        let part = |size| Part::new(std::iter::once(size).chain(id.into_iter().flatten()).collect());
        let parts =
            transport.exchange(group, call, deadline, Parts::Each(sizes.into_iter().map(part).collect()))?;
        let words = |part: &Part| part.elements::<u64>().first().map_or(0, |&size| size as usize);
        let id = parts[0].elements::<u64>().get(1..=ID_WORDS).and_then(|words| words.try_into().ok());
        Ok((parts.iter().map(words).collect(), id))
    }

    fn form(&self, id: Option<Id>, watch: Watch<'_>) -> Result<Arc<Line>, Trouble> {
        let id = id.ok_or_else(|| Trouble::Device("the first rank has told no identity".into()))?;
        self.rank.form(id, self.control.group.ranks.len(), self.control.group.place, watch)
    }

    /// What keeps this rank's device from a call.
    pub(super) fn device_failure(&self, call: &Call, text: &str) -> Arc<Failure> {
        let rank = self.control.group.rank();
        Failure::new(vec![rank], format!("the device of rank {rank} failed in {call}: {text}"))
    }

    /// The failure that a trouble is, which all ranks hear of; NCCL ends.
    pub(super) fn explain(&self, call: &Call, deadline: Deadline, trouble: Trouble) -> Arc<Failure> {
        let ranks = &self.control.group.ranks;
        let failure = match trouble {
            Trouble::Failure(failure) => failure,
            Trouble::Device(text) => self.control.transport.fail(self.device_failure(call, &text)),
            Trouble::Late => {
                let (who, waited) = (name_ranks(ranks), deadline.waited());
                let cause = format!(
                    "{who} all came to {call}, but NCCL did not end it within {waited} ms; it does not say whose device is \
                     at fault"
                );
                self.control.transport.fail(Failure::new(ranks.to_vec(), cause))
            }
        };
        self.rank.abort();
        failure
    }
}
