//! From the layout that a model is trained in to the one that it generates in.
//!
//! Every rank knows both layouts, so each finds the same plan without a word: which block of which parameter goes from
//! which rank to which. What a rank has already it copies, or hands on by handle where it has all of it; what it lacks
//! comes once, from the holder that has sent least so far. So the bytes that travel are the least possible. Moves
//! go out in buckets: beside the new parameters, a rank has one bucket that it sends and one that it gets.
//!
//! The idea of a plan that each rank finds alone is Megatron-LM's (`core/resharding`); a pipeline that unfolds into
//! replicas is NeMo-Aligner's (Shen et al. 2024, arXiv:2405.01481, section 4).

mod layout;
mod plan;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::Arc;

use aligner_core::ops::host::{HostTensor, with_slice};
use aligner_core::{Communicator, Device, Error, Param, ParamSet, Phase, Result, Tensor};
use burn::tensor::TensorData;

pub use layout::Layout;
pub(crate) use layout::stages;
pub use plan::{Traffic, Transfer};

use layout::Tile;
use plan::Plan;

const MOVE: Phase = Phase::new("parameters on their way to the engine");

/// Bytes of a bucket where nothing else is said.
pub const BUCKET_BYTES: usize = 32 << 20;

/// A plan, ready to be carried out as often as parameters change.
#[derive(Debug, Clone)]
pub struct Reshard {
    from: Arc<Layout>,
    to: Arc<Layout>,
    plan: Plan,
}

/// A parameter in the new layout, as far as it is there.
enum Target {
    /// It is what the rank has already.
    Kept,
    Filling(Vec<f32>),
}

impl Reshard {
    /// Plans the way between two layouts of the same parameters on the same ranks, in buckets of `bucket_bytes`.
    ///
    /// # Errors
    /// Layouts of other parameters or another number of ranks, and a parameter that lies on no rank.
    pub fn new(from: Layout, to: Layout, bucket_bytes: usize) -> Result<Self> {
        let plan = Plan::new(&from, &to, bucket_bytes)?;
        Ok(Self { from: Arc::new(from), to: Arc::new(to), plan })
    }

    /// What travels, and what the least is.
    pub fn traffic(&self) -> Traffic {
        self.plan.traffic(&self.from, &self.to)
    }

    /// All transfers between ranks, in the order in which they go.
    pub fn transfers(&self) -> &[Transfer] {
        self.plan.transfers()
    }

    /// Whether every rank has just what it needs.
    pub fn is_nothing(&self) -> bool {
        self.from.is_held_like(&self.to)
    }

    /// This rank's parameters in the new layout, from its `own` in the old one. All ranks of `comm`, which are those
    /// of the layouts, call it together.
    ///
    /// # Errors
    /// Parameters that are not those of the layout; a failed collective.
    pub fn carry(&self, comm: &dyn Communicator, own: &ParamSet) -> Result<ParamSet> {
        let (me, ranks) = (comm.rank(), self.from.ranks());
        if comm.size() != ranks {
            return Err(Error::Invalid(format!("a plan for {ranks} ranks on {}", comm.size())));
        }
        let mut targets = self.begin(me, own)?;
        let lacking = |at: usize| Error::Invalid(format!("the parameters lack {}", self.from.name(at)));
        let read = |at: usize| own.by_name(self.from.name(at)).ok_or_else(|| lacking(at));
        for copy in self.plan.copies().iter().filter(|copy| copy.to == me) {
            let (mine, theirs) = (self.from.tiles(me, copy.param), self.to.tiles(me, copy.param));
            let Some(Target::Filling(target)) = &mut targets[copy.param] else { continue };
            with_slice(&read(copy.param)?.value, |source| {
                for (from, to) in copy.runs(mine).zip(copy.runs(theirs)) {
                    target[to].copy_from_slice(&source[from]);
                }
            });
        }
        for bucket in self.plan.buckets() {
            let mut parts = vec![Vec::new(); ranks];
            for step in bucket.iter().filter(|step| step.from == me) {
                let tiles = self.from.tiles(me, step.param);
                let part = &mut parts[step.to];
                with_slice(&read(step.param)?.value, |source| {
                    step.runs(tiles).for_each(|run| part.extend_from_slice(&source[run]));
                });
            }
            let part = |part: Vec<f32>| {
                let len = part.len();
                Tensor::from_data(TensorData::new(part, [len]), &Device::flex())
            };
            let came = comm.all_to_all(parts.into_iter().map(part).collect(), MOVE)?;
            let came: Vec<HostTensor> = came.iter().map(HostTensor::new).collect();
            let mut used = vec![0; ranks];
            for step in bucket.iter().filter(|step| step.to == me) {
                let (tiles, start) = (self.to.tiles(me, step.param), used[step.from]);
                let values = came[step.from].as_slice().get(start..start + step.elements());
                let Some(values) = values else {
                    return Err(Error::Invalid(format!("rank {} has sent too little", step.from)));
                };
                used[step.from] += step.elements();
                if let Some(Target::Filling(target)) = &mut targets[step.param] {
                    for (run, row) in step.runs(tiles).zip(values.chunks_exact(step.columns.len())) {
                        target[run].copy_from_slice(row);
                    }
                }
            }
        }
        self.finish(me, own, targets)
    }

    fn begin(&self, me: usize, own: &ParamSet) -> Result<Vec<Option<Target>>> {
        let target = |at: usize| {
            let Some(shape) = self.to.shape(me, at) else { return Ok(None) };
            let held = own.by_name(self.from.name(at));
            let elements = self.from.shape(me, at).map(|shape| shape.iter().product::<usize>());
            if held.map(Param::elements) != elements {
                let name = self.from.name(at);
                return Err(Error::Invalid(format!("rank {me} holds another part of {name} than planned")));
            }
            Ok(Some(match held {
                Some(_) if self.from.tiles(me, at) == self.to.tiles(me, at) => Target::Kept,
                _ => Target::Filling(vec![0.0; shape.iter().product()]),
            }))
        };
        (0..self.from.params()).map(target).collect()
    }

    fn finish(&self, me: usize, own: &ParamSet, targets: Vec<Option<Target>>) -> Result<ParamSet> {
        let mut set = ParamSet::default();
        for (at, target) in targets.into_iter().enumerate() {
            let (Some(target), Some(shape)) = (target, self.to.shape(me, at)) else { continue };
            let name = self.from.name(at);
            let held = own.by_name(name);
            match (target, held) {
                (Target::Kept, Some(param)) => set.insert(name, shape, param.value.clone())?,
                (Target::Kept, None) => return Err(Error::Invalid(format!("the parameters lack {name}"))),
                (Target::Filling(values), _) => set.insert_data(name, shape, values, &own.device())?,
            };
            let trainable = held.is_none_or(|param| param.trainable);
            if let Some(added) = set.iter_mut().last() {
                added.trainable = trainable;
            }
        }
        Ok(set)
    }
}

impl Transfer {
    pub(crate) fn elements(&self) -> usize {
        self.rows.len() * self.columns.len()
    }

    /// The places of each of its rows, in order, among the elements of the rank that has `tiles`.
    fn runs<'a>(&'a self, tiles: &'a [Tile]) -> impl Iterator<Item = Range<usize>> + 'a {
        let tile = tiles.iter().find(|tile| tile.has(&self.rows, &self.columns));
        let run = |(tile, row): (&Tile, usize)| {
            let start = tile.place(row, self.columns.start);
            start..start + self.columns.len()
        };
        self.rows.clone().filter_map(move |row| tile.map(|tile| (tile, row))).map(run)
    }
}
