//! What one rank sends to another, who may receive it much later.
//!
//! NCCL's send ends when the receiver has come, and ours does not wait for it. So each ordered pair of ranks of a
//! group has a communicator of its own, with a thread at the sender, which holds what is sent until it has gone.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::library::{Id, Way, Work, new_id};
use super::memory::Chunk;
use super::rank::{Line, Rank, Trouble, Watch};
use crate::call::Call;
use crate::collectives::Ranks;
use crate::failure::Failure;
use crate::transport::Transport;

/// The letters of one rank in one group, by the other's place.
#[derive(Default)]
pub(super) struct Letters {
    to: Mutex<HashMap<usize, Outgoing>>,
    from: Mutex<HashMap<usize, Arc<Line>>>,
    closing: Arc<Closing>,
}

/// When senders give up.
#[derive(Default)]
struct Closing {
    /// The rank is about to leave, and waits so long for receivers.
    until: OnceLock<Instant>,
    at_once: AtomicBool,
}

struct Outgoing {
    chunks: Option<Sender<Chunk>>,
    thread: Option<JoinHandle<()>>,
}

impl Letters {
    /// The identity that a first letter to this place has to tell; none of later ones. `open` starts what sends.
    pub(super) fn open<T: Transport>(
        &self,
        place: usize,
        call: &Call,
        rank: &Arc<Rank>,
        control: &Ranks<T>,
    ) -> Result<Option<Id>, String> {
        let mut to = self.to.lock().unwrap_or_else(PoisonError::into_inner);
        if to.contains_key(&place) {
            return Ok(None);
        }
        let id = new_id()?;
        let (chunks, queue) = channel();
        let (rank, transport, closing) = (rank.clone(), control.transport.clone(), self.closing.clone());
        let (group, call) = (control.group.clone(), call.clone());
        let (own, other) = (group.rank(), group.ranks[place]);
        let work = move || {
            let attend = || transport.attend_to(&group, &call);
            // Who has left receives nothing any more.
            let watch =
                Watch { attend: &attend, is_late: &|| closing.is_over() || transport.has_left(other) };
            if let Err(Trouble::Device(text)) = send_all(id, &queue, &rank, watch) {
                let cause = format!("the device of rank {own} cannot send to rank {other}: {text}");
                transport.fail(Failure::new(vec![own], cause));
                rank.abort();
            }
        };
        let thread = std::thread::Builder::new().name(format!("send to {other}")).spawn(work);
        let thread = thread.map_err(|error| format!("no thread that sends: {error}"))?;
        to.insert(place, Outgoing { chunks: Some(chunks), thread: Some(thread) });
        Ok(Some(id))
    }

    /// Hands over what is to be sent.
    pub(super) fn send(&self, place: usize, chunk: Chunk) {
        let to = self.to.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(chunks) = to.get(&place).and_then(|outgoing| outgoing.chunks.as_ref()) {
            // A thread that has ended has made its trouble everyone's.
            let _ = chunks.send(chunk);
        }
    }

    /// Receives what the rank at this place sends, into a chunk; `id` is what its letter told.
    pub(super) fn receive(
        &self,
        place: usize,
        id: Option<Id>,
        rank: &Rank,
        chunk: Chunk,
        watch: Watch<'_>,
    ) -> Result<Chunk, Trouble> {
        let mut from = self.from.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(id) = id {
            from.insert(place, rank.form(id, 2, 1, watch)?);
        }
        let Some(line) = from.get(&place).cloned() else {
            return Err(Trouble::Device("a letter came from a rank that has told no identity".into()));
        };
        drop(from);
        let ways = [Way::From(0, chunk.span)];
        let mut chunks = rank.run(&line, Work::Ways(&ways), vec![chunk], watch)?;
        chunks.pop().ok_or_else(|| Trouble::Device("the memory is lost".into()))
    }

    /// Waits until all has gone, or so long; where the run has failed or this thread panics, for nothing.
    pub(super) fn close(&self, limit: Duration) {
        let _ = self.closing.until.set(Instant::now() + limit);
        self.closing.at_once.store(std::thread::panicking(), Ordering::Relaxed);
        let mut to = self.to.lock().unwrap_or_else(PoisonError::into_inner);
        for outgoing in to.values_mut() {
            outgoing.chunks = None;
        }
        for outgoing in to.values_mut() {
            if let Some(thread) = outgoing.thread.take() {
                let _ = thread.join();
            }
        }
    }
}

impl Closing {
    fn is_over(&self) -> bool {
        let is_late = self.until.get().is_some_and(|&until| Instant::now() > until);
        is_late || self.at_once.load(Ordering::Relaxed)
    }
}

/// Sends all that comes, each as soon as the receiver takes it.
fn send_all(id: Id, queue: &Receiver<Chunk>, rank: &Rank, watch: Watch<'_>) -> Result<(), Trouble> {
    let line = rank.form(id, 2, 0, watch)?;
    for chunk in queue {
        let ways = [Way::To(1, chunk.span)];
        rank.run(&line, Work::Ways(&ways), vec![chunk], watch)?;
    }
    Ok(())
}
