//! The server's answers: statuses, formats, fields. The engine follows a script, so no model is needed.

mod server;

use serde_json::{Value, json};
use server::{MODEL, SCRIPT, Server, Setup, tokenizer};

fn message(text: &str) -> Value {
    json!({ "model": MODEL, "messages": [{ "role": "user", "content": text }] })
}

/// `message` with further fields.
fn with(fields: &Value) -> Value {
    let mut body = message("hello");
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

#[test]
fn a_chat_answer_has_the_format_of_openai() {
    let server = Server::start();
    let answer = server.chat(&message("hello")).ok();
    assert_eq!(answer["object"], "chat.completion");
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(answer["model"], MODEL);
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"]["role"], "assistant");
    assert_eq!(choice["message"]["content"], SCRIPT);
    assert_eq!(choice["finish_reason"], "stop");
    assert!(choice["logprobs"].is_null());
    let prompt = tokenizer().encode("[user] hello\n").unwrap().len();
    let drawn = tokenizer().encode(SCRIPT).unwrap().len() + 1;
    let usage =
        json!({ "prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn });
    assert_eq!(answer["usage"], usage);
}

#[test]
fn a_chat_stream_begins_with_the_role_and_ends_with_done() {
    let server = Server::start();
    let body = with(&json!({ "stream": true, "stream_options": { "include_usage": true } }));
    let reply = server.chat(&body);
    assert_eq!(reply.status, 200);
    assert!(reply.head.contains("content-type: text/event-stream"), "{}", reply.head);
    let mut events = reply.events();
    assert_eq!(events.pop().unwrap(), "[DONE]");
    let chunks: Vec<Value> = events.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    let text: String =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, SCRIPT);
    let [.., last, usage] = &chunks[..] else { panic!("{chunks:?}") };
    assert_eq!(last["choices"][0]["finish_reason"], "stop");
    assert_eq!(last["choices"][0]["delta"], json!({}));
    assert_eq!(usage["choices"], json!([]));
    assert!(usage["usage"]["completion_tokens"].as_u64().unwrap() > 10);
    for chunk in &chunks {
        assert_eq!(chunk["object"], "chat.completion.chunk");
        assert_eq!(chunk["id"], chunks[0]["id"]);
        assert!(chunk.get("usage").is_some());
    }
    let without = server.chat(&with(&json!({ "stream": true }))).events();
    assert!(without.iter().all(|event| !event.contains("usage")));
}

#[test]
fn completions_take_texts_tokens_and_lists_of_both() {
    let server = Server::start();
    let tokens = tokenizer().encode("hello").unwrap();
    for (prompt, choices) in [
        (json!("hello"), 1),
        (json!(["hello", "you", ""]), 0),
        (json!(["hello", "you"]), 2),
        (json!(tokens), 1),
        (json!([tokens, tokens]), 2),
    ] {
        let reply = server.text(&json!({ "prompt": prompt, "max_tokens": 100 }));
        if choices == 0 {
            assert_eq!(reply.status, 400);
            continue;
        }
        let answer = reply.ok();
        assert_eq!(answer["object"], "text_completion");
        let texts: Vec<&Value> =
            answer["choices"].as_array().unwrap().iter().map(|choice| &choice["text"]).collect();
        assert_eq!(texts, vec![SCRIPT; choices]);
    }
    // OpenAI's default is 16 tokens.
    let short = server.text(&json!({ "prompt": "hello" })).ok();
    assert_eq!(short["usage"]["completion_tokens"], 16);
    assert_eq!(short["choices"][0]["finish_reason"], "length");
    let echoed = server.text(&json!({ "prompt": "hello", "echo": true, "max_tokens": 100 })).ok();
    assert_eq!(echoed["choices"][0]["text"], format!("hello{SCRIPT}"));
}

#[test]
fn samples_have_numbers_and_one_prompt_is_counted_once() {
    let server = Server::start();
    let answer = server.chat(&with(&json!({ "n": 3, "seed": 5 }))).ok();
    let indices: Vec<&Value> =
        answer["choices"].as_array().unwrap().iter().map(|choice| &choice["index"]).collect();
    assert_eq!(indices, [0, 1, 2]);
    let submitted = server.control.submitted.lock().unwrap();
    assert_eq!(submitted.iter().map(|request| request.sample).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(submitted.iter().all(|request| request.sampling.seed == 5));
    assert_eq!(answer["usage"]["prompt_tokens"], submitted[0].prompt.tokens.len());
}

#[test]
fn adapters_are_models_of_their_own_names() {
    let mut setup = Setup::default();
    setup.settings.adapters = vec!["polite".into(), "terse".into()];
    let server = Server::with(setup);
    let listed = server.get("/v1/models").ok();
    let ids: Vec<&str> =
        listed["data"].as_array().unwrap().iter().map(|own| own["id"].as_str().unwrap()).collect();
    assert_eq!(ids, [MODEL, "polite", "terse"]);
    assert_eq!((&listed["data"][0]["parent"], &listed["data"][1]["parent"]), (&Value::Null, &json!(MODEL)));
    assert_eq!(server.get("/v1/models/terse").ok()["id"], "terse");
    let answer = server.chat(&with(&json!({ "model": "terse" }))).ok();
    assert_eq!(
        (answer["model"].as_str(), answer["choices"][0]["message"]["content"].as_str()),
        (Some("terse"), Some(SCRIPT))
    );
    server.chat(&message("hello")).ok();
    server.text(&json!({ "prompt": "hello" })).ok();
    let asked: Vec<Option<String>> =
        server.control.submitted.lock().unwrap().iter().map(|request| request.adapter.clone()).collect();
    assert_eq!(asked, [Some("terse".to_string()), None, None]);
    let refused = server.chat(&with(&json!({ "model": "rude" })));
    assert_eq!(refused.status, 404);
    let error = refused.json()["error"].clone();
    assert_eq!((error["code"].as_str(), error["param"].as_str()), (Some("model_not_found"), Some("model")));
    assert!(error["message"].as_str().unwrap().contains("`polite`, `terse` are"), "{error}");
}

#[test]
fn stop_strings_cut_across_token_borders() {
    let server = Server::start();
    let cut = SCRIPT.split("ee EN").next().unwrap();
    for stop in [json!("ee EN"), json!(["never", "ee EN"])] {
        let answer = server.chat(&with(&json!({ "stop": stop }))).ok();
        assert_eq!(answer["choices"][0]["message"]["content"], cut);
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
        let streamed = server.text(&json!({ "prompt": "a", "stop": stop, "max_tokens": 90, "stream": true }));
        let text: String = streamed
            .events()
            .iter()
            .filter_map(|event| serde_json::from_str::<Value>(event).ok())
            .filter_map(|chunk| chunk["choices"][0]["text"].as_str().map(str::to_string))
            .collect();
        assert_eq!(text, cut);
    }
}

#[test]
fn chat_logprobs_have_tokens_bytes_and_alternatives() {
    let server = Server::start();
    let answer = server.chat(&with(&json!({ "logprobs": true, "top_logprobs": 3 }))).ok();
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), answer["usage"]["completion_tokens"].as_u64().unwrap() as usize);
    assert_eq!(content[0]["logprob"], -0.5);
    assert_eq!(content[0]["top_logprobs"].as_array().unwrap().len(), 3);
    assert_eq!(content[0]["top_logprobs"][2]["logprob"], -9999.0);
    // The bytes of all but the stop token are those of the text, whatever its characters' tokens are.
    let bytes: Vec<u8> = content[..content.len() - 1]
        .iter()
        .flat_map(|entry| entry["bytes"].as_array().unwrap())
        .map(|byte| byte.as_u64().unwrap() as u8)
        .collect();
    assert_eq!(String::from_utf8(bytes).unwrap(), SCRIPT);
    let streamed = server.chat(&with(&json!({ "logprobs": true, "stream": true }))).events();
    let entries: usize = streamed
        .iter()
        .filter_map(|event| serde_json::from_str::<Value>(event).ok())
        .filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array().map(Vec::len))
        .sum();
    assert_eq!(entries, content.len());
}

