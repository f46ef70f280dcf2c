//! What responses are worth: rewards that come with the toolkit, and the sum of several.

mod parts;

pub use parts::RewardParts;
