//! The events of a pipeline: who computes what from when to when.

use std::collections::{BTreeMap, VecDeque};

use aligner_core::{Error, Result};

use crate::schedule::Task;

/// A kind of work on one micro-batch and one chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Piece {
    /// The forward pass.
    Forward,
    /// The whole backward pass.
    Backward,
    /// The backward pass as far as the input's gradient, for which the part before waits.
    Input,
    /// The rest of the backward pass: the weights' gradients, for which nobody waits.
    Weight,
}

/// What a rank computes at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    /// Which kind.
    pub piece: Piece,
    /// Which of the rank's chunks.
    pub chunk: usize,
    /// Which micro-batch.
    pub micro: usize,
}

impl Work {
    /// Whether it is a forward pass.
    pub fn is_forward(self) -> bool {
        self.piece == Piece::Forward
    }
}

impl From<Task> for Work {
    fn from(task: Task) -> Self {
        match task {
            Task::Forward { chunk, micro } => Self { piece: Piece::Forward, chunk, micro },
            Task::Backward { chunk, micro } => Self { piece: Piece::Backward, chunk, micro },
        }
    }
}

/// Seconds of the work on one micro-batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Costs {
    /// By part of the model: the forward pass.
    pub forward: Vec<f64>,
    /// By part: the backward pass as far as the input's gradient.
    pub input: Vec<f64>,
    /// By part: the rest of the backward pass.
    pub weight: Vec<f64>,
    /// From the end of a part on one rank to its arrival on the next.
    pub transfer: f64,
}

impl Costs {
    /// The same for each of `parts`, half of a backward pass being the weights' gradients.
    pub fn uniform(parts: usize, forward: f64, backward: f64, transfer: f64) -> Self {
        let half = vec![backward / 2.0; parts];
        Self { forward: vec![forward; parts], input: half.clone(), weight: half, transfer }
    }

    fn of(&self, piece: Piece, part: usize) -> f64 {
        match piece {
            Piece::Forward => self.forward[part],
            Piece::Backward => self.input[part] + self.weight[part],
            Piece::Input => self.input[part],
            Piece::Weight => self.weight[part],
        }
    }
}

/// A pipeline that has come to its end.
#[derive(Debug, Clone, PartialEq)]
pub struct Timeline {
    /// From the first task's beginning to the last one's end.
    pub seconds: f64,
    /// By rank: seconds of computing.
    pub busy: Vec<f64>,
    /// By rank: the most forward passes whose activations it held at once.
    pub in_flight: Vec<usize>,
    /// By rank: when each of its works began and ended, in the order of its list.
    pub spans: Vec<Vec<(f64, f64)>>,
}

impl Timeline {
    /// The time that the average rank waits, over the time that it computes: (p - 1) / m for 1F1B.
    pub fn bubble(&self) -> f64 {
        let busy = self.busy.iter().sum::<f64>() / self.busy.len() as f64;
        self.seconds / busy - 1.0
    }
}

/// A part of a micro-batch on its way: which, and when it arrives.
type Letter = (usize, usize, f64);

struct State<'a> {
    stages: usize,
    costs: &'a Costs,
    /// By sender and receiver: what has been sent and not taken, activations and gradients in one order.
    letters: BTreeMap<(usize, usize), VecDeque<Letter>>,
    done: BTreeMap<(Piece, usize, usize), f64>,
}

