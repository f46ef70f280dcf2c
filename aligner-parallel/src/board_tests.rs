//! Every order in which ranks can come to the board.
//!
//! Ranks touch the board under one lock, and sleep only where they have found nothing to see. So what
//! threads can do is an order of these steps: come, look after being woken, find the deadline over,
//! leave. The explorer goes through all of them, and through no state twice.

use std::collections::HashSet;

use aligner_core::Reduce;

use crate::board::{Board, Departure, Ticket};
use crate::call::{Call, Element, Op};
use crate::transport::{Group, Met};

#[derive(Debug, Clone, Copy)]
enum Step {
    /// Meets the ranks of a group, by its index, for an operation on so many elements.
    Meet(usize, Op, usize),
    Send(usize),
    Recv(usize),
    Panic,
    /// Never calls again, and does not leave either.
    Hang,
}

/// A meeting that goes well.
const fn meet(group: usize) -> Step {
    Step::Meet(group, Op::AllReduce(Reduce::Sum), 1)
}

/// When a waiting rank may find its deadline over.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Deadlines {
    Never,
    /// Where nobody can do anything else: they are long beside all work.
    WhenQuiet,
    Anytime,
}

#[derive(Debug, Clone)]
struct Rank {
    program: Vec<Step>,
    done: usize,
    ticket: Option<Ticket>,
    awake: bool,
    /// What it has been given.
    seen: Vec<Vec<u32>>,
    end: Option<End>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum End {
    Finished,
    Failed { culprits: Vec<usize>, cause: String },
    Panicked,
    Hung,
}

#[derive(Debug, Clone)]
struct Run {
    board: Board<u32>,
    groups: Vec<Vec<usize>>,
    ranks: Vec<Rank>,
}

#[derive(Debug, Clone, Copy)]
enum Move {
    /// Begins the next step, or looks again.
    Go,
    Expire,
}

impl Run {
    fn new(groups: &[&[usize]], programs: &[&[Step]]) -> Self {
        let rank = |program: &&[Step]| Rank {
            program: program.to_vec(),
            done: 0,
            ticket: None,
            awake: false,
            seen: Vec::new(),
            end: None,
        };
        Self {
            board: Board::new(programs.len(), true),
            groups: groups.iter().map(|ranks| ranks.to_vec()).collect(),
            ranks: programs.iter().map(rank).collect(),
        }
    }

    fn group(&self, index: usize, rank: usize) -> Group {
        let ranks = &self.groups[index];
        let place = ranks.iter().position(|&member| member == rank).expect("a member");
        Group { id: index as u64, ranks: ranks.as_slice().into(), place, run: self.ranks.len() }
    }

    fn moves(&self, deadlines: Deadlines) -> Vec<(usize, Move)> {
        let alive = || self.ranks.iter().enumerate().filter(|(_, rank)| rank.end.is_none());
        let able = alive().filter(|(_, rank)| rank.ticket.is_none() || rank.awake);
        let mut moves: Vec<_> = able.map(|(at, _)| (at, Move::Go)).collect();
        if deadlines == Deadlines::Anytime || deadlines == Deadlines::WhenQuiet && moves.is_empty() {
            let waiting = alive().filter(|(_, rank)| rank.ticket.is_some());
            moves.extend(waiting.map(|(at, _)| (at, Move::Expire)));
        }
        moves
    }

    fn go(&mut self, at: usize, how: Move) {
        match (self.ranks[at].ticket.clone(), how) {
            (None, _) => self.begin(at),
            (Some(ticket), Move::Go) => self.look(at, &ticket),
            (Some(ticket), Move::Expire) => {
                self.look(at, &ticket);
                if self.ranks[at].ticket.is_some() {
                    let waits = self.board.waits();
                    self.board.expire(&ticket, 0, &waits, Vec::new());
                    self.look(at, &ticket);
                }
            }
        }
        for woken in self.board.take_woken() {
            self.ranks[woken].awake = true;
        }
    }

    fn begin(&mut self, at: usize) {
        let call =
            |op, elements| Call { op, element: Element::F32, elements, stage: 0, phase: "test".into() };
        let done = self.ranks[at].done;
        let Some(&step) = self.ranks[at].program.get(done) else {
            return self.leave(at, End::Finished, Departure::Done);
        };
        let payload = (100 * at + done) as u32;
        match step {
            Step::Meet(index, op, elements) => {
                let group = self.group(index, at);
                let ticket = self.board.post(&group, &call(op, elements), payload);
                self.wait(at, ticket);
            }
            Step::Recv(from) => {
                let ticket = self.board.await_letter(&self.group(0, at), &call(Op::Recv, 1), from);
                self.wait(at, ticket);
            }
            Step::Send(to) => {
                let sent = self.board.send(&self.group(0, at), &call(Op::Send, 1), to, payload);
                self.saw(at, sent.map(|()| Vec::new()));
            }
            Step::Panic => self.leave(at, End::Panicked, Departure::Panicked),
            Step::Hang => self.ranks[at].end = Some(End::Hung),
        }
    }

