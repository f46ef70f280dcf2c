//! A language model, or a scalar model on the same body, as a policy.

use std::sync::Arc;

use burn::tensor::{Device, Tensor};
use rayon::prelude::*;

use super::llama::{Layout, Llama};
use super::lora::rows;
use super::{Adapter, ModelConfig, layerwise};
use crate::algorithm::LANGUAGE_HEAD;
use crate::ops::{Dropout, embedding, linear, linear_cross_entropy};
use crate::rng::Rng;
use crate::shard::{Shard, Whole};
use crate::weights::Checkpoint;
use crate::{
    Batch, Error, Forward, Gradients, LossFn, Needs, ParamId, ParamSet, Policy, Result,
    policy::accumulate_in_turn,
};

const HEAD: &str = "lm_head.weight";
pub(super) const SCORE: &str = "score.weight";

/// A model with its parameters.
///
/// With `num_labels` in its configuration it has a scalar head (`score.weight`) in place of the
/// language-model head, as `LlamaForSequenceClassification` has.
#[derive(Debug, Clone)]
pub struct CausalLm {
    config: Arc<ModelConfig>,
    body: Arc<Llama>,
    params: ParamSet,
    head: Head,
    device: Device,
    gradient_checkpointing: bool,
    /// What divides the logits; none where nothing does, so that nothing is rounded.
    temperature: Option<f32>,
    dropout: DropoutKey,
}

/// What decides which elements an adapter's dropout drops.
#[derive(Debug, Clone, Copy, Default)]
struct DropoutKey {
    seed: u64,
    /// Optimizer steps done.
    step: u64,
    /// Whether gradients are being computed.
    training: bool,
}

#[derive(Debug, Clone, Copy)]
enum Head {
    Language(ParamId),
    Score(ParamId),
}

impl CausalLm {
    /// Names and shapes of all parameters of a model, in the order of its [`ParamSet`].
    pub fn parameters(config: &ModelConfig) -> Vec<(String, Vec<usize>)> {
        let mut all = Llama::parameters(config);
        if let Some(labels) = config.num_labels {
            all.push((SCORE.into(), vec![labels, config.hidden_size]));
        } else if !config.tie_embeddings {
            all.push((HEAD.into(), vec![config.vocab_size, config.hidden_size]));
        }
        all
    }

    /// Reads a checkpoint's parameters to `device`.
    ///
    /// # Errors
    /// Tensors that are absent, of another shape, or that the model has no place for.
    pub fn load(checkpoint: &Checkpoint, device: &Device) -> Result<Self> {
        let config = checkpoint.config().clone();
        let expected = Self::parameters(&config);
        let known = |name: &str| expected.iter().any(|(known, _)| known == name);
        let tied = |name: &str| name == HEAD && config.tie_embeddings && config.num_labels.is_none();
        let unknown: Vec<&str> = (checkpoint.names())
            .filter(|name| !known(name) && !tied(name) && !name.contains("rotary_emb.inv_freq"))
            .collect();
        if !unknown.is_empty() {
            let message = format!(
                "tensors that a {} with this configuration has no place for: {}",
                config.model_type,
                unknown.join(", ")
            );
            return Err(Error::format(checkpoint.path(), message));
        }
        let mut params = ParamSet::default();
        for (name, shape) in &expected {
            params.insert_data(name.as_str(), shape, checkpoint.read_shaped(name, shape)?, device)?;
        }
        if let Some(name) = params.first_not_finite() {
            return Err(Error::format(checkpoint.path(), format!("tensor {name} holds NaN or infinity")));
        }
        Self::new(config, params, device)
    }

    /// A model with random weights: normal with standard deviation 0.02, norms 1, biases 0.
    ///
    /// # Errors
    /// A configuration that is not valid.
    pub fn init(config: ModelConfig, seed: u64, device: &Device) -> Result<Self> {
        config.validate()?;
        let mut params = ParamSet::default();
        for (index, (name, shape)) in Self::parameters(&config).iter().enumerate() {
            params.insert_data(name.as_str(), shape, initial(shape, &[seed, index as u64]), device)?;
            if name.contains(".bias") {
                let zeros = Tensor::zeros([shape[0]], device);
                if let Some(param) = params.iter_mut().last() {
                    param.value = zeros;
                }
            }
        }
        Self::new(config, params, device)
    }

    /// A model around parameters that are there already.
    ///
    /// # Errors
    /// Parameters that the configuration asks for and the set lacks.
    pub fn new(config: ModelConfig, params: ParamSet, device: &Device) -> Result<Self> {
        let body = Llama::new(&config, &params)?;
        let find =
            |name: &str| params.id(name).ok_or_else(|| Error::Invalid(format!("the parameters lack {name}")));
        let head = if config.num_labels.is_some() {
            Head::Score(find(SCORE)?)
        } else if config.tie_embeddings {
            Head::Language(body.embedding_id())
        } else {
            Head::Language(find(HEAD)?)
        };
        Ok(Self {
            config: Arc::new(config),
            body: Arc::new(body),
            params,
            head,
            device: device.clone(),
            gradient_checkpointing: false,
            temperature: None,
            dropout: DropoutKey::default(),
        })
    }

