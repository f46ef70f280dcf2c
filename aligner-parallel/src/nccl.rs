//! Ranks whose tensors go from CUDA device to CUDA device, by NCCL.

#[cfg(feature = "nccl")]
mod cuda;
#[cfg(feature = "nccl-host")]
mod host;
mod letters;
mod library;
mod memory;
mod on_device;
mod rank;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use aligner_core::{Communicator, Error, Phase, Reduce, Result, Tensor};

use crate::call::{Call, ON_DEVICE, Op};
use crate::collectives::{Ranks, call};
use crate::part::Part;
use crate::solo::Solo;
use crate::transport::Transport;
use letters::Letters;
use library::{Way, Work};
use memory::Memory;
use on_device::OnDevice;
use rank::{Line, Rank, Watch};

/// A rank with a CUDA device of its own: tensors on it go from device to device by NCCL, and all else over another
/// communicator, of threads or processes, which this one wraps.
///
/// Before NCCL is called, the ranks of the group meet over the other communicator, as they do for any collective: who is
/// missing, or calls something else, is named, and NCCL never sees a call that does not match. A rank whose process ends
/// later is found by that communicator too, and a call that NCCL does not end until the phase's deadline fails on all
/// ranks. After a failure all of NCCL's communicators are aborted.
///
/// Sums are NCCL's: all ranks get the same bits, which are not those of [`ThreadComm`](crate::ThreadComm), and halves are
/// added as halves. Tensors of types that NCCL does not have go over the host's memory, as do those on other devices.
///
/// A call waits until the device has computed what is sent, and returns when NCCL is done: nothing is computed meanwhile.
pub struct NcclComm<T: Transport> {
    letters: Letters,
    /// The group's communicator of NCCL's, from its first collective on.
    line: Mutex<Option<Arc<Line>>>,
    rank: Arc<Rank>,
    /// Dropped last: others wait for this rank to leave.
    control: Ranks<T>,
}

impl<T: Transport> NcclComm<T> {
    /// The rank of `control`, with the CUDA device at `index` of those that this process sees. All ranks of the run call it.
    ///
    /// # Errors
    /// [`Error::Setting`] where the driver, the device or NCCL is not there; ranks that have the same device; whatever
    /// keeps ranks from meeting.
    #[cfg(feature = "nccl")]
    pub fn on_cuda(control: Ranks<T>, index: usize) -> Result<Self> {
        const PHASE: Phase = Phase::new("comparing devices");
        library::check()?;
        let cuda = cuda::Cuda::open(index)?;
        let devices = control.all_gather_bytes(&cuda.identity()?, PHASE)?;
        for (rank, device) in devices.iter().enumerate() {
            if let Some(other) = devices[..rank].iter().position(|other| other == device) {
                let message =
                    format!("ranks {other} and {rank} have the same CUDA device; each needs one of its own");
                return Err(Error::setting("device", message));
            }
        }
        Ok(Self::with(control.on(aligner_core::Device::cuda(index)), Box::new(cuda)))
    }

    /// The rank of `control`, with host memory in the place of a device's, for a library in the place of NCCL.
    ///
    /// # Errors
    /// As `on_cuda`.
    #[cfg(feature = "nccl-host")]
    pub fn on_host(control: Ranks<T>) -> Result<Self> {
        library::check()?;
        Ok(Self::with(control, Box::new(host::Host)))
    }

    fn with(control: Ranks<T>, memory: Box<dyn Memory>) -> Self {
        let transport = control.transport.clone();
        let is_over = Box::new(move || transport.attend().is_err());
        Self::of(control, Rank::new(memory, is_over))
    }

    fn of(control: Ranks<T>, rank: Arc<Rank>) -> Self {
        Self { letters: Letters::default(), line: Mutex::default(), rank, control }
    }

    /// The result of a call; where ranks have failed to meet, NCCL ends too.
    fn guard<R>(&self, result: Result<R>) -> Result<R> {
        if matches!(result, Err(Error::Collective(_))) {
            self.rank.abort();
        }
        result
    }

    /// The values as NCCL can have them; none where it cannot.
    fn own(&self, values: &Tensor<1>) -> Option<OnDevice> {
        OnDevice::new(values, &*self.rank.memory)
    }

    /// The largest of each element. What NCCL's maximum is where an element is not a number, NCCL does not say; so a
    /// second half tells of each element whether it is one.
    fn largest(&self, own: &OnDevice, phase: Phase) -> Result<Tensor<1>> {
        let elements = own.elements;
        let is_nan = own.plain.clone().is_nan();
        let numbers = own.plain.clone().mask_fill(is_nan.clone(), f32::NEG_INFINITY);
        let both = Tensor::cat(vec![numbers, is_nan.float().cast(own.dtype)], 0);
        let largest =
            self.reduced(&OnDevice { plain: both, ..own.clone() }, 2 * elements, Reduce::Max, phase)?;
        let is_nan = largest.clone().narrow(0, elements, elements).greater_elem(0.5);
        Ok(largest.narrow(0, 0, elements).mask_fill(is_nan, f32::NAN))
    }

