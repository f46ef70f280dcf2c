//! Ranks: communicators and the mesh that they form.
//!
//! There is always a communicator and a mesh. One process alone is [`Solo`] on [`Mesh::one`], so
//! no algorithm asks whether it is distributed.
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

mod mesh;
mod solo;

pub use mesh::{Axis, Mesh};
pub use solo::Solo;
