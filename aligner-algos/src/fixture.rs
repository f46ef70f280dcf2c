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

/// Groups of one prompt each, with one answer for each reward; answers differ in tokens and length.
pub(crate) fn siblings(count: u32, rewards: &[f32]) -> Vec<Group> {
    let group = |at: u32| {
        let sample = |(place, reward): (u32, &f32)| {
            let answer: Vec<u32> = (0..=(at + place) % 3).map(|i| 4 + (3 * at + 2 * place + i) % 7).collect();
            Sample { reward: Some(*reward), ..Sample::response(&[1, 2 + at % 2], &answer) }
        };
        let samples = (0..).zip(rewards).map(sample).collect();
        Group { id: format!("prompt {at}"), samples, ..Group::default() }
    };
    (0..count).map(group).collect()
}
