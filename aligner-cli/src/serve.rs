//! `aligner serve`: a server that `OpenAI`'s clients can talk to.
//!
//! The engine runs on a thread of its own ([`EngineHandle`]); the server's tasks hand it requests and read
//! their events from channels that are bounded by what each request may cause.

mod answer;
mod body;
mod command;
mod draft;
mod engine;
mod failure;
mod fields;
mod format;
mod listener;
mod logprobs;
mod metrics;
mod options;
mod routes;

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aligner_core::Detokenize;
use aligner_data::Tokenizer;
use axum::Router;
use failure::Failure;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::{sleep, timeout};

pub(crate) use command::{Arguments, run};
pub use engine::EngineHandle;

/// What a server knows of its model, and its limits.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The name that requests give in `model`.
    pub model_name: String,
    /// The names of the model's adapters, which requests give in its place.
    pub adapters: Vec<String>,
    /// Most tokens of prompt and response together.
    pub context_tokens: usize,
    /// Token ids are below it.
    pub vocab_size: usize,
    /// Tokens that end a response.
    pub stop_tokens: Vec<u32>,
    /// What clients must send as `Authorization: Bearer KEY`; absent, anyone may ask.
    pub api_key: Option<String>,
    /// Largest body of a request.
    pub max_body_bytes: usize,
    /// Most tokens of a response.
    pub max_tokens_limit: usize,
    /// How long a request may take, from its head to its last token.
    pub request_timeout: Duration,
}

impl Settings {
    /// The adapter that a request's `model` names, none for the model alone.
    fn adapter(&self, name: Option<&str>) -> Result<Option<String>, Failure> {
        let Some(name) = name.filter(|name| *name != self.model_name) else { return Ok(None) };
        let own = self.adapters.iter().find(|own| *own == name);
        own.cloned().map(Some).ok_or_else(|| Failure::no_model(name, self))
    }

    /// All names that requests may give.
    fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(&self.model_name).chain(&self.adapters).map(String::as_str)
    }
}

/// What all tasks share.
struct State {
    engine: EngineHandle,
    tokenizer: Tokenizer,
    detokenize: Arc<dyn Detokenize>,
    settings: Settings,
    body_room: Arc<Semaphore>,
    /// Unix time in seconds.
    started: u64,
}

/// The routes over an engine.
pub fn app(engine: EngineHandle, tokenizer: Tokenizer, settings: Settings) -> Router {
    let detokenize: Arc<dyn Detokenize> = Arc::new(tokenizer.clone());
    let body_room = body::room(settings.max_body_bytes);
    let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    routes::router(Arc::new(State { engine, tokenizer, detokenize, settings, body_room, started }))
}

/// How long cancelled requests have to say that they were.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Serves until `shutdown`: no connection is taken any more, running requests have `grace` to finish, and
/// are cancelled then. A connection on which nothing moves for `idle` is closed.
///
/// # Errors
/// Those of the listener.
pub async fn listen(
    listener: TcpListener,
    app: Router,
    engine: EngineHandle,
    idle: Duration,
    grace: Duration,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let (began, begun) = oneshot::channel();
    let of_signal = engine.clone();
    let signal = async move {
        shutdown.await;
        of_signal.drain();
        let _ = began.send(());
    };
    let serving = axum::serve(listener::Guarded::new(listener, idle), app).with_graceful_shutdown(signal);
    let mut serving = std::pin::pin!(serving.into_future());
    let out_of_time = async {
        match begun.await {
            Ok(()) => sleep(grace).await,
            // The signal's task is gone, so the server is too.
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        served = &mut serving => return served,
        () = out_of_time => {}
    }
    engine.stop();
    // A client that reads nothing is not waited for.
    timeout(LAST_WORDS, serving).await.unwrap_or(Ok(()))
}
