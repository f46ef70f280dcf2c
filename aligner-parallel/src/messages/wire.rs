//! Messages as words of 64 bits, in which elements lie aligned.

use std::sync::Arc;

use aligner_core::Reduce;

use crate::board::Departure;
use crate::call::{Call, Element, Op};
use crate::failure::Wait;
use crate::part::Part;
use crate::transport::Group;

/// Types by the number that stands for them.
const ELEMENTS: [Element; 4] = [Element::F32, Element::F64, Element::F16, Element::Bf16];

/// What one process tells another.
#[derive(Debug)]
pub(super) enum Message {
    /// Comes to the group's next meeting with this for the receiver.
    Post(Group, Call, Part),
    /// A send to the receiver.
    Letter(Group, Call, Part),
    /// Asks the group's first rank for a number of this round.
    Take(Group, Call, u64),
    /// Asks for a status.
    Query,
    /// What the sender waits for, and its last operations.
    Status(Vec<Wait>, String),
    /// Why nobody can go on.
    Failed { culprits: Vec<usize>, cause: String },
    /// The sender will not call again.
    Left(Departure),
}

impl Message {
    pub(super) fn encode(&self) -> Vec<u64> {
        let mut words = Words(Vec::new());
        match self {
            Self::Post(group, call, part) => words.call(0, group, call, part),
            Self::Letter(group, call, part) => words.call(1, group, call, part),
            Self::Take(group, call, round) => words.call(6, group, call, &Part::new(vec![*round])),
            Self::Query => words.number(2),
            Self::Status(waits, tale) => {
                words.number(3);
                words.number(waits.len());
                for wait in waits {
                    words.text(wait.call.as_bytes());
                    words.list(&wait.missing);
                }
                words.text(tale.as_bytes());
            }
            Self::Failed { culprits, cause } => {
                words.number(4);
                words.list(culprits);
                words.text(cause.as_bytes());
            }
            Self::Left(how) => {
                words.number(5);
                words.number(match how {
                    Departure::Done => 0,
                    Departure::Failed => 1,
                    Departure::Panicked => 2,
                });
            }
        }
        words.0
    }

    /// The message of rank `from`; nothing where the words are none.
    pub(super) fn decode(words: Vec<u64>, from: usize, run: usize) -> Option<Self> {
        let mut reader = Reader { words: &words, at: 0 };
        let kind = reader.number()?;
        Some(match kind {
            0 | 1 => {
                let (group, call, part) = reader.call(from, run)?;
                let part = Part::new(words).slice(part, 1);
                if kind == 0 { Self::Post(group, call, part) } else { Self::Letter(group, call, part) }
            }
            6 => {
                let (group, call, part) = reader.call(from, run)?;
                let round = words.get(part.start / 8).filter(|_| part.len() == 8)?;
                Self::Take(group, call, *round)
            }
            2 => Self::Query,
            3 => {
                let count = reader.number()?;
                let mut waits = Vec::new();
                for _ in 0..count {
                    waits.push(Wait { call: reader.text()?, missing: reader.ranks(run)? });
                }
                Self::Status(waits, reader.text()?)
            }
            4 => Self::Failed { culprits: reader.ranks(run)?, cause: reader.text()? },
            5 => Self::Left(match reader.number()? {
                0 => Departure::Done,
                1 => Departure::Failed,
                2 => Departure::Panicked,
                _ => return None,
            }),
            _ => return None,
        })
    }
}

struct Words(Vec<u64>);

impl Words {
    fn number(&mut self, number: usize) {
        self.0.push(number as u64);
    }

    fn list(&mut self, numbers: &[usize]) {
        self.number(numbers.len());
        self.0.extend(numbers.iter().map(|&number| number as u64));
    }

    /// The number of bytes, and the bytes, filled up to whole words.
    fn text(&mut self, bytes: &[u8]) {
        self.number(bytes.len());
        let start = self.0.len();
        self.0.resize(start + bytes.len().div_ceil(8), 0);
        bytemuck::cast_slice_mut(&mut self.0[start..])[..bytes.len()].copy_from_slice(bytes);
    }

    fn call(&mut self, kind: usize, group: &Group, call: &Call, part: &Part) {
        self.0.reserve(part.bytes().len() / 8 + group.ranks.len() + 32);
        let reduce = |op| match op {
            Reduce::Sum => 0,
            Reduce::Max => 1,
            Reduce::Mean => 2,
        };
        let (op, argument) = match call.op {
            Op::AllReduce(op) => (0, reduce(op)),
            Op::AllGather => (1, 0),
            Op::AllGatherUneven => (2, 0),
            Op::ReduceScatter => (3, 0),
            Op::Broadcast(root) => (4, root),
            Op::AllToAll => (5, 0),
            Op::Barrier => (6, 0),
            Op::Split => (7, 0),
            Op::Send => (8, 0),
            Op::Recv => (9, 0),
            Op::Take => (10, 0),
        };
        let element = ELEMENTS.iter().position(|&element| element == call.element).unwrap_or_default();
        for number in [kind, op, argument, element, call.elements] {
            self.number(number);
        }
        self.number(call.stage.into());
        self.0.push(group.id);
        self.list(&group.ranks);
        self.text(call.phase.as_bytes());
        self.text(part.bytes());
    }
}

struct Reader<'a> {
    words: &'a [u64],
    at: usize,
}

