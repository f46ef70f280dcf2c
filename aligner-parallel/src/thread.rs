//! Ranks as threads of one process.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use aligner_core::{Error, Result};

use crate::board::{Board, Departure, Ticket};
use crate::call::Call;
use crate::collectives::Ranks;
use crate::part::{Part, Parts};
use crate::recorder::{Recorder, TITLE};
use crate::transport::{Deadline, Group, Met, Transport};

/// A rank that is a thread. Ranks exchange handles to memory: nothing is copied but results.
///
/// A rank leaves when the last of its communicators is dropped: whoever waits for it then, or later,
/// fails at once. So does everyone when a rank panics.
///
/// ```
/// use aligner_core::{Communicator, Phase, Reduce};
/// use aligner_parallel::ThreadComm;
///
/// let sums = ThreadComm::run(4, |comm| {
///     let mut sum = [comm.rank() as f64];
///     comm.all_reduce_host(&mut sum, Reduce::Sum, Phase::new("count"))?;
///     Ok(sum[0])
/// });
/// assert!(sums.into_iter().all(|sum| sum.is_ok_and(|sum| sum == 6.0)));
/// ```
pub type ThreadComm = Ranks<Seat>;

impl ThreadComm {
    /// The communicators of `size` ranks, in order, one for each thread.
    ///
    /// # Errors
    /// A size of 0.
    pub fn group(size: usize) -> Result<Vec<Self>> {
        if size == 0 {
            return Err(Error::setting("ranks", "expected at least 1, got 0"));
        }
        let start = Instant::now();
        let world = Arc::new(World {
            board: Mutex::new(Board::new(size, true)),
            bells: (0..size).map(|_| Condvar::new()).collect(),
            recorders: (0..size).map(|_| Recorder::new(start)).collect(),
        });
        Ok((0..size).map(|rank| Self::all(Seat { world: world.clone(), rank }, rank, size)).collect())
    }

    /// Runs `work` on `size` ranks, a thread each, and returns their results in order; a panic is an error.
    pub fn run<R: Send>(size: usize, work: impl Fn(Self) -> Result<R> + Sync) -> Vec<Result<R>> {
        let ranks = match Self::group(size) {
            Ok(ranks) => ranks,
            Err(error) => return vec![Err(error)],
        };
        std::thread::scope(|scope| {
            let start = |comm| std::thread::Builder::new().spawn_scoped(scope, || work(comm));
            let threads: Vec<_> = ranks.into_iter().map(start).collect();
            let end = |(rank, thread): (usize, std::io::Result<std::thread::ScopedJoinHandle<'_, _>>)| {
                let thread =
                    thread.map_err(|error| Error::Invalid(format!("rank {rank} has no thread: {error}")))?;
                thread.join().unwrap_or_else(|panic| {
                    Err(Error::Invalid(format!("rank {rank} panicked: {}", said(&*panic))))
                })
            };
            threads.into_iter().enumerate().map(end).collect()
        })
    }
}

/// What a panic said.
fn said(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

/// What the ranks share.
struct World {
    board: Mutex<Board<Arc<Parts>>>,
    /// By rank: rings when it has to look at the board again.
    bells: Vec<Condvar>,
    recorders: Vec<Recorder>,
}

/// A rank's place among the threads; the rank leaves when it is dropped.
pub struct Seat {
    world: Arc<World>,
    rank: usize,
}

type Locked<'a> = MutexGuard<'a, Board<Arc<Parts>>>;

impl Seat {
    /// The board, which no panic leaves half changed: nothing under its lock runs foreign code.
    fn board(&self) -> Locked<'_> {
        self.world.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self, board: &mut Locked<'_>) {
        for rank in board.take_woken() {
            self.world.bells[rank].notify_all();
        }
    }

    /// Looks until there is something to see, or the deadline is over.
    fn wait<R>(
        &self,
        mut board: Locked<'_>,
        ticket: &Met<Ticket>,
        deadline: Deadline,
        look: impl Fn(&mut Board<Arc<Parts>>, &Ticket) -> Option<Met<R>>,
    ) -> Met<R> {
        self.ring(&mut board);
        let ticket = ticket.as_ref().map_err(Arc::clone)?;
        loop {
            let seen = look(&mut board, ticket);
            self.ring(&mut board);
            if let Some(seen) = seen {
                return seen;
            }
            let left = deadline.left();
            if left.is_zero() {
                let waits = board.waits();
                board.expire(ticket, deadline.waited(), &waits, Vec::new());
                continue;
            }
            let bell = &self.world.bells[self.rank];
            board = bell.wait_timeout(board, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Transport for Seat {
    fn exchange(&self, group: &Group, call: &Call, deadline: Deadline, parts: Parts) -> Met<Vec<Part>> {
        let mut board = self.board();
        let ticket = board.post(group, call, Arc::new(parts));
        let brought = self.wait(board, &ticket, deadline, Board::take)?;
        Ok(brought.iter().map(|parts| parts.for_place(group.place)).collect())
    }

    fn send(&self, group: &Group, call: &Call, to: usize, part: Part) -> Met<()> {
        let mut board = self.board();
        let sent = board.send(group, call, to, Arc::new(Parts::Same(part)));
        self.ring(&mut board);
        sent
    }

    fn recv(&self, group: &Group, call: &Call, deadline: Deadline, from: usize) -> Met<Part> {
        let mut board = self.board();
        let ticket = board.await_letter(group, call, from);
        let letter = self.wait(board, &ticket, deadline, Board::open)?;
        Ok(letter.for_place(0))
    }

    fn take(&self, group: &Group, call: &Call, _deadline: Deadline, round: u64) -> Met<u64> {
        let mut board = self.board();
        let number = board.take_number(group, call, round);
        self.ring(&mut board);
        number
    }

    fn attend(&self) -> Met<()> {
        self.board().failure().cloned().map_or(Ok(()), Err)
    }

    #[cfg(any(feature = "nccl", feature = "nccl-host"))]
    fn attend_to(&self, group: &Group, call: &Call) -> Met<()> {
        let mut board = self.board();
        let checked = board.check_group(group, call);
        self.ring(&mut board);
        checked
    }

    #[cfg(any(feature = "nccl", feature = "nccl-host"))]
    fn has_left(&self, rank: usize) -> bool {
        self.board().has_left(rank)
    }

    #[cfg(any(feature = "nccl", feature = "nccl-host"))]
    fn fail(&self, failure: Arc<crate::failure::Failure>) -> Arc<crate::failure::Failure> {
        let mut board = self.board();
        let first = board.fail(failure);
        self.ring(&mut board);
        first
    }

    fn recorder(&self) -> &Recorder {
        &self.world.recorders[self.rank]
    }

    fn history(&self) -> String {
        let ranks = self.world.recorders.iter().enumerate();
        TITLE.to_owned() + &ranks.map(|(rank, recorder)| recorder.tell(rank)).collect::<String>()
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let how = if std::thread::panicking() { Departure::Panicked } else { Departure::Done };
        let mut board = self.board();
        board.leave(self.rank, how);
        self.ring(&mut board);
    }
}
