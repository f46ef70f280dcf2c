//! An engine that says the same to everybody.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use aligner_core::{
    Drawn, Engine, EngineStats, Error, Event, FinishReason, ParamSet, Request, RequestId, Result, Sample,
};

/// What it says before the stop token; characters of several tokens are in it.
pub(crate) const SCRIPT: &str = "one two caf\u{e9} \u{2603} three END four five";
pub(crate) const STOP: u32 = 2;
/// How many requests run at a time, each with a page.
pub(crate) const WIDTH: usize = 48;

/// What a test may see and change.
#[derive(Default)]
pub(crate) struct Control {
    pause: AtomicBool,
    pub(crate) fail: AtomicBool,
    pub(crate) panic: AtomicBool,
    /// Whether it starts its script anew in place of stopping.
    pub(crate) endless: AtomicBool,
    pub(crate) step_micros: AtomicU64,
    pub(crate) cancelled: AtomicUsize,
    pub(crate) finished: AtomicUsize,
    pub(crate) polls: AtomicUsize,
    pub(crate) submitted: Mutex<Vec<Request>>,
}

impl Control {
    pub(crate) fn pause(&self, pause: bool) {
        self.pause.store(pause, Ordering::SeqCst);
    }

    pub(crate) fn endless(&self) {
        self.endless.store(true, Ordering::SeqCst);
    }
}

pub(crate) struct Scripted {
    script: Vec<u32>,
    control: std::sync::Arc<Control>,
    waiting: VecDeque<(RequestId, Request)>,
    running: BTreeMap<RequestId, (Request, usize)>,
    cancelled: Vec<RequestId>,
    next: u64,
}

impl Scripted {
    pub(crate) fn new(script: Vec<u32>, control: std::sync::Arc<Control>) -> Self {
        let (waiting, running) = (VecDeque::new(), BTreeMap::new());
        Self { script, control, waiting, running, cancelled: Vec::new(), next: 0 }
    }

    fn token(&self, at: usize) -> u32 {
        let endless = self.control.endless.load(Ordering::SeqCst);
        let at = if endless { at % self.script.len() } else { at };
        self.script.get(at).copied().unwrap_or(STOP)
    }
}

impl Engine for Scripted {
    fn submit(&mut self, request: Request) -> Result<RequestId> {
        self.next += 1;
        let id = RequestId(self.next);
        self.control.submitted.lock().unwrap().push(request.clone());
        self.waiting.push_back((id, request));
        Ok(id)
    }

    fn poll(&mut self) -> Result<Vec<Event>> {
        self.control.polls.fetch_add(1, Ordering::SeqCst);
        std::thread::sleep(Duration::from_micros(self.control.step_micros.load(Ordering::SeqCst)));
        assert!(!self.control.panic.load(Ordering::SeqCst), "as the test wants it");
        if self.control.fail.swap(false, Ordering::SeqCst) {
            return Err(Error::Invalid("a forward pass that failed".into()));
        }
        let mut events = Vec::new();
        let mut finish = |request, reason| {
            events.push(Event::Finished { request, sample: Sample::default(), reason });
        };
        self.cancelled.drain(..).for_each(|id| finish(id, FinishReason::Cancelled));
        if self.control.pause.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
            return Ok(events);
        }
        while self.running.len() < WIDTH
            && let Some((id, request)) = self.waiting.pop_front()
        {
            self.running.insert(id, (request, 0));
        }
        let mut ended = Vec::new();
        for (&id, (request, count)) in &self.running {
            let token = self.token(*count);
            let top = [(token, -0.5), (7, -1.0), (8, f32::NEG_INFINITY)];
            let top = top.into_iter().take(request.sampling.top_logprobs).collect();
            events
                .push(Event::Token { request: id, drawn: Drawn { token, logp: -0.25, raw_logp: -0.5, top } });
            let stopped = request.sampling.stop_tokens.contains(&token);
            if stopped || count + 1 >= request.sampling.max_tokens {
                let reason = if stopped { FinishReason::Stop } else { FinishReason::Length };
                events.push(Event::Finished { request: id, sample: Sample::default(), reason });
                ended.push(id);
            }
        }
        self.running.values_mut().for_each(|(_, count)| *count += 1);
        self.control.finished.fetch_add(ended.len(), Ordering::SeqCst);
        for id in &ended {
            self.running.remove(id);
        }
        Ok(events)
    }

    fn cancel(&mut self, request: RequestId) -> bool {
        let waiting = self.waiting.len();
        self.waiting.retain(|(id, _)| *id != request);
        let known = self.waiting.len() < waiting || self.running.remove(&request).is_some();
        if known {
            self.control.cancelled.fetch_add(1, Ordering::SeqCst);
            self.cancelled.push(request);
        }
        known
    }

    fn stats(&self) -> EngineStats {
        EngineStats {
            waiting: self.waiting.len() + self.cancelled.len(),
            running: self.running.len(),
            pages: WIDTH,
            free_pages: WIDTH - self.running.len(),
            ..EngineStats::default()
        }
    }

    fn refit(&mut self, _: &ParamSet, _: u64) -> Result<()> {
        Ok(())
    }
}
