//! The packed batch: no padding, and no prompt computed twice.

use std::ops::Range;

use burn::tensor::{IndexingUpdateOp, Int, Tensor, TensorData};

use crate::{Error, Group, Result};

/// A run of tokens in the batch that continues another run, or starts at position 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Row of its first token in the batch.
    pub start: usize,
    /// Its tokens.
    pub len: usize,
    /// Position of its first token in its sequence.
    pub position: usize,
    /// The segment that it continues: its tokens see all of that segment's keys.
    pub parent: Option<usize>,
}

impl Segment {
    /// The segment's rows in the batch.
    pub fn rows(&self) -> Range<usize> {
        self.start..self.start + self.len
    }
}

/// One sample in the batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sequence {
    /// Index of its group in [`Batch::groups`].
    pub group: usize,
    /// Index of the sample in its group.
    pub sample: usize,
    /// Its targets, as a range over the batch's `[targets]` arrays.
    pub targets: Range<usize>,
    /// Row of its last token: where a scalar head reads.
    pub last_row: usize,
}

/// Groups of samples, packed: per-token arrays are `[tokens]`, per-target arrays `[targets]`.
///
/// A group's common prompt is one segment, its samples' rests are segments that continue it.
/// Target `i` is token `targets[i]`, predicted by row `rows[i]`: several targets may share a row,
/// as the first tokens of the continuations do.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Batch {
    /// Token ids, `[tokens]`.
    pub tokens: Vec<u32>,
    /// Position of each token in its sequence, `[tokens]`.
    pub positions: Vec<u32>,
    /// The segments, each after the one that it continues.
    pub segments: Vec<Segment>,
    /// Row that predicts each target, `[targets]`.
    pub rows: Vec<u32>,
    /// The target token ids, `[targets]`, sample by sample.
    pub targets: Vec<u32>,
    /// Credit of each target, `[targets]`.
    pub weights: Vec<f32>,
    /// Log-probability of each target when it was sampled, `[targets]`; empty if unknown. The
    /// trainer's own where a sample has `old_logps`, else the sampler's `logps`.
    pub old_logps: Vec<f32>,
    /// Log-probability of each target under the reference, `[targets]`; empty if unknown.
    pub ref_logps: Vec<f32>,
    /// A critic's value before each target, `[targets]`; empty if unknown.
    pub values: Vec<f32>,
    /// What the critic should have said, `[targets]`; empty if unknown.
    pub returns: Vec<f32>,
    /// The samples, in the order of the groups.
    pub sequences: Vec<Sequence>,
    /// Ids of the groups.
    pub groups: Vec<String>,
    /// Scores of the samples, `[sequences]`.
    pub rewards: Vec<Option<f32>>,
}

impl Batch {
    /// Packs `groups`, each with its common prompt stored once.
    ///
    /// # Errors
    /// Per-token fields of the wrong length, a sample with no token, and a batch in which some but
    /// not all samples carry log-probabilities (`old_logps` or `logps`), `ref_logps`, `values` or
    /// `returns`.
    pub fn collate<'a>(groups: impl IntoIterator<Item = &'a Group>) -> Result<Self> {
        let mut batch = Self::default();
        for group in groups {
            batch.push(group)?;
        }
        for (field, got) in [
            ("logps", batch.old_logps.len()),
            ("ref_logps", batch.ref_logps.len()),
            ("values", batch.values.len()),
            ("returns", batch.returns.len()),
        ] {
            if got != 0 && got != batch.targets.len() {
                return Err(Error::Invalid(format!(
                    "`{field}` is known for {got} of the batch's {} targets; it must be all or none",
                    batch.targets.len()
                )));
            }
        }
        Ok(batch)
    }

    fn push(&mut self, group: &Group) -> Result<()> {
        group.check()?;
        let group_index = self.groups.len();
        self.groups.push(group.id.clone());
        let prefix_len = group.shared_prefix();
        let prefix_start = self.tokens.len();
        let parent = (prefix_len > 0).then_some(self.segments.len());
        if let Some(first) = group.samples.first().filter(|_| prefix_len > 0) {
            self.push_segment(&first.tokens[..prefix_len], 0, None);
        }
        for (sample_index, sample) in group.samples.iter().enumerate() {
            if sample.tokens.is_empty() {
                return Err(Error::Invalid(format!("group {}, sample {sample_index}: no token", group.id)));
            }
            let own_start = self.tokens.len();
            self.push_segment(&sample.tokens[prefix_len..], prefix_len, parent);
            let row = |token: usize| {
                if token < prefix_len { prefix_start + token } else { own_start + token - prefix_len }
            };
            let old_logps = if sample.old_logps.is_empty() { &sample.logps } else { &sample.old_logps };
            let first_target = self.targets.len();
            for at in (1..sample.tokens.len()).filter(|&at| sample.mask[at]) {
                self.rows.push(row(at - 1) as u32);
                self.targets.push(sample.tokens[at]);
                self.weights.push(sample.weights.get(at).copied().unwrap_or(1.0));
                self.old_logps.extend(old_logps.get(at));
                self.ref_logps.extend(sample.ref_logps.get(at));
                self.values.extend(sample.values.get(at));
                self.returns.extend(sample.returns.get(at));
            }
            self.sequences.push(Sequence {
                group: group_index,
                sample: sample_index,
                targets: first_target..self.targets.len(),
                last_row: row(sample.tokens.len() - 1),
            });
            self.rewards.push(sample.reward);
        }
        Ok(())
    }

    fn push_segment(&mut self, tokens: &[u32], position: usize, parent: Option<usize>) {
        self.segments.push(Segment { start: self.tokens.len(), len: tokens.len(), position, parent });
        self.tokens.extend_from_slice(tokens);
        self.positions.extend((position..position + tokens.len()).map(|at| at as u32));
    }

    /// Names of the batch's samples, for an error.
    pub fn sample_ids(&self) -> Vec<String> {
        self.sequences.iter().map(|s| format!("{}#{}", self.groups[s.group], s.sample)).collect()
    }

    /// Sums `values` `[targets]` within each sample: `[sequences]`, differentiable.
    pub fn sum_per_sequence(&self, values: Tensor<1>) -> Tensor<1> {
        let owner: Vec<i64> = (self.sequences.iter().enumerate())
            .flat_map(|(at, s)| std::iter::repeat_n(at as i64, s.targets.len()))
            .collect();
        let device = values.device();
        let zeros = Tensor::<1>::zeros([self.sequences.len()], &device);
        if owner.is_empty() {
            return zeros;
        }
        let owner = Tensor::<1, Int>::from_data(TensorData::from(owner.as_slice()), &device);
        zeros.select_assign(0, owner, values, IndexingUpdateOp::Add)
    }

    /// The credit of each target on the device of `like`, `[targets]`.
    pub fn weights(&self, like: &Tensor<1>) -> Tensor<1> {
        constant(&self.weights, like)
    }

    /// The log-probabilities when the targets were sampled, on the device of `like`, `[targets]`.
    ///
    /// # Errors
    /// [`Error::Missing`] where the batch carries none.
    pub fn old_logps(&self, like: &Tensor<1>) -> Result<Tensor<1>> {
        self.known(&self.old_logps, "old_logps", "Needs::OLD_LOGPS", like)
    }

    /// The reference's log-probabilities on the device of `like`, `[targets]`.
    ///
    /// # Errors
    /// [`Error::Missing`] where the batch carries none.
    pub fn ref_logps(&self, like: &Tensor<1>) -> Result<Tensor<1>> {
        self.known(&self.ref_logps, "ref_logps", "Needs::REF_LOGPS", like)
    }

    /// The critic's values on the device of `like`, `[targets]`.
    ///
    /// # Errors
    /// [`Error::Missing`] where the batch carries none.
    pub fn values(&self, like: &Tensor<1>) -> Result<Tensor<1>> {
        self.known(&self.values, "values", "Needs::VALUES", like)
    }

    /// The critic's targets on the device of `like`, `[targets]`.
    ///
    /// # Errors
    /// [`Error::Missing`] where the batch carries none: the policy's algorithm gives credit first.
    pub fn returns(&self, like: &Tensor<1>) -> Result<Tensor<1>> {
        self.known(&self.returns, "returns", "Needs::VALUES", like)
    }

    fn known(
        &self,
        values: &[f32],
        field: &'static str,
        need: &'static str,
        like: &Tensor<1>,
    ) -> Result<Tensor<1>> {
        if values.len() != self.targets.len() {
            return Err(Error::Missing { field, need });
        }
        Ok(constant(values, like))
    }
}

