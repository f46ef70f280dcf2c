//! `aligner fetch` against a server in this process, which speaks as much of the hub as is asked for.

mod scene;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use scene::Scene;
use sha2::{Digest as _, Sha256};

/// A request as the server saw it.
#[derive(Debug, Clone)]
struct Seen {
    path: String,
    range: Option<String>,
    authorization: Option<String>,
}

/// The repository `owner/tiny` with `config.json` and `model.safetensors`.
struct Server {
    endpoint: String,
    seen: Arc<Mutex<Vec<Seen>>>,
    /// Whether the main branch is at its second commit.
    moved: Arc<AtomicBool>,
}

/// How the server misbehaves.
#[derive(Debug, Clone, Copy, Default)]
struct Faults {
    /// So many downloads of the weights break off half way.
    break_off: usize,
    /// The listed checksum is another file's.
    wrong_checksum: bool,
}

fn weights() -> Vec<u8> {
    (0..100_000u32).map(|at| (at * 7 % 251) as u8).collect()
}

/// What the server has at one commit: the second has another configuration of the same size, and
/// weights of another.
struct Content {
    commit: &'static str,
    config: &'static [u8],
    weights: Vec<u8>,
}

impl Content {
    fn at(moved: bool) -> Self {
        if moved {
            Self { commit: SECOND, config: b"[]", weights: weights()[..60_000].to_vec() }
        } else {
            Self { commit: FIRST, config: b"{}", weights: weights() }
        }
    }
}

const FIRST: &str = "0123456789abcdef";
const SECOND: &str = "fedcba9876543210";

impl Server {
    fn start(faults: Faults) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&seen);
        let broken = Arc::new(AtomicUsize::new(0));
        let moved = Arc::new(AtomicBool::new(false));
        let has_moved = Arc::clone(&moved);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // A client that goes away is the test's business, not the server's.
                let content = Content::at(has_moved.load(Ordering::SeqCst));
                let _ = serve(&stream, faults, &content, &broken, &log);
            }
        });
        Self { endpoint, seen, moved }
    }

    fn seen(&self) -> Vec<Seen> {
        self.seen.lock().expect("no panic in the server").clone()
    }

    /// Byte ranges that were asked for of the weights, the question for their size left out.
    fn ranges(&self) -> Vec<String> {
        let weights = |seen: &Seen| seen.path.ends_with("model.safetensors");
        let ranges = self.seen().into_iter().filter(weights).filter_map(|seen| seen.range);
        ranges.filter(|range| range != "bytes=0-0").collect()
    }

    fn fetch(&self, scene: &Scene, more: &[&str]) -> scene::Call {
        let variables = [("HF_ENDPOINT", self.endpoint.as_str()), ("HF_TOKEN", "secret")];
        scene.aligner_with(&variables, &[&["fetch"][..], more].concat())
    }
}

fn serve(
    stream: &TcpStream,
    faults: Faults,
    at: &Content,
    broken: &AtomicUsize,
    log: &Mutex<Vec<Seen>>,
) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let request = lines.next().transpose()?.unwrap_or_default();
    let path = request.split(' ').nth(1).unwrap_or_default().to_string();
    let mut headers = BTreeMap::new();
    for line in lines {
        let line = line?;
        if line.is_empty() {
            break;
        }
        if let Some((name, value)) = line.split_once(": ") {
            headers.insert(name.to_lowercase(), value.to_string());
        }
    }
    let range = headers.get("range").cloned();
    log.lock().expect("no panic in the server").push(Seen {
        path: path.clone(),
        range: range.clone(),
        authorization: headers.get("authorization").cloned(),
    });
    let listing = listing(faults, at);
    let (content, cut) = match path.as_str() {
        path if path.starts_with("/api/models/owner/tiny/revision/main") => {
            (listing.as_bytes().to_vec(), false)
        }
        "/owner/tiny/resolve/main/config.json" => (at.config.to_vec(), false),
        "/owner/tiny/resolve/main/model.safetensors" => {
            let whole = range.as_deref() != Some("bytes=0-0");
            (at.weights.clone(), whole && broken.fetch_add(1, Ordering::SeqCst) < faults.break_off)
        }
        _ => return respond(stream, "404 Not Found", &[], b"not found", false),
    };
    let (first, last) = bounds(range.as_deref(), content.len());
    if first > last {
        return respond(stream, "416 Range Not Satisfiable", &[], b"", false);
    }
    let fields = [
        ("etag", format!("\"{}\"", etag(&content, at))),
        ("x-repo-commit", at.commit.to_string()),
        ("content-range", format!("bytes {first}-{last}/{}", content.len())),
    ];
    let status = if range.is_some() { "206 Partial Content" } else { "200 OK" };
    respond(stream, status, &fields, &content[first..=last], cut)
}

