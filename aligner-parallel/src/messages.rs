//! Ranks that send each other messages. Each has a board of its own, on which it notes what it is told.

mod wire;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use aligner_core::{Error, Result};

use crate::board::{Board, Departure, Ticket};
use crate::call::Call;
use crate::collectives::Ranks;
use crate::failure::{Failure, Wait};
use crate::idle::Idle;
use crate::part::{Part, Parts};
use crate::recorder::{Recorder, TITLE};
use crate::transport::{Deadline, Group, Met, Transport};
use wire::Message;

/// How long a rank that waits may take to tell what for. A rank that is in no call does not answer.
const ANSWER: Duration = Duration::from_secs(1);

/// How long a rank stays after a failure, so that all are told before one of them ends the run.
const PARTING: Duration = Duration::from_secs(2);

/// Carries messages between ranks, the messages of a sender in their order. It need not work while it
/// is not called.
pub trait Network: Send + 'static {
    /// Begins to send a message, which may go to other ranks too.
    fn send(&mut self, to: usize, message: Arc<Vec<u64>>);

    /// The next message that has come, with its sender.
    fn receive(&mut self) -> Option<(usize, Vec<u64>)>;

    /// A rank that is gone, once all messages that it had sent have been received, with what is known of it
    /// ("is gone"). Each is told once; a network that cannot know tells none.
    fn lost(&mut self) -> Option<(usize, String)> {
        None
    }

    /// How many sends have begun.
    fn begun(&self) -> u64;

    /// The receivers of sends that have begun, from the `since`-th on, and are not over.
    fn unsent(&mut self, since: u64) -> Vec<usize>;

    /// Ends it. Where not everyone has taken leave, others may be gone or out of step.
    fn close(&mut self, everyone_has_left: bool);
}

/// A rank that sends messages over a network of its own, as [`ThreadComm`](crate::ThreadComm)'s ranks
/// look at common memory. Collectives, sums and errors are the same, to the bit.
///
/// An exchange is a message from each rank to each other one. A rank that waits looks for messages, and
/// yields. What a rank sends may wait until it calls again.
/// When the last communicator of a rank is dropped, the rank takes leave, and waits until all others
/// have. After a failure it stays for two seconds at most, so that all can tell of it.
pub type MessageComm<N> = Ranks<Messenger<N>>;

impl<N: Network> MessageComm<N> {
    /// Rank `rank` of `size`, each of which has a network to all others.
    ///
    /// # Errors
    /// A rank that is not below the size.
    pub fn over(network: N, rank: usize, size: usize) -> Result<Self> {
        if rank >= size {
            return Err(Error::Invalid(format!("rank {rank} of {size} does not exist")));
        }
        Ok(Self::all(Messenger::new(network, rank, size), rank, size))
    }
}

/// A rank's side of a [`MessageComm`].
pub struct Messenger<N: Network> {
    local: Mutex<Local<N>>,
    recorder: Recorder,
}

struct Local<N> {
    network: N,
    board: Board<Part>,
    rank: usize,
    run: usize,
    /// Since when the others are asked what they wait for.
    asked: Option<Instant>,
    /// By rank: what it has answered.
    answers: Vec<Option<(Vec<Wait>, String)>>,
    /// By rank: how it left.
    left: Vec<Option<Departure>>,
    /// Whether the others have been told of the failure.
    told: bool,
}

impl<N: Network> Messenger<N> {
    fn new(network: N, rank: usize, run: usize) -> Self {
        let local = Local {
            network,
            board: Board::new(run, false),
            rank,
            run,
            asked: None,
            answers: vec![None; run],
            left: vec![None; run],
            told: false,
        };
        Self { local: Mutex::new(local), recorder: Recorder::new(Instant::now()) }
    }

    fn local(&self) -> MutexGuard<'_, Local<N>> {
        self.local.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in messages until there is something to see and what was sent has gone, or until a failure.
    fn wait<R>(
        &self,
        ticket: &Ticket,
        deadline: Deadline,
        since: u64,
        look: impl Fn(&mut Board<Part>, &Ticket) -> Option<Met<R>>,
    ) -> Met<R> {
        let mut idle = Idle::default();
        loop {
            let mut local = self.local();
            local.take_in(&self.recorder);
            let unsent = local.network.unsent(since);
            if unsent.is_empty() {
                let seen = look(&mut local.board, ticket);
                local.spread();
                if let Some(seen) = seen {
                    return seen;
                }
            } else if let Some(failure) = local.board.failure() {
                return Err(failure.clone());
            }
            if deadline.left().is_zero() {
                local.expire(ticket, deadline.waited(), unsent);
            }
            drop(local);
            idle.rest();
        }
    }
}

