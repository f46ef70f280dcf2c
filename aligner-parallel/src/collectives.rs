//! The collectives, once for every transport.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use aligner_core::{CollectiveError, Communicator, Device, Error, Phase, Reduce, Result, Tensor};

use crate::call::{Call, Element, Op, name_ranks};
use crate::failure::Failure;
use crate::form::{Form, concat};
use crate::part::{Part, Parts};
use crate::reduce::reduce_parts;
use crate::solo::Solo;
use crate::transport::{Deadline, Group, Met, Transport};

/// From how many elements on each rank reduces a part of its own, in place of all of them.
const SHARED_WORK: usize = 1 << 14;

/// One rank of a group, over threads ([`ThreadComm`](crate::ThreadComm)) or processes.
pub struct Ranks<T> {
    pub(crate) transport: Arc<T>,
    pub(crate) group: Group,
    /// The least number that no group of this rank has had. It is locked during a split, so that no
    /// other thread of this rank offers the same one.
    next_group: Arc<Mutex<u64>>,
    /// The deadline of phases that have the default one, in milliseconds.
    deadline: Arc<AtomicU64>,
    /// Where received values lie.
    pub(crate) device: Device,
}

impl<T: Transport> Ranks<T> {
    /// All ranks of a run.
    pub(crate) fn all(transport: T, rank: usize, run: usize) -> Self {
        Self {
            transport: Arc::new(transport),
            group: Group::all(rank, run),
            next_group: Arc::new(Mutex::new(1)),
            deadline: Arc::new(AtomicU64::new(Phase::DEADLINE.as_millis() as u64)),
            device: Device::flex(),
        }
    }

    /// With what [`Communicator::recv`] returns on this device, in place of the CPU's.
    #[must_use]
    pub fn on(self, device: Device) -> Self {
        Self { device, ..self }
    }

    pub(crate) fn limit(&self, phase: Phase) -> Duration {
        match phase.deadline {
            Phase::DEADLINE => Duration::from_millis(self.deadline.load(Ordering::Relaxed)),
            own => own,
        }
    }

    /// Notes the call, does its work and says on failure what this rank was doing.
    pub(crate) fn perform<R>(
        &self,
        call: &Call,
        peer: Option<usize>,
        phase: Phase,
        work: impl FnOnce(Deadline) -> Met<R>,
    ) -> Result<R> {
        let recorder = self.transport.recorder();
        let number = recorder.begin(call, &self.group.ranks, peer.map(|place| self.group.ranks[place]));
        let failure = match work(Deadline::after(self.limit(phase))) {
            Ok(done) => {
                recorder.end(number);
                return Ok(done);
            }
            Err(failure) => failure,
        };
        Err(self.failed(call, &failure))
    }

    /// A failure of the run as this rank tells it, which was about to do this.
    fn failed(&self, call: &Call, failure: &Failure) -> Error {
        let history = failure.history.get_or_init(|| self.transport.history()).clone();
        let (culprits, cause) = (failure.culprits.clone(), failure.cause.clone());
        let (rank, size) = (self.group.rank(), self.group.run);
        let among = if self.size() == size {
            String::new()
        } else {
            format!(" among {}", name_ranks(&self.group.ranks))
        };
        let operation = format!("{call}{among}");
        CollectiveError { rank, size, operation, culprits, cause, history }.into()
    }

    /// A meeting of one exchange.
    fn meet(&self, call: &Call, phase: Phase, parts: Parts) -> Result<Vec<Part>> {
        self.perform(call, None, phase, |deadline| {
            self.transport.exchange(&self.group, call, deadline, parts)
        })
    }

    /// What every rank's parts reduce to, as one part or several in order.
    fn reduced(&self, own: Part, element: Element, op: Reduce, phase: Phase) -> Result<Vec<Part>> {
        let elements = own.bytes().len() / element.size();
        let call = call(Op::AllReduce(op), element, elements, phase);
        let exchange =
            |call: &Call, deadline, parts| self.transport.exchange(&self.group, call, deadline, parts);
        self.perform(&call, None, phase, |deadline| {
            if elements < SHARED_WORK {
                let parts = exchange(&call, deadline, Parts::Same(own))?;
                return Ok(vec![reduce_parts(&parts, element, op)]);
            }
            let parts = exchange(&call, deadline, Parts::Each(cut(&own, element, self.size())))?;
            let mine = reduce_parts(&parts, element, op);
            exchange(&Call { stage: 1, ..call.clone() }, deadline, Parts::Same(mine))
        })
    }

