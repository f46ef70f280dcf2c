//! The responses to one HTTP request as they grow.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use aligner_core::{Drawn, FinishReason, Request};
use aligner_infer::TextStream;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use super::State;
use super::engine::{Job, OTHER_UPDATES, Slots, Update};
use super::failure::Failure;

/// Why a choice ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Stop,
    Length,
    /// The time limit; clients know no other word for it than `length`.
    TimedOut,
}

impl End {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length | Self::TimedOut => "length",
        }
    }
}

/// More of one choice.
#[derive(Debug, Default)]
pub(super) struct Piece {
    pub(super) choice: usize,
    pub(super) text: String,
    /// The tokens since the last piece, where log-probabilities are asked for.
    pub(super) drawn: Vec<Drawn>,
    pub(super) end: Option<End>,
}

/// All choices of a request. Dropping it cancels what still runs.
pub(super) struct Answer {
    updates: mpsc::Receiver<(usize, Update)>,
    /// What came while acceptance was waited for.
    early: VecDeque<(usize, Update)>,
    choices: Vec<Choice>,
    open: usize,
    generated: usize,
    deadline: Instant,
    is_cut: bool,
    state: Arc<State>,
    /// Given back only when the client has read everything, or is gone.
    _slots: Slots,
}

struct Choice {
    text: TextStream,
    drawn: Vec<Drawn>,
    enough: Arc<AtomicBool>,
    ended: bool,
}

impl Answer {
    /// Submits the requests, one for each choice, and waits until the engine has taken them all.
    pub(super) async fn submit(
        state: &Arc<State>,
        requests: Vec<Request>,
        slots: Slots,
        deadline: Instant,
    ) -> Result<Self, Failure> {
        let room = |request: &Request| request.sampling.max_tokens + OTHER_UPDATES;
        let (sender, updates) = mpsc::channel(requests.iter().map(room).sum());
        let mut choices = Vec::with_capacity(requests.len());
        for (choice, request) in requests.into_iter().enumerate() {
            let enough = Arc::new(AtomicBool::new(false));
            let text = TextStream::new(Arc::clone(&state.detokenize), &request.sampling);
            choices.push(Choice { text, drawn: Vec::new(), enough: Arc::clone(&enough), ended: false });
            let job = Job { request, choice, updates: sender.clone(), enough };
            if !state.engine.submit(job).await {
                return Err(Failure::internal());
            }
        }
        let open = choices.len();
        let mut answer = Self {
            updates,
            early: VecDeque::new(),
            choices,
            open,
            generated: 0,
            deadline,
            is_cut: false,
            state: Arc::clone(state),
            _slots: slots,
        };
        drop(sender);
        answer.accepted().await?;
        Ok(answer)
    }

    async fn accepted(&mut self) -> Result<(), Failure> {
        let mut missing = self.open;
        while missing > 0 {
            match timeout_at(self.deadline, self.updates.recv()).await {
                Ok(Some((_, Update::Accepted))) => missing -= 1,
                Ok(Some((_, Update::Failed(error)))) => return Err(Failure::of_engine(&error, false)),
                Ok(Some(other)) => self.early.push_back(other),
                Ok(None) => return Err(self.broken_off()),
                Err(_) => return Err(Failure::timed_out(self.state.settings.request_timeout.as_secs_f64())),
            }
        }
        Ok(())
    }

    /// How many choices there are.
    pub(super) fn len(&self) -> usize {
        self.choices.len()
    }

    /// Tokens of all choices.
    pub(super) fn generated(&self) -> usize {
        self.generated
    }

    /// The next piece; none when every choice has ended. After a failure nothing comes.
    pub(super) async fn next(&mut self) -> Option<Result<Piece, Failure>> {
        while self.open > 0 {
            let update = match self.early.pop_front() {
                Some(early) => Ok(Some(early)),
                None if self.is_cut => return self.cut().map(Ok),
                None => timeout_at(self.deadline, self.updates.recv()).await,
            };
            let piece = match update {
                Ok(Some((choice, update))) => self.take(choice, update),
                Ok(None) => Err(self.broken_off()),
                Err(_) => Ok(self.cut()),
            };
            match piece {
                Ok(None) => {}
                Ok(Some(piece)) => return Some(Ok(piece)),
                Err(failure) => {
                    self.open = 0;
                    return Some(Err(failure));
                }
            }
        }
        None
    }

    fn take(&mut self, choice: usize, update: Update) -> Result<Option<Piece>, Failure> {
        if self.choices.get(choice).is_none_or(|choice| choice.ended) {
            return Ok(None);
        }
        match update {
            Update::Token(drawn) => Ok(self.token(choice, drawn)),
            Update::Finished(FinishReason::Stop) => Ok(Some(self.end(choice, End::Stop))),
            Update::Finished(FinishReason::Length) => Ok(Some(self.end(choice, End::Length))),
            Update::Finished(FinishReason::Cancelled) => Err(self.broken_off()),
            Update::Failed(error) => Err(Failure::of_engine(&error, true)),
            Update::Accepted => Ok(None),
        }
    }

    fn token(&mut self, at: usize, drawn: Drawn) -> Option<Piece> {
        self.generated += 1;
        let choice = self.choices.get_mut(at)?;
        let text = choice.text.push(drawn.token);
        choice.drawn.push(drawn);
        if choice.text.stopped() {
            choice.enough.store(true, Ordering::Release);
            return Some(Piece { text, ..self.end(at, End::Stop) });
        }
        if text.is_empty() {
            return None;
        }
        Some(Piece { choice: at, text, drawn: std::mem::take(&mut choice.drawn), end: None })
    }

    fn end(&mut self, at: usize, end: End) -> Piece {
        let mut piece = Piece { choice: at, end: Some(end), ..Piece::default() };
        if let Some(choice) = self.choices.get_mut(at) {
            piece.text = choice.text.finish();
            piece.drawn = std::mem::take(&mut choice.drawn);
            choice.ended = true;
            self.open -= 1;
        }
        piece
    }

    /// Ends one more choice at the time limit; the engine hears of it at once.
    fn cut(&mut self) -> Option<Piece> {
        self.updates.close();
        self.is_cut = true;
        let next = self.choices.iter().position(|choice| !choice.ended)?;
        Some(self.end(next, End::TimedOut))
    }

    /// Why the engine gave up what was still wanted.
    fn broken_off(&self) -> Failure {
        if self.state.engine.is_draining() { Failure::stopping() } else { Failure::internal() }
    }
}
