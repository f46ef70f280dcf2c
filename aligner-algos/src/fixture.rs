//! Groups that several modules test with.

use aligner_core::{Group, Sample};

/// Pairs of different prompts, whose chosen answers differ and whose rejected ones do not.
pub(crate) fn pairs(count: u32) -> Vec<Group> {
    let pair = |at: u32| {
        let prompt = [1, 2 + at];
        Group::pair(
            format!("row {at}"),
            Sample::response(&prompt, &[5, 6 + at]),
            Sample::response(&prompt, &[7]),
        )
    };
    (0..count).map(pair).collect()
}