    /// This rank in its part of the group ([`Communicator::split`]); none where it is alone there.
    pub(crate) fn part_of(&self, color: usize, key: usize, phase: Phase) -> Result<Option<Self>> {
        let mut next = self.next_group.lock().unwrap_or_else(PoisonError::into_inner);
        let own = Part::new(vec![color as u64, key as u64, *next]);
        let all = self.meet(&call(Op::Split, Element::F64, 0, phase), phase, Parts::Same(own))?;
        // A number that is new to every rank, so that no two groups of a rank have the same.
        let id = all.iter().map(|part| part.elements::<u64>()[2]).max().unwrap_or(*next);
        *next = id + 1;
        drop(next);
        let mut members: Vec<(u64, usize)> = Vec::new();
        for (part, &rank) in all.iter().zip(self.group.ranks.iter()) {
            if part.elements::<u64>()[0] == color as u64 {
                members.push((part.elements::<u64>()[1], rank));
            }
        }
        members.sort_by_key(|&(key, _)| key);
        let ranks: Arc<[usize]> = members.into_iter().map(|(_, rank)| rank).collect();
        if ranks.len() == 1 {
            return Ok(None);
        }
        let place = ranks.iter().position(|&rank| rank == self.group.rank()).unwrap_or_default();
        let group = Group { id, ranks, place, run: self.group.run };
        Ok(Some(Self {
            transport: self.transport.clone(),
            group,
            next_group: self.next_group.clone(),
            deadline: self.deadline.clone(),
            device: self.device.clone(),
        }))
    }

    /// A call on values that go over the host's memory.
    #[cfg(any(feature = "nccl", feature = "nccl-host"))]
    pub(crate) fn call_of(&self, op: Op, values: &Tensor<1>, phase: Phase) -> Call {
        let form = Form::of(values);
        call(op, form.element, form.elements, phase)
    }

    pub(crate) fn check_place(&self, place: usize, operation: &str, phase: Phase) -> Result<()> {
        if place < self.size() {
            return Ok(());
        }
        Err(self.invalid(phase, &format!("{operation} names rank {place} of a group of {}", self.size())))
    }

    pub(crate) fn check_peer(&self, place: usize, operation: &str, phase: Phase) -> Result<()> {
        self.check_place(place, operation, phase)?;
        if place != self.group.place {
            return Ok(());
        }
        Err(self.invalid(phase, &format!("{operation} names this rank itself")))
    }

    pub(crate) fn invalid(&self, phase: Phase, message: &str) -> Error {
        Error::Invalid(format!("rank {} of {}, {}: {message}", self.group.rank(), self.group.run, phase.name))
    }
}

pub(crate) fn call(op: Op, element: Element, elements: usize, phase: Phase) -> Call {
    Call { op, element, elements, stage: 0, phase: phase.name.into() }
}

/// `ranks` slices of about the same size.
fn cut(part: &Part, element: Element, ranks: usize) -> Vec<Part> {
    let elements = part.bytes().len() / element.size();
    let slice = |rank| part.slice(rank * elements / ranks..(rank + 1) * elements / ranks, element.size());
    (0..ranks).map(slice).collect()
}

impl<T: Transport> Communicator for Ranks<T> {
    fn rank(&self) -> usize {
        self.group.place
    }

    fn size(&self) -> usize {
        self.group.ranks.len()
    }

    fn all_reduce(&self, values: Tensor<1>, op: Reduce, phase: Phase) -> Result<Tensor<1>> {
        let form = Form::of(&values);
        Ok(form.tensor(&self.reduced(form.part(values), form.element, op, phase)?))
    }

    fn all_reduce_host(&self, values: &mut [f64], op: Reduce, phase: Phase) -> Result<()> {
        let reduced = self.reduced(Part::new(values.to_vec()), Element::F64, op, phase)?;
        values.copy_from_slice(&concat(&reduced));
        Ok(())
    }

    fn all_gather(&self, values: Tensor<1>, phase: Phase) -> Result<Tensor<1>> {
        let form = Form::of(&values);
        let call = call(Op::AllGather, form.element, form.elements, phase);
        Ok(form.tensor(&self.meet(&call, phase, Parts::Same(form.part(values)))?))
    }

    fn reduce_scatter(&self, values: Tensor<1>, phase: Phase) -> Result<Tensor<1>> {
        let form = Form::of(&values);
        if !form.elements.is_multiple_of(self.size()) {
            let message = format!("reduce_scatter of {} elements over {} ranks", form.elements, self.size());
            return Err(self.invalid(phase, &message));
        }
        let call = call(Op::ReduceScatter, form.element, form.elements, phase);
        let parts = Parts::Each(cut(&form.part(values), form.element, self.size()));
        let mine = reduce_parts(&self.meet(&call, phase, parts)?, form.element, Reduce::Sum);
        Ok(form.tensor(&[mine]))
    }

