//! Errors as `OpenAI`'s clients read them.

use aligner_core::Error;
use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::Settings;

/// A refused or failed request.
#[derive(Debug)]
pub(super) struct Failure {
    status: StatusCode,
    kind: &'static str,
    message: String,
    /// The field that is to blame.
    param: Option<String>,
    code: Option<&'static str>,
}

impl Failure {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), param: None, code: None }
    }

    fn coded(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// A request that can never work.
    pub(super) fn refused(status: StatusCode, message: impl Into<String>) -> Self {
        Self::new(status, "invalid_request_error", message)
    }

    /// A body that is no request.
    pub(super) fn malformed(message: impl Into<String>) -> Self {
        Self::refused(StatusCode::BAD_REQUEST, message)
    }

    /// A field with a value that is not taken.
    pub(super) fn field(name: &str, message: impl std::fmt::Display) -> Self {
        Self { param: Some(name.into()), ..Self::malformed(format!("{name}: {message}")) }
    }

    /// A field that asks for what this server does not do.
    pub(super) fn unsupported(name: &str) -> Self {
        Self::field(name, "not supported by this server").coded("unsupported_parameter")
    }

    /// A prompt that leaves no room for an answer.
    pub(super) fn too_long(name: &str, tokens: usize, context: usize) -> Self {
        let message = format!("the prompt has {tokens} tokens, but the model's context is {context}");
        Self::field(name, message).coded("context_length_exceeded")
    }

    pub(super) fn wrong_key() -> Self {
        let message = "wrong or missing API key; send it as `Authorization: Bearer KEY`";
        Self::new(StatusCode::UNAUTHORIZED, "authentication_error", message).coded("invalid_api_key")
    }

    pub(super) fn no_model(name: &str, served: &Settings) -> Self {
        let names: Vec<String> = served.names().map(|own| format!("`{own}`")).collect();
        let is = if names.len() == 1 { "is" } else { "are" };
        let message = format!("the model `{name}` is not served here; {} {is}", names.join(", "));
        let failure = Self::refused(StatusCode::NOT_FOUND, message).coded("model_not_found");
        Self { param: Some("model".into()), ..failure }
    }

    pub(super) fn queue_full(limit: usize) -> Self {
        let message = format!("the queue is full: at most {limit} requests are open; try again later");
        Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message).coded("queue_full")
    }

    /// No memory is left for bodies.
    pub(super) fn busy() -> Self {
        let message = "too many large requests at once; try again later";
        Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
    }

    pub(super) fn stopping() -> Self {
        let message = "the server is shutting down";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable_error", message)
    }

    pub(super) fn timed_out(secs: f64) -> Self {
        let message = format!("the answer was not complete within {secs} s");
        Self::new(StatusCode::GATEWAY_TIMEOUT, "timeout_error", message).coded("timeout")
    }

    /// Our own fault; the cause is in the log.
    pub(super) fn internal() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", "the server failed; its log says why")
    }

    /// What the engine says of a request that it does not take, or could not finish.
    pub(super) fn of_engine(error: &Error, accepted: bool) -> Self {
        match error {
            Error::Setting { key, message } if !accepted => Self::field(field_name(key), message),
            Error::Invalid(message) if !accepted => Self::malformed(message.as_str()),
            _ => Self::internal(),
        }
    }

    /// A setting of `Sampling` that is out of range.
    pub(super) fn of_setting(error: &Error) -> Self {
        Self::of_engine(error, false)
    }

    /// The error's object.
    pub(super) fn to_value(&self) -> Value {
        let Self { message, kind, param, code, .. } = self;
        json!({ "error": { "message": message, "type": kind, "param": param, "code": code } })
    }
}

/// A field of `Sampling` as a request names it.
fn field_name(key: &str) -> &str {
    match key {
        "stop_strings" => "stop",
        "stop_tokens" => "stop_token_ids",
        "allowed" => "allowed_token_ids",
        key => key,
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let mut response = json_response(self.status, &self.to_value());
        let headers = response.headers_mut();
        match self.status {
            StatusCode::UNAUTHORIZED => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
            }
            _ => {}
        }
        response
    }
}

/// A response with a JSON body.
pub(super) fn json_response(status: StatusCode, value: &Value) -> Response {
    let mut response = Response::new(Body::from(value.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