impl<N: Network> Local<N> {
    /// Notes all messages that have come, and answers questions.
    fn take_in(&mut self, recorder: &Recorder) {
        while let Some((from, words)) = self.network.receive() {
            // Once there is a failure, it is the answer to every call.
            let _ = self.note(from, Message::decode(words, from, self.run), recorder);
        }
        while let Some((rank, how)) = self.network.lost() {
            // Who has taken leave may go.
            if self.left[rank].is_none() {
                self.left[rank] = Some(Departure::Failed);
                self.board.fail(Failure::new(vec![rank], format!("rank {rank} {how}")));
            }
        }
        self.spread();
    }

    fn note(&mut self, from: usize, message: Option<Message>, recorder: &Recorder) -> Met<()> {
        match message {
            Some(Message::Post(group, call, part)) => self.board.come(&group, &call, part).map(|_| ()),
            Some(Message::Letter(group, call, part)) => {
                let place = group.ranks.iter().position(|&rank| rank == self.rank);
                place.map_or(Ok(()), |place| self.board.send(&group, &call, place, part))
            }
            Some(Message::Take(group, call, round)) => {
                if group.ranks.first() != Some(&self.rank) {
                    let cause =
                        format!("rank {from} asked rank {} for a count that it does not keep", self.rank);
                    return Err(self.board.fail(Failure::new(vec![from], cause)));
                }
                let number = self.board.take_number(&group, &call, round);
                let letter = Message::Letter(numbers(&group, 0), call, Part::new(vec![number?]));
                self.network.send(from, Arc::new(letter.encode()));
                Ok(())
            }
            Some(Message::Query) => {
                let status = Message::Status(self.waits(), recorder.tell(self.rank));
                self.network.send(from, Arc::new(status.encode()));
                Ok(())
            }
            Some(Message::Status(waits, tale)) => {
                self.answers[from] = Some((waits, tale));
                Ok(())
            }
            Some(Message::Failed { culprits, cause }) => Err(self.board.fail(Failure::new(culprits, cause))),
            Some(Message::Left(how)) => {
                self.left[from] = Some(how);
                self.board.leave(from, how);
                Ok(())
            }
            None => {
                let cause = format!("rank {from} sent what rank {} cannot read", self.rank);
                Err(self.board.fail(Failure::new(vec![from], cause)))
            }
        }
    }

    /// What this rank waits for: others that have not come, or that have not taken what it sent.
    fn waits(&mut self) -> Vec<Wait> {
        let mut waits = self.board.waits().swap_remove(self.rank);
        if waits.iter().all(|wait| wait.missing.is_empty()) {
            let missing = self.network.unsent(0);
            for wait in &mut waits {
                wait.missing.clone_from(&missing);
            }
        }
        waits
    }

    /// Tells the others of a failure, once.
    fn spread(&mut self) {
        let Some(failure) = self.board.failure().filter(|_| !self.told) else { return };
        let message = Message::Failed { culprits: failure.culprits.clone(), cause: failure.cause.clone() };
        self.told = true;
        self.tell_all(&message);
    }

    fn tell_all(&mut self, message: &Message) {
        let message = Arc::new(message.encode());
        for to in (0..self.run).filter(|&to| to != self.rank) {
            self.network.send(to, message.clone());
        }
    }

    /// Asks the others what they wait for, and then says who is at fault: who has not come or, where all
    /// have, who has not taken what was sent.
    fn expire(&mut self, ticket: &Ticket, millis: u128, unsent: Vec<usize>) {
        let Some(asked) = self.asked else {
            self.asked = Some(Instant::now());
            self.answers.fill(None);
            return self.tell_all(&Message::Query);
        };
        let answered = self.answers.iter().flatten().count() + 1 == self.run;
        if answered || asked.elapsed() > ANSWER {
            self.asked = None;
            let answers = self.answers.iter().map(|answer| answer.as_ref().map(|(waits, _)| waits.clone()));
            let mut waits: Vec<Vec<Wait>> = answers.map(Option::unwrap_or_default).collect();
            waits[self.rank] = self.waits();
            self.board.expire(ticket, millis, &waits, unsent);
        }
    }
}

impl<N: Network> Transport for Messenger<N> {
    fn exchange(&self, group: &Group, call: &Call, deadline: Deadline, parts: Parts) -> Met<Vec<Part>> {
        let mut local = self.local();
        local.take_in(&self.recorder);
        let since = local.network.begun();
        let ticket = local.board.post(group, call, parts.for_place(group.place));
        if ticket.is_ok() {
            let post = |part| Arc::new(Message::Post(group.clone(), call.clone(), part).encode());
            // What is the same for all is there once.
            let same = if let Parts::Same(part) = &parts { Some(post(part.clone())) } else { None };
            for (place, &rank) in group.ranks.iter().enumerate().filter(|&(place, _)| place != group.place) {
                let message = same.clone().unwrap_or_else(|| post(parts.for_place(place)));
                local.network.send(rank, message);
            }
        }
        local.spread();
        drop(local);
        self.wait(&ticket?, deadline, since, Board::take)
    }