    fn broadcast(&self, values: Tensor<1>, root: usize, phase: Phase) -> Result<Tensor<1>> {
        self.check_place(root, "broadcast", phase)?;
        let form = Form::of(&values);
        let call = call(Op::Broadcast(root), form.element, form.elements, phase);
        let own = if root == self.group.place { form.part(values) } else { Part::empty() };
        let mut parts = self.meet(&call, phase, Parts::Same(own))?;
        Ok(form.tensor(&[parts.swap_remove(root)]))
    }

    fn all_to_all(&self, parts: Vec<Tensor<1>>, phase: Phase) -> Result<Vec<Tensor<1>>> {
        let forms: Vec<Form> = parts.iter().map(Form::of).collect();
        let uniform = forms.iter().all(|form| form.element == forms[0].element);
        if parts.len() != self.size() || !uniform {
            let (ranks, parts) = (self.size(), parts.len());
            let message =
                format!("all_to_all takes {ranks} parts of one type, one for each rank; got {parts}");
            return Err(self.invalid(phase, &message));
        }
        let elements = forms.iter().map(|form| form.elements).sum();
        let call = call(Op::AllToAll, forms[0].element, elements, phase);
        let parts = forms.iter().zip(parts).map(|(form, part)| form.part(part)).collect();
        let parts = self.meet(&call, phase, Parts::Each(parts))?;
        Ok(parts.into_iter().map(|part| forms[0].tensor(&[part])).collect())
    }

    fn send(&self, values: Tensor<1>, to: usize, phase: Phase) -> Result<()> {
        self.check_peer(to, "send", phase)?;
        let form = Form::of(&values);
        let call = call(Op::Send, form.element, form.elements, phase);
        let part = form.part(values);
        self.perform(&call, Some(to), phase, |_| self.transport.send(&self.group, &call, to, part))
    }

    fn recv(&self, elements: usize, from: usize, phase: Phase) -> Result<Tensor<1>> {
        self.check_peer(from, "recv", phase)?;
        let form = Form::on(&self.device, elements);
        let call = call(Op::Recv, form.element, elements, phase);
        let receive = |deadline| self.transport.recv(&self.group, &call, deadline, from);
        Ok(form.tensor(&[self.perform(&call, Some(from), phase, receive)?]))
    }

    fn split(&self, color: usize, key: usize, phase: Phase) -> Result<Arc<dyn Communicator>> {
        Ok(match self.part_of(color, key, phase)? {
            Some(part) => Arc::new(part),
            None => Arc::new(Solo),
        })
    }

    fn all_gather_uneven(&self, values: Tensor<1>, phase: Phase) -> Result<Vec<Tensor<1>>> {
        let form = Form::of(&values);
        let call = call(Op::AllGatherUneven, form.element, form.elements, phase);
        let parts = self.meet(&call, phase, Parts::Same(form.part(values)))?;
        Ok(parts.into_iter().map(|part| form.tensor(&[part])).collect())
    }

    fn take(&self, round: u64, _taken: u64, phase: Phase) -> Result<u64> {
        let call = call(Op::Take, Element::F64, 1, phase);
        self.perform(&call, (self.group.place > 0).then_some(0), phase, |deadline| {
            self.transport.take(&self.group, &call, deadline, round)
        })
    }

    fn attend(&self, phase: Phase) -> Result<()> {
        let call = call(Op::Take, Element::F64, 0, phase);
        self.transport.attend().map_err(|failure| self.failed(&call, &failure))
    }

    fn set_deadline(&self, deadline: Duration) {
        self.deadline.store(deadline.as_millis() as u64, Ordering::Relaxed);
    }

    fn barrier(&self, phase: Phase) -> Result<()> {
        self.meet(&call(Op::Barrier, Element::F64, 0, phase), phase, Parts::Same(Part::empty()))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;

    use super::*;
    use crate::ThreadComm;

    const PHASE: Phase = Phase::new("a test's phase");

    fn tensor(values: &[f32], dtype: DType) -> Tensor<1> {
        Tensor::<1>::from_floats(values, &Device::flex()).cast(dtype)
    }

    fn values(tensor: &Tensor<1>) -> Vec<f64> {
        tensor.to_data().iter::<f64>().collect()
    }

    /// Runs on three ranks, which all have to succeed.
    fn on_three(work: impl Fn(&ThreadComm) -> Result<()> + Sync) {
        for result in ThreadComm::run(3, |comm| work(&comm)) {
            result.unwrap();
        }
    }

    #[test]
    fn results_have_the_type_that_came() {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            on_three(|comm| {
                let own = || tensor(&[comm.rank() as f32, 0.5, 1.0], dtype);
                let sum = comm.all_reduce(own(), Reduce::Sum, PHASE)?;
                assert_eq!((values(&sum), sum.dtype()), (vec![3.0, 1.5, 3.0], dtype));
                let parts = comm.all_to_all(vec![own(), own(), own()], PHASE)?;
                for (rank, part) in parts.iter().enumerate() {
                    assert_eq!((values(part), part.dtype()), (vec![rank as f64, 0.5, 1.0], dtype));
                }
                let part = comm.reduce_scatter(own(), PHASE)?;
                assert_eq!((values(&part), part.dtype()), (vec![[3.0, 1.5, 3.0][comm.rank()]], dtype));
                Ok(())
            });
        }
    }

