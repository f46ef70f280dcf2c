//! What all communicators of a rank share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::library::{Comm, Id, Told, Work};
use super::memory::{Chunk, Memory};
use crate::failure::Failure;
use crate::idle::Idle;
use crate::transport::Met;

/// How long communicators may take to end in order, and work that is given up to let go of memory.
const ENDING: Duration = Duration::from_secs(2);

/// How long a rank whose NCCL fails waits to hear of another one that failed before.
const HEARSAY: Duration = Duration::from_secs(1);

/// Why something on a device did not come to its end.
pub(super) enum Trouble {
    /// The run has failed.
    Failure(Arc<Failure>),
    /// NCCL or the device says so.
    Device(String),
    /// It takes too long.
    Late,
}

impl From<String> for Trouble {
    fn from(text: String) -> Self {
        Self::Device(text)
    }
}

/// A communicator of NCCL's, with a stream of its own: what runs on two of them waits for each other on no rank.
pub(super) struct Line {
    comm: Comm,
    stream: u64,
}

/// How somebody who waits looks about: for failures of the run, and at the clock.
#[derive(Clone, Copy)]
pub(super) struct Watch<'a> {
    pub(super) attend: &'a dyn Fn() -> Met<()>,
    pub(super) is_late: &'a dyn Fn() -> bool,
}

/// One rank's device, and all communicators of NCCL's that it has.
pub(super) struct Rank {
    pub(super) memory: Box<dyn Memory>,
    /// Whether the run has failed.
    is_over: Box<dyn Fn() -> bool + Send + Sync>,
    lines: Mutex<Vec<Arc<Line>>>,
    has_failed: AtomicBool,
}

impl Rank {
    pub(super) fn new(memory: Box<dyn Memory>, is_over: Box<dyn Fn() -> bool + Send + Sync>) -> Arc<Self> {
        Arc::new(Self { memory, is_over, lines: Mutex::default(), has_failed: AtomicBool::new(false) })
    }

    /// Forms a communicator of `size` ranks, as the one at `place`.
    pub(super) fn form(
        &self,
        id: Id,
        size: usize,
        place: usize,
        watch: Watch<'_>,
    ) -> Result<Arc<Line>, Trouble> {
        self.memory.enter()?;
        let stream = self.memory.open_stream()?;
        let comm = match Comm::begin(id, size, place) {
            Ok(comm) => comm,
            Err(text) => {
                self.memory.close_stream(stream);
                return Err(text.into());
            }
        };
        let line = Arc::new(Line { comm, stream });
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).push(line.clone());
        wait(watch, || line.comm.is_ready())?;
        Ok(line)
    }

    /// Does some work with these chunks, to its end, and gives them back.
    pub(super) fn run(
        &self,
        line: &Line,
        work: Work<'_>,
        chunks: Vec<Chunk>,
        watch: Watch<'_>,
    ) -> Result<Vec<Chunk>, Trouble> {
        self.memory.settle()?;
        self.memory.enter()?;
        // SAFETY: the chunks are held until the work is done or, below, given up.
        unsafe { line.comm.work(work, line.stream) }?;
        let Err(trouble) = wait(watch, || Ok(line.comm.is_ready()? && self.memory.is_done(line.stream)?))
        else {
            return Ok(chunks);
        };
        line.comm.abort();
        if !ends(Instant::now(), || self.memory.is_done(line.stream)) {
            // The device may still write there.
            std::mem::forget(chunks);
        }
        Err(trouble)
    }

    /// Ends all that goes on, on all communicators: after a failure nobody can go on.
    pub(super) fn abort(&self) {
        self.has_failed.store(true, Ordering::Relaxed);
        for line in self.lines.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            line.comm.abort();
        }
    }
}

/// Looks until it is done.
fn wait(watch: Watch<'_>, is_done: impl Fn() -> Told<bool>) -> Result<(), Trouble> {
    let mut idle = Idle::default();
    loop {
        let done = is_done();
        if let Ok(true) = done {
            return Ok(());
        }
        let since = Instant::now();
        loop {
            (watch.attend)().map_err(Trouble::Failure)?;
            // What NCCL says may be no more than that another rank is gone: the run's failure, which is on its way,
            // says which.
            if done.is_ok() || since.elapsed() > HEARSAY {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        done?;
        if (watch.is_late)() {
            return Err(Trouble::Late);
        }
        idle.rest();
    }
}

/// Looks until it is done; says whether it was, soon after `since`.
fn ends(since: Instant, is_done: impl Fn() -> Told<bool>) -> bool {
    let mut idle = Idle::default();
    loop {
        match is_done() {
            Ok(false) if since.elapsed() < ENDING => idle.rest(),
            done => return done == Ok(true),
        }
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let lines = std::mem::take(self.lines.get_mut().unwrap_or_else(PoisonError::into_inner));
        let in_order = !self.has_failed.load(Ordering::Relaxed) && !std::thread::panicking();
        // What fails or lasts now is given up when the line is dropped.
        let _ = self.memory.enter();
        let ending = lines.iter().filter(|line| in_order && line.comm.finalize().is_ok());
        let (ending, since) = (ending.collect::<Vec<_>>(), Instant::now());
        for line in ending {
            // Others end in order only while the run has not failed.
            let is_ready =
                || if (self.is_over)() { Err("the run has failed".into()) } else { line.comm.is_ready() };
            if ends(since, is_ready) {
                line.comm.close();
            }
        }
        for line in &lines {
            line.comm.abort();
            self.memory.close_stream(line.stream);
        }
    }
}
