//! `AdamW`, clipping by the global norm, and learning-rate schedules.
//!
//! ```
//! use aligner_core::optim::{AdamW, AdamWConfig, Norm, clip_coefficient, global_norm};
//! use aligner_core::{Device, ParamSet, Tensor};
//!
//! let device = Device::flex();
//! let mut params = ParamSet::default();
//! params.insert_data("weight", &[1, 2], vec![1.0, 1.0], &device)?;
//! let grads = [Some(Tensor::from_floats([3.0, -4.0], &device))];
//!
//! let scale = clip_coefficient(global_norm(&grads, Norm::L2), 1.0);
//! AdamW::new(AdamWConfig::default())?.step(&mut params, &grads, 1e-3, scale)?;
//! let moved = aligner_core::ops::host::to_vec(&params.by_name("weight").unwrap().value);
//! assert!(moved[0] < 1.0 && moved[1] > 1.0);
//! # Ok::<(), aligner_core::Error>(())
//! ```

mod adamw;
mod kernel;
mod norm;
mod optimizer;
mod schedule;

pub use adamw::{AdamW, AdamWConfig};
pub use norm::{Norm, clip_coefficient, first_not_finite, global_norm};
pub use optimizer::{Optimizer, OptimizerState};
pub use schedule::{LearningRate, Schedule, ScheduleOptions};