    /// The same model with another adapter, or none, around these parameters.
    pub(super) fn rebuilt(&self, adapter: Option<Arc<Adapter>>, params: ParamSet) -> Result<Self> {
        let config = ModelConfig { adapter, ..(*self.config).clone() };
        let model = Self::new(config, params, &self.device)?;
        let Self { gradient_checkpointing, temperature, dropout, .. } = *self;
        Ok(Self { gradient_checkpointing, temperature, dropout, ..model })
    }

    /// The same body with a fresh scalar head of `labels` outputs in place of its own head.
    ///
    /// # Errors
    /// A configuration that is not valid with the head; a model with an adapter.
    pub fn with_score_head(self, labels: usize, seed: u64) -> Result<Self> {
        if self.config.adapter.is_some() {
            return Err(Error::Invalid("the model has an adapter: its head comes first".into()));
        }
        let mut config = (*self.config).clone();
        config.num_labels = Some(labels);
        let mut params = ParamSet::default();
        for param in self.params.iter().filter(|param| param.name != HEAD && param.name != SCORE) {
            params.insert(param.name.as_str(), &param.shape, param.value.clone())?;
        }
        let shape = [labels, config.hidden_size];
        params.insert_data(SCORE, &shape, initial(&shape, &[seed, u64::MAX]), &self.device)?;
        let model = Self::new(config, params, &self.device)?;
        let Self { gradient_checkpointing, temperature, .. } = self;
        Ok(Self { gradient_checkpointing, temperature, ..model })
    }

    /// The configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The device of the parameters.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Trades time for memory: backward passes compute each layer's activations again.
    pub fn set_gradient_checkpointing(&mut self, on: bool) {
        self.gradient_checkpointing = on;
    }

    /// Divides the logits behind log-probabilities and entropies, so that they are those of a distribution that
    /// was sampled with this temperature.
    ///
    /// # Errors
    /// [`Error::Setting`] for one that is not above 0.
    pub fn set_temperature(&mut self, temperature: f32) -> Result<()> {
        if !(temperature.is_finite() && temperature > 0.0) {
            return Err(Error::setting("temperature", format!("must be above 0, got {temperature}")));
        }
        self.temperature = (temperature.to_bits() != 1.0_f32.to_bits()).then_some(temperature);
        Ok(())
    }

    /// Seeds the dropout of an adapter in training.
    pub fn set_dropout_seed(&mut self, seed: u64) {
        self.dropout.seed = seed;
    }

    /// What an adapter drops of each row of a batch; none outside of training.
    ///
    /// # Errors
    /// A rate out of range.
    pub(super) fn batch_dropout(&self, batch: &Batch) -> Result<Option<Dropout>> {
        let DropoutKey { seed, step, training } = self.dropout;
        let rate = self.config.adapter.as_ref().map_or(0.0, |adapter| adapter.config.dropout);
        let drops = training && rate > 0.0;
        drops.then(|| Dropout::new(rate, rows::names(batch, seed, step))).transpose()
    }

    /// Logits of each row of `hidden` `[tokens, hidden]`: `[tokens, vocab]`. For generation, where
    /// few rows are asked for; training never calls it.
    ///
    /// # Errors
    /// [`Error::Head`] where the model has a scalar head instead.
    pub fn logits(&self, hidden: Tensor<2>) -> Result<Tensor<2>> {
        linear(hidden, self.params.matrix(self.language_head()?), None, None)
    }

    /// The final hidden states of a packed layout: `[tokens, hidden]`.
    ///
    /// # Errors
    /// Token ids past the vocabulary, positions past the model's context.
    pub fn hidden(&self, tokens: &[u32], layout: &Layout, shard: &dyn Shard) -> Result<Tensor<2>> {
        self.body.hidden(&self.params, tokens, layout, shard)
    }

    /// The layout of a packed batch.
    ///
    /// # Errors
    /// [`Error::Invalid`] where a position is past the model's context.
    pub fn layout(&self, positions: &[u32], segments: &[crate::Segment]) -> Result<Layout> {
        let limit = self.config.max_positions;
        if let Some(position) = positions.iter().find(|&&position| position as usize >= limit) {
            return Err(Error::Invalid(format!(
                "position {position} is past the model's context of {limit} tokens"
            )));
        }
        Ok(self.body.layout(positions, segments.into()))
    }

    /// The model without its head.
    pub fn body(&self) -> &Llama {
        &self.body
    }

    /// The language-model head's parameter `[vocab, hidden]`; the embedding where they are tied.
    ///
    /// # Errors
    /// [`Error::Head`] where the model has a scalar head instead.
    pub fn language_head(&self) -> Result<ParamId> {
        match self.head {
            Head::Language(id) => Ok(id),
            Head::Score(_) => Err(Error::Head { field: "logits", head: LANGUAGE_HEAD }),
        }
    }

