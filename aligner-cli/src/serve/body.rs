//! Reading a request's body: within its size, its time, and the memory for all of them.

use std::sync::Arc;

use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use futures_util::StreamExt as _;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

use super::State;
use super::failure::Failure;

/// How many of the largest bodies memory is set aside for.
const WHOLE_BODIES: usize = 16;
/// A body that is too large is read on for so many bytes: a client that is cut off while it still writes
/// does not see the answer.
const DISCARDED_BYTES: usize = 64 << 20;

/// The bytes that all bodies together may hold.
pub(super) fn room(max_body_bytes: usize) -> Arc<Semaphore> {
    let bytes = max_body_bytes.saturating_mul(WHOLE_BODIES);
    Arc::new(Semaphore::new(bytes.min(Semaphore::MAX_PERMITS)))
}

/// A body, and its part of the room.
pub(super) struct Body {
    bytes: Vec<u8>,
    room: Option<OwnedSemaphorePermit>,
}

impl Body {
    /// Reads a JSON body until `deadline`.
    pub(super) async fn read(state: &State, request: Request, deadline: Instant) -> Result<Self, Failure> {
        if !is_json(request.headers()) {
            let message = "expected the header `Content-Type: application/json`";
            return Err(Failure::refused(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
        }
        let late = |_| Failure::refused(StatusCode::REQUEST_TIMEOUT, "the body did not come in time");
        timeout_at(deadline, Self::collect(state, request)).await.map_err(late)?
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    async fn collect(state: &State, request: Request) -> Result<Self, Failure> {
        let limit = state.settings.max_body_bytes;
        let mut body = Self { bytes: Vec::new(), room: None };
        let mut seen = 0;
        let mut chunks = request.into_body().into_data_stream();
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.map_err(|error| Failure::malformed(format!("the body broke off: {error}")))?;
            seen += chunk.len();
            if seen <= limit {
                body.make_room(state, chunk.len())?;
                body.bytes.extend_from_slice(&chunk);
            } else if seen - limit > DISCARDED_BYTES {
                break;
            } else {
                body = Self { bytes: Vec::new(), room: None };
            }
        }
        if seen > limit {
            let message = format!("the body is larger than {limit} bytes");
            return Err(Failure::refused(StatusCode::PAYLOAD_TOO_LARGE, message));
        }
        Ok(body)
    }

    fn make_room(&mut self, state: &State, bytes: usize) -> Result<(), Failure> {
        let all = Arc::clone(&state.body_room);
        let room = all.try_acquire_many_owned(bytes as u32).map_err(|_| Failure::busy())?;
        match &mut self.room {
            Some(own) => own.merge(room),
            None => self.room = Some(room),
        }
        Ok(())
    }
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let essence = kind.split(';').next().unwrap_or_default().trim();
    essence.eq_ignore_ascii_case("application/json")
}
