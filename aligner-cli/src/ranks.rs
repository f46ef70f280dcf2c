//! The ranks of a run, as one of them sees them.

use std::sync::Arc;
use std::time::Duration;

use aligner_algos::{Crew, Learner, LearnerConfig, TrainingRanks};
use aligner_core::model::CausalLm;
use aligner_core::optim::AdamW;
use aligner_core::{Communicator, Error, Phase, Policy, Reduce, Result};
use aligner_parallel::{Axis, Mesh, MeshAdamW, MeshComms, ParallelLm, Solo};

use crate::config::MeshSection;

const AGREE: Phase = Phase::new("agreeing on how the run goes on");

/// One rank with its communicators; without a mesh, the only one.
#[derive(Clone)]
pub(crate) struct Ranks {
    all: Arc<dyn Communicator>,
    /// This rank's number on its machine.
    local: usize,
    mesh: Option<OnMesh>,
}

#[derive(Clone)]
struct OnMesh {
    comms: MeshComms,
    section: MeshSection,
}

impl Ranks {
    /// One rank alone.
    pub(crate) fn one() -> Self {
        Self { all: Arc::new(Solo), local: 0, mesh: None }
    }

    /// This rank of `all`, on the mesh of a run file; of the ranks of its machine it is number `local`.
    ///
    /// # Errors
    /// A mesh of another size.
    pub(crate) fn on(section: &MeshSection, all: Arc<dyn Communicator>, local: usize) -> Result<Self> {
        let mesh = section.mesh(all.size())?;
        if mesh.size() == 1 {
            return Ok(Self { all, local, mesh: None });
        }
        all.set_deadline(Duration::from_secs_f64(section.deadline_secs));
        let comms = MeshComms::new(mesh, all.clone())?;
        Ok(Self { all, local, mesh: Some(OnMesh { comms, section: section.clone() }) })
    }

    /// Whether this is the rank that speaks and writes.
    pub(crate) fn is_main(&self) -> bool {
        self.all.is_main()
    }

    /// This rank, counted over all.
    pub(crate) fn rank(&self) -> usize {
        self.all.rank()
    }

    /// The mesh.
    pub(crate) fn mesh(&self) -> Mesh {
        self.mesh.as_ref().map_or_else(Mesh::one, |on| on.comms.mesh())
    }

    /// What of the devices that a run file names this rank computes on: of several CUDA devices the one that has its
    /// number.
    pub(crate) fn device(&self, name: &str) -> String {
        let shared = self.mesh.is_some() && name == "cuda";
        if shared { format!("cuda:{}", self.local) } else { name.to_owned() }
    }

    /// The ranks that draw samples together, where there are several.
    pub(crate) fn crew(&self) -> Option<Crew> {
        let OnMesh { comms, section } = self.mesh.as_ref()?;
        Some(Crew::new(self.all.clone(), comms.batches().clone(), section.prompts))
    }

    /// The largest number of any rank.
    pub(crate) fn largest(&self, own: f64) -> Result<f64> {
        let mut largest = [own];
        self.all.all_reduce_host(&mut largest, Reduce::Max, AGREE)?;
        Ok(largest[0])
    }

    /// Whether any rank says so.
    pub(crate) fn any(&self, own: bool) -> Result<bool> {
        Ok(self.largest(f64::from(u8::from(own)))? > 0.0)
    }

    /// A number that the main rank alone can tell; none where it has none.
    pub(crate) fn of_main(&self, own: impl FnOnce() -> Option<u64>) -> Result<Option<u64>> {
        let own = if self.is_main() { own() } else { None };
        let number = self.largest(own.map_or(-1.0, |own| own as f64))?;
        Ok((number >= 0.0).then_some(number as u64))
    }

    /// Waits for all ranks.
    pub(crate) fn barrier(&self) -> Result<()> {
        self.all.barrier(AGREE)
    }

    /// Of things of a step, those of this rank's batches.
    pub(crate) fn of_batches<T>(&self, all: Vec<T>) -> Vec<T> {
        let Some(OnMesh { comms, .. }) = &self.mesh else { return all };
        let batches = comms.batches();
        all.into_iter().skip(batches.rank()).step_by(batches.size()).collect()
    }

    /// This rank's part of a model that every rank has whole.
    pub(crate) fn policy(&self, model: CausalLm) -> Result<Box<dyn Policy>> {
        Ok(match &self.mesh {
            None => Box::new(model),
            Some(on) => Box::new(on.part(&model)?),
        })
    }

    /// A learner of this rank's part of a model.
    pub(crate) fn learner(&self, model: CausalLm, config: LearnerConfig, updates: u64) -> Result<Learner> {
        let Some(on) = &self.mesh else {
            return Learner::new(Box::new(model), config, updates, self.all.clone());
        };
        let policy = on.part(&model)?;
        drop(model);
        let adamw = AdamW::new(config.adamw())?;
        let optimizer = MeshAdamW::new(&policy, adamw, on.section.shard_optimizer)?;
        let ranks = TrainingRanks { all: self.all.clone(), batches: on.comms.batches().clone() };
        Learner::on_ranks(Box::new(policy), config, updates, ranks, Box::new(optimizer))
    }
}

impl OnMesh {
    fn part(&self, model: &CausalLm) -> Result<ParallelLm> {
        let dropout = model.config().adapter.as_ref().map_or(0.0, |adapter| adapter.config.dropout);
        if dropout > 0.0 && self.comms.along(Axis::Tensor).size() > 1 {
            return Err(Error::setting("model.lora.dropout", "must be 0 where mesh.tp is above 1"));
        }
        ParallelLm::new(model, &self.comms, self.section.cut())
    }
}
