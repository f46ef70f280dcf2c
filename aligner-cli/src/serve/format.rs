//! Answers in `OpenAI`'s JSON: whole, or as a stream of chunks.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::Stream;
use serde_json::{Value, json};

use super::State;
use super::answer::{Answer, End, Piece};
use super::draft::{Draft, Form};
use super::failure::{Failure, json_response};
use super::logprobs::Logprobs;
use super::options::any_seed;

/// Writes one answer.
pub(super) struct Format {
    form: Form,
    id: String,
    created: u64,
    /// The adapter that answers, whose name the answer has.
    model: Option<String>,
    state: Arc<State>,
    include_usage: bool,
    /// One for each choice, where they are asked for.
    logprobs: Option<Vec<Logprobs>>,
    /// What each choice begins with.
    echoes: Vec<String>,
    prompt_tokens: usize,
}

impl Format {
    /// `echoes` has one text for each choice.
    pub(super) fn new(state: &Arc<State>, draft: &Draft, echoes: Vec<String>, prompt_tokens: usize) -> Self {
        let prefix = if draft.form == Form::Chat { "chatcmpl" } else { "cmpl" };
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let of_each = || echoes.iter().map(|_| Logprobs::default()).collect();
        Self {
            form: draft.form,
            id: format!("{prefix}-{:016x}{:016x}", any_seed(), any_seed()),
            created: since.as_secs(),
            model: draft.adapter.clone(),
            state: Arc::clone(state),
            include_usage: draft.options.include_usage,
            logprobs: draft.options.logprobs.then(of_each),
            echoes,
            prompt_tokens,
        }
    }

    /// The whole answer in one body.
    pub(super) async fn whole(mut self, mut answer: Answer) -> Response {
        let mut wholes: Vec<Piece> = (0..answer.len()).map(|_| Piece::default()).collect();
        while let Some(piece) = answer.next().await {
            let piece = match piece {
                Ok(piece) => piece,
                Err(failure) => return failure.into_response(),
            };
            if piece.end == Some(End::TimedOut) {
                let limit = self.state.settings.request_timeout;
                return Failure::timed_out(limit.as_secs_f64()).into_response();
            }
            let Some(whole) = wholes.get_mut(piece.choice) else { continue };
            whole.choice = piece.choice;
            whole.text.push_str(&piece.text);
            if self.logprobs.is_some() {
                whole.drawn.extend(piece.drawn);
            }
            whole.end = piece.end;
        }
        let choices: Vec<Value> = wholes.into_iter().map(|whole| self.choice(whole)).collect();
        let kind = if self.form == Form::Chat { "chat.completion" } else { "text_completion" };
        let mut body = self.envelope(kind, &choices);
        body["usage"] = self.usage(answer.generated());
        json_response(StatusCode::OK, &body)
    }

    fn choice(&mut self, mut whole: Piece) -> Value {
        let logprobs = self.logprobs_of(&mut whole);
        let (index, end) = (whole.choice, whole.end.map(End::name));
        match self.form {
            Form::Chat => json!({
                "index": index,
                "message": { "role": "assistant", "content": whole.text, "refusal": null },
                "logprobs": logprobs,
                "finish_reason": end,
            }),
            Form::Text => {
                let text = std::mem::take(&mut self.echoes[index]) + &whole.text;
                json!({ "index": index, "text": text, "logprobs": logprobs, "finish_reason": end })
            }
        }
    }

    /// The answer as server-sent events.
    pub(super) fn stream(self, answer: Answer) -> Response {
        let events = Sse::new(Chunks::start(self, answer)).keep_alive(KeepAlive::default());
        let mut response = events.into_response();
        // Proxies that collect the events would take the point out of them.
        response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
        response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        response
    }

