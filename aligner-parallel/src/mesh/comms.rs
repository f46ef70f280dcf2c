//! A rank's communicators on a mesh.

use std::sync::Arc;

use aligner_core::{Communicator, Error, Phase, Result};

use super::{Axis, Mesh};

const PHASE: Phase = Phase::new("forming the groups of the mesh");

/// The ranks that weights outside experts are equal on, and whose gradients of them add up.
pub(crate) const GRADIENTS: [Axis; 3] = [Axis::Context, Axis::Expert, Axis::Data];
/// The ranks that an expert's weights are equal on, and whose gradients of them add up.
const EXPERT_GRADIENTS: [Axis; 2] = [Axis::Context, Axis::Data];
/// The ranks that have batches of their own.
const BATCHES: [Axis; 2] = [Axis::Expert, Axis::Data];

/// One rank's communicators on a mesh: all ranks, those along each axis, and those that share sums.
#[derive(Clone)]
pub struct MeshComms {
    mesh: Mesh,
    all: Arc<dyn Communicator>,
    axes: [Arc<dyn Communicator>; 5],
    gradients: Arc<dyn Communicator>,
    expert_gradients: Arc<dyn Communicator>,
    batches: Arc<dyn Communicator>,
}

impl MeshComms {
    /// Forms the groups of `mesh` among all ranks, which have to call it together.
    ///
    /// # Errors
    /// A mesh of another size than the communicator, and what the communicator reports.
    pub fn new(mesh: Mesh, all: Arc<dyn Communicator>) -> Result<Self> {
        if mesh.size() != all.size() {
            let (ranks, size) = (all.size(), mesh.size());
            return Err(Error::Invalid(format!(
                "the mesh {mesh} has {size} ranks, but {ranks} were started"
            )));
        }
        let over = |axes: &[Axis]| all.split(mesh.first(all.rank(), axes)?, all.rank(), PHASE);
        let along = |axis| over(&[axis]);
        let axes = [
            along(Axis::Tensor)?,
            along(Axis::Context)?,
            along(Axis::Expert)?,
            along(Axis::Data)?,
            along(Axis::Pipeline)?,
        ];
        let (gradients, expert_gradients) = (over(&GRADIENTS)?, over(&EXPERT_GRADIENTS)?);
        let batches = over(&BATCHES)?;
        Ok(Self { mesh, all, axes, gradients, expert_gradients, batches })
    }

    /// The mesh.
    pub fn mesh(&self) -> Mesh {
        self.mesh
    }

    /// All ranks.
    pub fn all(&self) -> &Arc<dyn Communicator> {
        &self.all
    }

    /// The ranks along one axis; this rank's place among them is its coordinate.
    pub fn along(&self, axis: Axis) -> &Arc<dyn Communicator> {
        &self.axes[axis as usize]
    }

    /// The ranks over which gradients of weights outside experts add up: context, expert and data.
    pub fn gradients(&self) -> &Arc<dyn Communicator> {
        &self.gradients
    }

    /// The ranks over which gradients of an expert's weights add up: context and data.
    pub fn expert_gradients(&self) -> &Arc<dyn Communicator> {
        &self.expert_gradients
    }

    /// The ranks that have batches of their own: expert and data.
    pub fn batches(&self) -> &Arc<dyn Communicator> {
        &self.batches
    }
}

#[cfg(test)]
mod tests {
    use aligner_core::Reduce;

    use super::*;
    use crate::ThreadComm;

    #[test]
    fn every_group_of_a_mesh_sums_over_its_own_ranks() {
        let mesh = Mesh::new([2, 1, 2, 1, 2]).unwrap();
        let results = ThreadComm::run(mesh.size(), |comm| {
            let comms = MeshComms::new(mesh, Arc::new(comm))?;
            let rank = comms.all().rank();
            let check = |comm: &Arc<dyn Communicator>, axes: &[Axis]| {
                let group = mesh.group(rank, axes)?;
                assert_eq!((comm.size(), comm.rank()), (group.len(), group.binary_search(&rank).unwrap()));
                let mut sum = [rank as f64];
                comm.all_reduce_host(&mut sum, Reduce::Sum, PHASE)?;
                assert_eq!(sum[0] as usize, group.iter().sum::<usize>(), "{axes:?}");
                Ok::<_, Error>(())
            };
            for axis in Axis::ALL {
                check(comms.along(axis), &[axis])?;
                assert_eq!(comms.along(axis).rank(), mesh.coordinates(rank)?[axis as usize]);
            }
            check(comms.gradients(), &GRADIENTS)?;
            check(comms.expert_gradients(), &EXPERT_GRADIENTS)?;
            check(comms.batches(), &BATCHES)
        });
        for result in results {
            result.unwrap();
        }
    }

    #[test]
    fn mesh_of_another_size_is_refused() {
        let mesh = Mesh::new([1, 1, 1, 3, 1]).unwrap();
        let results = ThreadComm::run(2, |comm| MeshComms::new(mesh, Arc::new(comm)).map(|_| ()));
        for result in results {
            let message = result.unwrap_err().to_string();
            assert_eq!(message, "the mesh tp=1 cp=1 ep=1 dp=3 pp=1 has 3 ranks, but 2 were started");
        }
    }
}
