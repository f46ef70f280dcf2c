//! Pipeline schedules of the simulator: those that train here, and one that none does yet.

use aligner_core::Result;
use serde::Deserialize;

use super::{Piece, Work};
use crate::schedule::PipelineSchedule;

/// The order of work in a simulated pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
pub enum Order {
    /// [`PipelineSchedule::GPipe`].
    #[serde(rename = "gpipe")]
    GPipe,
    /// [`PipelineSchedule::OneForwardOneBackward`].
    #[default]
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
    /// [`PipelineSchedule::Interleaved`].
    #[serde(rename = "interleaved")]
    Interleaved,
    /// One forward, one backward, with the weights' gradients computed later, where a rank would wait: ZB-H1 (Qi et al. 2023,
    /// arXiv:2401.10241, section 3.1). The first rank holds as many activations as with 1F1B, and all others as many as
    /// it does.
    #[serde(rename = "zb_h1")]
    ZeroBubble,
}

impl Order {
    /// The order of this name.
    pub fn named(name: &str) -> Option<Self> {
        let all = [Self::GPipe, Self::OneForwardOneBackward, Self::Interleaved, Self::ZeroBubble];
        all.into_iter().find(|order| order.name() == name)
    }

    /// The name in a file.
    pub fn name(self) -> &'static str {
        self.trained().map_or("zb_h1", PipelineSchedule::name)
    }

    fn trained(self) -> Option<PipelineSchedule> {
        match self {
            Self::GPipe => Some(PipelineSchedule::GPipe),
            Self::OneForwardOneBackward => Some(PipelineSchedule::OneForwardOneBackward),
            Self::Interleaved => Some(PipelineSchedule::Interleaved),
            Self::ZeroBubble => None,
        }
    }

    /// Every reason why there is no such schedule; empty where there is one.
    pub fn check(self, stages: usize, micros: usize, chunks: usize) -> Vec<String> {
        let trained = self.trained().unwrap_or(PipelineSchedule::OneForwardOneBackward);
        trained.check(stages, micros, chunks)
    }

    /// By rank: its work, in order.
    ///
    /// # Errors
    /// What [`PipelineSchedule::check`] says.
    pub fn works(self, stages: usize, micros: usize, chunks: usize) -> Result<Vec<Vec<Work>>> {
        let trained = self.trained().unwrap_or(PipelineSchedule::OneForwardOneBackward);
        let ranks = trained.tasks(stages, micros, chunks)?;
        let convert = |(rank, tasks): (usize, Vec<_>)| {
            let works = tasks.into_iter().map(Work::from);
            if self == Self::ZeroBubble { split(works, rank, micros) } else { works.collect() }
        };
        Ok(ranks.into_iter().enumerate().map(convert).collect())
    }
}

/// Splits backward passes. Rank r computes the weights' gradients of a micro-batch after the input's gradient of
/// the r-th one behind it: so many activations more than with 1F1B it may hold.
fn split(works: impl Iterator<Item = Work>, rank: usize, micros: usize) -> Vec<Work> {
    let weight = |micro| Work { piece: Piece::Weight, chunk: 0, micro };
    let mut out = Vec::new();
    for work in works {
        if work.piece == Piece::Forward {
            out.push(work);
            continue;
        }
        out.push(Work { piece: Piece::Input, ..work });
        out.extend(work.micro.checked_sub(rank).map(weight));
    }
    out.extend((micros.saturating_sub(rank)..micros).map(weight));
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::{Costs, Timeline, replay};

    fn run(order: Order, [stages, micros, chunks]: [usize; 3], backward: (f64, f64)) -> Timeline {
        let parts = stages * chunks;
        let each = |whole: f64| vec![whole / chunks as f64; parts];
        let costs =
            Costs { forward: each(1.0), input: each(backward.0), weight: each(backward.1), transfer: 0.0 };
        replay(&order.works(stages, micros, chunks).unwrap(), &costs).unwrap()
    }

    #[test]
    fn bubbles_are_those_of_the_papers() {
        for (stages, micros) in [(2, 4), (4, 8), (8, 16), (8, 64)] {
            let (p, m) = (stages as f64, micros as f64);
            for order in [Order::GPipe, Order::OneForwardOneBackward] {
                let bubble = run(order, [stages, micros, 1], (1.0, 1.0)).bubble();
                assert!((bubble - (p - 1.0) / m).abs() < 1e-9, "{order:?} {stages} {micros}: {bubble}");
            }
            for chunks in [2, 4] {
                let bubble = run(Order::Interleaved, [stages, micros, chunks], (1.0, 1.0)).bubble();
                let expected = (p - 1.0) / (m * chunks as f64);
                assert!((bubble - expected).abs() < 1e-9, "{stages} {micros} {chunks}: {bubble}");
            }
            // (p - 1) (F + B - W), where a whole micro-batch takes F + B + W.
            let (input, weight) = (1.2, 0.8);
            let bubble = run(Order::ZeroBubble, [stages, micros, 1], (input, weight)).bubble();
            let expected = (p - 1.0) * (1.0 + input - weight) / (m * (1.0 + input + weight));
            assert!((bubble - expected).abs() < 1e-9, "{stages} {micros}: {bubble} {expected}");
        }
    }

    #[test]
    fn zero_bubble_holds_as_much_as_the_first_rank_of_1f1b() {
        for (stages, micros) in [(1, 3), (2, 2), (3, 7), (4, 8), (6, 4)] {
            let timeline = run(Order::ZeroBubble, [stages, micros, 1], (1.0, 1.0));
            assert_eq!(timeline.in_flight, vec![stages.min(micros); stages], "{stages} {micros}");
        }
    }

    #[test]
    fn orders_have_the_names_of_a_file() {
        for name in ["gpipe", "1f1b", "interleaved", "zb_h1"] {
            assert_eq!(Order::named(name).unwrap().name(), name);
        }
        assert_eq!(Order::named("dual"), None);
    }
}
