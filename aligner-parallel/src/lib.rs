//! Ranks: communicators and the mesh that they form.
//!
//! There is always a communicator and a mesh. One process alone is [`Solo`] on [`Mesh::one`], so
//! no algorithm asks whether it is distributed. [`ThreadComm`] has threads for ranks, [`MessageComm`]
//! whatever a [`Network`] connects: [`TcpComm`] is one of processes and, with the feature `mpi`, `MpiComm`.
//! With the feature `nccl`, `NcclComm` lets tensors on CUDA devices go from device to device.
//!
//! ```
//! use aligner_core::{Communicator, Phase, Reduce};
//! use aligner_parallel::{Mesh, Solo};
//!
//! let mut count = [3.0];
//! Solo.all_reduce_host(&mut count, Reduce::Sum, Phase::new("count tokens"))?;
//! assert_eq!((count, Solo.size(), Mesh::one().size()), ([3.0], 1, 1));
//! # Ok::<(), aligner_core::Error>(())
//! ```

pub mod balance;
mod board;
#[cfg(test)]
mod board_tests;
mod call;
mod collectives;
mod context;
mod cut;
mod device;
mod differentiable;
mod expert;
mod failure;
mod flat;
mod form;
mod idle;
mod mesh;
mod messages;
#[cfg(any(feature = "nccl", feature = "nccl-host"))]
mod nccl;
mod optimizer;
mod part;
mod parts;
mod pieces;
mod policy;
#[cfg(feature = "mpi")]
mod process;
mod recorder;
mod reduce;
pub mod reshard;
mod schedule;
#[cfg(test)]
mod schedule_tests;
pub mod simulate;
mod solo;
mod tcp;
mod tensor;
mod thread;
mod transport;

pub use collectives::Ranks;
pub use device::with_device;
pub use flat::all_reduce_together;
pub use mesh::{Axis, Mesh, MeshComms};
pub use messages::{MessageComm, Network};
#[cfg(any(feature = "nccl", feature = "nccl-host"))]
pub use nccl::NcclComm;
pub use optimizer::MeshAdamW;
pub use pieces::Pieces;
pub use policy::{Cut, ParallelLm};
#[cfg(feature = "mpi")]
pub use process::MpiComm;
pub use schedule::{PipelineSchedule, Task};
pub use solo::Solo;
pub use tcp::{Rendezvous, TcpComm, TcpNetwork, local_rank};
pub use thread::ThreadComm;
