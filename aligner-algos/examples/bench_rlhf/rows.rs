//! What a packed batch with shared prompts saves, undone: each sample is a row of its own, with its prompt, and
//! padded to the longest where that is asked for.

use aligner_core::{
    Batch, Forward, Gradients, LossFn, Needs, ParamSet, Policy, Result, Segment, Sequence, Tensor,
};
use burn::tensor::{Int, TensorData};

/// Fills rows up. Any id does: nothing that counts sees the padding, which is behind it.
const PAD: u32 = 0;

/// A policy that computes in rows, and answers as if the batch had stayed as it was.
pub(crate) struct Rows {
    pub(crate) policy: Box<dyn Policy>,
    pub(crate) padded: bool,
    /// Most tokens of a pass, padding included.
    pub(crate) budget: usize,
}

impl Rows {
    /// The batch's samples as batches of rows, in their order.
    fn lay(&self, batch: &Batch) -> Vec<Batch> {
        let length = |sequence: &Sequence| batch.positions[sequence.last_row] as usize + 1;
        let longest = batch.sequences.iter().map(length).max().unwrap_or(0);
        let mut all: Vec<Batch> = Vec::new();
        for sequence in &batch.sequences {
            let width = if self.padded { longest } else { length(sequence) };
            match all.last_mut() {
                Some(rows) if rows.tokens.len() + width <= self.budget => push(rows, batch, sequence, width),
                _ => {
                    let mut rows = Batch::default();
                    push(&mut rows, batch, sequence, width);
                    all.push(rows);
                }
            }
        }
        all
    }
}

impl Policy for Rows {
    fn forward(&self, batch: &Batch, needs: Needs) -> Result<Forward> {
        let parts = self.lay(batch).into_iter().map(|rows| self.policy.forward(&rows, needs));
        let parts = parts.collect::<Result<Vec<Forward>>>()?;
        let join = |field: fn(&Forward) -> &Option<Tensor<1>>| {
            let values: Option<Vec<_>> = parts.iter().map(|part| field(part).clone()).collect();
            values.filter(|values| !values.is_empty()).map(|values| Tensor::cat(values, 0))
        };
        Ok(Forward {
            logps: join(|part| &part.logps),
            entropy: join(|part| &part.entropy),
            correct: join(|part| &part.correct),
            values: join(|part| &part.values),
            scores: None,
            balance_loss: None,
        })
    }

    fn params(&self) -> &ParamSet {
        self.policy.params()
    }

    fn params_mut(&mut self) -> &mut ParamSet {
        self.policy.params_mut()
    }

    fn with_params(&self, params: ParamSet) -> Box<dyn Policy> {
        Box::new(Self { policy: self.policy.with_params(params), ..*self })
    }

    fn accumulate(&self, micro: &[Batch], needs: Needs, loss: &LossFn<'_>) -> Result<Gradients> {
        let rows: Vec<Batch> = micro.iter().flat_map(|batch| self.lay(batch)).collect();
        self.policy.accumulate(&rows, needs, loss)
    }
}

/// The segment that holds a sequence's last token, and no other sequence's.
fn own_segment(batch: &Batch, sequence: &Sequence) -> Segment {
    let holds = |segment: &&Segment| segment.rows().contains(&sequence.last_row);
    *batch.segments.iter().find(holds).expect("a sequence's last token is in the batch")
}

/// Adds one sample as a row of `width` tokens.
fn push(rows: &mut Batch, from: &Batch, sequence: &Sequence, width: usize) {
    let (start, own) = (rows.tokens.len(), own_segment(from, sequence));
    let prompt = own.parent.map(|parent| from.segments[parent].rows()).unwrap_or_default();
    for tokens in [prompt, own.rows()] {
        rows.tokens.extend_from_slice(&from.tokens[tokens]);
    }
    let last_row = rows.tokens.len() - 1;
    rows.tokens.resize(start + width, PAD);
    rows.positions.extend(0..width as u32);
    rows.segments.push(Segment { start, len: width, position: 0, parent: None });
    let (targets, first) = (sequence.targets.clone(), rows.targets.len());
    // Where a token stands in its sequence, it stands in its row.
    let row = |&row: &u32| start as u32 + from.positions[row as usize];
    rows.rows.extend(from.rows[targets.clone()].iter().map(row));
    rows.targets.extend_from_slice(&from.targets[targets.clone()]);
    for (own, values) in [
        (&mut rows.weights, &from.weights),
        (&mut rows.old_logps, &from.old_logps),
        (&mut rows.ref_logps, &from.ref_logps),
        (&mut rows.values, &from.values),
        (&mut rows.returns, &from.returns),
    ] {
        // Absent for all samples where it is absent for one.
        own.extend_from_slice(values.get(targets.clone()).unwrap_or_default());
    }
    let (group, targets) = (rows.groups.len(), first..rows.targets.len());
    rows.sequences.push(Sequence { group, sample: 0, targets, last_row });
    rows.groups.push(format!("{}#{}", from.groups[sequence.group], sequence.sample));
    rows.rewards.push(None);
}

/// A policy whose head is computed for each row from the first target's to the end, padding included, as one that
/// holds its batch as a matrix does.
pub(crate) struct Columns {
    pub(crate) policy: Box<dyn Policy>,
}

impl Policy for Columns {
    fn forward(&self, batch: &Batch, needs: Needs) -> Result<Forward> {
        let mut asked =
            Batch { rows: Vec::new(), targets: Vec::new(), sequences: Vec::new(), ..batch.clone() };
        let mut places: Vec<i64> = Vec::new();
        for sequence in &batch.sequences {
            let (first, rows) = (asked.rows.len(), &batch.rows[sequence.targets.clone()]);
            let Some(&start) = rows.first() else { continue };
            let columns = start..own_segment(batch, sequence).rows().end as u32 - 1;
            places.extend(rows.iter().map(|row| first as i64 + i64::from(row - start)));
            asked.targets.extend(columns.clone().map(|row| batch.tokens[row as usize + 1]));
            asked.rows.extend(columns);
            asked.sequences.push(Sequence { targets: first..asked.rows.len(), ..sequence.clone() });
        }
        let out = self.policy.forward(&asked, needs)?;
        let pick = |values: Option<Tensor<1>>| {
            let values = values?;
            let places = TensorData::from(places.as_slice());
            Some(values.clone().select(0, Tensor::<1, Int>::from_data(places, &values.device())))
        };
        let Forward { logps, entropy, correct, values, scores, balance_loss } = out;
        let [logps, entropy, correct, values] = [logps, entropy, correct, values].map(pick);
        Ok(Forward { logps, entropy, correct, values, scores, balance_loss })
    }

    fn params(&self) -> &ParamSet {
        self.policy.params()
    }

    fn params_mut(&mut self) -> &mut ParamSet {
        self.policy.params_mut()
    }

    fn with_params(&self, params: ParamSet) -> Box<dyn Policy> {
        Box::new(Self { policy: self.policy.with_params(params) })
    }
}