/// The name of the content in the cache.
fn etag(content: &[u8], at: &Content) -> String {
    let edition = if at.commit == FIRST { "" } else { "-second" };
    format!("{}{edition}", content.len())
}

fn listing(faults: Faults, at: &Content) -> String {
    let hash = Sha256::digest(if faults.wrong_checksum { b"other".to_vec() } else { at.weights.clone() });
    let hash = hash.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"));
    serde_json::json!({ "sha": at.commit, "siblings": [
        { "rfilename": "README.md", "size": 1 },
        { "rfilename": "config.json", "size": 2 },
        { "rfilename": "model.safetensors", "size": at.weights.len(), "lfs": { "sha256": hash } },
    ]})
    .to_string()
}

fn bounds(range: Option<&str>, len: usize) -> (usize, usize) {
    let Some((first, last)) = range.and_then(|range| range.strip_prefix("bytes=")?.split_once('-')) else {
        return (0, len - 1);
    };
    (first.parse().expect("a number"), last.parse().unwrap_or(len - 1))
}

fn respond(
    mut stream: &TcpStream,
    status: &str,
    fields: &[(&str, String)],
    body: &[u8],
    cut: bool,
) -> std::io::Result<()> {
    write!(stream, "HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n", body.len())?;
    for (name, value) in fields {
        write!(stream, "{name}: {value}\r\n")?;
    }
    stream.write_all(b"\r\n")?;
    stream.write_all(if cut { &body[..body.len() / 2] } else { body })
}

#[test]
fn a_model_is_fetched_with_the_token_and_only_what_it_needs() {
    let (scene, server) = (Scene::new(), Server::start(Faults::default()));
    let call = server.fetch(&scene, &["owner/tiny"]);
    let snapshot = std::path::PathBuf::from(call.succeeds().trim());
    assert_eq!(std::fs::read(snapshot.join("model.safetensors")).unwrap(), weights());
    assert!(snapshot.join("config.json").exists() && !snapshot.join("README.md").exists());
    assert!(server.seen().iter().all(|seen| seen.authorization.as_deref() == Some("Bearer secret")));
    // What is there is not fetched again.
    server.fetch(&scene, &["owner/tiny"]).succeeds();
    assert_eq!(server.ranges(), ["bytes=0-"]);
}

#[test]
fn a_download_that_broke_off_goes_on_where_it_was() {
    let (scene, server) = (Scene::new(), Server::start(Faults { break_off: 2, ..Faults::default() }));
    let call = server.fetch(&scene, &["owner/tiny"]);
    let snapshot = std::path::PathBuf::from(call.succeeds().trim());
    assert_eq!(std::fs::read(snapshot.join("model.safetensors")).unwrap(), weights());
    assert_eq!(server.ranges(), ["bytes=0-", "bytes=50000-", "bytes=75000-"]);
}

#[test]
fn a_fetch_that_gave_up_goes_on_in_the_next_call() {
    let (scene, server) = (Scene::new(), Server::start(Faults { break_off: 5, ..Faults::default() }));
    assert_eq!(server.fetch(&scene, &["owner/tiny"]).code, Some(1));
    let call = server.fetch(&scene, &["owner/tiny"]);
    let snapshot = std::path::PathBuf::from(call.succeeds().trim());
    assert_eq!(std::fs::read(snapshot.join("model.safetensors")).unwrap(), weights());
    assert_eq!(server.ranges().last().map(String::as_str), Some("bytes=96875-"));
}

