//! The command around the server: its arguments, its model, its signals.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::Path;
use std::time::Duration;

use aligner_core::Engine;
use aligner_core::weights::gguf_name;
use anyhow::{Context as _, bail, ensure};
use tokio::net::TcpListener;

use super::{EngineHandle, Settings, app, listen};
use crate::Usage;
use crate::interrupt::Interrupt;
use crate::progress::say;
use crate::wire::{EngineFlags, LoadedModel, ModelFlags};

/// Serve a model over HTTP with the routes that clients of chat completions know; see docs/serve.md.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    model: ModelFlags,
    /// The address to listen on; other machines reach the server on 0.0.0.0.
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// The port; 0 lets the system choose one.
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// What clients must send as `Authorization: Bearer KEY`.
    #[arg(long, env = "ALIGNER_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// Largest body of a request, in bytes.
    #[arg(long, default_value_t = 4 << 20)]
    max_body_bytes: usize,
    /// Most requests that are open at a time, waiting or running; n samples are n requests.
    #[arg(long, default_value_t = 256)]
    max_queue: usize,
    /// Most tokens of a response.
    #[arg(long, default_value_t = 4096)]
    max_tokens_limit: usize,
    /// How long a request may take, in seconds.
    #[arg(long, value_name = "SECS", default_value_t = 600)]
    request_timeout: u64,
    /// How long running requests may go on after Ctrl-C, in seconds.
    #[arg(long, value_name = "SECS", default_value_t = 30)]
    grace: u64,
    /// The name of the model in requests; by default that of its file or directory.
    #[arg(long)]
    served_model_name: Option<String>,
    #[command(flatten)]
    engine: EngineFlags,
}

/// Requests end by their own time limit before their connection is taken for dead.
const IDLE_MARGIN: Duration = Duration::from_secs(30);
/// How often a signal is looked for.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);
/// Threads that make tokens of long prompts.
const ENCODERS: usize = 2;

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    check(arguments)?;
    // Before the model is loaded: a signal then ends the program as it should, after the load.
    let interrupt = Interrupt::listen()?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(ENCODERS).build()?;
    // A port that is taken is found out before the model is loaded.
    let listener = runtime.block_on(bind(&arguments.host, arguments.port))?;
    let model = arguments.model.writer()?;
    let settings = settings(arguments, &model);
    let is_base = settings.adapters.contains(&settings.model_name);
    let advice = "is the model's own name; --served-model-name gives it another";
    ensure!(!is_base, Usage(format!("--adapter: `{}` {advice}", settings.model_name)));
    let tokenizer = model.tokenizer.clone();
    let flags = arguments.engine.clone();
    let engine = EngineHandle::start(arguments.max_queue, move || {
        let engine: Box<dyn Engine> = Box::new(flags.engine(&model)?);
        Ok(engine)
    })?;
    let address = listener.local_addr()?;
    if settings.api_key.is_none() && !address.ip().is_loopback() {
        say("warning: other machines can reach this server, and no --api-key is set");
    }
    if tokenizer.template().is_none() {
        say("the model has no chat template: /v1/completions answers, /v1/chat/completions does not");
    }
    let names: Vec<String> = settings.names().map(|name| format!("`{name}`")).collect();
    say(&format!("serving {} on http://{address}", names.join(", ")));
    let idle = settings.request_timeout + IDLE_MARGIN;
    let app = app(engine.clone(), tokenizer, settings);
    let grace = Duration::from_secs(arguments.grace);
    let shutdown = shutdown(interrupt.clone(), engine.clone());
    runtime.block_on(listen(listener, app, engine, idle, grace, shutdown))?;
    if !interrupt.asked() {
        bail!("the engine's thread ended, so the server did too");
    }
    Ok(())
}

fn check(arguments: &Arguments) -> anyhow::Result<()> {
    let limits = [
        ("--max-body-bytes", arguments.max_body_bytes as u64),
        ("--max-queue", arguments.max_queue as u64),
        ("--max-tokens-limit", arguments.max_tokens_limit as u64),
        ("--request-timeout", arguments.request_timeout),
    ];
    for (name, value) in limits {
        ensure!(value > 0, Usage(format!("{name}: expected 1 or more, got 0")));
    }
    let is_empty = arguments.api_key.as_ref().is_some_and(String::is_empty);
    ensure!(!is_empty, Usage("--api-key (or ALIGNER_API_KEY): the key is empty".into()));
    Ok(())
}

fn settings(arguments: &Arguments, model: &LoadedModel) -> Settings {
    let config = model.checkpoint.config();
    Settings {
        model_name: arguments.served_model_name.clone().unwrap_or_else(|| name_of(&arguments.model.model)),
        adapters: model.named.iter().map(|(name, _)| name.clone()).collect(),
        context_tokens: config.max_positions,
        vocab_size: config.vocab_size,
        stop_tokens: model.stop_tokens(),
        api_key: arguments.api_key.clone(),
        max_body_bytes: arguments.max_body_bytes,
        max_tokens_limit: arguments.max_tokens_limit,
        request_timeout: Duration::from_secs(arguments.request_timeout),
    }
}

/// The last part of the path, without `.gguf` and the number of a file among several.
fn name_of(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let is_file = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    let directory = || path.file_name().map(|name| name.to_string_lossy().into_owned());
    let name = if is_file { gguf_name(&path) } else { directory() };
    name.unwrap_or_else(|| "model".into())
}

async fn bind(host: &str, port: u16) -> anyhow::Result<TcpListener> {
    let wrong = || Usage(format!("--host: `{host}` is no address of this machine"));
    let addresses: Vec<SocketAddr> = (host, port).to_socket_addrs().map_err(|_| wrong())?.collect();
    TcpListener::bind(&addresses[..]).await.with_context(|| format!("{host}:{port}"))
}

/// Returns at the first signal, or when there is no engine any more. A second signal ends the program.
async fn shutdown(interrupt: Interrupt, engine: EngineHandle) {
    let asked = async {
        while !interrupt.asked() {
            tokio::time::sleep(SIGNAL_INTERVAL).await;
        }
        say("shutting down: running requests may finish; Ctrl-C again ends at once");
    };
    tokio::select! {
        () = asked => {}
        () = engine.closed() => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_named_after_its_file_or_directory() {
        assert_eq!(name_of(Path::new("models/SmolLM2-135M.Q4_1.gguf")), "SmolLM2-135M.Q4_1");
        assert_eq!(name_of(Path::new("models/Qwen3-4B-00001-of-00003.gguf")), "Qwen3-4B");
        assert_eq!(name_of(Path::new("runs/demo.v2/model/")), "model");
    }
}