    fn wait(&mut self, at: usize, ticket: Met<Ticket>) {
        match ticket {
            Ok(ticket) => {
                self.ranks[at].ticket = Some(ticket.clone());
                self.look(at, &ticket);
            }
            Err(failure) => self.saw(at, Err(failure)),
        }
    }

    /// Looks, and sleeps where there is nothing to see.
    fn look(&mut self, at: usize, ticket: &Ticket) {
        self.ranks[at].awake = false;
        let seen = self.board.take(ticket);
        if let Some(seen) = seen.or_else(|| Some(self.board.open(ticket)?.map(|letter| vec![letter]))) {
            self.ranks[at].ticket = None;
            self.saw(at, seen);
        }
    }

    fn saw(&mut self, at: usize, seen: Met<Vec<u32>>) {
        match seen {
            Ok(seen) => {
                self.ranks[at].seen.push(seen);
                self.ranks[at].done += 1;
            }
            Err(failure) => {
                let end = End::Failed { culprits: failure.culprits.clone(), cause: failure.cause.clone() };
                self.leave(at, end, Departure::Done);
            }
        }
    }

    fn leave(&mut self, at: usize, end: End, how: Departure) {
        self.ranks[at].end = Some(end);
        self.board.leave(at, how);
    }

    fn culprits(&self, at: usize) -> Option<&[usize]> {
        match self.ranks[at].end.as_ref() {
            Some(End::Failed { culprits, .. }) => Some(culprits),
            _ => None,
        }
    }

