//! The server under clients that hang up, read slowly or come in crowds, and at its end.

mod server;

use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use server::{MODEL, SCRIPT, Server, Setup, wait_for};

const CHAT: &str = "/v1/chat/completions";

fn body(fields: &Value) -> Value {
    let mut body = json!({ "model": MODEL, "messages": [{ "role": "user", "content": "hello" }] });
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

fn streamed() -> Value {
    body(&json!({ "stream": true, "max_tokens": 200 }))
}

#[test]
fn a_client_that_hangs_up_frees_its_pages_at_once() {
    let server = Server::start();
    server.control.endless();
    server.control.step_micros.store(20_000, Ordering::SeqCst);
    // In a stream, ...
    let mut stream = server.stream(CHAT, &streamed());
    stream.next().unwrap();
    assert_eq!(server.engine.open(), 1);
    drop(stream);
    wait_for("the stream is cancelled", || server.control.cancelled.load(Ordering::SeqCst) == 1);
    // ... before a whole answer is there, ...
    let whole = server.stream(CHAT, &body(&json!({ "max_tokens": 200, "n": 2 })));
    wait_for("it runs", || server.engine.stats().running == 2);
    drop(whole);
    wait_for("both are cancelled", || server.control.cancelled.load(Ordering::SeqCst) == 3);
    // ... and in the queue.
    server.control.pause(true);
    let waiting = server.stream(CHAT, &streamed());
    wait_for("it waits", || server.engine.stats().waiting == 1);
    drop(waiting);
    wait_for("it is cancelled", || server.control.cancelled.load(Ordering::SeqCst) == 4);
    server.control.pause(false);
    wait_for("all places are free", || server.engine.open() == 0 && server.engine.stats().running == 0);
    assert_eq!(server.metric("aligner_cache_free_pages"), server.metric("aligner_cache_pages"));
    assert_eq!(server.metric("aligner_cancelled_total"), 4);
}

#[test]
fn a_full_queue_is_429_and_samples_count() {
    let server = Server::with(Setup { max_queue: 4, ..Setup::default() });
    server.control.pause(true);
    let three = server.stream(CHAT, &body(&json!({ "n": 3 })));
    wait_for("three are open", || server.engine.open() == 3);
    let reply = server.chat(&body(&json!({ "n": 2 })));
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (429, &json!("queue_full")));
    assert!(reply.head.contains("retry-after: "), "{}", reply.head);
    let fourth = server.stream(CHAT, &body(&json!({})));
    wait_for("four are open", || server.engine.open() == 4);
    assert_eq!(server.chat(&body(&json!({}))).status, 429);
    // More than the queue will ever have room for is no matter of time.
    assert_eq!(server.chat(&body(&json!({ "n": 5 }))).status, 400);
    server.control.pause(false);
    assert_eq!(three.reply().ok()["choices"].as_array().unwrap().len(), 3);
    assert_eq!(fourth.reply().status, 200);
    server.chat(&body(&json!({ "n": 4 }))).ok();
    assert_eq!(server.metric("aligner_requests_total{route=\"/v1/chat/completions\",status=\"429\"}"), 2);
}

#[test]
fn a_slow_reader_holds_up_nobody() {
    let server = Server::start();
    server.control.endless();
    let slow: Vec<_> = (0..8).map(|_| server.stream(CHAT, &streamed())).collect();
    wait_for("the engine is done with them", || server.control.finished.load(Ordering::SeqCst) == 8);
    let started = Instant::now();
    server.chat(&body(&json!({ "max_tokens": 20 }))).ok();
    assert!(started.elapsed() < Duration::from_secs(5));
    // What waited for the slow ones is whole.
    for stream in slow {
        let events = stream.rest();
        assert_eq!(events.last().unwrap(), "[DONE]");
        let text: String = events
            .iter()
            .filter_map(|event| serde_json::from_str::<Value>(event).ok())
            .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str().map(str::to_string))
            .collect();
        assert!(text.starts_with(&format!("{SCRIPT}{SCRIPT}")), "{text}");
    }
    wait_for("all places are free", || server.engine.open() == 0);
}

