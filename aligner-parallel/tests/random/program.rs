//! Programs: operations on groups of ranks, drawn from a seed.

use std::sync::Arc;
use std::time::Duration;

use aligner_core::rng::Rng;
use aligner_core::{Communicator, Device, Error, Phase, Reduce, Tensor};

use super::fault::{Fault, Kind as FaultKind};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    AllReduce(Reduce),
    AllReduceHost(Reduce),
    AllGather,
    AllGatherUneven,
    ReduceScatter,
    Broadcast { root: usize },
    AllToAll,
    Barrier,
    Letter { from: usize, to: usize },
    Split { colors: u64 },
}

/// One operation, on one group or on all groups of a partition of the ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Operation {
    pub(crate) kind: Kind,
    /// Which partition.
    pub(crate) partition: usize,
    /// The only group of the partition that takes part.
    pub(crate) only: Option<usize>,
    /// Elements, of a rank or of a rank for each rank; uneven operations have fewer on some.
    pub(crate) elements: usize,
}

/// What every rank does, in order.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) seed: u64,
    pub(crate) ranks: usize,
    pub(crate) operations: Vec<Operation>,
    /// Ways to part the ranks, each a list of groups in their order: all together, then those of the splits.
    pub(crate) partitions: Vec<Vec<Vec<usize>>>,
}

/// A name for each operation, as phases need one that lasts.
const PHASES: [&str; 14] = [
    "step 0", "step 1", "step 2", "step 3", "step 4", "step 5", "step 6", "step 7", "step 8", "step 9",
    "step 10", "step 11", "step 12", "step 13",
];

/// The bits of what a rank has got from an operation.
pub(crate) type Values = Vec<Vec<u64>>;

/// How a rank ended: what it has got, by operation, and its error.
pub(crate) struct End {
    pub(crate) got: Vec<(usize, Values)>,
    pub(crate) error: Option<Error>,
}

impl Program {
    pub(crate) fn random(seed: u64) -> Self {
        let rng = Rng::new(&[seed, 1]);
        let ranks = 2 + rng.below(0, 7) as usize;
        let all = vec![(0..ranks).collect::<Vec<_>>()];
        let mut program = Self { seed, ranks, operations: Vec::new(), partitions: vec![all] };
        let count = 3 + rng.below(1, PHASES.len() as u64 - 2);
        for number in 0..count {
            program.add(Rng::new(&[seed, 2, number]));
        }
        program
    }

    fn add(&mut self, rng: Rng) {
        let partition = rng.below(0, self.partitions.len() as u64) as usize;
        let groups = self.partitions[partition].clone();
        let only = (rng.below(1, 3) == 0).then(|| rng.below(2, groups.len() as u64) as usize);
        let least = only.map_or_else(|| groups.iter().map(Vec::len).min(), |only| Some(groups[only].len()));
        let least = least.expect("a group") as u64;
        let reduce = [Reduce::Sum, Reduce::Max, Reduce::Mean][rng.below(3, 3) as usize];
        let kind = match rng.below(4, 11) {
            0 | 1 => Kind::AllReduce(reduce),
            2 => Kind::AllReduceHost(reduce),
            3 => Kind::AllGather,
            4 => Kind::AllGatherUneven,
            5 => Kind::ReduceScatter,
            6 => Kind::Broadcast { root: rng.below(5, least) as usize },
            7 => Kind::AllToAll,
            8 | 9 if least > 1 => {
                let from = rng.below(5, least);
                let to = (from + 1 + rng.below(6, least - 1)) % least;
                Kind::Letter { from: from as usize, to: to as usize }
            }
            10 if self.partitions.len() < 4 => {
                let colors = 1 + rng.below(5, 3);
                self.partitions.push(self.parts(&groups, self.operations.len(), colors));
                Kind::Split { colors }
            }
            _ => Kind::Barrier,
        };
        let only = if matches!(kind, Kind::Split { .. }) { None } else { only };
        // Now and then so many that ranks share the work of a sum.
        let elements = if rng.below(7, 40) == 0 { 20_000 } else { rng.below(8, 30) as usize };
        self.operations.push(Operation { kind, partition, only, elements });
    }

    /// The groups that a split makes of these.
    fn parts(&self, groups: &[Vec<usize>], number: usize, colors: u64) -> Vec<Vec<usize>> {
        let mut parts = Vec::new();
        for group in groups {
            for color in 0..colors as usize {
                let of_color = |&&rank: &&usize| self.color_and_key(number, rank, colors).0 == color;
                let mut part: Vec<usize> = group.iter().filter(of_color).copied().collect();
                part.sort_by_key(|&rank| self.color_and_key(number, rank, colors).1);
                if !part.is_empty() {
                    parts.push(part);
                }
            }
        }
        parts
    }

    fn color_and_key(&self, number: usize, rank: usize, colors: u64) -> (usize, usize) {
        let rng = Rng::new(&[self.seed, 3, number as u64, rank as u64]);
        (rng.below(0, colors) as usize, rng.below(1, 4) as usize)
    }

    /// The group of an operation that a rank is in, if it takes part.
    pub(crate) fn group(&self, number: usize, rank: usize) -> Option<&Vec<usize>> {
        let operation = &self.operations[number];
        let mut groups = self.partitions[operation.partition].iter().enumerate();
        let (at, group) = groups.find(|(_, group)| group.contains(&rank))?;
        let here = |place: usize| group.get(place) == Some(&rank);
        let acts = match operation.kind {
            Kind::Letter { from, to } => here(from) || here(to),
            _ => true,
        };
        (acts && operation.only.is_none_or(|only| only == at)).then_some(group)
    }

