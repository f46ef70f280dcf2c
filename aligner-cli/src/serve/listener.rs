//! Accepting connections, and closing those on which nothing moves.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep};

/// A client that takes nothing for so long is gone: what waits for it is given up.
const WRITE_STALL: Duration = Duration::from_secs(30);
/// Most connections at a time; further ones wait to be accepted.
const MAX_CONNECTIONS: usize = 4096;

/// Accepts connections with limits.
#[derive(Debug)]
pub(super) struct Guarded {
    listener: TcpListener,
    places: Arc<Semaphore>,
    idle: Duration,
}

impl Guarded {
    /// Connections that neither send nor take anything for `idle` are closed.
    pub(super) fn new(listener: TcpListener, idle: Duration) -> Self {
        Self { listener, places: Arc::new(Semaphore::new(MAX_CONNECTIONS)), idle }
    }
}

impl Listener for Guarded {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        // The semaphore is never closed; without a place the connection would only go uncounted.
        let place = Arc::clone(&self.places).acquire_owned().await.ok();
        let (stream, address) = Listener::accept(&mut self.listener).await;
        // Tokens are small packets, each of them wanted at once.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!("{address}: TCP_NODELAY: {error}");
        }
        let reads = Patience::new(self.idle);
        (Connection { stream, reads, writes: Patience::new(WRITE_STALL), _place: place }, address)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection that fails when nothing moves on it.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    reads: Patience,
    writes: Patience,
    _place: Option<OwnedSemaphorePermit>,
}

/// How long one direction may wait.
#[derive(Debug)]
struct Patience {
    limit: Duration,
    until: Pin<Box<Sleep>>,
    is_waiting: bool,
}

impl Patience {
    fn new(limit: Duration) -> Self {
        Self { limit, until: Box::pin(tokio::time::sleep(limit)), is_waiting: false }
    }

    /// Passes `polled` on; once it has been pending for too long, an error instead.
    fn watch<T>(&mut self, polled: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            self.is_waiting = false;
            return polled;
        }
        if !self.is_waiting {
            self.is_waiting = true;
            self.until.as_mut().reset(Instant::now() + self.limit);
        }
        ready!(self.until.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }

    /// Begins to wait anew.
    fn renew(&mut self) {
        self.is_waiting = false;
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.stream).poll_read(context, buffer);
        this.reads.watch(polled, context)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.stream).poll_write(context, bytes);
        if polled.is_ready() {
            // A client that reads a long stream need not say anything meanwhile.
            this.reads.renew();
        }
        this.writes.watch(polled, context)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.stream).poll_write_vectored(context, slices);
        if polled.is_ready() {
            this.reads.renew();
        }
        this.writes.watch(polled, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}
