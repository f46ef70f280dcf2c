//! The heads on the final hidden states, and the rows that they read.

use std::sync::Arc;

use burn::tensor::Tensor;

use super::causal_lm::Head;
use super::{CausalLm, Work};
use crate::algorithm::LANGUAGE_HEAD;
use crate::ops::{TargetScores, embedding, linear};
use crate::shard::Reader;
use crate::{Batch, Error, Forward, Needs, Result};

/// The rows of the hidden states that the heads read.
#[derive(Debug)]
pub(super) struct HeadRows {
    /// The row that predicts each target.
    targets: Picked,
    /// Each sequence's last row.
    ends: Picked,
}

/// Rows of some of a list's entries: of those whose rows this rank computes.
#[derive(Debug)]
struct Picked {
    /// One for each entry. Without any, one that nobody asked for: so a rank without entries of its own has
    /// the same graph as the others.
    rows: Vec<u32>,
    /// Which of the list's entries they are.
    entries: Vec<u32>,
    /// Entries of the list.
    total: usize,
    /// Whether other ranks may have entries that this one lacks.
    is_shared: bool,
}

impl Picked {
    /// `rows` of the whole batch, of which this rank computes `own`, or all.
    fn new(rows: Vec<u32>, own: Option<&[u32]>) -> Self {
        let total = rows.len();
        let Some(own) = own else {
            return Self { rows, entries: (0..total as u32).collect(), total, is_shared: false };
        };
        let (mut places, mut entries) = (Vec::new(), Vec::new());
        for (entry, row) in rows.iter().enumerate() {
            if let Ok(place) = own.binary_search(row) {
                places.push(place as u32);
                entries.push(entry as u32);
            }
        }
        if places.is_empty() && total > 0 {
            places.push(0);
        }
        Self { rows: places, entries, total, is_shared: true }
    }

    /// The entries of `all`, of which there is one for each entry of the list.
    fn of(&self, all: &[u32]) -> Vec<u32> {
        let picked: Vec<u32> = self.entries.iter().map(|&entry| all[entry as usize]).collect();
        if picked.len() < self.rows.len() { all[..1].to_vec() } else { picked }
    }
}

impl HeadRows {
    /// The rows of a batch, of which this rank computes `own`, or all.
    pub(super) fn new(batch: &Batch, own: Option<&[u32]>) -> Self {
        let ends = batch.sequences.iter().map(|sequence| sequence.last_row as u32).collect();
        Self { targets: Picked::new(batch.rows.clone(), own), ends: Picked::new(ends, own) }
    }

    /// The rows, of `tokens`, that the head reads, ascending, and changes the references to
    /// places among them. None where that is all rows, or none.
    pub(super) fn keep(&mut self, head: Head, needs: Needs, tokens: usize) -> Option<Arc<[u32]>> {
        let mut read = vec![false; tokens];
        let language = matches!(head, Head::Language(_));
        let of_targets = self.targets.rows.iter().filter(|_| language || needs.contains(Needs::VALUES));
        let of_ends = self.ends.rows.iter().filter(|_| needs.contains(Needs::SCORES));
        of_targets.chain(of_ends).for_each(|&row| read[row as usize] = true);
        let kept: Arc<[u32]> = (0..tokens as u32).filter(|&row| read[row as usize]).collect();
        if kept.is_empty() || kept.len() == tokens {
            return None;
        }
        // Rows that are not read have no place: nothing looks them up.
        let mut places = vec![0; tokens];
        kept.iter().zip(0..).for_each(|(&row, place)| places[row as usize] = place);
        for row in self.targets.rows.iter_mut().chain(&mut self.ends.rows) {
            *row = places[*row as usize];
        }
        Some(kept)
    }
}

impl CausalLm {
    /// The heads on the final hidden states `[rows, hidden]` that [`CausalLm::through`] gave on the last
    /// stage.
    ///
    /// # Errors
    /// [`Error::Head`] where the model lacks the head that `needs` asks for, or is not the last stage.
    pub fn read(&self, hidden: Tensor<2>, work: &Work, batch: &Batch, needs: Needs) -> Result<Forward> {
        let mut out = Forward::default();
        let (shard, rows) = (self.shard(), &work.rows);
        let leave = |reader| shard.leave(hidden, work.layout.rows, reader);
        match self.head()? {
            Head::Language(id) => {
                if needs.contains(Needs::SCORES) {
                    return Err(Error::Head { field: "scores", head: "scalar head" });
                }
                let hidden = self.tempered(leave(Reader::Vocabulary)?);
                let picked = &rows.targets;
                let targets = picked.of(&batch.targets);
                let TargetScores { logps, entropy, correct } =
                    shard.scores(hidden, self.head_matrix(id), &picked.rows, &targets, self.cap())?;
                let [logps, entropy, correct] = self.collect([logps, entropy, correct], picked)?;
                (out.logps, out.entropy, out.correct) = (Some(logps), Some(entropy), Some(correct.detach()));
            }
            Head::Score(id) => {
                if !needs.contains(Needs::SCORES) && !needs.contains(Needs::VALUES) {
                    return Err(Error::Head { field: "logps", head: LANGUAGE_HEAD });
                }
                let hidden = leave(Reader::Score)?;
                let read = |picked: &Picked| {
                    let read =
                        linear(embedding(hidden.clone(), &picked.rows)?, self.head_matrix(id), None, None)?;
                    shard.collect(read, &picked.entries, picked.total)
                };
                if needs.contains(Needs::SCORES) {
                    out.scores = Some(read(&rows.ends)?);
                }
                if needs.contains(Needs::VALUES) {
                    let values = read(&rows.targets)?;
                    out.values = Some(values.narrow(1, 0, 1).reshape([rows.targets.total]));
                }
            }
        }
        Ok(out)
    }

    /// Values of this rank's targets, each `[own]`, as those of all, `[targets]`.
    fn collect<const N: usize>(&self, values: [Tensor<1>; N], picked: &Picked) -> Result<[Tensor<1>; N]> {
        if !picked.is_shared {
            // As the default of the hook has it, without putting the columns together and apart.
            return Ok(values);
        }
        let columns = values.map(|values| values.unsqueeze_dim::<2>(1)).to_vec();
        let all = self.shard().collect(Tensor::cat(columns, 1), &picked.entries, picked.total)?;
        Ok(std::array::from_fn(|at| all.clone().narrow(1, at, 1).reshape([picked.total])))
    }
}
