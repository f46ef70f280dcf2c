//! HTTP by hand.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

pub(crate) const JSON: &str = "Content-Type: application/json\r\n";

pub(crate) fn request(method: &str, path: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n{headers}Content-Length: {length}\r\n\r\n"
    );
    [head.as_bytes(), body].concat()
}

/// A whole response.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) head: String,
    body: Vec<u8>,
}

impl Reply {
    pub(crate) fn parse(bytes: &[u8]) -> Self {
        let end = bytes.windows(4).position(|window| window == b"\r\n\r\n").expect("a response's head");
        let head = String::from_utf8(bytes[..end].to_vec()).unwrap().to_lowercase();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let body = &bytes[end + 4..];
        let body = if head.contains("transfer-encoding: chunked") { unchunked(body) } else { body.to_vec() };
        Self { status, head, body }
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("no JSON: {self:?} {}", self.text()))
    }

    /// Asserts success and gives the body.
    #[track_caller]
    pub(crate) fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text());
        self.json()
    }

    /// The `data` of each event of a stream.
    pub(crate) fn events(&self) -> Vec<String> {
        let text = self.text();
        let blocks = text.split("\n\n").filter_map(|block| block.strip_prefix("data: "));
        blocks.map(str::to_string).collect()
    }
}

fn unchunked(mut bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    while let Some(end) = bytes.windows(2).position(|window| window == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&bytes[..end]).unwrap(), 16).unwrap();
        out.extend_from_slice(&bytes[end + 2..end + 2 + size]);
        bytes = &bytes[end + 4 + size..];
    }
    out
}

/// A stream that is read event by event.
pub(crate) struct Stream(BufReader<TcpStream>);

impl Stream {
    pub(crate) fn open(address: SocketAddr, request: &[u8]) -> Self {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_mins(1))).unwrap();
        stream.write_all(request).unwrap();
        Self(BufReader::new(stream))
    }

    /// The next event's `data`; none at the end. A break in the connection is the end too.
    pub(crate) fn next(&mut self) -> Option<String> {
        loop {
            let mut line = String::new();
            if self.0.read_line(&mut line).ok()? == 0 {
                return None;
            }
            if let Some(data) = line.strip_prefix("data: ") {
                return Some(data.trim_end().to_string());
            }
        }
    }

    /// The rest of the events.
    pub(crate) fn rest(mut self) -> Vec<String> {
        std::iter::from_fn(|| self.next()).collect()
    }

    /// All bytes to the end.
    pub(crate) fn reply(mut self) -> Reply {
        let mut bytes = Vec::new();
        let _ = self.0.read_to_end(&mut bytes);
        Reply::parse(&bytes)
    }
}