    fn finished(&self) -> bool {
        self.ranks.iter().all(|rank| rank.end == Some(End::Finished))
    }
}

/// Goes through every order; returns how many states there are, and all that nobody can go on from.
fn explore(start: &Run, deadlines: Deadlines) -> (usize, Vec<Run>) {
    let (mut seen, mut ends, mut open) = (HashSet::new(), Vec::new(), vec![start.clone()]);
    while let Some(run) = open.pop() {
        let moves = run.moves(deadlines);
        if moves.is_empty() {
            let asleep = run.ranks.iter().filter(|rank| rank.end.is_none()).count();
            assert_eq!(asleep, 0, "ranks sleep for ever: {run:#?}");
            ends.push(run);
            continue;
        }
        for (at, how) in moves {
            let mut next = run.clone();
            next.go(at, how);
            if seen.insert(format!("{next:?}")) {
                open.push(next);
            }
        }
    }
    (seen.len(), ends)
}

/// All ranks that failed tell the same failure.
fn assert_one_failure(run: &Run) {
    let mut failures = run.ranks.iter().filter(|rank| matches!(rank.end, Some(End::Failed { .. })));
    let Some(first) = failures.next() else { return };
    assert!(failures.all(|rank| rank.end == first.end), "{run:#?}");
}

const ALL: &[usize] = &[0, 1, 2];

#[test]
fn every_order_of_overlapping_groups_and_letters_ends_with_the_same_values() {
    let programs: [&[Step]; 4] = [
        &[meet(0), meet(1), Step::Send(2), meet(0), meet(0)],
        &[meet(0), meet(1), meet(2), meet(0), Step::Send(3), meet(0)],
        &[meet(0), Step::Recv(0), meet(2), meet(0), Step::Send(3), meet(0)],
        &[meet(0), meet(0), Step::Recv(2), Step::Recv(1), meet(0)],
    ];
    let run = Run::new(&[&[0, 1, 2, 3], &[0, 1], &[1, 2]], &programs);
    let (states, ends) = explore(&run, Deadlines::Never);
    assert!(states > 1000, "{states}");
    for run in &ends {
        assert!(run.finished(), "{run:#?}");
        let seen: Vec<_> = run.ranks.iter().map(|rank| rank.seen.clone()).collect();
        let all = |steps: [u32; 4]| vec![steps[0], 100 + steps[1], 200 + steps[2], 300 + steps[3]];
        let (first, second, third) = (all([0; 4]), all([3, 3, 3, 1]), all([4, 5, 5, 4]));
        let pairs = [vec![1, 101], vec![102, 202]];
        let expected = [
            vec![first.clone(), pairs[0].clone(), vec![], second.clone(), third.clone()],
            vec![first.clone(), pairs[0].clone(), pairs[1].clone(), second.clone(), vec![], third.clone()],
            vec![first.clone(), vec![2], pairs[1].clone(), second.clone(), vec![], third.clone()],
            vec![first, second, vec![204], vec![104], third],
        ];
        assert_eq!(seen, expected);
    }
}

#[test]
fn deadline_that_passes_at_any_moment_leaves_nobody_asleep() {
    let programs: [&[Step]; 3] = [
        &[meet(1), meet(2), Step::Send(2), meet(0)],
        &[meet(2), meet(3), meet(0)],
        &[meet(1), meet(3), Step::Recv(0), meet(0)],
    ];
    // Each rank is in two of the pairs.
    let run = Run::new(&[ALL, &[0, 2], &[0, 1], &[1, 2]], &programs);
    let (states, ends) = explore(&run, Deadlines::Anytime);
    assert!(states > 500, "{states}");
    ends.iter().for_each(assert_one_failure);
    assert!(ends.iter().any(Run::finished) && ends.iter().any(|run| run.culprits(0).is_some()));
}

#[test]
fn opposite_orders_of_two_groups_name_the_circle() {
    let programs: [&[Step]; 3] = [&[meet(0), meet(1)], &[meet(1), meet(0)], &[meet(0)]];
    let (_, ends) = explore(&Run::new(&[ALL, &[0, 1]], &programs), Deadlines::WhenQuiet);
    for run in &ends {
        assert_one_failure(run);
        for at in 0..3 {
            assert_eq!(run.culprits(at), Some(&[0, 1][..]), "{run:#?}");
        }
    }
}

#[test]
fn wrong_operation_or_size_is_found_without_a_deadline_and_names_the_rank() {
    for wrong in [Step::Meet(0, Op::AllGather, 1), Step::Meet(0, Op::AllReduce(Reduce::Sum), 2)] {
        let programs: [&[Step]; 3] = [&[meet(0), meet(0)], &[meet(0), meet(0)], &[meet(0), wrong]];
        let (_, ends) = explore(&Run::new(&[ALL], &programs), Deadlines::Never);
        for run in &ends {
            assert_one_failure(run);
            for at in 0..3 {
                assert_eq!(run.culprits(at), Some(&[2][..]), "{run:#?}");
            }
        }
    }
}

#[test]
fn panic_anywhere_is_told_to_all_who_wait() {
    for at in 0..3 {
        let mut third = vec![meet(0), meet(1), meet(0)];
        third[at] = Step::Panic;
        let programs: [&[Step]; 3] = [&[meet(0), meet(0)], &[meet(0), meet(1), meet(0)], &third];
        let (_, ends) = explore(&Run::new(&[ALL, &[1, 2]], &programs), Deadlines::Never);
        for run in &ends {
            assert_eq!((run.culprits(0), run.culprits(1)), (Some(&[2][..]), Some(&[2][..])), "{run:#?}");
        }
    }
}

#[test]
fn rank_that_hangs_is_named_by_those_who_do_not_wait_for_it_too() {
    // Rank 0 waits for 1, and 1 waits for 2.
    let programs: [&[Step]; 3] = [&[meet(0)], &[meet(1), meet(0)], &[Step::Hang]];
    let (_, ends) = explore(&Run::new(&[&[0, 1], &[1, 2]], &programs), Deadlines::WhenQuiet);
    assert!(ends.len() > 1);
    for run in &ends {
        assert_eq!((run.culprits(0), run.culprits(1)), (Some(&[2][..]), Some(&[2][..])), "{run:#?}");
    }
    let programs: [&[Step]; 3] = [&[Step::Recv(1)], &[Step::Recv(2), Step::Send(0)], &[Step::Hang]];
    let (_, ends) = explore(&Run::new(&[ALL], &programs), Deadlines::WhenQuiet);
    for run in &ends {
        assert_eq!((run.culprits(0), run.culprits(1)), (Some(&[2][..]), Some(&[2][..])), "{run:#?}");
    }
}

#[test]
fn rank_that_left_is_not_waited_for() {
    let programs: [&[Step]; 3] = [&[meet(0), meet(0)], &[meet(0), meet(0)], &[meet(0)]];
    let (_, ends) = explore(&Run::new(&[ALL], &programs), Deadlines::Never);
    for run in &ends {
        assert_eq!((run.culprits(0), run.culprits(1)), (Some(&[2][..]), Some(&[2][..])), "{run:#?}");
        assert_eq!(run.ranks[2].end, Some(End::Finished));
    }
}
