//! A communicator that notes the phases of its calls, and does something wrong in one of them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aligner_core::{Communicator, Phase, Reduce, Result, Tensor};

/// What a rank does wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Its thread panics.
    Panic,
    /// It comes when the others have given up.
    Late,
    /// It calls something else.
    Other,
}

/// What a rank is to do wrong, and when.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Planned {
    pub(crate) fault: Fault,
    pub(crate) phase: &'static str,
}

/// What all communicators of a rank have in common.
#[derive(Debug, Default)]
struct Shared {
    planned: Option<Planned>,
    /// It happens once.
    is_done: AtomicBool,
    deadline: Duration,
    /// Phases in the order of their first calls.
    phases: Mutex<Vec<&'static str>>,
}

pub(crate) struct Watched {
    inner: Arc<dyn Communicator>,
    shared: Arc<Shared>,
}

impl Watched {
    /// Watches a rank whose calls have this deadline; it does what is planned, if anything.
    pub(crate) fn new(inner: Arc<dyn Communicator>, deadline: Duration, planned: Option<Planned>) -> Self {
        Self {
            inner,
            shared: Arc::new(Shared {
                planned,
                deadline,
                is_done: AtomicBool::new(false),
                phases: Mutex::default(),
            }),
        }
    }

    pub(crate) fn phases(&self) -> Vec<&'static str> {
        self.shared.phases.lock().expect("no panic holds it").clone()
    }

    /// The phase of a call, with the watched deadline; here what is planned happens.
    fn call(&self, phase: Phase) -> Result<Phase> {
        let mut phases = self.shared.phases.lock().expect("no panic holds it");
        if !phases.contains(&phase.name) {
            phases.push(phase.name);
        }
        drop(phases);
        let deadline = self.shared.deadline;
        let phase = Phase { deadline, ..phase };
        let planned = self.shared.planned.filter(|planned| planned.phase == phase.name);
        let Some(planned) = planned.filter(|_| !self.shared.is_done.swap(true, Ordering::Relaxed)) else {
            return Ok(phase);
        };
        match planned.fault {
            Fault::Panic => panic!("as planned, in {}", phase.name),
            Fault::Late => std::thread::sleep(deadline + Duration::from_millis(700)),
            // Nobody else calls this with these numbers.
            Fault::Other => self.inner.all_reduce_host(&mut [0.0; 77], Reduce::Max, phase)?,
        }
        Ok(phase)
    }
}

impl Communicator for Watched {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn all_reduce(&self, values: Tensor<1>, op: Reduce, phase: Phase) -> Result<Tensor<1>> {
        self.inner.all_reduce(values, op, self.call(phase)?)
    }

    fn all_reduce_host(&self, values: &mut [f64], op: Reduce, phase: Phase) -> Result<()> {
        self.inner.all_reduce_host(values, op, self.call(phase)?)
    }

    fn all_gather(&self, values: Tensor<1>, phase: Phase) -> Result<Tensor<1>> {
        self.inner.all_gather(values, self.call(phase)?)
    }

    fn reduce_scatter(&self, values: Tensor<1>, phase: Phase) -> Result<Tensor<1>> {
        self.inner.reduce_scatter(values, self.call(phase)?)
    }

    fn broadcast(&self, values: Tensor<1>, root: usize, phase: Phase) -> Result<Tensor<1>> {
        self.inner.broadcast(values, root, self.call(phase)?)
    }

    fn all_to_all(&self, parts: Vec<Tensor<1>>, phase: Phase) -> Result<Vec<Tensor<1>>> {
        self.inner.all_to_all(parts, self.call(phase)?)
    }

    fn send(&self, values: Tensor<1>, to: usize, phase: Phase) -> Result<()> {
        self.inner.send(values, to, self.call(phase)?)
    }

    fn recv(&self, elements: usize, from: usize, phase: Phase) -> Result<Tensor<1>> {
        self.inner.recv(elements, from, self.call(phase)?)
    }

    fn split(&self, color: usize, key: usize, phase: Phase) -> Result<Arc<dyn Communicator>> {
        let inner = self.inner.split(color, key, self.call(phase)?)?;
        Ok(Arc::new(Self { inner, shared: self.shared.clone() }))
    }

    fn all_gather_uneven(&self, values: Tensor<1>, phase: Phase) -> Result<Vec<Tensor<1>>> {
        self.inner.all_gather_uneven(values, self.call(phase)?)
    }

    fn take(&self, round: u64, taken: u64, phase: Phase) -> Result<u64> {
        self.inner.take(round, taken, self.call(phase)?)
    }

    fn attend(&self, phase: Phase) -> Result<()> {
        self.inner.attend(phase)
    }

    fn barrier(&self, phase: Phase) -> Result<()> {
        self.inner.barrier(self.call(phase)?)
    }
}
