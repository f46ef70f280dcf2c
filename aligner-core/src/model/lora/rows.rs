//! Names of a batch's rows, for dropout: a token has the same one in whichever micro-batch it is computed.

use std::collections::HashSet;
use std::sync::Arc;

use crate::Batch;
use crate::rng::{Rng, key_of};

/// A name for each row of the batch, `[tokens]`, in the optimizer step `step`: from the row's group, sample
/// and position. The rows of a common prompt have no sample.
pub(in crate::model) fn names(batch: &Batch, seed: u64, step: u64) -> Arc<[u64]> {
    let prompts: HashSet<usize> = batch.segments.iter().filter_map(|segment| segment.parent).collect();
    let mut sequences = batch.sequences.iter().peekable();
    let mut names = vec![0; batch.tokens.len()];
    for (at, segment) in batch.segments.iter().enumerate() {
        let is_prompt = prompts.contains(&at);
        let sequence = if is_prompt { sequences.peek().copied() } else { sequences.next() };
        let Some(sequence) = sequence else { continue };
        let (group, first) = whole(&batch.groups[sequence.group]);
        let part = if is_prompt { 0 } else { 1 + first + sequence.sample as u64 };
        let rng = Rng::new(&[seed, step, key_of(group), part]);
        for row in segment.rows() {
            names[row] = rng.bits(u64::from(batch.positions[row]));
        }
    }
    names.into()
}

/// The id of the group that `id` is, or is a part of (`group[first..]`), and its first sample.
fn whole(id: &str) -> (&str, u64) {
    let part = id.strip_suffix("..]").and_then(|id| id.rsplit_once('['));
    part.and_then(|(group, first)| Some((group, first.parse().ok()?))).unwrap_or((id, 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Group, Sample};

    fn group(id: &str, answers: &[&[u32]]) -> Group {
        let samples = answers.iter().map(|answer| Sample::response(&[1, 2, 3], answer)).collect();
        Group { id: id.into(), samples, ..Group::default() }
    }

    fn of(groups: &[&Group]) -> Vec<u64> {
        names(&Batch::collate(groups.iter().copied()).unwrap(), 7, 3).to_vec()
    }

    #[test]
    fn a_row_has_its_name_in_any_micro_batch() {
        let (a, b) = (group("a", &[&[4, 5], &[6], &[7, 8]]), group("b", &[&[4, 5], &[6]]));
        let (alone, together) = (of(&[&a]), of(&[&b, &a]));
        assert_eq!(together[6..], alone);
        let parts = [group("a", &[&[4, 5]]), group("a[1..]", &[&[6], &[7, 8]])];
        // Alone, a sample shares no prompt: its prompt's rows are its own.
        assert_eq!(of(&[&parts[1]]), [&alone[..3], &alone[5..]].concat());
        assert_eq!(of(&[&parts[0]])[3..], alone[3..5]);
    }

    #[test]
    fn no_two_rows_and_no_two_steps_share_a_name() {
        let (a, b) = (group("a", &[&[4, 5], &[6]]), group("b", &[&[4, 5], &[6]]));
        let batch = Batch::collate([&a, &b]).unwrap();
        let all: HashSet<u64> = [(7, 3), (7, 4), (8, 3)]
            .into_iter()
            .flat_map(|(seed, step)| names(&batch, seed, step).to_vec())
            .collect();
        assert_eq!(all.len(), 3 * batch.tokens.len());
    }
}