    /// What comes before the first token.
    fn opening(&self, choices: usize) -> VecDeque<String> {
        let of_choice = |index: usize| match self.form {
            Form::Chat => {
                let delta = json!({ "role": "assistant", "content": "", "refusal": null });
                Some(json!({ "index": index, "delta": delta, "logprobs": null, "finish_reason": null }))
            }
            Form::Text if self.echoes[index].is_empty() => None,
            Form::Text => Some(
                json!({ "index": index, "text": self.echoes[index], "logprobs": null, "finish_reason": null }),
            ),
        };
        (0..choices).filter_map(of_choice).map(|choice| self.chunk(choice)).collect()
    }

    /// The chunks of a piece: its text, and the end in one of its own.
    fn pieces(&mut self, mut piece: Piece) -> impl Iterator<Item = String> + use<> {
        let logprobs = self.logprobs_of(&mut piece);
        let (index, is_chat) = (piece.choice, self.form == Form::Chat);
        let more = (!piece.text.is_empty() || !logprobs.is_null()).then(|| {
            let mut choice = json!({ "index": index, "logprobs": logprobs, "finish_reason": null });
            if is_chat {
                choice["delta"] = json!({ "content": piece.text });
            } else {
                choice["text"] = piece.text.into();
            }
            self.chunk(choice)
        });
        let last = piece.end.map(|end| {
            let mut choice = json!({ "index": index, "logprobs": null, "finish_reason": end.name() });
            if is_chat {
                choice["delta"] = json!({});
            } else {
                choice["text"] = "".into();
            }
            self.chunk(choice)
        });
        more.into_iter().chain(last)
    }

    fn chunk(&self, choice: Value) -> String {
        let mut chunk = self.envelope(self.chunk_kind(), &[choice]);
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        chunk.to_string()
    }

    /// What comes after the last token.
    fn closing(&self, generated: usize) -> impl Iterator<Item = String> + use<> {
        let usage = self.include_usage.then(|| {
            let mut chunk = self.envelope(self.chunk_kind(), &[]);
            chunk["usage"] = self.usage(generated);
            chunk.to_string()
        });
        usage.into_iter().chain(std::iter::once("[DONE]".to_string()))
    }

    fn chunk_kind(&self) -> &'static str {
        if self.form == Form::Chat { "chat.completion.chunk" } else { "text_completion" }
    }

    fn envelope(&self, kind: &str, choices: &[Value]) -> Value {
        json!({
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model.as_ref().unwrap_or(&self.state.settings.model_name),
            "choices": choices,
        })
    }

    fn usage(&self, generated: usize) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self.prompt_tokens + generated,
        })
    }

    fn logprobs_of(&mut self, piece: &mut Piece) -> Value {
        let drawn = std::mem::take(&mut piece.drawn);
        match self.logprobs.as_mut().and_then(|all| all.get_mut(piece.choice)) {
            Some(logprobs) if !drawn.is_empty() => logprobs.of(self.form, &drawn, &self.state.tokenizer),
            _ => Value::Null,
        }
    }
}

/// The state of a stream: what is ready to be sent, and where more comes from.
struct Chunks {
    format: Format,
    /// None when the last of it has been taken.
    answer: Option<Answer>,
    ready: VecDeque<String>,
}

impl Chunks {
    fn start(format: Format, answer: Answer) -> impl Stream<Item = Result<Event, Infallible>> {
        let ready = format.opening(answer.len());
        let chunks = Self { format, answer: Some(answer), ready };
        futures_util::stream::unfold(chunks, |mut chunks| async move {
            let data = chunks.next().await?;
            Some((Ok(Event::default().data(data)), chunks))
        })
    }

    async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(chunk) = self.ready.pop_front() {
                return Some(chunk);
            }
            let answer = self.answer.as_mut()?;
            match answer.next().await {
                Some(Ok(piece)) => self.ready.extend(self.format.pieces(piece)),
                Some(Err(failure)) => {
                    self.ready.extend([failure.to_value().to_string(), "[DONE]".to_string()]);
                    self.answer = None;
                }
                None => {
                    self.ready.extend(self.format.closing(answer.generated()));
                    self.answer = None;
                }
            }
        }
    }
}