    #[test]
    fn halves_are_summed_in_f32() {
        on_three(|comm| {
            // In steps of bf16, 256 + 1 is 256, so that a sum rounded each time would stay there.
            let own = if comm.rank() == 0 { 256.0 } else { 1.0 };
            let sum = comm.all_reduce(tensor(&[own], DType::BF16), Reduce::Sum, PHASE)?;
            assert_eq!(values(&sum), [258.0]);
            Ok(())
        });
    }

    #[test]
    fn a_deadline_of_the_run_is_that_of_all_its_groups() {
        let began = std::time::Instant::now();
        let results = ThreadComm::run(2, |comm| {
            let group = comm.split(0, comm.rank(), PHASE)?;
            comm.set_deadline(Duration::from_millis(200));
            if comm.rank() == 1 {
                std::thread::sleep(Duration::from_millis(700));
            }
            group.barrier(PHASE)
        });
        assert!(began.elapsed() < Duration::from_mins(1));
        let Err(Error::Collective(error)) = &results[0] else { panic!("{results:?}") };
        assert_eq!(error.culprits, [1], "{error}");
    }

    #[test]
    fn types_that_differ_are_a_mismatch() {
        let results = ThreadComm::run(3, |comm| {
            let dtype = if comm.rank() == 1 { DType::F64 } else { DType::F32 };
            comm.all_gather(tensor(&[1.0], dtype), PHASE).map(|_| ())
        });
        for result in results {
            let Err(Error::Collective(error)) = result else { panic!("{result:?}") };
            assert_eq!(error.culprits, [1]);
            assert!(
                error.cause.contains("rank 1 called all_gather of 1 f64 in \"a test's phase\""),
                "{error}"
            );
        }
    }

    #[test]
    fn calls_that_no_rank_could_make_sense_of_name_the_phase() {
        on_three(|comm| {
            let one = || tensor(&[1.0], DType::F32);
            let mixed = vec![one(), one(), tensor(&[1.0], DType::F64)];
            let errors = [
                comm.reduce_scatter(one(), PHASE).unwrap_err(),
                comm.broadcast(one(), 3, PHASE).unwrap_err(),
                comm.all_to_all(vec![one(); 2], PHASE).unwrap_err(),
                comm.all_to_all(mixed, PHASE).unwrap_err(),
                comm.send(one(), 3, PHASE).unwrap_err(),
                comm.send(one(), comm.rank(), PHASE).unwrap_err(),
                comm.recv(1, comm.rank(), PHASE).unwrap_err(),
            ];
            for message in errors.map(|error| error.to_string()) {
                let start = format!("rank {} of 3, a test's phase: ", comm.rank());
                assert!(message.starts_with(&start), "{message}");
            }
            // Nobody has been told of them: the ranks are still in step.
            comm.barrier(PHASE)
        });
    }

    #[test]
    fn letters_come_in_their_order_while_nobody_waits_for_the_sender() {
        on_three(|comm| {
            let (next, before) = ((comm.rank() + 1) % 3, (comm.rank() + 2) % 3);
            // All send first: a send waits for nobody.
            for count in 0..4 {
                comm.send(tensor(&[comm.rank() as f32, count as f32], DType::F32), next, PHASE)?;
            }
            for count in 0..4 {
                assert_eq!(values(&comm.recv(2, before, PHASE)?), [before as f64, count as f64]);
            }
            Ok(())
        });
    }

    #[test]
    fn two_threads_of_a_rank_may_use_two_groups_at_once() {
        on_three(|comm| {
            let (one, other) = (comm.split(0, 0, PHASE)?, comm.split(0, 2 - comm.rank(), PHASE)?);
            assert_eq!((one.rank(), other.rank()), (comm.rank(), 2 - comm.rank()));
            std::thread::scope(|scope| {
                let count = |comm: Arc<dyn Communicator>| {
                    for round in 0..100 {
                        let mut sum = [round as f64];
                        comm.all_reduce_host(&mut sum, Reduce::Sum, PHASE)?;
                        assert_eq!(sum[0] as usize, 3 * round);
                    }
                    Ok(())
                };
                let threads = [scope.spawn(move || count(one)), scope.spawn(move || count(other))];
                threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
            })
        });
    }
}
