//! A service as a reward, against a server in a thread.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use aligner_algos::rewards::{RemoteConfig, RemoteReward};
use aligner_core::{Reward, Sample, Score};
use serde_json::{Value, json};

/// What a server got: the head and the lines of each request.
type Requests = Receiver<(String, Vec<Value>)>;

/// A server that answers each connection with the next of these; an empty one closes it without a word.
fn serve(answers: Vec<String>) -> (String, Requests) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/score", listener.local_addr().unwrap());
    let (sender, requests) = channel();
    std::thread::spawn(move || {
        for answer in answers {
            let (stream, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let (mut head, mut length) = (String::new(), 0);
            loop {
                let mut line = String::new();
                reader.read_line(&mut line).unwrap();
                if line.trim().is_empty() {
                    break;
                }
                if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
                    length = value.trim().parse().unwrap();
                }
                head += &line;
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            let body = String::from_utf8(body).unwrap();
            let lines = body.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            let _ = sender.send((head, lines));
            let _ = (&stream).write_all(answer.as_bytes());
        }
    });
    (url, requests)
}

fn response(status: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len())
}

fn samples() -> Vec<Sample> {
    let sample = |text: &str| Sample {
        text: text.into(),
        metadata: json!({"prompt": "Hi"}),
        ..Sample::response(&[1], &[2, 3])
    };
    ["a", "bb", "ccc"].map(sample).to_vec()
}

fn config(url: &str) -> RemoteConfig {
    RemoteConfig { url: url.into(), backoff_secs: 0.01, timeout_secs: 20.0, ..RemoteConfig::default() }
}

fn scores(config: RemoteConfig) -> aligner_core::Result<Vec<Score>> {
    RemoteReward::new(config).unwrap().score(&samples())
}

const ALL: &str =
    "{\"id\": 2, \"score\": 3}\n\n{\"id\": 0, \"score\": null}\n{\"id\": 1, \"scores\": [1, 2]}\n";

fn expected() -> Vec<Score> {
    vec![Score::None, Score::Tokens(vec![0.0, 1.0, 2.0]), Score::Sample(3.0)]
}

#[test]
fn headers_may_stand_in_the_environment_and_secrets_are_not_written() {
    let (url, requests) = serve(vec![response("200 OK", ALL)]);
    let table = |value: &str| BTreeMap::from([("Authorization".to_string(), value.to_string())]);
    // A variable that every process has.
    let config = RemoteConfig { headers_from_env: table("PATH"), ..config(&url) };
    scores(config.clone()).unwrap();
    let (head, _) = requests.recv().unwrap();
    let path = std::env::var("PATH").unwrap();
    assert!(head.contains(&format!("Authorization: {path}")), "{head}");

    let refused = |config| RemoteReward::new(config).unwrap_err().to_string();
    let unset = RemoteConfig { headers_from_env: table("NOT_SET_HERE"), ..config.clone() };
    assert!(refused(unset).starts_with("headers_from_env.Authorization: "));
    let twice = RemoteConfig { headers: table("Bearer secret"), ..config.clone() };
    assert!(refused(twice).contains("`headers` too"));
    let secret =
        RemoteConfig { headers: table("Bearer secret"), headers_from_env: BTreeMap::new(), ..config };
    let written = serde_json::to_value(&secret).unwrap();
    assert_eq!(written["headers"], json!(["Authorization"]));
}

#[test]
fn samples_are_posted_as_lines_and_scores_come_in_any_order() {
    let (url, requests) = serve(vec![response("200 OK", ALL)]);
    let headers = BTreeMap::from([("Authorization".into(), "Bearer secret".into())]);
    assert_eq!(scores(RemoteConfig { headers, send_tokens: true, ..config(&url) }).unwrap(), expected());
    let (head, lines) = requests.recv().unwrap();
    assert!(head.starts_with("POST /score ") && head.contains("Authorization: Bearer secret"), "{head}");
    assert_eq!(lines.len(), 3);
    assert_eq!(
        lines[1],
        json!({"id": 1, "prompt": "Hi", "response": "bb", "metadata": {"prompt": "Hi"},
            "tokens": [1, 2, 3], "mask": [false, true, true]})
    );
}

