//! Rewards against the packages whose rules they follow, and against live services and models.

mod golden;
mod model;
mod remote;
