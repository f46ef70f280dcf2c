//! One connection to one rank: messages in pieces, as they come and go.

use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice, Read, Result, Write};
use std::net::TcpStream;
use std::sync::Arc;

/// Bytes before each message: how many words it has.
const HEADER: usize = 8;

/// No message has more words (128 GiB); whoever says so is no rank, or out of step.
const MOST_WORDS: u64 = 1 << 34;

/// Words for which there is memory before the first have come (64 KiB). Memory then grows with what comes,
/// so that a length alone takes none.
const FIRST_WORDS: usize = 1 << 13;

const GONE: &str = "is gone: its process has ended, or the connection to it is broken";

/// Messages to and from one rank, over a connection that never waits.
#[derive(Debug)]
pub(super) struct Link {
    stream: TcpStream,
    outgoing: VecDeque<Outgoing>,
    incoming: Incoming,
    end: End,
}

/// Whether messages still come.
#[derive(Debug)]
enum End {
    Open,
    /// They do not, and this is why.
    Over(String),
    Told,
}

#[derive(Debug)]
struct Outgoing {
    number: u64,
    message: Arc<Vec<u64>>,
    /// Bytes that are on their way, with those of the header.
    written: usize,
}

/// A message of which a part has come.
#[derive(Debug, Default)]
struct Incoming {
    header: [u8; HEADER],
    words: Vec<u64>,
    /// Bytes that have come, with those of the header.
    got: usize,
}

impl Link {
    pub(super) fn new(stream: TcpStream) -> Result<Self> {
        stream.set_nonblocking(true)?;
        // Messages are whole: there is nothing to wait for.
        stream.set_nodelay(true)?;
        Ok(Self { stream, outgoing: VecDeque::new(), incoming: Incoming::default(), end: End::Open })
    }

    /// Begins to send a message.
    pub(super) fn send(&mut self, number: u64, message: Arc<Vec<u64>>) {
        if matches!(self.end, End::Open) {
            self.outgoing.push_back(Outgoing { number, message, written: 0 });
            self.flush(number);
        }
    }

    /// Sends what can be sent now; says whether something of the `since`-th message on is left.
    pub(super) fn flush(&mut self, since: u64) -> bool {
        while let Some(first) = self.outgoing.front_mut() {
            match first.write(&mut self.stream) {
                Ok(true) => {
                    self.outgoing.pop_front();
                }
                Ok(false) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // Nobody will read it. Why, what is still to be received will tell.
                Err(_) => self.outgoing.clear(),
            }
        }
        self.outgoing.back().is_some_and(|last| last.number >= since)
    }

    /// The next message, if all of it has come.
    pub(super) fn receive(&mut self) -> Option<Vec<u64>> {
        while matches!(self.end, End::Open) {
            let read = match self.incoming.room() {
                Ok(room) => self.stream.read(room),
                Err(claim) => {
                    self.end = End::Over(claim);
                    break;
                }
            };
            match read {
                Ok(0) => self.end = End::Over(GONE.into()),
                Ok(bytes) => {
                    self.incoming.got += bytes;
                    if let Some(message) = self.incoming.take() {
                        return Some(message);
                    }
                }
                Err(error) => match error.kind() {
                    ErrorKind::Interrupted => {}
                    ErrorKind::WouldBlock => return None,
                    ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted => {
                        self.end = End::Over(GONE.into());
                    }
                    _ => self.end = End::Over(format!("is gone: {error}")),
                },
            }
        }
        None
    }

    /// Why no message will come any more; told once.
    pub(super) fn take_end(&mut self) -> Option<String> {
        if matches!(self.end, End::Open) {
            return None;
        }
        self.outgoing.clear();
        match std::mem::replace(&mut self.end, End::Told) {
            End::Over(why) => Some(why),
            End::Open | End::Told => None,
        }
    }
}

