//! What one thread works out for a program.

use aligner_core::Reduce;

use super::program::{End, Kind, Program, Values};

fn reduce(ranks: &[Vec<f64>], op: Reduce, narrow: bool) -> Vec<f64> {
    // f32 sums are rounded after each addition, as the ranks' are.
    let round = |value: f64| if narrow { f64::from(value as f32) } else { value };
    let element = |at: usize| {
        let values = ranks.iter().map(|rank| rank[at]);
        match op {
            Reduce::Sum => values.reduce(|sum, value| round(sum + value)),
            Reduce::Max => values.reduce(f64::max),
            Reduce::Mean => {
                values.reduce(|sum, value| round(sum + value)).map(|sum| round(sum / ranks.len() as f64))
            }
        }
    };
    (0..ranks[0].len()).filter_map(element).collect()
}

impl Program {
    /// The partition that a split makes.
    pub(crate) fn made_by(&self, number: usize) -> usize {
        let before = self.operations[..=number].iter();
        before.filter(|operation| matches!(operation.kind, Kind::Split { .. })).count()
    }

    /// What a rank has to get from an operation that it takes part in.
    fn expected(&self, number: usize, rank: usize) -> Values {
        let group = self.group(number, rank).expect("it takes part");
        let place = group.iter().position(|&member| member == rank).expect("a member");
        let of = |member: &usize, place| -> Vec<f64> {
            self.values(number, *member, place).into_iter().map(f64::from).collect()
        };
        let all = |place| group.iter().map(|member| of(member, place)).collect::<Vec<_>>();
        let narrow =
            |values: Vec<f64>| values.into_iter().map(|value| u64::from((value as f32).to_bits())).collect();
        let operation = &self.operations[number];
        match operation.kind {
            Kind::AllReduce(op) => vec![narrow(reduce(&all(0), op, true))],
            Kind::AllReduceHost(op) => {
                vec![reduce(&all(0), op, false).into_iter().map(f64::to_bits).collect()]
            }
            Kind::AllGather => vec![narrow(all(0).concat())],
            Kind::AllGatherUneven => all(0).into_iter().map(narrow).collect(),
            Kind::ReduceScatter => vec![narrow(reduce(&all(place), Reduce::Sum, true))],
            Kind::Broadcast { root } => vec![narrow(all(0).swap_remove(root))],
            Kind::AllToAll => all(place).into_iter().map(narrow).collect(),
            Kind::Letter { from, to } if place == to => vec![narrow(of(&group[from], 0))],
            Kind::Letter { .. } | Kind::Barrier => Vec::new(),
            Kind::Split { .. } => {
                let parts = &self.partitions[self.made_by(number)];
                let part = parts.iter().find(|part| part.contains(&rank)).expect("every rank is in a part");
                let place = part.iter().position(|&member| member == rank).expect("a member");
                vec![vec![place as u64, part.len() as u64]]
            }
        }
    }

    /// A rank has done everything, with the right values.
    pub(crate) fn assert_rank_right(&self, end: &End, rank: usize, seed: u64) {
        let error = end.error.as_ref().map(ToString::to_string);
        assert_eq!(error, None, "program {seed}, rank {rank}");
        assert_eq!(end.got.len(), self.steps(rank).len(), "program {seed}, rank {rank}");
        self.assert_right_so_far(end, rank, seed);
    }

    /// What a rank has got is right, to the bit.
    pub(crate) fn assert_right_so_far(&self, end: &End, rank: usize, seed: u64) {
        for (number, values) in &end.got {
            let operation = &self.operations[*number];
            assert!(*values == self.expected(*number, rank), "program {seed}, rank {rank}, {operation:?}");
        }
    }
}
