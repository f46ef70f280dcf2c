//! What the ranks of a run have called so far, without the waiting.
//!
//! Threads share one board. A process has a board of its own, on which it notes what the others'
//! messages say. Every method is one step that no other comes between. It notes whom it concerns: they
//! have to look again.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::call::{Call, Mismatch, mismatch};
use crate::failure::{Failure, Wait, blame};
use crate::transport::{Group, Met};

/// Tells groups apart: the number, and the first rank, as the parts of one split have the same number.
type GroupKey = (u64, usize);

fn key(group: &Group) -> GroupKey {
    (group.id, group.ranks[0])
}

/// How a rank left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Departure {
    /// It needs no other rank any more.
    Done,
    /// It has met a failure.
    Failed,
    /// It panicked.
    Panicked,
}

/// What a rank waits for.
#[derive(Debug, Clone)]
pub(crate) struct Ticket {
    number: u64,
    group: Group,
    call: Call,
    what: Awaited,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Awaited {
    /// The others, in this meeting of the group.
    Round(u64),
    /// The next letter of this rank.
    Letter(usize),
}

/// The meetings of one group that are not over.
#[derive(Debug, Clone)]
struct Meetings<P> {
    /// The number of the first.
    first: u64,
    /// Each rank's next.
    next: Vec<u64>,
    rounds: VecDeque<Round<P>>,
}

#[derive(Debug, Clone)]
struct Round<P> {
    posts: Vec<Option<(Call, P)>>,
    /// How many have taken what they came for.
    taken: usize,
    /// Whether all have come, with calls that agree.
    held: bool,
}

/// What all ranks have called so far. `P` is what they bring.
#[derive(Debug, Clone)]
pub(crate) struct Board<P> {
    meetings: BTreeMap<GroupKey, Meetings<P>>,
    /// Letters on the way, by group, sender and receiver.
    letters: BTreeMap<(GroupKey, usize, usize), VecDeque<(Call, P)>>,
    /// By group: the round of its count, and the next number.
    counts: BTreeMap<GroupKey, (u64, u64)>,
    /// Whether all ranks look at this board, or one alone.
    shared: bool,
    /// By rank that looks at this board: what its threads wait for.
    waits: Vec<Vec<Ticket>>,
    /// By rank: how many tickets it has had.
    tickets: Vec<u64>,
    left: Vec<Option<Departure>>,
    failure: Option<Arc<Failure>>,
    /// Ranks that have to look again.
    woken: Vec<bool>,
}

impl<P: Clone> Board<P> {
    /// A board of so many ranks. Where it is not `shared`, one of them alone looks at it.
    pub(crate) fn new(ranks: usize, shared: bool) -> Self {
        Self {
            meetings: BTreeMap::new(),
            letters: BTreeMap::new(),
            counts: BTreeMap::new(),
            shared,
            waits: vec![Vec::new(); ranks],
            tickets: vec![0; ranks],
            left: vec![None; ranks],
            failure: None,
            woken: vec![false; ranks],
        }
    }

    /// The ranks that have to look again since the last call of this.
    pub(crate) fn take_woken(&mut self) -> Vec<usize> {
        let woken = self.woken.iter_mut().enumerate();
        woken.filter_map(|(rank, woken)| std::mem::take(woken).then_some(rank)).collect()
    }

    /// Comes to the group's next meeting, and waits for the others.
    pub(crate) fn post(&mut self, group: &Group, call: &Call, payload: P) -> Met<Ticket> {
        let number = self.come(group, call, payload)?;
        Ok(self.wait(group, call, Awaited::Round(number)))
    }

    /// Notes that the rank of `group` comes to the group's next meeting; returns the meeting's number.
    pub(crate) fn come(&mut self, group: &Group, call: &Call, payload: P) -> Met<u64> {
        self.check()?;
        let ranks = group.ranks.len();
        let meetings = self.meetings.entry(key(group)).or_insert_with(|| Meetings {
            first: 0,
            next: vec![0; ranks],
            rounds: VecDeque::new(),
        });
        let number = meetings.next[group.place];
        meetings.next[group.place] += 1;
        while meetings.first + meetings.rounds.len() as u64 <= number {
            meetings.rounds.push_back(Round { posts: vec![None; ranks], taken: 0, held: false });
        }
        let at = (number - meetings.first) as usize;
        meetings.rounds[at].posts[group.place] = Some((call.clone(), payload));
        let ticket =
            Ticket { number: 0, group: group.clone(), call: call.clone(), what: Awaited::Round(number) };
        self.judge(&ticket)?;
        if self.missing(&ticket).is_empty() {
            if let Some(meetings) = self.meetings.get_mut(&key(group)) {
                meetings.rounds[at].held = true;
            }
            self.wake(&group.ranks);
        }
        Ok(number)
    }