    pub(super) fn tracked(&self) -> Self {
        Self { params: self.params.tracked(), ..self.clone() }
    }

    /// The heads on the final hidden states `[rows, hidden]` that `rows` refers to.
    pub(super) fn heads(
        &self,
        hidden: Tensor<2>,
        rows: &HeadRows,
        batch: &Batch,
        needs: Needs,
    ) -> Result<Forward> {
        let mut out = Forward::default();
        match self.head {
            Head::Language(id) => {
                if needs.contains(Needs::SCORES) {
                    return Err(Error::Head { field: "scores", head: "scalar head" });
                }
                // Logits are linear in it.
                let hidden = match self.temperature {
                    Some(temperature) => hidden / temperature,
                    None => hidden,
                };
                let scores =
                    linear_cross_entropy(hidden, self.params.matrix(id), &rows.targets, &batch.targets)?;
                out.logps = Some(scores.logps);
                out.entropy = Some(scores.entropy);
                out.correct = Some(scores.correct);
            }
            Head::Score(id) => {
                if !needs.contains(Needs::SCORES) && !needs.contains(Needs::VALUES) {
                    return Err(Error::Head { field: "logps", head: LANGUAGE_HEAD });
                }
                if needs.contains(Needs::SCORES) {
                    let at_ends = embedding(hidden.clone(), &rows.ends)?;
                    out.scores = Some(linear(at_ends, self.params.matrix(id), None, None)?);
                }
                if needs.contains(Needs::VALUES) {
                    let at_targets = embedding(hidden, &rows.targets)?;
                    let values = linear(at_targets, self.params.matrix(id), None, None)?;
                    out.values = Some(values.narrow(1, 0, 1).reshape([rows.targets.len()]));
                }
            }
        }
        Ok(out)
    }
}

/// The rows of the hidden states that the heads read.
pub(super) struct HeadRows {
    /// The row that predicts each target.
    targets: Vec<u32>,
    /// Each sequence's last row.
    ends: Vec<u32>,
}

impl HeadRows {
    pub(super) fn of(batch: &Batch) -> Self {
        let ends = batch.sequences.iter().map(|sequence| sequence.last_row as u32).collect();
        Self { targets: batch.rows.clone(), ends }
    }

    /// The rows of a batch of `tokens` that the head reads, ascending, and changes the references to
    /// places among them. None where that is all rows, or none.
    fn keep(&mut self, head: Head, needs: Needs, tokens: usize) -> Option<Arc<[u32]>> {
        let mut read = vec![false; tokens];
        let language = matches!(head, Head::Language(_));
        let of_targets = self.targets.iter().filter(|_| language || needs.contains(Needs::VALUES));
        let of_ends = self.ends.iter().filter(|_| needs.contains(Needs::SCORES));
        of_targets.chain(of_ends).for_each(|&row| read[row as usize] = true);
        let kept: Arc<[u32]> = (0..tokens as u32).filter(|&row| read[row as usize]).collect();
        if kept.is_empty() || kept.len() == tokens {
            return None;
        }
        // Rows that are not read have no place: nothing looks them up.
        let mut places = vec![0; tokens];
        kept.iter().zip(0..).for_each(|(&row, place)| places[row as usize] = place);
        for row in self.targets.iter_mut().chain(&mut self.ends) {
            *row = places[*row as usize];
        }
        Some(kept)
    }
}

/// Normal values with standard deviation 0.02 for a matrix, ones for a vector.
fn initial(shape: &[usize], key: &[u64]) -> Vec<f32> {
    let len = shape.iter().product();
    if shape.len() < 2 {
        return vec![1.0; len];
    }
    let rng = Rng::new(key);
    (0..len as u64).into_par_iter().map(|i| (rng.normal(i) * 0.02) as f32).collect()
}

impl Policy for CausalLm {
    fn forward(&self, batch: &Batch, needs: Needs) -> Result<Forward> {
        let mut layout = self.layout(&batch.positions, &batch.segments)?;
        let mut rows = HeadRows::of(batch);
        layout.kept = rows.keep(self.head, needs, batch.tokens.len());
        layout.dropout = self.batch_dropout(batch)?;
        let hidden = self.hidden(&batch.tokens, &layout, &Whole)?;
        self.heads(hidden, &rows, batch, needs)
    }

    fn params(&self) -> &ParamSet {
        &self.params
    }

    fn params_mut(&mut self) -> &mut ParamSet {
        &mut self.params
    }

    fn with_params(&self, params: ParamSet) -> Box<dyn Policy> {
        Box::new(Self { params, ..self.clone() })
    }

    fn begin_step(&mut self, step: u64) {
        self.dropout.step = step;
    }

    fn accumulate(&self, micro: &[Batch], needs: Needs, loss: &LossFn<'_>) -> Result<Gradients> {
        let training = Self { dropout: DropoutKey { training: true, ..self.dropout }, ..self.clone() };
        if self.gradient_checkpointing {
            layerwise::accumulate(&training, micro, needs, loss)
        } else {
            accumulate_in_turn(&training, micro, needs, loss)
        }
    }
}