    /// `elements` combined over all ranks.
    fn reduced(&self, own: &OnDevice, elements: usize, op: Reduce, phase: Phase) -> Result<Tensor<1>> {
        self.combined(own, Op::AllReduce(op), elements, phase, |from, to| Work::AllReduce(op, from, to))
    }

    /// Sends to each place what is for it, and returns what came, in the order of the group.
    fn exchange(&self, op: Op, parts: &[OnDevice], phase: Phase) -> Result<Vec<Tensor<1>>> {
        let own = &parts[self.rank()];
        let elements = match op {
            Op::AllToAll => parts.iter().map(|part| part.elements).sum(),
            _ => own.elements,
        };
        let call = Call { elements, ..own.call(op, phase) };
        let sizes = parts.iter().map(|part| part.elements as u64).collect();
        let place = self.rank();
        let got = self.collective(&call, phase, Some(sizes), |meeting| {
            let (mut ways, mut chunks) = (Vec::new(), Vec::new());
            for (to, part) in parts.iter().enumerate().filter(|&(to, part)| to != place && part.elements > 0)
            {
                let chunk = meeting.hold(&part.plain)?;
                ways.push(Way::To(to, chunk.span));
                chunks.push(chunk);
            }
            let sent = chunks.len();
            let incoming: Vec<(usize, usize)> = (meeting.sizes.iter().copied().enumerate())
                .filter(|&(from, elements)| from != place && elements > 0)
                .collect();
            for &(from, elements) in &incoming {
                let chunk = meeting.room(elements, own.dtype)?;
                ways.push(Way::From(from, chunk.span));
                chunks.push(chunk);
            }
            if !ways.is_empty() {
                chunks = meeting.run(Work::Ways(&ways), chunks)?;
            }
            let came = incoming.into_iter().zip(chunks.split_off(sent));
            Ok(came.map(|((from, _), chunk)| (from, chunk.into_tensor())).collect::<Vec<_>>())
        })?;
        let mut all = vec![own.nothing(); self.size()];
        all[place] = own.plain.clone();
        for (from, values) in got {
            all[from] = values;
        }
        Ok(all.into_iter().map(|values| own.like(values)).collect())
    }
}

impl<T: Transport> Communicator for NcclComm<T> {
    fn rank(&self) -> usize {
        self.control.rank()
    }

    fn size(&self) -> usize {
        self.control.size()
    }

    fn all_reduce(&self, values: Tensor<1>, op: Reduce, phase: Phase) -> Result<Tensor<1>> {
        let Some(own) = self.own(&values) else {
            return self.guard(self.control.all_reduce(values, op, phase));
        };
        let reduced = match op {
            Reduce::Max if own.elements > 0 => self.largest(&own, phase)?,
            _ => self.reduced(&own, own.elements, op, phase)?,
        };
        Ok(own.like(reduced))
    }

    fn all_reduce_host(&self, values: &mut [f64], op: Reduce, phase: Phase) -> Result<()> {
        self.guard(self.control.all_reduce_host(values, op, phase))
    }

    fn all_gather(&self, values: Tensor<1>, phase: Phase) -> Result<Tensor<1>> {
        let Some(own) = self.own(&values) else {
            return self.guard(self.control.all_gather(values, phase));
        };
        let elements = own.elements * self.size();
        let all = self.combined(&own, Op::AllGather, elements, phase, Work::AllGather)?;
        Ok(own.like(all))
    }

    fn reduce_scatter(&self, values: Tensor<1>, phase: Phase) -> Result<Tensor<1>> {
        let own = self.own(&values).filter(|own| own.elements.is_multiple_of(self.size()));
        let Some(own) = own else {
            return self.guard(self.control.reduce_scatter(values, phase));
        };
        let elements = own.elements / self.size();
        let part = self.combined(&own, Op::ReduceScatter, elements, phase, Work::ReduceScatter)?;
        Ok(own.like(part))
    }

    fn broadcast(&self, values: Tensor<1>, root: usize, phase: Phase) -> Result<Tensor<1>> {
        let Some(own) = self.own(&values) else {
            return self.guard(self.control.broadcast(values, root, phase));
        };
        self.control.check_place(root, "broadcast", phase)?;
        let all = self.collective(&own.call(Op::Broadcast(root), phase), phase, None, |meeting| {
            let chunk = match own.elements {
                0 => return Ok(own.plain.clone()),
                _ if root == self.rank() => meeting.hold(&own.plain)?,
                elements => meeting.room(elements, own.dtype)?,
            };
            Ok(meeting.run(Work::Broadcast(root, chunk.span), vec![chunk])?.remove(0).into_tensor())
        })?;
        Ok(own.like(all))
    }

