//! The engine on a thread of its own, and what the server's tasks see of it.
//!
//! Nothing here waits for a client. A request comes with a channel that has room for every event it can
//! cause, so a slow reader neither blocks the engine nor makes memory grow: `Slots` bound the number of
//! requests, and `max_tokens` the events of each. A client that hangs up drops its receiver, which the
//! thread sees before its next step.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc as blocking};
use std::time::Instant;

use aligner_core::{Drawn, Engine, EngineStats, Error, Event, FinishReason, Request, RequestId};
use anyhow::Context as _;
use tokio::sync::mpsc;

use super::metrics::Metrics;

/// An engine that runs on its own thread. Clones speak to the same engine; it ends with the last one.
#[derive(Debug, Clone)]
pub struct EngineHandle {
    jobs: mpsc::Sender<Job>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    stats: Mutex<EngineStats>,
    metrics: Metrics,
    /// Requests that are promised a place.
    open: AtomicUsize,
    max_queue: usize,
    draining: AtomicBool,
    stopping: AtomicBool,
}

/// One request of a client.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) request: Request,
    /// What the events are labelled with.
    pub(super) choice: usize,
    pub(super) updates: mpsc::Sender<(usize, Update)>,
    /// Set where the client has enough.
    pub(super) enough: Arc<AtomicBool>,
}

/// What becomes of a request.
#[derive(Debug)]
pub(super) enum Update {
    /// The engine has taken it.
    Accepted,
    Token(Drawn),
    Finished(FinishReason),
    Failed(Error),
}

/// Updates that are not tokens: accepted, finished or failed, and one to spare.
pub(super) const OTHER_UPDATES: usize = 3;

/// Places for some requests, given back when dropped.
#[derive(Debug)]
pub(super) struct Slots {
    shared: Arc<Shared>,
    count: usize,
}

impl Drop for Slots {
    fn drop(&mut self) {
        self.shared.open.fetch_sub(self.count, Ordering::AcqRel);
    }
}

impl EngineHandle {
    /// Starts the thread and makes the engine there; at most `max_queue` requests are open at a time.
    ///
    /// # Errors
    /// Those of `build`, or a thread that the system refuses.
    pub fn start(
        max_queue: usize,
        build: impl FnOnce() -> anyhow::Result<Box<dyn Engine>> + Send + 'static,
    ) -> anyhow::Result<Self> {
        let (jobs, receiver) = mpsc::channel(max_queue.max(1));
        let shared = Arc::new(Shared {
            stats: Mutex::default(),
            metrics: Metrics::default(),
            open: AtomicUsize::new(0),
            max_queue,
            draining: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
        });
        let (built, outcome) = blocking::sync_channel(1);
        let of_thread = Arc::clone(&shared);
        let body = move || {
            let engine = match build() {
                Ok(engine) => engine,
                Err(error) => {
                    let _ = built.send(Err(error));
                    return;
                }
            };
            let _ = built.send(Ok(()));
            Loop { engine, shared: of_thread, open: HashMap::new() }.run(receiver);
        };
        std::thread::Builder::new().name("engine".into()).spawn(body)?;
        outcome.recv().context("the engine's thread ended before the engine was there")??;
        Ok(Self { jobs, shared })
    }