#[test]
fn completion_logprobs_are_parallel_lists() {
    let server = Server::start();
    let answer = server.text(&json!({ "prompt": "a", "logprobs": 2, "max_tokens": 4 })).ok();
    let logprobs = &answer["choices"][0]["logprobs"];
    for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[list].as_array().unwrap().len(), 4, "{list}");
    }
    assert_eq!(logprobs["text_offset"][0], 0);
    let first = logprobs["tokens"][0].as_str().unwrap();
    assert_eq!(logprobs["text_offset"][1], first.chars().count());
    assert_eq!(logprobs["top_logprobs"][0][first], -0.5);
    assert_eq!(logprobs["top_logprobs"][0].as_object().unwrap().len(), 2);
}

#[test]
fn requests_that_cannot_work_are_400_and_name_their_field() {
    let server = Server::start();
    let chat: [(&str, Value); 32] = [
        ("n", json!({ "n": 1000 })),
        ("n", json!({ "n": 0 })),
        ("n", json!({ "n": -1 })),
        ("n", json!({ "n": 100 })),
        ("max_tokens", json!({ "max_tokens": -5 })),
        ("max_tokens", json!({ "max_tokens": 0 })),
        ("max_tokens", json!({ "max_tokens": 201 })),
        ("max_completion_tokens", json!({ "max_completion_tokens": 1e9 })),
        ("temperature", json!({ "temperature": -0.1 })),
        ("temperature", json!({ "temperature": "hot" })),
        ("top_p", json!({ "top_p": 0 })),
        ("top_k", json!({ "top_k": -2 })),
        ("min_p", json!({ "min_p": 2 })),
        ("repetition_penalty", json!({ "repetition_penalty": 0 })),
        ("min_tokens", json!({ "min_tokens": 300 })),
        ("logit_bias", json!({ "logit_bias": { "320": 1 } })),
        ("logit_bias", json!({ "logit_bias": { "a": 1 } })),
        ("stop", json!({ "stop": "" })),
        ("stop", json!({ "stop": [1] })),
        ("stop", json!({ "stop": vec!["a"; 17] })),
        ("stop_token_ids", json!({ "stop_token_ids": [5000] })),
        ("allowed_token_ids", json!({ "allowed_token_ids": [u32::MAX] })),
        ("top_logprobs", json!({ "top_logprobs": 2 })),
        ("top_logprobs", json!({ "logprobs": true, "top_logprobs": 21 })),
        ("best_of", json!({ "best_of": 3 })),
        ("tools", json!({ "tools": [{ "type": "function" }] })),
        ("response_format", json!({ "response_format": { "type": "json_schema" } })),
        ("modalities", json!({ "modalities": ["audio"] })),
        ("stream_options", json!({ "stream_options": {} })),
        ("messages", json!({ "messages": [] })),
        ("messages", json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url" }] }] })),
        ("messages", json!({ "messages": [{ "role": "user", "content": "long ".repeat(300) }] })),
    ];
    for (field, fields) in chat {
        let reply = server.chat(&with(&fields));
        let error = reply.json()["error"].clone();
        assert_eq!((reply.status, error["param"].as_str()), (400, Some(field)), "{fields}: {error}");
        assert!(error["message"].is_string() && error["type"] == "invalid_request_error", "{error}");
    }
    let text = [
        ("prompt", json!({})),
        ("prompt", json!({ "prompt": 5 })),
        ("prompt", json!({ "prompt": [] })),
        ("prompt", json!({ "prompt": [320] })),
        ("prompt", json!({ "prompt": [-1] })),
        ("suffix", json!({ "prompt": "a", "suffix": "b" })),
        ("echo", json!({ "prompt": "a", "echo": true, "logprobs": 1 })),
        ("n", json!({ "prompt": vec!["a"; 65] })),
    ];
    for (field, body) in text {
        let reply = server.text(&body);
        assert_eq!((reply.status, reply.json()["error"]["param"].as_str()), (400, Some(field)), "{body}");
    }
    assert_eq!(server.engine.open(), 0);
    assert!(server.control.submitted.lock().unwrap().is_empty());
}

#[test]
fn bodies_that_are_no_requests() {
    let server = Server::start();
    let json = "Content-Type: application/json\r\n";
    for body in [
        &b""[..],
        b"{",
        b"[1]",
        b"null",
        b"\xff\xfe{}",
        b"{\"messages\": \"\xc3\x28\"}",
        b"{\"messages\": [{\"role\": \"user\", \"content\": \"\\ud800\"}]}",
        b"{\"temperature\": 1e999, \"messages\": []}",
        b"{\"messages\": {}}",
        "[".repeat(100_000).as_bytes(),
    ] {
        let reply = server.request("POST", CHAT, json, body);
        let shown = String::from_utf8_lossy(body);
        assert_eq!(reply.status, 400, "{shown:.80}");
        assert!(reply.json()["error"]["message"].is_string());
    }
    let large = vec![b' '; 10 << 20];
    assert_eq!(server.request("POST", CHAT, json, &large).status, 413);
    for kind in ["", "Content-Type: text/plain\r\n", "Content-Type: application/x-www-form-urlencoded\r\n"] {
        assert_eq!(server.request("POST", CHAT, kind, message("a").to_string().as_bytes()).status, 415);
    }
    let with_charset = "Content-Type: Application/JSON; charset=utf-8\r\n";
    let body = message("a").to_string();
    assert_eq!(server.request("POST", CHAT, with_charset, body.as_bytes()).status, 200);
    // A body in chunks has no length that could be looked at before.
    let head = format!("POST {CHAT} HTTP/1.1\r\nHost: t\r\nConnection: close\r\n{json}");
    let chunk = [b"100000\r\n".to_vec(), vec![b' '; 1 << 20], b"\r\n".to_vec()].concat();
    let head = format!("{head}Transfer-Encoding: chunked\r\n\r\n").into_bytes();
    let chunked = [head, chunk.repeat(10), b"0\r\n\r\n".to_vec()].concat();
    assert_eq!(server.raw(&chunked).status, 413);
    assert_eq!(server.raw(b"not http at all\r\n\r\n").status, 400);
    server.chat(&message("still there")).ok();
}

#[test]
fn fields_that_change_nothing_are_ignored() {
    let server = Server::start();
    let fields = json!({
        "user": "me", "metadata": { "a": 1 }, "store": false, "service_tier": "auto", "parallel_tool_calls": true,
        "tools": [], "tool_choice": "none", "response_format": { "type": "text" }, "logit_bias": null, "stop": null,
        "prediction": null, "unheard_of": { "deeply": ["nested"] }, "n": 1, "best_of": 1, "top_k": -1,
    });
    server.chat(&with(&fields)).ok();
    let parts = json!([{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }]);
    let body = json!({ "messages": [{ "role": "developer", "content": parts, "name": "x" }] });
    server.chat(&body).ok();
    let submitted = server.control.submitted.lock().unwrap();
    let prompt = tokenizer().decode(&submitted.last().unwrap().prompt.tokens).unwrap();
    assert_eq!(prompt, "[system] ab\n");
}

#[test]
fn sampling_fields_reach_the_engine() {
    let server = Server::start();
    let fields = json!({
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "typical_p": 0.8, "repetition_penalty": 1.5,
        "presence_penalty": -1.0, "frequency_penalty": 0.25, "logit_bias": { "7": -100 }, "min_tokens": 2,
        "max_completion_tokens": 9, "seed": -1, "stop": ["x"], "ignore_eos": true, "stop_token_ids": [9],
    });
    server.chat(&with(&fields)).ok();
    let sampling = server.control.submitted.lock().unwrap()[0].sampling.clone();
    assert_eq!(
        (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.typical_p),
        (0.5, 0.9, 7, 0.1, 0.8)
    );
    assert_eq!(
        (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty),
        (1.5, -1.0, 0.25)
    );
    assert_eq!((sampling.logit_bias, sampling.min_tokens, sampling.max_tokens), (vec![(7, -100.0)], 2, 9));
    assert_eq!((sampling.seed, sampling.stop_strings), (u64::MAX, vec!["x".to_string()]));
    assert_eq!(sampling.stop_tokens, [9]);
}

#[test]
fn a_response_fits_the_context() {
    let server = Server::start();
    server.control.endless();
    let prompt = vec![7; server::CONTEXT - 3];
    let answer = server.text(&json!({ "prompt": prompt, "max_tokens": 100 })).ok();
    assert_eq!(answer["usage"]["completion_tokens"], 3);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    let reply = server.text(&json!({ "prompt": vec![7; server::CONTEXT] }));
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (400, &json!("context_length_exceeded")));
}

