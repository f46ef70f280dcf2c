//! Who comes to a rank that listens.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Result};
use std::net::{SocketAddr, TcpListener, TcpStream};

use super::greeting::{HELLO_BYTES, Hello};

/// How many more than there are ranks may stand at the door that have not said who they are. Scanners of
/// ports come and say nothing.
const MORE_GUESTS: usize = 512;

/// Takes in connections, and waits for none.
#[derive(Debug)]
pub(super) struct Door {
    listener: TcpListener,
    guests: VecDeque<Guest>,
    most_guests: usize,
    /// The last that was no rank of any run.
    pub(super) stranger: Option<SocketAddr>,
}

#[derive(Debug)]
struct Guest {
    stream: TcpStream,
    from: SocketAddr,
    bytes: [u8; HELLO_BYTES],
    got: usize,
}

/// A rank that has said who it is, or what is wrong with what it said.
pub(super) struct Greeted {
    pub(super) hello: std::result::Result<Hello, String>,
    pub(super) stream: TcpStream,
    pub(super) from: SocketAddr,
}

impl Door {
    /// A door for so many ranks.
    pub(super) fn new(listener: TcpListener, ranks: usize) -> Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self { listener, guests: VecDeque::new(), most_guests: ranks + MORE_GUESTS, stranger: None })
    }

    /// Those who have said who they are since the last call.
    pub(super) fn greeted(&mut self) -> Vec<Greeted> {
        // An error is that of one connection, or of now: whoever is missing comes again, or is named.
        while let Ok((stream, from)) = self.listener.accept() {
            if stream.set_nonblocking(true).is_ok() {
                self.guests.push_back(Guest { stream, from, bytes: [0; HELLO_BYTES], got: 0 });
            }
            if self.guests.len() > self.most_guests {
                self.guests.pop_front();
            }
        }
        let mut greeted = Vec::new();
        for mut guest in std::mem::take(&mut self.guests) {
            if !guest.listen() {
                self.stranger = Some(guest.from);
            } else if guest.got < HELLO_BYTES {
                self.guests.push_back(guest);
            } else if let Some(hello) = Hello::of_bytes(guest.bytes) {
                greeted.push(Greeted { hello, stream: guest.stream, from: guest.from });
            }
        }
        greeted
    }
}

impl Guest {
    /// Reads what has come; says whether it may be a rank.
    fn listen(&mut self) -> bool {
        while self.got < HELLO_BYTES {
            match self.stream.read(&mut self.bytes[self.got..]) {
                Ok(0) => return false,
                Ok(bytes) => self.got += bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return error.kind() == ErrorKind::WouldBlock,
            }
            if !Hello::may_begin(&self.bytes[..self.got]) {
                return false;
            }
        }
        true
    }
}

/// Whether the other end of a connection has closed it.
pub(super) fn is_closed(stream: &TcpStream) -> bool {
    let peeked = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
    match peeked {
        Ok(bytes) => bytes == 0,
        Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
    }
}
