//! Running requests on an engine of one's own.

use std::collections::HashMap;
use std::sync::Arc;

use aligner_core::{Detokenize, Drawn, Engine, Event, FinishReason, Request, RequestId};
use aligner_infer::TextStream;
use anyhow::ensure;

/// A complete answer.
#[derive(Debug)]
pub(crate) struct Answer {
    /// The text before the first stop text.
    pub(crate) text: String,
    pub(crate) drawn: Vec<Drawn>,
    pub(crate) reason: FinishReason,
}

/// Answers that grow.
pub(crate) struct Answers<'a> {
    engine: &'a mut dyn Engine,
    detokenize: Arc<dyn Detokenize>,
    growing: HashMap<RequestId, Growing>,
}

struct Growing {
    /// The caller's number for the request.
    at: usize,
    stream: TextStream,
    text: String,
    drawn: Vec<Drawn>,
}

/// What `Answers::step` tells of: more text of some answer, or a whole answer and its number.
pub(crate) enum News {
    Text(String),
    Done(usize, Answer),
}

impl<'a> Answers<'a> {
    pub(crate) fn new(engine: &'a mut dyn Engine, detokenize: Arc<dyn Detokenize>) -> Self {
        Self { engine, detokenize, growing: HashMap::new() }
    }

    /// Submits a request; `at` stands for it in the news.
    pub(crate) fn submit(&mut self, at: usize, request: Request) -> aligner_core::Result<()> {
        let stream = TextStream::new(Arc::clone(&self.detokenize), &request.sampling);
        let id = self.engine.submit(request)?;
        self.growing.insert(id, Growing { at, stream, text: String::new(), drawn: Vec::new() });
        Ok(())
    }

    /// Whether every answer is complete.
    pub(crate) fn is_done(&self) -> bool {
        self.growing.is_empty()
    }

    /// Ends every answer early; its `Done` still comes.
    pub(crate) fn cancel(&mut self) {
        for &id in self.growing.keys() {
            self.engine.cancel(id);
        }
    }

    /// Runs the engine one step.
    pub(crate) fn step(&mut self) -> anyhow::Result<Vec<News>> {
        let events = self.engine.poll()?;
        let stats = self.engine.stats();
        // A step may have computed prompts only.
        let is_idle = events.is_empty() && stats.waiting + stats.running == 0;
        ensure!(!is_idle, "the engine stopped with {} answers open", self.growing.len());
        Ok(events.into_iter().filter_map(|event| self.take(event)).collect())
    }

    fn take(&mut self, event: Event) -> Option<News> {
        match event {
            Event::Token { request, drawn } => {
                let growing = self.growing.get_mut(&request)?;
                let new = growing.stream.push(drawn.token);
                growing.drawn.push(drawn);
                growing.text.push_str(&new);
                if growing.stream.stopped() {
                    // An engine that looks for stop texts itself has ended it already.
                    self.engine.cancel(request);
                }
                (!new.is_empty()).then_some(News::Text(new))
            }
            Event::Finished { request, reason, .. } => {
                let Growing { at, mut stream, mut text, drawn } = self.growing.remove(&request)?;
                let reason = if stream.stopped() { FinishReason::Stop } else { reason };
                text.push_str(&stream.finish());
                Some(News::Done(at, Answer { text, drawn, reason }))
            }
        }
    }
}

/// Runs one request to its end. `show` sees the text as it comes; where `interrupted` is set, the answer
/// ends as it is.
pub(crate) fn stream(
    engine: &mut dyn Engine,
    detokenize: Arc<dyn Detokenize>,
    request: Request,
    interrupted: impl Fn() -> bool,
    mut show: impl FnMut(&str) -> anyhow::Result<()>,
) -> anyhow::Result<Answer> {
    let mut answers = Answers::new(engine, detokenize);
    answers.submit(0, request)?;
    let (mut shown, mut cancelled) = (0, false);
    loop {
        if !cancelled && interrupted() {
            cancelled = true;
            answers.cancel();
        }
        for news in answers.step()? {
            match news {
                News::Text(text) => {
                    shown += text.len();
                    show(&text)?;
                }
                News::Done(_, answer) => {
                    show(answer.text.get(shown..).unwrap_or_default())?;
                    return Ok(answer);
                }
            }
        }
    }
}

/// A reason's name in files and responses.
pub(crate) fn reason_name(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Cancelled => "cancelled",
    }
}
