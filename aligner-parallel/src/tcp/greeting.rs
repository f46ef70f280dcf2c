//! What ranks say to each other before the first message.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// The first word of everything; in another order of bytes it is another one.
const MAGIC: u64 = u64::from_be_bytes(*b"ALIGNER\0");

/// Counts changes of what ranks send each other, greetings and messages.
const VERSION: u64 = 1;

/// Bytes of a [`Hello`].
pub(super) const HELLO_BYTES: usize = 48;

/// Most bytes of a refusal's text.
const MOST_TEXT: usize = 4096;

/// Who connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) size: usize,
    pub(super) rank: usize,
    /// The number of the run that rank 0 gives; 0 before.
    pub(super) run: u64,
    /// Where it listens.
    pub(super) port: u16,
}

impl Hello {
    pub(super) fn to_bytes(self) -> [u8; HELLO_BYTES] {
        let words = [MAGIC, VERSION, self.size as u64, self.rank as u64, self.run, self.port.into()];
        bytemuck::cast(words)
    }

    /// Nothing where the bytes are none of this library's; what is wrong where they are of another version.
    pub(super) fn of_bytes(bytes: [u8; HELLO_BYTES]) -> Option<std::result::Result<Self, String>> {
        let [magic, version, size, rank, run, port]: [u64; 6] = bytemuck::cast(bytes);
        if magic != MAGIC {
            return None;
        }
        if version != VERSION {
            let text =
                format!("it speaks version {version} of what ranks say to each other, others {VERSION}");
            return Some(Err(text));
        }
        let port = port.try_into().ok()?;
        Some(Ok(Self { size: size.try_into().ok()?, rank: rank.try_into().ok()?, run, port }))
    }

    /// Whether bytes may still become a greeting.
    pub(super) fn may_begin(bytes: &[u8]) -> bool {
        let magic = MAGIC.to_ne_bytes();
        let known = bytes.len().min(magic.len());
        bytes[..known] == magic[..known]
    }
}

/// What whoever was greeted says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    /// Rank 0, to all when all have come: the number of the run, and where each rank but rank 0 listens.
    Table(u64, Vec<SocketAddr>),
    /// Another rank: it is the one that was looked for.
    Welcome,
    /// The run does not begin.
    Refusal(String),
}

impl Answer {
    fn to_bytes(&self) -> Vec<u8> {
        let (kind, body) = match self {
            Self::Table(run, places) => {
                let mut words = vec![*run];
                for place in places {
                    let ip: [u64; 2] = bytemuck::cast(v6(place.ip()).octets());
                    words.extend([ip[0], ip[1], place.port().into()]);
                }
                (0, bytemuck::cast_slice(&words).to_vec())
            }
            Self::Welcome => (1, Vec::new()),
            Self::Refusal(text) => (2, text.as_bytes()[..text.len().min(MOST_TEXT)].to_vec()),
        };
        let mut bytes = bytemuck::cast_slice(&[MAGIC, VERSION, kind, body.len() as u64]).to_vec();
        bytes.extend(body);
        bytes
    }

    /// Sends it, and waits until it has gone.
    pub(super) fn send(&self, stream: &mut TcpStream, until: Instant) -> Result<()> {
        stream.set_nonblocking(false)?;
        stream.set_write_timeout(Some(left(until)))?;
        stream.write_all(&self.to_bytes())
    }

    /// Waits for one in a run of so many ranks.
    pub(super) fn receive(stream: &mut TcpStream, size: usize, until: Instant) -> Result<Self> {
        let mut header = [0; 32];
        read(stream, &mut header, until)?;
        let [magic, version, kind, bytes]: [u64; 4] = bytemuck::cast(header);
        if magic != MAGIC {
            return Err(invalid("what answers is no rank of a run".into()));
        }
        if version != VERSION {
            return Err(invalid(format!("what answers speaks version {version}, this rank {VERSION}")));
        }
        let expected = match kind {
            0 => bytes == 8 * (1 + 3 * (size as u64 - 1)),
            1 => bytes == 0,
            2 => bytes <= MOST_TEXT as u64,
            _ => false,
        };
        if !expected {
            return Err(invalid(format!("an answer of kind {kind} and {bytes} bytes is none")));
        }
        let mut body = vec![0; bytes as usize];
        read(stream, &mut body, until)?;
        Ok(match kind {
            0 => {
                let words: Vec<u64> = bytemuck::pod_collect_to_vec(&body);
                Self::Table(words[0], words[1..].chunks_exact(3).map(place).collect())
            }
            1 => Self::Welcome,
            _ => Self::Refusal(String::from_utf8_lossy(&body).into_owned()),
        })
    }
}

fn v6(ip: IpAddr) -> Ipv6Addr {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    }
}

fn place(words: &[u64]) -> SocketAddr {
    let octets: [u8; 16] = bytemuck::cast([words[0], words[1]]);
    SocketAddr::new(Ipv6Addr::from(octets).to_canonical(), words[2] as u16)
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidData, text)
}

/// The time until then, and never none at all, which would be for ever.
pub(super) fn left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}

/// Reads so many bytes.
fn read(stream: &mut TcpStream, mut bytes: &mut [u8], until: Instant) -> Result<()> {
    stream.set_nonblocking(false)?;
    while !bytes.is_empty() {
        stream.set_read_timeout(Some(left(until)))?;
        match stream.read(bytes) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(read) => bytes = &mut bytes[read..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Err(ErrorKind::TimedOut.into()),
            Err(error) => return Err(error),
        }
        if !bytes.is_empty() && Instant::now() > until {
            return Err(ErrorKind::TimedOut.into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn greetings_come_out_as_they_went_in() {
        let hello = Hello { size: 8, rank: 3, run: u64::MAX, port: 29_500 };
        assert_eq!(Hello::of_bytes(hello.to_bytes()), Some(Ok(hello)));
        let mut bytes = hello.to_bytes();
        assert!((0..=bytes.len()).all(|length| Hello::may_begin(&bytes[..length])));
        bytes[8] += 1;
        assert!(
            Hello::of_bytes(bytes).is_some_and(|hello| hello.is_err_and(|text| text.contains("version")))
        );
        bytes[0] += 1;
        assert!(Hello::of_bytes(bytes).is_none() && !Hello::may_begin(&bytes[..1]));
    }

    #[test]
    fn answers_come_out_as_they_went_in_and_others_are_refused() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut receiver = listener.accept().unwrap().0;
        let soon = Instant::now() + Duration::from_secs(10);
        let places = vec!["10.0.0.1:80".parse().unwrap(), "[fd00::2]:29500".parse().unwrap()];
        for answer in [Answer::Table(9, places), Answer::Welcome, Answer::Refusal("no".into())] {
            answer.send(&mut sender, soon).unwrap();
            assert_eq!(Answer::receive(&mut receiver, 3, soon).unwrap(), answer);
        }
        Answer::Table(9, Vec::new()).send(&mut sender, soon).unwrap();
        assert!(Answer::receive(&mut receiver, 3, soon).is_err(), "a table of another size");
        let brief = Instant::now() + Duration::from_millis(50);
        let mut receiver = listener.local_addr().map(TcpStream::connect).unwrap().unwrap();
        let error = Answer::receive(&mut receiver, 3, brief).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
    }
}