impl Outgoing {
    /// Writes once; says whether all is written.
    fn write(&mut self, stream: &mut TcpStream) -> Result<bool> {
        let header = (self.message.len() as u64).to_ne_bytes();
        let body: &[u8] = bytemuck::cast_slice(&self.message);
        let written = if self.written < HEADER {
            stream.write_vectored(&[IoSlice::new(&header[self.written..]), IoSlice::new(body)])?
        } else {
            stream.write(&body[self.written - HEADER..])?
        };
        if written == 0 {
            return Err(ErrorKind::WriteZero.into());
        }
        self.written += written;
        Ok(self.written == HEADER + body.len())
    }
}

impl Incoming {
    /// Where the next bytes go; what is wrong with a length that none can have.
    fn room(&mut self) -> std::result::Result<&mut [u8], String> {
        if self.got < HEADER {
            return Ok(&mut self.header[self.got..]);
        }
        let length = u64::from_ne_bytes(self.header);
        if length > MOST_WORDS {
            return Err(format!(
                "announced a message of {length} words; no message has more than {MOST_WORDS}"
            ));
        }
        if self.got - HEADER == 8 * self.words.len() {
            let room = (4 * self.words.len()).max(FIRST_WORDS).min(length as usize);
            self.words.resize(room, 0);
        }
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
        Ok(&mut bytes[self.got - HEADER..])
    }

    /// The message, if it is complete.
    fn take(&mut self) -> Option<Vec<u64>> {
        let complete = self.got >= HEADER
            && (self.got - HEADER) as u64 == 8 * u64::from_ne_bytes(self.header).min(MOST_WORDS + 1);
        complete.then(|| std::mem::take(self).words)
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn pair() -> (Link, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (Link::new(listener.accept().unwrap().0).unwrap(), stream)
    }

    /// What comes in the end: a message, or the link's end.
    fn wait(link: &mut Link) -> std::result::Result<Vec<u64>, String> {
        loop {
            if let Some(message) = link.receive() {
                return Ok(message);
            }
            if let Some(end) = link.take_end() {
                return Err(end);
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn messages_come_whole_whatever_the_pieces() {
        let (mut link, mut other) = pair();
        let mut bytes = Vec::new();
        let messages = [vec![1, 2, 3], vec![], vec![u64::MAX; 3 * FIRST_WORDS + 5]];
        for message in &messages {
            bytes.extend((message.len() as u64).to_ne_bytes());
            bytes.extend(bytemuck::cast_slice::<u64, u8>(message));
        }
        let writer = std::thread::spawn(move || {
            let (first, rest) = bytes.split_at(50);
            for byte in first {
                other.write_all(&[*byte]).unwrap();
            }
            other.write_all(rest).unwrap();
            other
        });
        for message in messages {
            assert_eq!(wait(&mut link), Ok(message));
        }
        drop(writer.join().unwrap());
        assert_eq!(wait(&mut link), Err(GONE.into()));
        assert_eq!(link.take_end(), None, "it is told once");
    }

    #[test]
    fn lengths_that_none_has_are_refused_and_others_take_no_memory() {
        let (mut link, mut other) = pair();
        other.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        assert!(wait(&mut link).unwrap_err().starts_with("announced a message of "));
        let (mut link, mut other) = pair();
        other.write_all(&MOST_WORDS.to_ne_bytes()).unwrap();
        other.write_all(&[1; 100]).unwrap();
        drop(other);
        assert_eq!(wait(&mut link), Err(GONE.into()));
        assert!(link.incoming.words.capacity() <= 2 * FIRST_WORDS);
    }

    #[test]
    fn what_nobody_takes_is_unsent_until_the_other_is_gone() {
        let (mut link, other) = pair();
        link.send(7, Arc::new(vec![0; 1 << 22]));
        assert!(link.flush(7) && link.flush(0) && !link.flush(8));
        drop(other);
        assert!(wait(&mut link).is_err());
        assert!(!link.flush(0));
    }
}
