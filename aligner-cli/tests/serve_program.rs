//! The program itself as a server: a real model, real signals.

mod scene;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, ChildStderr, Command, Stdio};

use scene::{Scene, copy_dir, golden};
use serde_json::{Value, json};

struct Program {
    child: Child,
    log: BufReader<ChildStderr>,
    address: String,
}

impl Program {
    fn start(scene: &Scene, arguments: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_aligner"));
        command.args(["serve", "model", "--port", "0"]).args(arguments).current_dir(scene.path(""));
        command.env("ALIGNER_API_KEY", "secret").stdin(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let log = BufReader::new(child.stderr.take().unwrap());
        let mut program = Self { child, log, address: String::new() };
        while program.address.is_empty() {
            let mut line = String::new();
            assert!(program.log.read_line(&mut line).unwrap() > 0, "it ended before it served");
            if let Some((_, address)) = line.trim().split_once(" on http://") {
                program.address = address.into();
            }
        }
        program
    }

    /// Asks for `tokens` tokens and gives the connection.
    fn ask(&self, tokens: usize, stream: bool) -> TcpStream {
        self.ask_of("model", tokens, stream)
    }

    /// Asks a model, or an adapter of it.
    fn ask_of(&self, model: &str, tokens: usize, stream: bool) -> TcpStream {
        let fields = json!({
            "model": model, "prompt": "one", "max_tokens": tokens, "ignore_eos": true, "temperature": 0, "stream": stream,
        });
        let body = fields.to_string();
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let length = body.len();
        let head = "POST /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\nAuthorization: Bearer secret\r\n";
        let rest = format!("Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}");
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(rest.as_bytes()).unwrap();
        stream
    }

    fn signal(&self, name: &str) {
        let status = Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }

    /// The exit code and the rest of the log.
    fn end(mut self) -> (Option<i32>, String) {
        let mut log = String::new();
        self.log.read_to_string(&mut log).unwrap();
        (self.child.wait().unwrap().code(), log)
    }
}

fn answer(mut stream: TcpStream) -> Value {
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    let (_, body) = reply.split_once("\r\n\r\n").unwrap();
    serde_json::from_str(body).unwrap_or_else(|_| panic!("{reply}"))
}

#[test]
fn it_answers_as_generate_does_and_ends_at_a_signal() {
    let scene = Scene::new();
    let program = Program::start(&scene, &[]);
    let whole = answer(program.ask(8, false));
    let generated = scene.aligner(&["generate", "model", "one", "--max-tokens", "8"]);
    assert_eq!(format!("{}\n", whole["choices"][0]["text"].as_str().unwrap()), generated.succeeds());
    assert_eq!(whole["model"], "model");
    // Once its head is there, the request runs.
    let mut running = BufReader::new(program.ask(100, true));
    let mut events = String::new();
    running.read_line(&mut events).unwrap();
    program.signal("-TERM");
    running.read_to_string(&mut events).unwrap();
    assert!(events.contains("\"finish_reason\":\"length\"") && events.contains("[DONE]"), "{events}");
    let (code, log) = program.end();
    assert_eq!(code, Some(0), "{log}");
    assert!(log.contains("shutting down"), "{log}");
}

#[test]
fn adapters_answer_under_their_names() {
    let scene = Scene::new();
    // The last one has a head and norms of its own.
    let adapters = ["lora_all_r3_rslora", "dora_qv_r4", "saved_head_norm_r2"];
    for name in adapters {
        copy_dir(&golden().join("lora").join(name), &scene.path(name));
    }
    let [a, b, c] = ["a=lora_all_r3_rslora", "b=dora_qv_r4", "c=saved_head_norm_r2"];
    let program = Program::start(&scene, &["--adapter", a, "--adapter", b, "--adapter", c]);
    // All at once, so that a pass has rows of each.
    let asked = ["model", "a", "b", "c"].map(|name| program.ask_of(name, 24, false));
    let generated = |adapter: &[&str]| {
        let call = scene.aligner(&[&["generate", "model", "one", "--max-tokens", "24"], adapter].concat());
        call.succeeds().to_string()
    };
    let of = |name: &&str| generated(&["--adapter", name]);
    let alone: Vec<String> = std::iter::once(generated(&[])).chain(adapters.iter().map(of)).collect();
    for (stream, alone) in asked.into_iter().zip(&alone) {
        let text = answer(stream)["choices"][0]["text"].as_str().unwrap().to_string();
        // `generate` ends where the text does.
        assert!(text.starts_with(alone.trim_end_matches('\n')), "{text} {alone}");
    }
    assert!(alone[0] != alone[1] && alone[1] != alone[2] && alone[3] != alone[0]);
    let unknown = answer(program.ask_of("d", 4, false));
    assert_eq!(unknown["error"]["code"], "model_not_found");
    program.signal("-TERM");
    assert_eq!(program.end().0, Some(0));
}

#[test]
fn mistakes_are_named_before_the_model_is_loaded() {
    let scene = Scene::new();
    scene.aligner(&["serve", "absent"]).fails(2, &["absent: no such file or directory"]);
    scene.aligner(&["serve", "model", "--max-queue", "0"]).fails(2, &["--max-queue: expected 1 or more"]);
    scene.aligner(&["serve", "model", "--host", "no host at all"]).fails(2, &["--host"]);
    scene.aligner_with(&[("ALIGNER_API_KEY", "")], &["serve", "model"]).fails(2, &["the key is empty"]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    scene.aligner(&["serve", "model", "--port", &port]).fails(1, &[&port, "in use"]);
}