    fn all_to_all(&self, parts: Vec<Tensor<1>>, phase: Phase) -> Result<Vec<Tensor<1>>> {
        let own: Option<Vec<OnDevice>> = parts.iter().map(|part| self.own(part)).collect();
        // What no rank can make sense of is told there.
        let own =
            own.filter(|own| own.len() == self.size() && own.iter().all(|part| part.dtype == own[0].dtype));
        match own {
            Some(own) => self.exchange(Op::AllToAll, &own, phase),
            None => self.guard(self.control.all_to_all(parts, phase)),
        }
    }

    fn all_gather_uneven(&self, values: Tensor<1>, phase: Phase) -> Result<Vec<Tensor<1>>> {
        match self.own(&values) {
            Some(own) => self.exchange(Op::AllGatherUneven, &vec![own; self.size()], phase),
            None => self.guard(self.control.all_gather_uneven(values, phase)),
        }
    }

    fn send(&self, values: Tensor<1>, to: usize, phase: Phase) -> Result<()> {
        self.control.check_peer(to, "send", phase)?;
        let own = self.own(&values).filter(|own| own.elements > 0).map(OnDevice::without_halves);
        let call = match &own {
            Some(own) => own.call(Op::Send, phase),
            None => self.control.call_of(Op::Send, &values, phase),
        };
        // A letter before the letter: what comes, and how.
        let sent = self.control.perform(&call, Some(to), phase, |_| {
            let transport = &self.control.transport;
            let told = |text: String| transport.fail(self.device_failure(&call, &text));
            let mut words = vec![u64::from(own.is_some())];
            let mut chunk = None;
            if let Some(own) = &own {
                words.extend(
                    self.letters
                        .open(to, &call, &self.rank, &self.control)
                        .map_err(told)?
                        .into_iter()
                        .flatten(),
                );
                let memory = &self.rank.memory;
                let held = memory.hold(own.plain.clone()).and_then(|chunk| memory.settle().map(|()| chunk));
                chunk = Some(held.map_err(told)?);
            }
            transport.send(&self.control.group, &call, to, Part::new(words))?;
            chunk.into_iter().for_each(|chunk| self.letters.send(to, chunk));
            Ok(())
        });
        self.guard(sent)?;
        if own.is_some() { Ok(()) } else { self.guard(self.control.send(values, to, phase)) }
    }

    fn recv(&self, elements: usize, from: usize, phase: Phase) -> Result<Tensor<1>> {
        self.control.check_peer(from, "recv", phase)?;
        let is_on_device = self.rank.memory.has(&self.control.device);
        let element = crate::call::Element::F32;
        let stage = if is_on_device && elements > 0 { ON_DEVICE } else { 0 };
        let call = Call { stage, ..call(Op::Recv, element, elements, phase) };
        let received = self.control.perform(&call, Some(from), phase, |deadline| {
            let transport = &self.control.transport;
            let letter = transport.recv(&self.control.group, &call, deadline, from)?;
            let words = letter.elements::<u64>();
            if words.first() != Some(&1) {
                return Ok(None);
            }
            let id = words[1..].try_into().ok();
            let attend = || transport.attend_to(&self.control.group, &call);
            let watch = Watch { attend: &attend, is_late: &|| deadline.left().is_zero() };
            let room = self.rank.memory.room(elements, burn::tensor::DType::F32).map_err(rank::Trouble::from);
            let chunk = room.and_then(|chunk| self.letters.receive(from, id, &self.rank, chunk, watch));
            Ok(Some(chunk.map_err(|trouble| self.explain(&call, deadline, trouble))?.into_tensor()))
        });
        match self.guard(received)? {
            Some(values) if is_on_device => Ok(values),
            Some(values) => Ok(values.to_device(&self.control.device)),
            None => self.guard(self.control.recv(elements, from, phase)),
        }
    }

    fn split(&self, color: usize, key: usize, phase: Phase) -> Result<Arc<dyn Communicator>> {
        Ok(match self.guard(self.control.part_of(color, key, phase))? {
            Some(part) => Arc::new(Self::of(part, self.rank.clone())),
            None => Arc::new(Solo),
        })
    }

    fn take(&self, round: u64, taken: u64, phase: Phase) -> Result<u64> {
        self.guard(self.control.take(round, taken, phase))
    }

    fn attend(&self, phase: Phase) -> Result<()> {
        self.guard(self.control.attend(phase))
    }

    fn set_deadline(&self, deadline: Duration) {
        self.control.set_deadline(deadline);
    }

    fn barrier(&self, phase: Phase) -> Result<()> {
        self.guard(self.control.barrier(phase))
    }
}

impl<T: Transport> Drop for NcclComm<T> {
    fn drop(&mut self) {
        self.letters.close(self.control.limit(Phase::new("leaving")));
    }
}
