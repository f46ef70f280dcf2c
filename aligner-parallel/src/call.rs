//! What a rank calls, as the other ranks and an error see it.

use std::borrow::Cow;
use std::fmt;

use aligner_core::Reduce;

/// The operations of a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Combine over all ranks.
    AllReduce(Reduce),
    /// Concatenate equally many of each rank.
    AllGather,
    /// Collect as many as each rank has.
    AllGatherUneven,
    /// Sum, and keep a part.
    ReduceScatter,
    /// Take the values of this place of the group.
    Broadcast(usize),
    /// A part for each rank.
    AllToAll,
    /// Nothing but meet.
    Barrier,
    /// Form smaller groups.
    Split,
    /// Values for one rank.
    Send,
    /// Values of one rank.
    Recv,
    /// The next number of the count that a group shares.
    Take,
}

/// The type of the elements that travel; over the host's memory, halves of floats travel as `f32`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    /// 4 bytes.
    F32,
    /// 8 bytes.
    F64,
    /// 2 bytes, between devices alone.
    F16,
    /// 2 bytes, between devices alone.
    Bf16,
}

impl Element {
    /// Bytes of one.
    pub(crate) fn size(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}

/// In a call's stage: its elements are on a device, and go from there to other devices.
pub(crate) const ON_DEVICE: u8 = 1 << 7;

/// One call of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// Which operation.
    pub op: Op,
    /// Of which type.
    pub element: Element,
    /// Elements that this rank brings, or waits for.
    pub elements: usize,
    /// Counts the meetings of an operation that has several.
    pub stage: u8,
    /// The name of the phase.
    pub phase: Cow<'static, str>,
}

impl Call {
    /// Whether two ranks of a group may meet with these calls.
    pub(crate) fn agrees(&self, other: &Self) -> bool {
        let uneven = matches!(self.op, Op::AllGatherUneven | Op::AllToAll);
        (self.op, self.element, self.stage, &self.phase)
            == (other.op, other.element, other.stage, &other.phase)
            && (uneven || self.elements == other.elements)
    }

    /// Whether `other` receives what this call sends.
    pub(crate) fn is_received_by(&self, other: &Self) -> bool {
        (self.element, self.elements, &self.phase) == (other.element, other.elements, &other.phase)
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.op {
            Op::AllReduce(Reduce::Sum) => write!(f, "all_reduce (sum)"),
            Op::AllReduce(Reduce::Max) => write!(f, "all_reduce (max)"),
            Op::AllReduce(Reduce::Mean) => write!(f, "all_reduce (mean)"),
            Op::AllGather => write!(f, "all_gather"),
            Op::AllGatherUneven => write!(f, "all_gather_uneven"),
            Op::ReduceScatter => write!(f, "reduce_scatter"),
            Op::Broadcast(root) => write!(f, "broadcast from place {root}"),
            Op::AllToAll => write!(f, "all_to_all"),
            Op::Barrier => write!(f, "barrier"),
            Op::Split => write!(f, "split"),
            Op::Send => write!(f, "send"),
            Op::Recv => write!(f, "recv"),
            Op::Take => write!(f, "take"),
        }?;
        let place = if self.stage & ON_DEVICE > 0 { " on a device" } else { "" };
        match self.op {
            Op::Barrier | Op::Split | Op::Take => write!(f, " in {:?}", self.phase),
            _ => write!(f, " of {} {}{place} in {:?}", self.elements, self.element.name(), self.phase),
        }
    }
}

/// Ranks as an error lists them: `rank 2`, or `ranks 0, 1, 3`.
pub(crate) fn name_ranks(ranks: &[usize]) -> String {
    let list = ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    if ranks.len() == 1 { format!("rank {list}") } else { format!("ranks {list}") }
}

/// Ranks that came to the same meeting with different calls.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Mismatch {
    /// Those who are not of the largest set that agrees; all, where no set is larger than the others.
    pub(crate) culprits: Vec<usize>,
    /// Who called what.
    pub(crate) text: String,
    /// Whether more than half of `of` ranks agree, so that later ones cannot change who is at fault.
    pub(crate) decided: bool,
}

/// What is wrong with the calls that have come so far to a meeting of `of` ranks.
pub(crate) fn mismatch(posts: &[(usize, &Call)], of: usize) -> Option<Mismatch> {
    let mut sets: Vec<(&Call, Vec<usize>)> = Vec::new();
    for &(rank, call) in posts {
        match sets.iter_mut().find(|(first, _)| first.agrees(call)) {
            Some((_, ranks)) => ranks.push(rank),
            None => sets.push((call, vec![rank])),
        }
    }
    if sets.len() < 2 {
        return None;
    }
    sets.sort_by_key(|(_, ranks)| (std::cmp::Reverse(ranks.len()), ranks.clone()));
    let most = sets[0].1.len();
    let tie = sets[1].1.len() == most;
    let mut culprits: Vec<usize> =
        sets[usize::from(!tie)..].iter().flat_map(|(_, ranks)| ranks.iter().copied()).collect();
    culprits.sort_unstable();
    let told = sets.iter().rev().map(|(call, ranks)| format!("{} called {call}", name_ranks(ranks)));
    Some(Mismatch {
        culprits,
        text: format!("calls do not match: {}", told.collect::<Vec<_>>().join("; ")),
        decided: posts.len() == of || 2 * most > of,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(op: Op, elements: usize, phase: &'static str) -> Call {
        Call { op, element: Element::F32, elements, stage: 0, phase: phase.into() }
    }

    #[test]
    fn only_uneven_operations_may_differ_in_size() {
        for (op, may) in [(Op::AllGather, false), (Op::AllGatherUneven, true), (Op::AllToAll, true)] {
            assert_eq!(call(op, 1, "a").agrees(&call(op, 2, "a")), may, "{op:?}");
        }
        assert!(!call(Op::AllGather, 1, "a").agrees(&call(Op::AllGather, 1, "b")), "the phase differs");
        assert!(!call(Op::Broadcast(0), 1, "a").agrees(&call(Op::Broadcast(1), 1, "a")), "the root differs");
    }

    #[test]
    fn minority_is_at_fault_and_a_tie_names_all() {
        let (right, wrong) =
            (call(Op::AllGather, 4, "weights"), call(Op::AllReduce(Reduce::Sum), 8, "gradients"));
        let found = mismatch(&[(3, &right), (5, &wrong), (9, &right)], 3).expect("a mismatch");
        assert_eq!((found.culprits, found.decided), (vec![5], true));
        assert_eq!(
            found.text,
            "calls do not match: rank 5 called all_reduce (sum) of 8 f32 in \"gradients\"; \
             ranks 3, 9 called all_gather of 4 f32 in \"weights\""
        );
        let found = mismatch(&[(3, &right), (5, &wrong)], 3).expect("a mismatch");
        assert_eq!((found.culprits, found.decided), (vec![3, 5], false));
        assert_eq!(mismatch(&[(3, &right), (5, &right)], 3), None);
    }
}