    /// What all ranks brought to a meeting, in the order of the group; nothing while one is missing.
    pub(crate) fn take(&mut self, ticket: &Ticket) -> Option<Met<Vec<P>>> {
        let Awaited::Round(number) = ticket.what else { return None };
        let takers = if self.shared { ticket.group.ranks.len() } else { 1 };
        let meetings = self.meetings.get_mut(&key(&ticket.group));
        let brought = meetings.and_then(|meetings| {
            let round = meetings.rounds.get_mut(number.checked_sub(meetings.first)? as usize)?;
            if !round.held {
                return None;
            }
            round.taken += 1;
            let payloads = round.posts.iter().flatten().map(|(_, payload)| payload.clone()).collect();
            if round.taken == takers {
                // Whoever comes to a meeting has taken from those before it: the first one is over first.
                meetings.rounds.pop_front();
                meetings.first += 1;
            }
            Some(payloads)
        });
        self.resolve(ticket, brought)
    }

    /// Leaves a letter of the rank of `group` for the one at place `to`.
    pub(crate) fn send(&mut self, group: &Group, call: &Call, to: usize, payload: P) -> Met<()> {
        self.check_receiver(group, call, to)?;
        let (from, to) = (group.rank(), group.ranks[to]);
        self.letters.entry((key(group), from, to)).or_default().push_back((call.clone(), payload));
        self.woken[to] = true;
        Ok(())
    }

    /// The next number of the group's count in this round, for the rank of `group`.
    pub(crate) fn take_number(&mut self, group: &Group, call: &Call, round: u64) -> Met<u64> {
        if group.place != 0 {
            self.check_receiver(group, call, 0)?;
        }
        self.check()?;
        let (begun, next) = self.counts.entry(key(group)).or_insert((round, 0));
        if round > *begun {
            (*begun, *next) = (round, 0);
        }
        if round == *begun {
            *next += 1;
            return Ok(*next - 1);
        }
        let (rank, begun) = (group.rank(), *begun);
        let cause = format!("rank {rank} called {call} in round {round}, but round {begun} has begun");
        Err(self.fail(Failure::new(vec![rank], cause)))
    }

    /// Fails where the rank at place `to` has left, and will receive nothing.
    pub(crate) fn check_receiver(&mut self, group: &Group, call: &Call, to: usize) -> Met<()> {
        self.check()?;
        let to = group.ranks[to];
        match self.left[to] {
            Some(how) => Err(self.fail(departed(to, how, group.rank(), call))),
            None => Ok(()),
        }
    }

    /// Fails where a rank of the group has panicked, with which this one is in a call that the board does not see.
    #[cfg(any(feature = "nccl", feature = "nccl-host"))]
    pub(crate) fn check_group(&mut self, group: &Group, call: &Call) -> Met<()> {
        self.check()?;
        let panicked = |&&rank: &&usize| self.left[rank] == Some(Departure::Panicked);
        match group.ranks.iter().find(panicked) {
            Some(&rank) => Err(self.fail(departed(rank, Departure::Panicked, group.rank(), call))),
            None => Ok(()),
        }
    }

    /// Whether a rank has left.
    #[cfg(any(feature = "nccl", feature = "nccl-host"))]
    pub(crate) fn has_left(&self, rank: usize) -> bool {
        self.left[rank].is_some()
    }

    /// Begins to wait for a letter of the rank at place `from`.
    pub(crate) fn await_letter(&mut self, group: &Group, call: &Call, from: usize) -> Met<Ticket> {
        self.check()?;
        let ticket = self.wait(group, call, Awaited::Letter(group.ranks[from]));
        self.judge(&ticket)?;
        Ok(ticket)
    }

    /// The letter that a ticket waits for.
    pub(crate) fn open(&mut self, ticket: &Ticket) -> Option<Met<P>> {
        let Awaited::Letter(from) = ticket.what else { return None };
        let to = ticket.group.rank();
        let letter = self.letters.get_mut(&(key(&ticket.group), from, to)).and_then(VecDeque::pop_front);
        let Some((sent, payload)) = letter else { return self.resolve(ticket, None) };
        if sent.is_received_by(&ticket.call) {
            return self.resolve(ticket, Some(payload));
        }
        let cause = format!(
            "calls do not match: rank {from} called {sent} to rank {to}, which called {}",
            ticket.call
        );
        Some(Err(self.fail(Failure::new(vec![from.min(to), from.max(to)], cause))))
    }

    /// Notes that a ticket's deadline is over. `waits` tells, by rank, what all ranks wait for, and
    /// `unsent` who has not taken what was sent, which counts where nobody else is missing.
    pub(crate) fn expire(&mut self, ticket: &Ticket, millis: u128, waits: &[Vec<Wait>], unsent: Vec<usize>) {
        let mut missing = self.missing(ticket);
        if missing.is_empty() {
            missing = unsent;
        }
        if missing.is_empty() {
            return;
        }
        let failure = if let Some(found) = self.mismatch(ticket) {
            Failure::new(found.culprits, found.text)
        } else {
            let wait = Wait { call: ticket.call.to_string(), missing };
            blame(ticket.group.rank(), wait, millis, waits)
        };
        self.fail(failure);
    }

