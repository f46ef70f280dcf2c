//! Faults of one rank, and what the others have to say of them.

use aligner_core::Error;
use aligner_core::rng::Rng;

use super::program::{End, Kind as Op, Program};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One element more than the others have.
    Size,
    /// This step and the next in the opposite order.
    Order,
    Panic,
    /// Ends without an error.
    Leave,
    /// Stays, and calls nothing.
    Missing,
    /// Comes when the deadline is long over.
    Late,
}

/// What a rank does wrong, and where.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(crate) rank: usize,
    /// The place in the rank's own steps.
    pub(crate) at: usize,
    pub(crate) kind: Kind,
}

impl Fault {
    /// A fault of one of these kinds, where the program has a place for it.
    pub(crate) fn draw(program: &Program, seed: u64, kinds: &[Kind]) -> Option<Self> {
        let rng = Rng::new(&[seed, 5]);
        (0..100).find_map(|attempt| {
            let rank = rng.below(3 * attempt, program.ranks as u64) as usize;
            let steps = program.steps(rank);
            let at = rng.below(3 * attempt + 1, steps.len() as u64) as usize;
            let kind = kinds[rng.below(3 * attempt + 2, kinds.len() as u64) as usize];
            let fault = Self { rank, at, kind };
            (!steps.is_empty() && fault.makes_sense(program, &steps)).then_some(fault)
        })
    }

    fn makes_sense(&self, program: &Program, steps: &[usize]) -> bool {
        let number = steps[self.at];
        let operation = &program.operations[number];
        let peers = program.group(number, self.rank).map_or(0, Vec::len);
        let fixed_size =
            !matches!(operation.kind, Op::AllGatherUneven | Op::AllToAll | Op::Barrier | Op::Split { .. });
        match self.kind {
            Kind::Size => peers > 1 && fixed_size,
            // The next step must not need what this one makes.
            Kind::Order => steps.get(self.at + 1).is_some_and(|&next| {
                !matches!(operation.kind, Op::Split { .. })
                    || program.operations[next].partition != program.made_by(number)
            }),
            _ => peers > 1,
        }
    }

    /// The ranks that cannot get past the fault.
    pub(crate) fn stopped(&self, program: &Program) -> Vec<usize> {
        let steps = program.steps(self.rank);
        let number = steps[self.at];
        let group = program.group(number, self.rank).expect("it takes part");
        let others = group.iter().copied().filter(|&rank| rank != self.rank);
        let letter = |number: usize| matches!(program.operations[number].kind, Op::Letter { .. });
        match (self.kind, program.operations[number].kind) {
            // Two operations of one group cannot change places; of others, it depends.
            (Kind::Order, _) => {
                let next = steps[self.at + 1];
                let same = program.group(next, self.rank) == Some(group) && !letter(number) && !letter(next);
                others.filter(|_| same).collect()
            }
            // A sender waits for nobody.
            (_, Op::Letter { to, .. }) => others.filter(|&rank| rank == group[to]).collect(),
            _ => others.collect(),
        }
    }

    fn is_exact(&self, program: &Program) -> bool {
        let number = program.steps(self.rank)[self.at];
        let peers = program.group(number, self.rank).map_or(0, Vec::len);
        let letter = matches!(program.operations[number].kind, Op::Letter { .. });
        match self.kind {
            Kind::Order => false,
            Kind::Size => peers > 2 && !letter,
            _ => true,
        }
    }

    /// A rank that failed names this one, and has the right values so far; returns the cause that it tells.
    pub(crate) fn assert_rank(&self, program: &Program, end: &End, rank: usize, seed: u64) -> Option<String> {
        program.assert_right_so_far(end, rank, seed);
        let Some(error) = &end.error else {
            assert!(
                !self.stopped(program).contains(&rank),
                "program {seed}, {self:?}: rank {rank} did not fail"
            );
            return None;
        };
        let context = format!("program {seed}, {self:?}: {error}");
        let Error::Collective(error) = error else { panic!("{context}") };
        let exact = error.culprits == [self.rank];
        assert!(exact || !self.is_exact(program) && error.culprits.contains(&self.rank), "{context}");
        assert!(error.history.contains(&format!("rank {rank}: ")), "{context}");
        assert_eq!((error.rank, error.size), (rank, program.ranks), "{context}");
        Some(error.cause.clone())
    }
}
