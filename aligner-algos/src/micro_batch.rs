//! How a step's groups are spread over micro-batches.

use aligner_core::{Batch, Group, Result};
use aligner_data::packing::best_fit_decreasing;

/// Packs `groups` into batches of at most `budget` computed tokens, by best-fit decreasing.
///
/// A pair is never split. Where `may_split` is true, a larger group over the budget becomes several
/// groups whose prompt is computed once each; losses that compare a group's samples do not allow it.
/// What is over the budget and cannot be split, a single sample above all, gets a batch of its own.
///
/// # Errors
/// Those of [`Batch::collate`].
pub fn micro_batches(groups: &[Group], budget: usize, may_split: bool) -> Result<Vec<Batch>> {
    let pieces: Vec<std::borrow::Cow<'_, Group>> = groups
        .iter()
        .flat_map(|group| {
            if may_split && group.samples.len() > 2 && group.packed_tokens() > budget {
                split(group, budget).into_iter().map(std::borrow::Cow::Owned).collect()
            } else {
                vec![std::borrow::Cow::Borrowed(group)]
            }
        })
        .collect();
    let lengths: Vec<usize> = pieces.iter().map(|piece| piece.packed_tokens()).collect();
    best_fit_decreasing(&lengths, budget)
        .into_iter()
        .map(|bin| Batch::collate(bin.into_iter().map(|at| pieces[at].as_ref())))
        .collect()
}

/// Cuts a group into runs of samples that fit the budget together with the common prompt.
fn split(group: &Group, budget: usize) -> Vec<Group> {
    let prefix = group.shared_prefix();
    let mut pieces: Vec<Group> = Vec::new();
    let mut used = 0;
    for (at, sample) in group.samples.iter().enumerate() {
        let own = sample.tokens.len() - prefix;
        match pieces.last_mut() {
            Some(piece) if used + own <= budget => piece.samples.push(sample.clone()),
            _ => {
                // Errors count samples from the piece's first one.
                let id = format!("{}[{at}..]", group.id);
                pieces.push(Group { id, samples: vec![sample.clone()], metadata: group.metadata.clone() });
                used = prefix;
            }
        }
        used += own;
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use aligner_core::Sample;

    fn group(id: &str, prompt: usize, answers: &[usize]) -> Group {
        let prompt: Vec<u32> = (1..=prompt as u32).collect();
        let sample = |(at, &len): (usize, &usize)| Sample::response(&prompt, &vec![100 + at as u32; len]);
        Group { id: id.into(), samples: answers.iter().enumerate().map(sample).collect(), ..Group::default() }
    }

    fn samples(batches: &[Batch]) -> usize {
        batches.iter().map(|batch| batch.sequences.len()).sum()
    }

    #[test]
    fn batches_keep_the_budget() {
        let groups: Vec<Group> = (1..20).map(|len| group(&format!("g{len}"), 3, &[len])).collect();
        let batches = micro_batches(&groups, 24, true).expect("valid groups");
        assert!(batches.iter().all(|batch| batch.tokens.len() <= 24));
        assert_eq!(samples(&batches), 19);
    }

    #[test]
    fn a_large_group_is_split_with_its_prompt_again() {
        let batches = micro_batches(&[group("g", 4, &[3, 3, 3, 3])], 10, true).expect("valid");
        assert_eq!(batches.iter().map(|b| b.tokens.len()).collect::<Vec<_>>(), [10, 10]);
        assert_eq!(batches[1].groups, ["g[2..]"]);
    }

    #[test]
    fn pairs_and_compared_groups_stay_whole() {
        let whole = micro_batches(&[group("pair", 2, &[9, 9])], 10, true).expect("valid");
        assert_eq!((whole.len(), whole[0].tokens.len()), (1, 20));
        let whole = micro_batches(&[group("list", 2, &[9, 9, 9])], 10, false).expect("valid");
        assert_eq!(whole.len(), 1);
    }

    #[test]
    fn a_sample_over_the_budget_stands_alone() {
        let groups = [group("long", 1, &[30]), group("a", 1, &[2]), group("b", 1, &[2])];
        let batches = micro_batches(&groups, 10, true).expect("valid");
        assert_eq!(batches.iter().map(|b| b.groups.len()).collect::<Vec<_>>(), [1, 2]);
    }
}