    /// The operations that a rank takes part in.
    pub(crate) fn steps(&self, rank: usize) -> Vec<usize> {
        (0..self.operations.len()).filter(|&number| self.group(number, rank).is_some()).collect()
    }

    /// What a rank brings to an operation for the rank at `place`.
    pub(crate) fn values(&self, number: usize, rank: usize, place: usize) -> Vec<f32> {
        let operation = &self.operations[number];
        let rng = Rng::new(&[self.seed, 4, number as u64, rank as u64, place as u64]);
        let elements = match operation.kind {
            Kind::AllToAll | Kind::AllGatherUneven => operation.elements * rng.below(0, 4) as usize / 3,
            _ => operation.elements,
        };
        (1..=elements as u64).map(|i| (rng.uniform(i) - 0.5) as f32).collect()
    }

    /// Runs a rank, which does what it does wrong where the fault is its own.
    pub(crate) fn play(&self, comm: Arc<dyn Communicator>, deadline: Duration, fault: Option<&Fault>) -> End {
        let rank = comm.rank();
        let mut comms = vec![None; self.partitions.len()];
        comms[0] = Some(comm);
        let mut player = Player { program: self, rank, comms, got: Vec::new(), deadline };
        let error = player.play(fault.filter(|fault| fault.rank == rank)).err();
        End { got: player.got, error }
    }
}

/// One rank of a running program.
struct Player<'a> {
    program: &'a Program,
    rank: usize,
    /// By partition: the communicator of this rank's group, once it has been made.
    comms: Vec<Option<Arc<dyn Communicator>>>,
    got: Vec<(usize, Values)>,
    deadline: Duration,
}

fn bits(tensor: Tensor<1>) -> Vec<u64> {
    let values = tensor.into_data().try_into_vec::<f32>().expect("f32");
    values.into_iter().map(|value| u64::from(value.to_bits())).collect()
}

impl Player<'_> {
    fn play(&mut self, fault: Option<&Fault>) -> aligner_core::Result<()> {
        let mut steps = self.program.steps(self.rank);
        if let Some(Fault { at, kind: FaultKind::Order, .. }) = fault {
            steps.swap(*at, at + 1);
        }
        for (at, &number) in steps.iter().enumerate() {
            let fault = fault.filter(|fault| fault.at == at).map(|fault| fault.kind);
            match fault {
                Some(FaultKind::Panic) => std::panic::resume_unwind(Box::new("a fault")),
                Some(FaultKind::Leave) => return Ok(()),
                Some(FaultKind::Missing) => {
                    std::thread::sleep(3 * self.deadline);
                    return Ok(());
                }
                Some(FaultKind::Late) => std::thread::sleep(3 * self.deadline),
                Some(FaultKind::Size | FaultKind::Order) | None => {}
            }
            let values = self.call(number, fault == Some(FaultKind::Size))?;
            self.got.push((number, values));
        }
        Ok(())
    }

    fn call(&mut self, number: usize, wrong_size: bool) -> aligner_core::Result<Values> {
        let program = self.program;
        let operation = &program.operations[number];
        let phase = Phase { name: PHASES[number], deadline: self.deadline };
        let comm = self.comms[operation.partition].clone().expect("the split comes first");
        let own = |place| {
            let mut values = program.values(number, self.rank, place);
            if wrong_size {
                values.push(1.0);
            }
            values
        };
        let tensor = |values: Vec<f32>| Tensor::<1>::from_floats(values.as_slice(), &Device::flex());
        Ok(match operation.kind {
            Kind::AllReduce(op) => vec![bits(comm.all_reduce(tensor(own(0)), op, phase)?)],
            Kind::AllReduceHost(op) => {
                let mut values: Vec<f64> = own(0).into_iter().map(f64::from).collect();
                comm.all_reduce_host(&mut values, op, phase)?;
                vec![values.into_iter().map(f64::to_bits).collect()]
            }
            Kind::AllGather => vec![bits(comm.all_gather(tensor(own(0)), phase)?)],
            Kind::AllGatherUneven => {
                comm.all_gather_uneven(tensor(own(0)), phase)?.into_iter().map(bits).collect()
            }
            Kind::ReduceScatter => {
                let whole = (0..comm.size()).flat_map(own).collect();
                vec![bits(comm.reduce_scatter(tensor(whole), phase)?)]
            }
            Kind::Broadcast { root } => vec![bits(comm.broadcast(tensor(own(0)), root, phase)?)],
            Kind::AllToAll => {
                let parts = (0..comm.size()).map(|place| tensor(own(place))).collect();
                comm.all_to_all(parts, phase)?.into_iter().map(bits).collect()
            }
            Kind::Barrier => {
                comm.barrier(phase)?;
                Vec::new()
            }
            Kind::Letter { from, to } if comm.rank() == from => {
                comm.send(tensor(own(0)), to, phase)?;
                Vec::new()
            }
            Kind::Letter { from, .. } => {
                let elements = operation.elements + usize::from(wrong_size);
                vec![bits(comm.recv(elements, from, phase)?)]
            }
            Kind::Split { colors } => {
                let (color, key) = program.color_and_key(number, self.rank, colors);
                let part = comm.split(color, key, phase)?;
                let made = program.made_by(number);
                let place = vec![vec![part.rank() as u64, part.size() as u64]];
                self.comms[made] = Some(part);
                place
            }
        })
    }
}