    fn send(&self, group: &Group, call: &Call, to: usize, part: Part) -> Met<()> {
        let mut local = self.local();
        local.take_in(&self.recorder);
        let sent = local.board.check_receiver(group, call, to);
        if sent.is_ok() {
            let letter = Message::Letter(group.clone(), call.clone(), part);
            local.network.send(group.ranks[to], Arc::new(letter.encode()));
        }
        local.spread();
        sent
    }

    fn recv(&self, group: &Group, call: &Call, deadline: Deadline, from: usize) -> Met<Part> {
        let mut local = self.local();
        local.take_in(&self.recorder);
        let since = local.network.begun();
        let ticket = local.board.await_letter(group, call, from);
        local.spread();
        drop(local);
        self.wait(&ticket?, deadline, since, Board::open)
    }

    fn take(&self, group: &Group, call: &Call, deadline: Deadline, round: u64) -> Met<u64> {
        let mut local = self.local();
        local.take_in(&self.recorder);
        if group.place == 0 {
            let number = local.board.take_number(group, call, round);
            local.spread();
            return number;
        }
        let since = local.network.begun();
        let ticket = local.board.await_letter(&numbers(group, group.place), call, 0);
        if ticket.is_ok() {
            let message = Message::Take(group.clone(), call.clone(), round);
            local.network.send(group.ranks[0], Arc::new(message.encode()));
        }
        local.spread();
        drop(local);
        Ok(self.wait(&ticket?, deadline, since, Board::open)?.elements::<u64>()[0])
    }

    fn attend(&self) -> Met<()> {
        let mut local = self.local();
        local.take_in(&self.recorder);
        local.board.failure().cloned().map_or(Ok(()), Err)
    }

    #[cfg(any(feature = "nccl", feature = "nccl-host"))]
    fn attend_to(&self, group: &Group, call: &Call) -> Met<()> {
        let mut local = self.local();
        local.take_in(&self.recorder);
        let checked = local.board.check_group(group, call);
        local.spread();
        checked
    }

    #[cfg(any(feature = "nccl", feature = "nccl-host"))]
    fn has_left(&self, rank: usize) -> bool {
        let mut local = self.local();
        local.take_in(&self.recorder);
        local.board.has_left(rank)
    }

    #[cfg(any(feature = "nccl", feature = "nccl-host"))]
    fn fail(&self, failure: Arc<Failure>) -> Arc<Failure> {
        let mut local = self.local();
        let first = local.board.fail(failure);
        local.spread();
        first
    }

    fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    fn history(&self) -> String {
        let local = self.local();
        let own = self.recorder.tell(local.rank);
        let ranks = local.answers.iter().enumerate();
        let tale = |(rank, answer): (usize, &Option<(Vec<Wait>, String)>)| match answer {
            _ if rank == local.rank => own.clone(),
            Some((_, tale)) => tale.clone(),
            None => String::new(),
        };
        TITLE.to_owned() + &ranks.map(tale).collect::<String>()
    }
}

impl<N: Network> Drop for Messenger<N> {
    fn drop(&mut self) {
        let panicking = std::thread::panicking();
        let recorder = &self.recorder;
        let local = self.local.get_mut().unwrap_or_else(PoisonError::into_inner);
        local.take_in(recorder);
        let how = match local.board.failure() {
            _ if panicking => Departure::Panicked,
            Some(_) => Departure::Failed,
            None => Departure::Done,
        };
        local.left[local.rank] = Some(how);
        local.tell_all(&Message::Left(how));
        let (mut idle, mut since) = (Idle::default(), None);
        loop {
            local.take_in(recorder);
            let gone = local.left.iter().all(Option::is_some) && local.network.unsent(0).is_empty();
            let wrong = local.board.failure().is_some()
                || local.left.iter().flatten().any(|&how| how != Departure::Done);
            if wrong {
                since.get_or_insert_with(Instant::now);
            }
            if gone || since.is_some_and(|since: Instant| since.elapsed() > PARTING) {
                return local.network.close(gone && !wrong);
            }
            idle.rest();
        }
    }
}

/// The group of the letters that carry numbers of `group`'s count, apart from what its ranks send otherwise.
fn numbers(group: &Group, place: usize) -> Group {
    Group { id: group.id | 1 << 63, place, ..group.clone() }
}