    /// What the engine did last; does not wait for it.
    pub fn stats(&self) -> EngineStats {
        *self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests that hold a place of the queue: waiting, running, or finished and not yet read.
    pub fn open(&self) -> usize {
        self.shared.open.load(Ordering::Acquire)
    }

    /// Takes no more requests; those that are open go on.
    pub fn drain(&self) {
        self.shared.draining.store(true, Ordering::Release);
    }

    /// Takes no more requests, and cancels those that are open.
    pub fn stop(&self) {
        self.drain();
        self.shared.stopping.store(true, Ordering::Release);
    }

    /// Returns when the engine's thread has ended.
    pub async fn closed(&self) {
        self.jobs.closed().await;
    }

    /// Whether new requests are taken.
    pub(super) fn is_serving(&self) -> bool {
        !self.is_draining() && !self.jobs.is_closed()
    }

    /// Whether the server is on its way down.
    pub(super) fn is_draining(&self) -> bool {
        self.shared.draining.load(Ordering::Acquire)
    }

    pub(super) fn max_queue(&self) -> usize {
        self.shared.max_queue
    }

    pub(super) fn metrics(&self) -> &Metrics {
        &self.shared.metrics
    }

    /// Places for `count` requests, unless the queue would be longer than it may be.
    pub(super) fn reserve(&self, count: usize) -> Option<Slots> {
        let more = |open: usize| open.checked_add(count).filter(|&sum| sum <= self.shared.max_queue);
        let taken = self.shared.open.fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
        taken.is_ok().then(|| Slots { shared: Arc::clone(&self.shared), count })
    }

    /// Hands a job over; false where the engine is gone.
    pub(super) async fn submit(&self, job: Job) -> bool {
        self.jobs.send(job).await.is_ok()
    }
}

/// A request that the engine has.
struct Open {
    job: Job,
    submitted: Instant,
    last_token: Option<Instant>,
    cancelled: bool,
}

struct Loop {
    engine: Box<dyn Engine>,
    shared: Arc<Shared>,
    open: HashMap<RequestId, Open>,
}

impl Loop {
    /// Runs until every handle is gone and every request is done.
    fn run(mut self, mut jobs: mpsc::Receiver<Job>) {
        loop {
            if self.open.is_empty() {
                match jobs.blocking_recv() {
                    Some(job) => self.take(job),
                    None => return,
                }
            }
            while let Ok(job) = jobs.try_recv() {
                self.take(job);
            }
            self.cancel_unwanted();
            if !self.open.is_empty() {
                self.step();
            }
            *self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner) = self.engine.stats();
        }
    }

    fn take(&mut self, job: Job) {
        if is_unwanted(&job) {
            return;
        }
        match self.engine.submit(job.request.clone()) {
            Ok(id) => {
                tell(&job, Update::Accepted);
                self.shared.metrics.prompt_tokens(job.request.prompt.tokens.len());
                let open = Open { job, submitted: Instant::now(), last_token: None, cancelled: false };
                self.open.insert(id, open);
            }
            Err(error) => {
                tracing::info!("a request was not taken: {error}");
                tell(&job, Update::Failed(error));
            }
        }
    }

    /// Cancels what nobody waits for, and everything while the server stops.
    fn cancel_unwanted(&mut self) {
        let stopping = self.shared.stopping.load(Ordering::Acquire);
        let (engine, metrics) = (&mut self.engine, &self.shared.metrics);
        self.open.retain(|&id, open| {
            if open.cancelled || !(stopping || is_unwanted(&open.job)) {
                return true;
            }
            open.cancelled = true;
            metrics.cancelled();
            let known = engine.cancel(id);
            if !known {
                tell(&open.job, Update::Finished(FinishReason::Cancelled));
            }
            known
        });
    }

    fn step(&mut self) {
        match self.engine.poll() {
            Ok(events) if events.is_empty() => {
                let stats = self.engine.stats();
                if stats.waiting + stats.running == 0 {
                    self.fail_all(&format!("the engine stopped with {} requests open", self.open.len()));
                }
                // A step may compute prompts only; whoever waits for the processor goes first.
                std::thread::yield_now();
            }
            Ok(events) => events.into_iter().for_each(|event| self.tell(event)),
            Err(error) => self.fail_all(&error.to_string()),
        }
    }

    fn tell(&mut self, event: Event) {
        match event {
            Event::Token { request, drawn } => {
                let Some(open) = self.open.get_mut(&request) else { return };
                let now = Instant::now();
                let since = open.last_token.unwrap_or(open.submitted);
                self.shared.metrics.token(open.last_token.is_none(), now - since);
                open.last_token = Some(now);
                tell(&open.job, Update::Token(drawn));
            }
            Event::Finished { request, reason, .. } => {
                if let Some(open) = self.open.remove(&request) {
                    tell(&open.job, Update::Finished(reason));
                }
            }
        }
    }

    /// Ends every open request: a failed step does not say whose it was.
    fn fail_all(&mut self, cause: &str) {
        tracing::error!("{} requests failed: {cause}", self.open.len());
        self.shared.metrics.engine_failed();
        for (id, open) in self.open.drain() {
            self.engine.cancel(id);
            tell(&open.job, Update::Failed(Error::Invalid(cause.to_string())));
        }
    }
}

fn is_unwanted(job: &Job) -> bool {
    job.updates.is_closed() || job.enough.load(Ordering::Acquire)
}

/// The channel has room for all that a request can cause. If an engine sends more than it was asked for,
/// the rest is lost rather than kept.
fn tell(job: &Job, update: Update) {
    let _ = job.updates.try_send((job.choice, update));
}
