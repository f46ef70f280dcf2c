//! The routes, and what holds for all of them.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Path, Request, State as Extract};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

use super::answer::Answer;
use super::body::Body;
use super::draft::{Draft, Form, Ready};
use super::failure::{Failure, json_response};
use super::fields::Fields;
use super::format::Format;
use super::{State, metrics};

type Shared = Extract<Arc<State>>;

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
const MODELS: &str = "/v1/models";
const HEALTH: &str = "/health";
const METRICS: &str = "/metrics";

pub(super) fn router(state: Arc<State>) -> Router {
    Router::new()
        .route(CHAT, post(chat))
        .route(TEXT, post(text))
        .route(MODELS, get(models))
        .route("/v1/models/{*name}", get(model))
        .route(HEALTH, get(health))
        .route(METRICS, get(prometheus))
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .layer(from_fn_with_state(Arc::clone(&state), authorized))
        .layer(from_fn_with_state(Arc::clone(&state), counted))
        .with_state(state)
}

async fn chat(Extract(state): Shared, request: Request) -> Response {
    complete(&state, Form::Chat, request).await.unwrap_or_else(Failure::into_response)
}

async fn text(Extract(state): Shared, request: Request) -> Response {
    complete(&state, Form::Text, request).await.unwrap_or_else(Failure::into_response)
}

async fn complete(state: &Arc<State>, form: Form, request: Request) -> Result<Response, Failure> {
    if !state.engine.is_serving() {
        return Err(Failure::stopping());
    }
    let deadline = Instant::now() + state.settings.request_timeout;
    let body = Body::read(state, request, deadline).await?;
    let draft = Draft::take(form, Fields::parse(body.bytes())?, &state.settings)?;
    let (asked, limit) = (draft.requests(), state.engine.max_queue());
    if asked > limit {
        let what = format!("prompts and `n` make {asked} requests, but the queue has {limit} places");
        return Err(Failure::field("n", what));
    }
    let slots = state.engine.reserve(asked).ok_or_else(|| Failure::queue_full(limit))?;
    let (draft, prompts) = encode(state, draft).await?;
    drop(body);
    let context = state.settings.context_tokens;
    let of_prompt = |prompt: &Ready| prompt.requests(&draft.options, draft.adapter.as_ref(), context);
    let requests = prompts.iter().flat_map(of_prompt).collect();
    let echo = |prompt: &Ready| std::iter::repeat_n(prompt.echo.clone(), draft.options.samples);
    let echoes = prompts.iter().flat_map(echo).collect();
    let prompt_tokens = prompts.iter().map(|prompt| prompt.tokens.len()).sum();
    let format = Format::new(state, &draft, echoes, prompt_tokens);
    let answer = Answer::submit(state, requests, slots, deadline).await?;
    Ok(if draft.options.stream { format.stream(answer) } else { format.whole(answer).await })
}

/// Makes tokens of the prompts, on a thread where a long one holds up nobody.
async fn encode(state: &Arc<State>, draft: Draft) -> Result<(Draft, Vec<Ready>), Failure> {
    let of_task = Arc::clone(state);
    let task = tokio::task::spawn_blocking(move || {
        let prompts = draft.encode(&of_task.tokenizer, &of_task.settings)?;
        Ok((draft, prompts))
    });
    task.await.unwrap_or_else(|error| {
        tracing::error!("a prompt could not be encoded: {error}");
        Err(Failure::internal())
    })
}

async fn models(Extract(state): Shared) -> Response {
    let all: Vec<Value> = state.settings.names().map(|name| model_value(&state, name)).collect();
    json_response(StatusCode::OK, &json!({ "object": "list", "data": all }))
}

async fn model(Extract(state): Shared, Path(name): Path<String>) -> Response {
    if state.settings.names().any(|own| own == name) {
        return json_response(StatusCode::OK, &model_value(&state, &name));
    }
    Failure::no_model(&name, &state.settings).into_response()
}

/// The model, or an adapter of it.
fn model_value(state: &State, name: &str) -> Value {
    let base = &state.settings.model_name;
    json!({
        "id": name,
        "object": "model",
        "created": state.started,
        "owned_by": "aligner",
        "max_model_len": state.settings.context_tokens,
        "root": name,
        "parent": if name == base { Value::Null } else { base.as_str().into() },
    })
}

async fn health(Extract(state): Shared) -> Response {
    if state.engine.is_serving() {
        return json_response(StatusCode::OK, &json!({ "status": "ok" }));
    }
    json_response(StatusCode::SERVICE_UNAVAILABLE, &json!({ "status": "stopping" }))
}

async fn prometheus(Extract(state): Shared) -> Response {
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, kind)], metrics::text(&state.engine)).into_response()
}

async fn no_route(method: Method, uri: Uri) -> Failure {
    Failure::refused(StatusCode::NOT_FOUND, format!("no such route: {method} {}", uri.path()))
}

async fn no_method(method: Method, uri: Uri) -> Failure {
    let message = format!("{method} is not allowed on {}", uri.path());
    Failure::refused(StatusCode::METHOD_NOT_ALLOWED, message)
}

/// Asks for the key below `/v1`; probes and scrapers have none.
async fn authorized(Extract(state): Shared, request: Request, next: Next) -> Response {
    let needed = state.settings.api_key.as_deref().filter(|_| request.uri().path().starts_with("/v1"));
    match needed {
        Some(key) if !has_key(request.headers(), key) => Failure::wrong_key().into_response(),
        _ => next.run(request).await,
    }
}

fn has_key(headers: &HeaderMap, key: &str) -> bool {
    let given = headers.get(header::AUTHORIZATION).map_or(&b""[..], HeaderValue::as_bytes);
    let scheme = given.get(..7).is_some_and(|scheme| scheme.eq_ignore_ascii_case(b"bearer "));
    // Hashes, so that the time of the comparison tells nothing about the key.
    scheme && Sha256::digest(given[7..].trim_ascii()) == Sha256::digest(key.as_bytes())
}

async fn counted(Extract(state): Shared, request: Request, next: Next) -> Response {
    let route = [CHAT, TEXT, MODELS, HEALTH, METRICS]
        .into_iter()
        .find(|route| request.uri().path() == *route)
        .unwrap_or("other");
    let response = next.run(request).await;
    state.engine.metrics().request(route, response.status().as_u16());
    response
}