#[test]
fn routes_methods_models_and_keys() {
    let mut setup = Setup::default();
    setup.settings.api_key = Some("secret".into());
    let server = Server::with(setup);
    let key = |key: &str| format!("Authorization: {key}\r\nContent-Type: application/json\r\n");
    let body = message("a").to_string();
    for (authorization, status) in [
        ("Bearer secret", 200),
        ("bearer secret", 200),
        ("Bearer secre", 401),
        ("Bearer secrets", 401),
        ("Bearer ", 401),
        ("Basic secret", 401),
    ] {
        let reply = server.request("POST", CHAT, &key(authorization), body.as_bytes());
        assert_eq!(reply.status, status, "{authorization}");
    }
    assert_eq!(server.chat(&message("a")).json()["error"]["code"], "invalid_api_key");
    let good = key("Bearer secret");
    let status = |method: &str, path: &str| {
        let reply = server.request(method, path, &good, b"");
        let is_error = reply.status >= 400 && method != "HEAD";
        assert!(!is_error || reply.json()["error"]["message"].is_string(), "{method} {path}");
        reply.status
    };
    for (method, path, expected) in [
        ("GET", "/v1/models", 200),
        ("HEAD", "/v1/models", 200),
        ("GET", "/v1/models/scripted", 200),
        ("GET", "/v1/models/other/one", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", "/", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", TEXT, 405),
        ("POST", "/health", 405),
    ] {
        assert_eq!(status(method, path), expected, "{method} {path}");
    }
    let other = json!({ "model": "gpt-4o", "messages": [{ "role": "user", "content": "a" }] }).to_string();
    let reply = server.request("POST", CHAT, &good, other.as_bytes());
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (404, &json!("model_not_found")));
    // Probes and scrapers need no key.
    assert_eq!(server.get("/health").ok()["status"], "ok");
    assert_eq!(server.metric("aligner_requests_total{route=\"/v1/chat/completions\",status=\"401\"}"), 5);
    assert_eq!(server.metric("aligner_time_to_first_token_seconds_count"), 2);
    assert_eq!(server.metric("aligner_cache_free_pages"), server.metric("aligner_cache_pages"));
}
