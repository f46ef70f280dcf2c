//! Ranks as processes that find each other over TCP.

mod door;
mod greeting;
mod link;
mod meeting;
mod rendezvous;

use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

use aligner_core::{Error, Result};

use crate::messages::{MessageComm, Network};
use link::Link;
pub use rendezvous::{Rendezvous, local_rank};

/// A rank that is a process, whoever started it: a [`MessageComm`] over connections from each rank to each
/// other one. It needs nothing but the standard library.
///
/// A rank whose process ends without taking leave is named at once, by all ranks that call; one whose
/// machine is gone without a word, at the deadline of what waits for it. What travels is neither encrypted
/// nor signed: the network has to be one's own.
pub type TcpComm = MessageComm<TcpNetwork>;

impl TcpComm {
    /// Meets all other ranks of the run.
    ///
    /// # Errors
    /// Ranks that do not come in time, by their numbers; two ranks of one number; ranks of a run of another
    /// size, or of another version of this library; an address that cannot be listened on or connected to.
    pub fn join(rendezvous: &Rendezvous) -> Result<Self> {
        let Rendezvous { rank, size, .. } = *rendezvous;
        if rank >= size {
            return Err(Error::Invalid(format!("rank {rank} of {size} does not exist")));
        }
        if rank == 0 {
            return Self::join_as_main(rendezvous.listen()?, rendezvous);
        }
        Self::connected(meeting::as_other(rendezvous)?, rank, size)
    }

    /// As [`TcpComm::join`], for rank 0, which listens already; host, port and rank of `rendezvous` are not
    /// looked at.
    ///
    /// # Errors
    /// Those of [`TcpComm::join`].
    pub fn join_as_main(listener: TcpListener, rendezvous: &Rendezvous) -> Result<Self> {
        Self::connected(meeting::as_main(listener, rendezvous)?, 0, rendezvous.size)
    }

    /// Over connections to each other rank.
    fn connected(streams: Vec<Option<TcpStream>>, rank: usize, size: usize) -> Result<Self> {
        let network = TcpNetwork::new(streams).map_err(|error| {
            Error::Invalid(format!("rank {rank} of {size} cannot use its connections: {error}"))
        })?;
        Self::over(network, rank, size)
    }
}

/// Messages over TCP.
pub struct TcpNetwork {
    /// By rank; none to itself, and none once it is closed.
    links: Vec<Option<Link>>,
    /// Whose messages are looked for first: everyone has a turn.
    next: usize,
    begun: u64,
}

impl TcpNetwork {
    fn new(streams: Vec<Option<TcpStream>>) -> std::io::Result<Self> {
        let link = |stream: Option<TcpStream>| stream.map(Link::new).transpose();
        let links = streams.into_iter().map(link).collect::<std::io::Result<_>>()?;
        Ok(Self { links, next: 0, begun: 0 })
    }
}

impl Network for TcpNetwork {
    fn send(&mut self, to: usize, message: Arc<Vec<u64>>) {
        if let Some(link) = &mut self.links[to] {
            link.send(self.begun, message);
        }
        self.begun += 1;
    }

    fn receive(&mut self) -> Option<(usize, Vec<u64>)> {
        let ranks = self.links.len();
        for from in (0..ranks).map(|turn| (self.next + turn) % ranks) {
            if let Some(message) = self.links[from].as_mut().and_then(Link::receive) {
                self.next = from + 1;
                return Some((from, message));
            }
        }
        None
    }

    fn lost(&mut self) -> Option<(usize, String)> {
        let mut links = self.links.iter_mut().enumerate();
        links.find_map(|(rank, link)| Some((rank, link.as_mut()?.take_end()?)))
    }

    fn begun(&self) -> u64 {
        self.begun
    }

    fn unsent(&mut self, since: u64) -> Vec<usize> {
        let mut ranks = Vec::new();
        for (rank, link) in self.links.iter_mut().enumerate() {
            if link.as_mut().is_some_and(|link| link.flush(since)) {
                ranks.push(rank);
            }
        }
        ranks
    }

    fn close(&mut self, _everyone_has_left: bool) {
        // What the system has taken goes its way, also after the process has ended.
        self.links.fill_with(|| None);
    }
}