#[test]
fn large_batches_are_posted_in_parts() {
    let part = |count: usize| {
        let lines: Vec<String> = (0..count).map(|id| format!("{{\"id\": {id}, \"score\": {id}}}")).collect();
        response("200 OK", &lines.join("\n"))
    };
    let (url, requests) = serve(vec![part(2), part(1)]);
    let expected = [0.0, 1.0, 0.0].map(Score::Sample);
    assert_eq!(scores(RemoteConfig { batch_size: 2, ..config(&url) }).unwrap(), expected);
    assert_eq!([requests.recv().unwrap().1.len(), requests.recv().unwrap().1.len()], [2, 1]);
}

#[test]
fn failures_that_may_pass_are_tried_again() {
    let busy = || response("503 Service Unavailable", "loading");
    let (url, requests) =
        serve(vec![busy(), String::new(), response("429 Too Many Requests", ""), response("200 OK", ALL)]);
    let start = Instant::now();
    assert_eq!(scores(config(&url)).unwrap(), expected());
    assert!(start.elapsed() >= Duration::from_millis(10 + 20 + 40), "the pause doubles");
    assert_eq!(requests.iter().take(4).count(), 4);
    let (url, _requests) = serve(vec![busy(), busy()]);
    let message = scores(RemoteConfig { retries: 1, ..config(&url) }).unwrap_err().to_string();
    assert!(
        message.starts_with(&url) && message.contains("status 503: loading (after 2 tries)"),
        "{message}"
    );
}

#[test]
fn a_refusal_is_told_at_once_with_address_status_and_body() {
    let (url, requests) = serve(vec![response("400 Bad Request", "no such model")]);
    let message = scores(config(&url)).unwrap_err().to_string();
    assert_eq!(message, format!("{url}: status 400: no such model"));
    assert_eq!(requests.iter().count(), 1);
}

#[test]
fn silence_is_an_error_after_the_time_limit() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let start = Instant::now();
    let silent = RemoteConfig { timeout_secs: 0.3, retries: 1, ..config(&url) };
    let message = scores(silent).unwrap_err().to_string();
    assert!(message.starts_with(&url) && message.contains("no answer"), "{message}");
    assert!(start.elapsed() < Duration::from_secs(10));
    drop(listener);
    let nobody = scores(RemoteConfig { retries: 0, ..config(&url) }).unwrap_err().to_string();
    assert!(nobody.starts_with(&url) && nobody.contains("no answer"), "{nobody}");
}

#[test]
fn faulty_answers_name_line_and_samples() {
    let told = |body: &str| {
        let (url, _requests) = serve(vec![response("200 OK", body)]);
        let message = scores(config(&url)).unwrap_err().to_string();
        assert!(message.starts_with(&url), "{message}");
        message
    };
    assert!(told("{\"id\": 1, \"score\": 1}").contains("no score came for sample 0, sample 2"));
    assert!(told("{\"id\": 0, \"score\": 1}\n<html>").contains("line 2 of its answer is not JSON"));
    assert!(told("{\"id\": 3, \"score\": 1}").contains("the id 3, which was not asked for"));
}

#[test]
fn settings_that_cannot_work_are_named() {
    let refused = |config| RemoteReward::new(config).unwrap_err().to_string();
    let base = || config("http://localhost:1/a");
    for url in ["", "localhost", "ftp://a", "http://", "http:// a"] {
        assert!(refused(config(url)).starts_with("url: "), "{url}");
    }
    assert!(refused(RemoteConfig { timeout_secs: 0.0, ..base() }).starts_with("timeout_secs: "));
    assert!(refused(RemoteConfig { backoff_secs: -1.0, ..base() }).starts_with("backoff_secs: "));
    assert!(refused(RemoteConfig { batch_size: 0, ..base() }).starts_with("batch_size: "));
    let headers = BTreeMap::from([("a b".to_string(), String::new())]);
    assert!(refused(RemoteConfig { headers, ..base() }).starts_with("headers.a b: "));
}
