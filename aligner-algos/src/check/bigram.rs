//! The smallest model that an algorithm can be tried on.

use aligner_core::{Batch, Device, Error, Forward, Needs, ParamSet, Policy, Result, Tensor};
use burn::tensor::{Int, TensorData, activation};

/// A model in which each token depends on the one before it, by a table of logits.
///
/// Log-probabilities, entropies, values and scores are all differentiable, and a pass takes
/// microseconds: it stands in for a transformer wherever only the algorithm is of interest.
pub struct BigramPolicy {
    params: ParamSet,
    vocab: usize,
}

impl BigramPolicy {
    /// A model over `vocab` tokens with pseudo-random logits and scores between −1 and 1.
    ///
    /// # Panics
    /// Never: the three parameters have different names and sizes as their shapes say.
    pub fn new(vocab: usize, seed: u64) -> Self {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(1);
        let mut draw = || {
            // Knuth's MMIX generator; the upper bits are the good ones.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
        };
        let mut params = ParamSet::default();
        for (name, shape) in
            [("logits", vec![vocab, vocab]), ("scores", vec![vocab]), ("values", vec![vocab])]
        {
            let values = (0..shape.iter().product()).map(|_| draw()).collect();
            params
                .insert_data(name, &shape, values, &Device::flex())
                .expect("three names, sizes as their shapes");
        }
        Self { params, vocab }
    }

    /// Tokens of the vocabulary.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    fn param(&self, name: &'static str) -> Result<Tensor<1>> {
        let param =
            self.params.by_name(name).ok_or_else(|| Error::Invalid(format!("no parameter {name}")))?;
        Ok(param.value.clone())
    }

    /// The token in each of `rows` as an index.
    fn tokens(&self, batch: &Batch, rows: impl Iterator<Item = usize>) -> Result<Tensor<1, Int>> {
        let tokens: Vec<i64> = rows.map(|row| i64::from(batch.tokens[row])).collect();
        let vocab = self.vocab;
        if let Some(token) = tokens.iter().find(|token| **token >= vocab as i64) {
            return Err(Error::Invalid(format!("token {token} is past the vocabulary of {vocab}")));
        }
        Ok(Tensor::from_data(TensorData::from(tokens.as_slice()), &self.param("logits")?.device()))
    }
}

impl Policy for BigramPolicy {
    fn forward(&self, batch: &Batch, needs: Needs) -> Result<Forward> {
        let mut out = Forward::default();
        if needs.contains(Needs::SCORES) {
            let last = self.tokens(batch, batch.sequences.iter().map(|sequence| sequence.last_row))?;
            let scores = self.param("scores")?.select(0, last);
            out.scores = Some(scores.reshape([batch.sequences.len(), 1]));
        }
        let targets = batch.targets.len();
        if targets == 0 {
            out.logps = Some(Tensor::zeros([0], &self.param("logits")?.device()));
            return Ok(out);
        }
        let rows = self.tokens(batch, batch.rows.iter().map(|&row| row as usize))?;
        let logits = self.param("logits")?.reshape([self.vocab, self.vocab]).select(0, rows.clone());
        let all = activation::log_softmax(logits, 1);
        let ids: Vec<i64> = batch.targets.iter().map(|&target| i64::from(target)).collect();
        let ids = Tensor::<1, Int>::from_data(TensorData::from(ids.as_slice()), &rows.device());
        out.logps = Some(all.clone().gather(1, ids.reshape([targets, 1])).reshape([targets]));
        if needs.contains(Needs::ENTROPY) {
            out.entropy = Some((all.clone().exp() * all).sum_dim(1).neg().reshape([targets]));
        }
        if needs.contains(Needs::VALUES) {
            out.values = Some(self.param("values")?.select(0, rows));
        }
        Ok(out)
    }

    fn params(&self) -> &ParamSet {
        &self.params
    }

    fn params_mut(&mut self) -> &mut ParamSet {
        &mut self.params
    }

    fn with_params(&self, params: ParamSet) -> Box<dyn Policy> {
        Box::new(Self { params, vocab: self.vocab })
    }
}