#[test]
fn two_hundred_streams_of_which_a_third_hangs_up() {
    let setup = Setup { max_queue: 400, ..Setup::default() };
    let server = Server::with(setup);
    server.control.endless();
    server.control.step_micros.store(500, Ordering::SeqCst);
    let clients = 200;
    thread::scope(|scope| {
        for client in 0..clients {
            let server = &server;
            scope.spawn(move || {
                let mut stream = server.stream(CHAT, &streamed());
                if client % 3 == 0 {
                    for _ in 0..=client % 40 {
                        stream.next();
                    }
                    return;
                }
                if client % 10 == 1 {
                    thread::sleep(Duration::from_millis(300));
                }
                let events = stream.rest();
                assert_eq!(events.last().map(String::as_str), Some("[DONE]"), "client {client}");
                assert!(events.len() > 100, "client {client}: {} events", events.len());
            });
        }
    });
    wait_for("all places are free", || server.engine.open() == 0 && server.engine.stats().running == 0);
    let stats = server.engine.stats();
    assert_eq!((stats.waiting, stats.free_pages), (0, stats.pages));
    let (cancelled, finished) =
        (server.control.cancelled.load(Ordering::SeqCst), server.control.finished.load(Ordering::SeqCst));
    assert_eq!(cancelled + finished, clients);
    assert!(finished >= clients - 67 && cancelled > 30, "{cancelled} cancelled, {finished} finished");
    server.chat(&body(&json!({ "max_tokens": 5 }))).ok();
}

#[test]
fn a_failed_step_is_500_and_the_next_request_works() {
    let server = Server::start();
    server.control.fail.store(true, Ordering::SeqCst);
    let reply = server.chat(&body(&json!({})));
    assert_eq!((reply.status, &reply.json()["error"]["type"]), (500, &json!("server_error")));
    server.chat(&body(&json!({}))).ok();
    server.control.endless();
    server.control.step_micros.store(5000, Ordering::SeqCst);
    let mut stream = server.stream(CHAT, &streamed());
    stream.next().unwrap();
    server.control.fail.store(true, Ordering::SeqCst);
    let events = stream.rest();
    let [.., error, done] = &events[..] else { panic!("{events:?}") };
    assert!(error.contains("server_error") && done == "[DONE]", "{error}");
    assert_eq!(server.metric("aligner_engine_failures_total"), 2);
    assert_eq!(server.engine.open(), 0);
}

#[test]
fn an_engine_that_is_gone_is_not_healthy() {
    let server = Server::start();
    server.control.panic.store(true, Ordering::SeqCst);
    assert_eq!(server.chat(&body(&json!({}))).status, 500);
    wait_for("it is seen", || server.get("/health").status == 503);
    assert_eq!(server.chat(&body(&json!({}))).status, 503);
}

#[test]
fn the_time_limit_is_504_or_ends_the_stream() {
    let mut setup = Setup::default();
    setup.settings.request_timeout = Duration::from_millis(600);
    let server = Server::with(setup);
    server.control.endless();
    server.control.step_micros.store(20_000, Ordering::SeqCst);
    let reply = server.chat(&body(&json!({ "max_tokens": 200 })));
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (504, &json!("timeout")));
    let events = server.chat(&body(&json!({ "max_tokens": 200, "stream": true, "n": 2 }))).events();
    assert_eq!(events.last().unwrap(), "[DONE]");
    let ends = events.iter().filter(|event| event.contains("\"finish_reason\":\"length\"")).count();
    assert_eq!(ends, 2);
    wait_for("all three are cancelled", || server.control.cancelled.load(Ordering::SeqCst) == 3);
    // A body that never comes has the same limit.
    let head =
        format!("POST {CHAT} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nConnection: close\r\n");
    assert_eq!(server.raw(format!("{head}Content-Length: 10\r\n\r\n{{").as_bytes()).status, 408);
}

#[test]
fn a_shutdown_lets_running_requests_finish() {
    let mut server = Server::start();
    server.control.step_micros.store(20_000, Ordering::SeqCst);
    let mut stream = server.stream(CHAT, &streamed());
    stream.next().unwrap();
    server.shut_down();
    wait_for("nobody is let in any more", || TcpStream::connect(server.address).is_err());
    let events = stream.rest();
    assert_eq!(events.last().unwrap(), "[DONE]");
    assert!(events.iter().any(|event| event.contains("\"finish_reason\":\"stop\"")));
    server.join();
    assert_eq!(server.control.cancelled.load(Ordering::SeqCst), 0);
}

#[test]
fn a_shutdown_cancels_what_takes_longer_than_the_grace_period() {
    let mut server = Server::with(Setup { grace: Duration::from_millis(200), ..Setup::default() });
    server.control.endless();
    server.control.step_micros.store(50_000, Ordering::SeqCst);
    let mut stream = server.stream(CHAT, &streamed());
    stream.next().unwrap();
    let whole = server.stream(CHAT, &body(&json!({ "max_tokens": 200 })));
    wait_for("both run", || server.engine.stats().running == 2);
    let started = Instant::now();
    server.shut_down();
    let events = stream.rest();
    assert!(events.iter().any(|event| event.contains("shutting down")), "{events:?}");
    assert_eq!(whole.reply().status, 503);
    server.join();
    assert!(started.elapsed() < Duration::from_secs(5));
    assert_eq!(server.control.cancelled.load(Ordering::SeqCst), 2);
}