    /// What each rank that looks at this board waits for.
    pub(crate) fn waits(&self) -> Vec<Vec<Wait>> {
        let wait = |ticket: &Ticket| Wait { call: ticket.call.to_string(), missing: self.missing(ticket) };
        self.waits.iter().map(|tickets| tickets.iter().map(wait).collect()).collect()
    }

    /// The first failure, if there is one.
    pub(crate) fn failure(&self) -> Option<&Arc<Failure>> {
        self.failure.as_ref()
    }

    /// Notes that a rank will not call again; who waits for it waits in vain.
    pub(crate) fn leave(&mut self, rank: usize, how: Departure) {
        self.left[rank] = Some(how);
        let waiting: Vec<Ticket> = self.waits.iter().flatten().cloned().collect();
        for ticket in &waiting {
            if self.judge(ticket).is_err() {
                return;
            }
        }
    }

    fn wake(&mut self, ranks: &[usize]) {
        for &rank in ranks {
            self.woken[rank] = true;
        }
    }

    fn check(&self) -> Met<()> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    fn wait(&mut self, group: &Group, call: &Call, what: Awaited) -> Ticket {
        let number = self.tickets[group.rank()];
        self.tickets[group.rank()] += 1;
        let ticket = Ticket { number, group: group.clone(), call: call.clone(), what };
        self.waits[group.rank()].push(ticket.clone());
        ticket
    }

    /// Ends a ticket's wait with what it waited for, or with the failure.
    fn resolve<R>(&mut self, ticket: &Ticket, found: Option<R>) -> Option<Met<R>> {
        let result = match (found, &self.failure) {
            (Some(found), _) => Ok(found),
            (None, Some(failure)) => Err(failure.clone()),
            (None, None) => return None,
        };
        self.waits[ticket.group.rank()].retain(|other| other.number != ticket.number);
        Some(result)
    }

    /// Keeps the first failure, and wakes everyone: after it nobody can go on.
    pub(crate) fn fail(&mut self, failure: Arc<Failure>) -> Arc<Failure> {
        self.woken.fill(true);
        self.failure.get_or_insert(failure).clone()
    }

    /// Fails where the ticket's meeting cannot take place any more.
    fn judge(&mut self, ticket: &Ticket) -> Met<()> {
        let missing = self.missing(ticket);
        let gone = missing.iter().find_map(|&rank| Some((rank, self.left[rank]?)));
        let failure = match (self.mismatch(ticket), gone) {
            (Some(found), gone) if found.decided || gone.is_some() => {
                Failure::new(found.culprits, found.text)
            }
            (_, Some((rank, how))) => departed(rank, how, ticket.group.rank(), &ticket.call),
            _ => return Ok(()),
        };
        Err(self.fail(failure))
    }

    fn round(&self, ticket: &Ticket) -> Option<&Round<P>> {
        let Awaited::Round(number) = ticket.what else { return None };
        let meetings = self.meetings.get(&key(&ticket.group))?;
        meetings.rounds.get(number.checked_sub(meetings.first)? as usize)
    }

    /// The ranks that a ticket waits for.
    fn missing(&self, ticket: &Ticket) -> Vec<usize> {
        if let Awaited::Letter(from) = ticket.what {
            let letters = self.letters.get(&(key(&ticket.group), from, ticket.group.rank()));
            return if letters.is_none_or(VecDeque::is_empty) { vec![from] } else { Vec::new() };
        }
        let posts = self.round(ticket).map_or(&[][..], |round| &round.posts);
        let absent = posts.iter().zip(ticket.group.ranks.iter()).filter(|(post, _)| post.is_none());
        absent.map(|(_, &rank)| rank).collect()
    }

    fn mismatch(&self, ticket: &Ticket) -> Option<Mismatch> {
        let round = self.round(ticket)?;
        let posts = ticket.group.ranks.iter().zip(&round.posts);
        let calls: Vec<(usize, &Call)> =
            posts.filter_map(|(&rank, post)| Some((rank, &post.as_ref()?.0))).collect();
        mismatch(&calls, ticket.group.ranks.len())
    }
}

fn departed(rank: usize, how: Departure, waiting: usize, call: &Call) -> Arc<Failure> {
    let how = match how {
        Departure::Done => "has left",
        Departure::Failed => "has failed",
        Departure::Panicked => "panicked",
    };
    Failure::new(vec![rank], format!("rank {rank} {how}, and rank {waiting} needs it in {call}"))
}
