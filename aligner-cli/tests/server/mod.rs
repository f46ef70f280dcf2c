//! A server over an engine that follows a script, and a client that sees every byte.
#![allow(dead_code, reason = "every test file uses a part of it")]

mod client;
mod scripted;

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aligner_cli::serve::{EngineHandle, Settings, app, listen};
use aligner_data::Tokenizer;
use serde_json::Value;
use tokio::sync::oneshot;

pub(crate) use client::{Reply, Stream};
pub(crate) use scripted::{Control, SCRIPT, STOP};

pub(crate) const MODEL: &str = "scripted";
pub(crate) const CONTEXT: usize = 256;

/// A server that runs until it is dropped.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) control: Arc<Control>,
    pub(crate) engine: EngineHandle,
    shutdown: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// What differs between servers.
pub(crate) struct Setup {
    pub(crate) max_queue: usize,
    pub(crate) grace: Duration,
    pub(crate) settings: Settings,
}

impl Default for Setup {
    fn default() -> Self {
        let settings = Settings {
            model_name: MODEL.into(),
            adapters: Vec::new(),
            context_tokens: CONTEXT,
            vocab_size: 320,
            stop_tokens: vec![STOP],
            api_key: None,
            max_body_bytes: 1 << 20,
            max_tokens_limit: 200,
            request_timeout: Duration::from_mins(1),
        };
        Self { max_queue: 64, grace: Duration::from_secs(20), settings }
    }
}

pub(crate) fn tokenizer() -> Tokenizer {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/models/llama_gqa_untied");
    let template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}";
    Tokenizer::from_dir(&model).unwrap().with_template(template).unwrap()
}

impl Server {
    pub(crate) fn start() -> Self {
        Self::with(Setup::default())
    }

    pub(crate) fn with(setup: Setup) -> Self {
        let control = Arc::new(Control::default());
        let (tokenizer, of_engine) = (tokenizer(), Arc::clone(&control));
        let script = tokenizer.encode(SCRIPT).unwrap();
        let engine = EngineHandle::start(setup.max_queue, move || {
            Ok(Box::new(scripted::Scripted::new(script, of_engine)) as Box<dyn aligner_core::Engine>)
        })
        .unwrap();
        let (shutdown, asked) = oneshot::channel();
        let (started, address) = std::sync::mpsc::channel();
        let of_server = engine.clone();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
                started.send(listener.local_addr().unwrap()).unwrap();
                let app = app(of_server.clone(), tokenizer, setup.settings);
                let asked = async {
                    let _ = asked.await;
                };
                let idle = Duration::from_secs(90);
                listen(listener, app, of_server, idle, setup.grace, asked).await.unwrap();
            });
        });
        let address = address.recv().unwrap();
        Self { address, control, engine, shutdown: Some(shutdown), thread: Some(thread) }
    }

    /// Asks the server to shut down.
    pub(crate) fn shut_down(&mut self) {
        self.shutdown.take().unwrap().send(()).unwrap();
    }

    /// Waits until the server has ended.
    pub(crate) fn join(&mut self) {
        self.thread.take().unwrap().join().unwrap();
    }

    /// Sends bytes as they are and reads all of the reply.
    pub(crate) fn raw(&self, bytes: &[u8]) -> Reply {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_mins(1))).unwrap();
        // A server may refuse a body before it has all of it.
        let _ = stream.write_all(bytes);
        let mut reply = Vec::new();
        stream.read_to_end(&mut reply).unwrap();
        Reply::parse(&reply)
    }

    pub(crate) fn request(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> Reply {
        self.raw(&client::request(method, path, headers, body))
    }

    pub(crate) fn get(&self, path: &str) -> Reply {
        self.request("GET", path, "", b"")
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Reply {
        self.request("POST", path, client::JSON, body.to_string().as_bytes())
    }

    pub(crate) fn chat(&self, body: &Value) -> Reply {
        self.post("/v1/chat/completions", body)
    }

    pub(crate) fn text(&self, body: &Value) -> Reply {
        self.post("/v1/completions", body)
    }

    /// Begins a stream.
    pub(crate) fn stream(&self, path: &str, body: &Value) -> Stream {
        Stream::open(self.address, &client::request("POST", path, client::JSON, body.to_string().as_bytes()))
    }

    /// A value of `/metrics`.
    pub(crate) fn metric(&self, name: &str) -> u64 {
        let text = self.get("/metrics").text();
        let line = text.lines().find(|line| line.split(' ').next() == Some(name));
        let line = line.unwrap_or_else(|| panic!("no {name} in\n{text}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.control.pause(false);
        self.engine.stop();
        if let Some(shutdown) = self.shutdown.take() {
            let _ = shutdown.send(());
        }
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking(), "the server panicked");
        }
    }
}

/// Waits until something holds.
#[track_caller]
pub(crate) fn wait_for(what: &str, holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