impl Reader<'_> {
    fn word(&mut self) -> Option<u64> {
        self.at += 1;
        self.words.get(self.at - 1).copied()
    }

    fn number(&mut self) -> Option<usize> {
        self.word()?.try_into().ok()
    }

    /// Ranks of the run, which has so many.
    fn ranks(&mut self, run: usize) -> Option<Vec<usize>> {
        let count = self.number()?;
        let list = self.words.get(self.at..self.at.checked_add(count)?)?;
        self.at += count;
        let ranks: Vec<usize> = list.iter().map(|&word| word as usize).collect();
        ranks.iter().all(|&rank| rank < run).then_some(ranks)
    }

    /// Where the bytes of a text lie, in bytes.
    fn span(&mut self) -> Option<std::ops::Range<usize>> {
        let bytes = self.number()?;
        let start = self.at * 8;
        self.at = self.at.checked_add(bytes.div_ceil(8))?;
        (self.at <= self.words.len()).then_some(start..start + bytes)
    }

    fn text(&mut self) -> Option<String> {
        let span = self.span()?;
        let bytes: &[u8] = bytemuck::cast_slice(self.words);
        Some(String::from_utf8_lossy(&bytes[span]).into_owned())
    }

    /// The sender's group and call, and where its part lies, in bytes.
    fn call(&mut self, from: usize, run: usize) -> Option<(Group, Call, std::ops::Range<usize>)> {
        let (op, argument) = (self.number()?, self.number()?);
        let op = match (op, argument) {
            (0, 0) => Op::AllReduce(Reduce::Sum),
            (0, 1) => Op::AllReduce(Reduce::Max),
            (0, 2) => Op::AllReduce(Reduce::Mean),
            (1, _) => Op::AllGather,
            (2, _) => Op::AllGatherUneven,
            (3, _) => Op::ReduceScatter,
            (4, root) => Op::Broadcast(root),
            (5, _) => Op::AllToAll,
            (6, _) => Op::Barrier,
            (7, _) => Op::Split,
            (8, _) => Op::Send,
            (9, _) => Op::Recv,
            (10, _) => Op::Take,
            _ => return None,
        };
        let element = *ELEMENTS.get(self.number()?)?;
        let (elements, stage) = (self.number()?, self.number()?.try_into().ok()?);
        let id = self.word()?;
        let ranks: Arc<[usize]> = self.ranks(run)?.into();
        let place = ranks.iter().position(|&rank| rank == from)?;
        let phase = self.text()?.into();
        let group = Group { id, ranks, place, run };
        Some((group, Call { op, element, elements, stage, phase }, self.span()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn post(op: Op) -> Message {
        let call = Call { op, element: Element::F32, elements: 3, stage: 1, phase: "a phase".into() };
        let group = Group { id: 7, ranks: Arc::new([4, 1, 2]), place: 1, run: 5 };
        Message::Post(group, call, Part::new(vec![1.0f32, 2.0, 3.0]))
    }

    #[test]
    fn every_call_comes_out_as_it_went_in() {
        let reductions = [Reduce::Sum, Reduce::Max, Reduce::Mean].map(Op::AllReduce);
        let others = [Op::AllGather, Op::AllGatherUneven, Op::ReduceScatter, Op::Broadcast(2), Op::AllToAll];
        let rest = [Op::Barrier, Op::Split, Op::Send, Op::Recv, Op::Take];
        for op in reductions.into_iter().chain(others).chain(rest) {
            let message = post(op);
            let got = Message::decode(message.encode(), 1, 5).expect("a message");
            let (Message::Post(group, call, part), Message::Post(sent_group, sent, _)) = (&got, &message)
            else {
                panic!("{got:?}")
            };
            assert_eq!((call, &group.ranks, group.id, group.place), (sent, &sent_group.ranks, 7, 1));
            assert_eq!(part.elements::<f32>(), [1.0, 2.0, 3.0]);
        }
    }

    #[test]
    fn news_come_out_as_they_went_in() {
        let wait = Wait { call: "a barrier".into(), missing: vec![0, 3] };
        let Message::Post(group, call, _) = post(Op::Take) else { panic!("a post") };
        let news = [
            Message::Take(group, call, 12),
            Message::Query,
            Message::Status(vec![wait.clone(), wait], "nothing happened".into()),
            Message::Failed { culprits: vec![2], cause: "it is late".into() },
            Message::Left(Departure::Done),
            Message::Left(Departure::Failed),
            Message::Left(Departure::Panicked),
        ];
        for message in news {
            let got = Message::decode(message.encode(), 1, 5).expect("a message");
            assert_eq!(format!("{got:?}"), format!("{message:?}"));
        }
    }

    #[test]
    fn cut_messages_and_unknown_ranks_are_refused() {
        let words = post(Op::AllGather).encode();
        for length in 0..words.len() {
            assert!(Message::decode(words[..length].to_vec(), 1, 5).is_none(), "{length} of {}", words.len());
        }
        assert!(Message::decode(words.clone(), 3, 5).is_none(), "rank 3 is not in the group");
        assert!(Message::decode(words, 1, 4).is_none(), "rank 4 is not in the run");
        assert!(Message::decode(vec![99], 1, 5).is_none());
        assert!(Message::decode(vec![3, u64::MAX], 1, 5).is_none());
    }
}