/// `values` as a constant on the device of `like`.
pub fn constant(values: &[f32], like: &Tensor<1>) -> Tensor<1> {
    Tensor::from_data(TensorData::from(values), &like.device())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Sample;

    fn pair() -> Group {
        Group::pair("row 1", Sample::response(&[1, 2, 3], &[4, 5]), Sample::response(&[1, 2, 3], &[6]))
    }

    #[test]
    fn a_shared_prompt_is_stored_once() {
        let batch = Batch::collate([&pair()]).unwrap();
        assert_eq!(batch.tokens, [1, 2, 3, 4, 5, 6]);
        assert_eq!(batch.positions, [0, 1, 2, 3, 4, 3]);
        assert_eq!(batch.segments[2], Segment { start: 5, len: 1, position: 3, parent: Some(0) });
    }

    #[test]
    fn the_last_prompt_row_predicts_every_first_token() {
        let batch = Batch::collate([&pair()]).unwrap();
        assert_eq!(batch.rows, [2, 3, 2]);
        assert_eq!(batch.targets, [4, 5, 6]);
        assert_eq!(batch.sequences[1], Sequence { group: 0, sample: 1, targets: 2..3, last_row: 5 });
    }

    #[test]
    fn sums_are_per_sequence_and_zero_without_targets() {
        let empty = Group::single("row 2", Sample::new(vec![1, 2], vec![false, false]));
        let batch = Batch::collate([&pair(), &empty]).unwrap();
        let values = Tensor::<1>::from_floats([1.0, 2.0, 4.0], &burn::tensor::Device::flex());
        let sums = crate::ops::host::to_vec(&batch.sum_per_sequence(values));
        assert_eq!(sums, [3.0, 4.0, 0.0]);
    }

    #[test]
    fn the_trainers_logps_go_before_the_samplers() {
        let mut group = pair();
        for sample in &mut group.samples {
            sample.logps = vec![-1.0; sample.tokens.len()];
            sample.values = vec![0.5; sample.tokens.len()];
        }
        group.samples[1].old_logps = vec![-2.0; 4];
        let batch = Batch::collate([&group]).unwrap();
        assert_eq!(batch.old_logps, [-1.0, -1.0, -2.0]);
        let like = Tensor::<1>::zeros([3], &burn::tensor::Device::flex());
        assert_eq!(crate::ops::host::to_vec(&batch.values(&like).unwrap()), [0.5; 3]);
        assert!(batch.returns(&like).is_err());
    }

    #[test]
    fn reference_logps_are_all_or_none() {
        let mut known = pair();
        for sample in &mut known.samples {
            sample.ref_logps = vec![-1.0; sample.tokens.len()];
        }
        assert_eq!(Batch::collate([&known]).unwrap().ref_logps.len(), 3);
        assert!(Batch::collate([&known, &pair()]).is_err());
    }
}
