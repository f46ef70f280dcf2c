//! Ranks as processes that MPI has started.

use std::collections::VecDeque;
use std::mem::{ManuallyDrop, forget};
use std::sync::Arc;

use aligner_core::{Error, Result};
use mpi::environment::Universe;
use mpi::request::{Request, StaticScope};
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator as _, Destination as _, Equivalence as _, Source as _};
use mpi::{Tag, Threading};

use crate::messages::{MessageComm, Network};

/// All messages have it.
const TAG: Tag = 0;

/// A rank that is a process, started by `mpirun`, `srun` or an MPI operator: a [`MessageComm`] over MPI.
///
/// After a failure MPI is left open, as to end it would be to wait for ranks that may be gone. The
/// process has to end with an error, at which MPI's launcher ends the others; so print an error before
/// the communicator is dropped.
///
/// The thread that calls [`MpiComm::start`] has to be the one that drops the last communicator.
pub type MpiComm = MessageComm<MpiNetwork>;

impl MpiComm {
    /// Starts MPI in this process; a process can do so once.
    ///
    /// # Errors
    /// An MPI that has been started, or that does not let threads take turns.
    pub fn start() -> Result<Self> {
        let started = mpi::initialize_with_threading(Threading::Serialized);
        let (universe, threading) =
            started.ok_or_else(|| Error::Invalid("MPI has been started in this process before".into()))?;
        if threading < Threading::Serialized {
            return Err(Error::Invalid(format!("this MPI gives {threading:?} threads; expected Serialized")));
        }
        // Messages of a communicator of our own meet no others.
        let comm = universe.world().duplicate();
        let (rank, size) = (comm.rank() as usize, comm.size() as usize);
        let network = MpiNetwork {
            open: Some((comm, universe)),
            sends: Vec::new(),
            arriving: VecDeque::new(),
            begun: 0,
        };
        Self::over(network, rank, size)
    }
}

/// Messages over MPI.
pub struct MpiNetwork {
    /// The communicator that carries the messages, and MPI itself, until they are closed.
    open: Option<(SimpleCommunicator, Universe)>,
    sends: Vec<Sending>,
    /// In the order of their sends for each sender.
    arriving: VecDeque<Arriving>,
    begun: u64,
}

// SAFETY: MPI has been started so that all threads may call it in turns. The handles belong to no
// thread, and are used through `&mut self` alone. Messages are owned.
unsafe impl Send for MpiNetwork {}

/// What MPI has begun to do with a message.
struct Underway(Option<Request<'static, [u64], StaticScope>>);

impl Underway {
    fn is_over(&mut self) -> bool {
        self.0 = self.0.take().and_then(|request| request.test().err());
        self.0.is_none()
    }
}

/// A message that goes to `to`. It is dropped only when it is no longer underway.
struct Sending {
    number: u64,
    to: usize,
    underway: Underway,
    message: ManuallyDrop<Arc<Vec<u64>>>,
}

/// A message that comes from `from`, in memory of `Box::into_raw`.
struct Arriving {
    from: usize,
    underway: Underway,
    message: *mut [u64],
}

impl Network for MpiNetwork {
    fn send(&mut self, to: usize, message: Arc<Vec<u64>>) {
        let Some((comm, _)) = &self.open else { return };
        let words: *const [u64] = message.as_slice();
        // SAFETY: nobody changes the words, as they are shared, and `unsent` alone drops this handle to
        // them, once MPI does not use them any more.
        let words = unsafe { &*words };
        let request = comm.process_at_rank(to as i32).immediate_send_with_tag(StaticScope, words, TAG);
        let (number, underway) = (self.begun, Underway(Some(request)));
        self.sends.push(Sending { number, to, underway, message: ManuallyDrop::new(message) });
        self.begun += 1;
    }

    fn receive(&mut self) -> Option<(usize, Vec<u64>)> {
        let (comm, _) = self.open.as_ref()?;
        while let Some((matched, status)) = comm.any_process().immediate_matched_probe_with_tag(TAG) {
            let words = status.count(u64::equivalent_datatype()) as usize;
            let message = Box::into_raw(vec![0; words].into_boxed_slice());
            // SAFETY: the memory is freed only below, once MPI does not use it any more.
            let request = matched.immediate_matched_receive_into(StaticScope, unsafe { &mut *message });
            let from = status.source_rank() as usize;
            self.arriving.push_back(Arriving { from, underway: Underway(Some(request)), message });
        }
        let mut before = Vec::new();
        for at in 0..self.arriving.len() {
            let Arriving { from, underway, message } = &mut self.arriving[at];
            // A later message of the same sender has to wait for those before it.
            if !before.contains(from) && underway.is_over() {
                // SAFETY: `message` is of `Box::into_raw`, MPI does not use it any more, and the entry goes.
                let message = (*from, unsafe { Box::from_raw(*message) }.into_vec());
                self.arriving.remove(at);
                return Some(message);
            }
            before.push(*from);
        }
        None
    }

    fn begun(&self) -> u64 {
        self.begun
    }

    fn unsent(&mut self, since: u64) -> Vec<usize> {
        self.sends.retain_mut(|send| {
            let over = send.underway.is_over();
            if over {
                // SAFETY: MPI does not use the message any more, and the entry goes.
                unsafe { ManuallyDrop::drop(&mut send.message) };
            }
            !over
        });
        let mut ranks: Vec<usize> =
            self.sends.iter().filter(|send| send.number >= since).map(|send| send.to).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    fn close(&mut self, everyone_has_left: bool) {
        let (sends, arriving) = (std::mem::take(&mut self.sends), std::mem::take(&mut self.arriving));
        if !everyone_has_left || !sends.is_empty() || !arriving.is_empty() {
            // To end MPI would be to wait for ranks that may be gone; the launcher ends them. Until then
            // MPI may use what is underway.
            forget((sends, arriving, self.open.take()));
        }
        self.open = None;
    }
}