#[test]
fn a_fetch_that_was_stopped_after_the_last_byte_starts_that_file_again() {
    let (scene, server) = (Scene::new(), Server::start(Faults::default()));
    let blobs = scene.path("hub/hub/models--owner--tiny/blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    std::fs::write(blobs.join("100000.part"), weights()).unwrap();
    let snapshot = std::path::PathBuf::from(server.fetch(&scene, &["owner/tiny"]).succeeds().trim());
    assert_eq!(std::fs::read(snapshot.join("model.safetensors")).unwrap(), weights());
    assert_eq!(server.ranges(), ["bytes=100000-", "bytes=0-"]);
}

#[test]
fn a_file_with_another_checksum_is_refused_and_removed() {
    let (scene, server) = (Scene::new(), Server::start(Faults { wrong_checksum: true, ..Faults::default() }));
    server.fetch(&scene, &["owner/tiny"]).fails(1, &["model.safetensors", "expected sha256", "removed"]);
    let snapshot = scene.path("hub/hub/models--owner--tiny/snapshots").join(FIRST);
    assert!(snapshot.join("config.json").exists() && !snapshot.join("model.safetensors").exists());
}

#[test]
fn a_branch_that_moved_is_fetched_anew_and_the_old_commit_stays() {
    let (scene, server) = (Scene::new(), Server::start(Faults::default()));
    let fetch = || std::path::PathBuf::from(server.fetch(&scene, &["owner/tiny"]).succeeds().trim());
    let read = |snapshot: &std::path::Path, file: &str| std::fs::read(snapshot.join(file)).unwrap();
    let first = fetch();
    server.moved.store(true, Ordering::SeqCst);
    let second = fetch();
    assert!(first.ends_with(FIRST) && second.ends_with(SECOND));
    assert_eq!(read(&second, "config.json"), b"[]", "not the first commit's, though of its size");
    assert_eq!(read(&second, "model.safetensors"), weights()[..60_000]);
    assert_eq!(read(&first, "config.json"), b"{}");
    assert_eq!(read(&first, "model.safetensors"), weights());
    // Back again: nothing is fetched, and offline it is this commit that is found.
    server.moved.store(false, Ordering::SeqCst);
    let ranges = server.ranges().len();
    assert_eq!(fetch(), first);
    assert_eq!(server.ranges().len(), ranges);
    let cached = scene.aligner_with(&[("HF_HUB_OFFLINE", "1")], &["fetch", "owner/tiny"]);
    assert_eq!(std::path::Path::new(cached.succeeds().trim()), first);
}

#[test]
fn what_is_not_there_is_said_in_words() {
    let (scene, server) = (Scene::new(), Server::start(Faults::default()));
    server
        .fetch(&scene, &["owner/absent"])
        .fails(1, &["owner/absent", "no such repository or revision (404)"]);
    server.fetch(&scene, &["owner/tiny", "--include", "*.gguf"]).fails(1, &["no file", "*.gguf"]);
    server.fetch(&scene, &["../../etc"]).fails(2, &["../../etc", "expected a repository"]);
}

#[test]
fn offline_only_the_cache_is_asked() {
    let (scene, server) = (Scene::new(), Server::start(Faults::default()));
    let offline = [("HF_ENDPOINT", server.endpoint.as_str()), ("HF_HUB_OFFLINE", "1")];
    scene.aligner_with(&offline, &["fetch", "owner/tiny"]).fails(1, &["HF_HUB_OFFLINE", "owner/tiny"]);
    assert!(server.seen().is_empty());
    let fetched = server.fetch(&scene, &["owner/tiny"]);
    let requests = server.seen().len();
    let cached = scene.aligner_with(&offline, &["fetch", "owner/tiny"]);
    assert_eq!(cached.succeeds(), fetched.succeeds());
    assert_eq!(server.seen().len(), requests);
}