/// Works through each rank's list in order: a rank waits for what it receives and for nothing else.
///
/// # Errors
/// Lists that cannot come to their end, with each rank's first work that cannot begin.
pub fn replay(ranks: &[Vec<Work>], costs: &Costs) -> Result<Timeline> {
    let stages = ranks.len();
    let mut state = State { stages, costs, letters: BTreeMap::new(), done: BTreeMap::new() };
    let mut spans: Vec<Vec<(f64, f64)>> = vec![Vec::new(); stages];
    let mut busy = vec![0.0; stages];
    loop {
        let mut moved = false;
        for (rank, works) in ranks.iter().enumerate() {
            while let Some(&work) = works.get(spans[rank].len()) {
                let Some(ready) = state.receive(rank, work) else { break };
                let free = spans[rank].last().map_or(0.0, |span| span.1);
                let begin = f64::max(free, ready);
                let took = costs.of(work.piece, work.chunk * stages + rank);
                spans[rank].push((begin, begin + took));
                busy[rank] += took;
                state.send(rank, work, begin + took);
                moved = true;
            }
        }
        if ranks.iter().zip(&spans).all(|(works, spans)| works.len() == spans.len()) {
            break;
        }
        if !moved {
            return Err(stuck(ranks, &spans));
        }
    }
    let ends = spans.iter().flatten().map(|span| span.1);
    let seconds = ends.fold(0.0, f64::max);
    let in_flight = ranks.iter().map(|works| most_held(works)).collect();
    Ok(Timeline { seconds, busy, in_flight, spans })
}

impl State<'_> {
    fn parts(&self) -> usize {
        self.costs.forward.len()
    }

    /// When the inputs of a work are there; nothing while one is missing.
    fn receive(&mut self, rank: usize, work: Work) -> Option<f64> {
        let (part, micro) = (work.chunk * self.stages + rank, work.micro);
        match work.piece {
            Piece::Forward if part == 0 => Some(0.0),
            Piece::Forward => self.take(part - 1, rank, part, micro, false),
            Piece::Backward | Piece::Input => {
                let forward = *self.done.get(&(Piece::Forward, part, micro))?;
                if part + 1 == self.parts() {
                    return Some(forward);
                }
                self.take(part + 1, rank, part, micro, true)
            }
            Piece::Weight => self.done.get(&(Piece::Input, part, micro)).copied(),
        }
    }

    /// Takes the next letter of the rank that has part `from`, where it is the one for `part`.
    fn take(&mut self, from: usize, rank: usize, part: usize, micro: usize, gradient: bool) -> Option<f64> {
        let channel = self.letters.get_mut(&(from % self.stages, rank))?;
        let &(to, of, arrival) = channel.front()?;
        if (to, of) != (2 * part + usize::from(gradient), micro) {
            return None;
        }
        channel.pop_front();
        Some(arrival)
    }

    fn send(&mut self, rank: usize, work: Work, end: f64) {
        let part = work.chunk * self.stages + rank;
        self.done.insert((work.piece, part, work.micro), end);
        let to = match work.piece {
            Piece::Forward if part + 1 < self.parts() => part + 1,
            Piece::Backward | Piece::Input if part > 0 => part - 1,
            _ => return,
        };
        let gradient = work.piece != Piece::Forward;
        // On one rank nothing travels.
        let transfer = if self.stages == 1 { 0.0 } else { self.costs.transfer };
        let letter = (2 * to + usize::from(gradient), work.micro, end + transfer);
        self.letters.entry((rank, to % self.stages)).or_default().push_back(letter);
    }
}

fn stuck(ranks: &[Vec<Work>], spans: &[Vec<(f64, f64)>]) -> Error {
    let waits = ranks.iter().zip(spans).enumerate().filter_map(|(rank, (works, spans))| {
        let Work { piece, chunk, micro } = works.get(spans.len())?;
        let piece = format!("{piece:?}").to_lowercase();
        Some(format!("rank {rank} cannot begin {piece} of micro-batch {micro} in chunk {chunk}"))
    });
    Error::Invalid(format!("the schedule does not come to its end: {}", waits.collect::<Vec<_>>().join("; ")))
}

/// Activations are held until the weights' gradients are there.
fn most_held(works: &[Work]) -> usize {
    let (mut held, mut most) = (0usize, 0);
    for work in works {
        match work.piece {
            Piece::Forward => held += 1,
            Piece::Backward | Piece::Weight => held = held.saturating_sub(1),
            Piece::Input => {}
        }
        most = most.max(held);
    }
    most
}
