//! What responses are worth: rewards that come with the toolkit, and the sum of several.

mod parts;
mod score_log;

pub use parts::RewardParts;
