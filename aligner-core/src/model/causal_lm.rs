//! A language model, or a scalar model on the same body, as a policy.

use std::collections::HashSet;
use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};
use rayon::prelude::*;

use super::balance::Balance;
use super::decoder::{Decoder, Layout};
use super::heads::HeadRows;
use super::lora::rows;
use super::parameters::{self, HEAD, ParamSpec, SCORE};
use super::{Adapter, ModelConfig, Stage, layerwise};
use crate::algorithm::LANGUAGE_HEAD;
use crate::ops::kernel::on_host;
use crate::ops::rows::{PackedKind, PackedWeight};
use crate::ops::{Dropout, LogitCap, linear};
use crate::rng::Rng;
use crate::shard::{Shard, Whole};
use crate::weights::{Checkpoint, Unread};
use crate::{
    Batch, Error, Forward, Gradients, LossFn, Needs, Param, ParamId, ParamSet, Policy, Result,
    policy::accumulate_in_turn,
};

/// A model with its parameters.
///
/// With `num_labels` in its configuration it has a scalar head (`score.weight`) in place of the
/// language-model head, as `LlamaForSequenceClassification` has.
#[derive(Debug, Clone)]
pub struct CausalLm {
    config: Arc<ModelConfig>,
    body: Arc<Decoder>,
    params: ParamSet,
    head: Option<Head>,
    stage: Stage,
    shard: Arc<dyn Shard>,
    device: Device,
    gradient_checkpointing: bool,
    /// What divides the logits; none where nothing does, so that nothing is rounded.
    temperature: Option<f32>,
    dropout: DropoutKey,
    /// The type that matrices are multiplied in, where it is not that of the parameters.
    products: Option<DType>,
    /// What the base has in place of the parameters that are trained in full beside an adapter.
    originals: Arc<[Param]>,
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

/// The head of a last stage.
#[derive(Debug, Clone, Copy)]
pub(super) enum Head {
    Language(ParamId),
    Score(ParamId),
}

/// What a pass over a batch works on: the rows that this rank computes.
#[derive(Debug)]
pub struct Work {
    pub(super) tokens: Vec<u32>,
    pub(super) layout: Layout,
    pub(super) rows: HeadRows,
}

impl Work {
    /// How many rows this rank computes.
    pub fn tokens(&self) -> usize {
        self.tokens.len()
    }
}

impl CausalLm {
    /// All parameters of a model, in the order of its [`ParamSet`].
    pub fn parameters(config: &ModelConfig) -> Vec<ParamSpec> {
        parameters::all(config)
    }

    /// Reads a checkpoint's parameters to `device`.
    ///
    /// # Errors
    /// Tensors that are absent, of another shape, or that the model has no place for.
    pub fn load(checkpoint: &Checkpoint, device: &Device) -> Result<Self> {
        Self::load_packed(checkpoint, device, None)
    }

    /// The same with the layers' linears packed, which are not trained then: the base of an adapter in few bits
    /// (Dettmers et al. 2023, arXiv:2305.14314). Embeddings, norms, routers, biases and heads are as they are in the
    /// file. A matrix is packed as it is read, so the whole model's values are never there at once.
    ///
    /// # Errors
    /// As [`CausalLm::load`]; a device other than the CPU, where something is to be packed.
    pub fn load_packed(checkpoint: &Checkpoint, device: &Device, kind: Option<PackedKind>) -> Result<Self> {
        let is_host = on_host(&Tensor::<1>::zeros([1], device));
        if let Some(kind) = kind.filter(|_| !is_host) {
            return Err(Error::Invalid(format!(
                "weights in {kind:?} are for the CPU: no other device has products of them"
            )));
        }
        let expected = Self::parameters_in(checkpoint)?;
        let mut params = ParamSet::default();
        let lost = |name: &str| {
            Err(Error::format(checkpoint.path(), format!("tensor {name} holds NaN or infinity")))
        };
        for spec in &expected {
            let values = checkpoint.read_parameter(spec)?;
            let Some((kind, shape)) = kind.zip(spec.packable()) else {
                params.insert_data(spec.name.as_str(), &spec.shape, values, device)?;
                continue;
            };
            // Nobody can tell afterwards.
            if !values.iter().all(|value| value.is_finite()) {
                return lost(&spec.name);
            }
            let packed = Arc::new(PackedWeight::pack(&values, shape, kind));
            params.insert_packed(spec.name.as_str(), packed, device)?;
        }
        if let Some(name) = params.first_not_finite() {
            return lost(name);
        }
        Self::new(checkpoint.config().clone(), params, device)
    }

    /// The same without reading any weight: a model to be cut for the ranks of a mesh, each of which then reads its own
    /// part. It does not run as it is.
    ///
    /// # Errors
    /// As [`CausalLm::load`], as far as names and shapes go.
    pub fn open(checkpoint: &Arc<Checkpoint>, device: &Device) -> Result<Self> {
        let mut params = ParamSet::default();
        for spec in Self::parameters_in(checkpoint)? {
            let (name, shape) = (spec.name.clone(), spec.shape.clone());
            params.insert_unread(name, &shape, Unread::parameter(checkpoint.clone(), spec), device)?;
        }
        Self::new(checkpoint.config().clone(), params, device)
    }

    /// All parameters of a checkpoint's model, in the order of its [`ParamSet`].
    ///
    /// # Errors
    /// Tensors that the model has no place for: to leave them out would change it.
    pub fn parameters_in(checkpoint: &Checkpoint) -> Result<Vec<ParamSpec>> {
        let config = checkpoint.config();
        let expected = Self::parameters(config);
        let known: HashSet<&str> = expected.iter().map(|spec| spec.name.as_str()).collect();
        let tied = |name: &str| name == HEAD && config.tie_embeddings && config.num_labels.is_none();
        let parts = &config.family.parts;
        let buffer = |name: &str| parts.buffers.iter().any(|end| name.ends_with(end));
        // Some files leave out what all names begin with.
        let short = |name: &str| known.contains(format!("{}.{name}", parts.base).as_str());
        let unknown: Vec<&str> = (checkpoint.names())
            .filter(|name| !known.contains(name) && !short(name) && !tied(name) && !buffer(name))
            .collect();
        if !unknown.is_empty() {
            let message = format!(
                "tensors that a {} with this configuration has no place for: {}",
                config.model_type(),
                unknown.join(", ")
            );
            return Err(Error::format(checkpoint.path(), message));
        }
        Ok(expected)
    }

    /// A model with random weights: normal with standard deviation 0.02, norms 1, biases 0.
    ///
    /// # Errors
    /// A configuration that is not valid.
    pub fn init(config: ModelConfig, seed: u64, device: &Device) -> Result<Self> {
        config.validate()?;
        let mut params = ParamSet::default();
        for (index, spec) in Self::parameters(&config).iter().enumerate() {
            let values = match spec.fresh(&config) {
                Some(value) => vec![value; spec.shape.iter().product()],
                None => normal(&spec.shape, &[seed, index as u64], DEVIATION),
            };
            params.insert_data(spec.name.as_str(), &spec.shape, values, device)?;
        }
        Self::new(config, params, device)
    }

    /// A model around parameters that are there already.
    ///
    /// # Errors
    /// Parameters that the configuration asks for and the set lacks.
    pub fn new(config: ModelConfig, params: ParamSet, device: &Device) -> Result<Self> {
        let stage = Stage::whole(&config);
        Self::part(config, params, device, stage)
    }

    /// A stage of a model around its parameters; the set may have those of other stages too.
    ///
    /// # Errors
    /// As [`CausalLm::new`].
    pub fn part(config: ModelConfig, params: ParamSet, device: &Device, stage: Stage) -> Result<Self> {
        let body = Decoder::new(&config, &params, &stage)?;
        let find =
            |name: &str| params.id(name).ok_or_else(|| Error::Invalid(format!("the parameters lack {name}")));
        let head = || {
            Ok::<_, Error>(if config.num_labels.is_some() {
                Head::Score(find(SCORE)?)
            } else if config.tie_embeddings {
                Head::Language(body.embedding_id()?)
            } else {
                Head::Language(find(HEAD)?)
            })
        };
        let head = stage.last.then(head).transpose()?;
        Ok(Self {
            config: Arc::new(config),
            body: Arc::new(body),
            params,
            head,
            stage,
            shard: Arc::new(Whole),
            device: device.clone(),
            gradient_checkpointing: false,
            temperature: None,
            dropout: DropoutKey::default(),
            products: None,
            originals: Arc::default(),
        })
    }

    /// The same model with another adapter, or none, around these parameters; `originals` are what the base has in place
    /// of some.
    pub(super) fn rebuilt(
        &self,
        adapter: Option<Arc<Adapter>>,
        params: ParamSet,
        originals: Arc<[Param]>,
    ) -> Result<Self> {
        let config = ModelConfig { adapter, ..(*self.config).clone() };
        Ok(Self { originals, ..self.reshaped(config, params, self.stage.clone())? })
    }

    /// What the base has in place of the parameters that are trained in full beside an adapter.
    pub(super) fn originals(&self) -> &Arc<[Param]> {
        &self.originals
    }

    /// The same body with a fresh scalar head of `labels` outputs in place of its own head.
    ///
    /// # Errors
    /// A configuration that is not valid with the head; a model with an adapter.
    pub fn with_score_head(self, labels: usize, seed: u64) -> Result<Self> {
        self.with_head(labels, seed, DEVIATION)
    }

    /// The same body with a fresh head of one output in place of its own head, which says next to nothing at
    /// first: what a critic has not learned yet must not be louder than rewards. The deviation is that of
    /// `OpenRLHF`, `1 / (hidden + 1)`.
    ///
    /// # Errors
    /// As [`CausalLm::with_score_head`].
    pub fn with_value_head(self, seed: u64) -> Result<Self> {
        let deviation = 1.0 / (self.config.hidden_size as f64 + 1.0);
        self.with_head(1, seed, deviation)
    }

    fn with_head(self, labels: usize, seed: u64, deviation: f64) -> Result<Self> {
        if self.config.adapter.is_some() {
            return Err(Error::Invalid("the model has an adapter: its head comes first".into()));
        }
        let mut config = (*self.config).clone();
        config.num_labels = Some(labels);
        let mut params = ParamSet::default();
        for param in self.params.iter().filter(|param| param.name != HEAD && param.name != SCORE) {
            params.share(param)?;
        }
        let shape = [labels, config.hidden_size];
        params.insert_data(SCORE, &shape, normal(&shape, &[seed, u64::MAX], deviation), &self.device)?;
        let model = Self::new(config, params, &self.device)?;
        let Self { gradient_checkpointing, temperature, products, .. } = self;
        Ok(Self { gradient_checkpointing, temperature, products, ..model })
    }

    /// The same model where `shard` has this rank's part of it meet the other ranks.
    #[must_use]
    pub fn with_shard(self, shard: Arc<dyn Shard>) -> Self {
        Self { shard, ..self }
    }

    /// What joins this rank's part to the other ranks.
    pub(super) fn shard(&self) -> &dyn Shard {
        self.shard.as_ref()
    }

    /// The part of the model's depth that this is.
    pub fn stage(&self) -> &Stage {
        &self.stage
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

    /// Multiplies matrices in bf16, as mixed precision does: weights and their gradients stay in f32, as do
    /// activations, norms, softmax and losses; only the operands of products are rounded. It is for devices with
    /// units for such products: on the CPU it is slower than f32.
    pub fn set_bf16_products(&mut self, on: bool) {
        self.products = on.then_some(DType::BF16);
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
        let logits = linear(hidden, self.params.matrix(self.language_head()?), None, None)?;
        Ok(match self.config.logit_softcap {
            Some(cap) => (logits / cap).tanh() * cap,
            None => logits,
        })
    }

    /// The final hidden states of a packed layout: `[tokens, hidden]`.
    ///
    /// # Errors
    /// Token ids past the vocabulary, positions past the model's context.
    pub fn hidden(&self, tokens: &[u32], layout: &Layout) -> Result<Tensor<2>> {
        let x = self.body.embed(&self.params, tokens, layout, self.shard())?;
        self.body.norm(&self.params, self.body.run(&self.params, x, layout, self.shard())?)
    }

    /// What a pass over `batch` works on.
    ///
    /// # Errors
    /// [`Error::Invalid`] where a position is past the model's context.
    pub fn work(&self, batch: &Batch) -> Result<Work> {
        let mut layout = self.layout(&batch.positions, &batch.segments)?;
        layout.dropout = self.batch_dropout(batch)?;
        layout.products = self.products;
        let Some(own) = self.shard.rows(&layout.segments)? else {
            return Ok(Work { tokens: batch.tokens.clone(), layout, rows: HeadRows::new(batch, None) });
        };
        let pick = |of: &[u32]| own.iter().map(|&row| of[row as usize]).collect::<Vec<u32>>();
        let mut layout = Layout {
            dropout: layout.dropout.map(|dropout| dropout.select(&own)),
            products: layout.products,
            ..self.body.layout(&pick(&batch.positions), layout.segments)
        };
        layout.kept = None;
        Ok(Work { tokens: pick(&batch.tokens), layout, rows: HeadRows::new(batch, Some(&own)) })
    }

    /// This stage's pass: of the first one from the tokens, else from `x`, the residual stream
    /// `[rows, hidden]` that the stage before it gave; of the last one to the final hidden states.
    ///
    /// # Errors
    /// Token ids past the vocabulary, a failed collective.
    pub fn through(&self, work: &Work, x: Option<Tensor<2>>) -> Result<Tensor<2>> {
        self.through_with_balance(work, x).map(|(x, _)| x)
    }

    /// The same, with how evenly the experts were used, where the work's layout asks for it.
    pub(super) fn through_with_balance(
        &self,
        work: &Work,
        x: Option<Tensor<2>>,
    ) -> Result<(Tensor<2>, Option<Balance>)> {
        if let Some(param) = self.params.first_unread() {
            return Err(Error::Invalid(format!("{} has not been read from its file", param.name)));
        }
        let x = match x {
            Some(x) => x,
            None => self.body.embed(&self.params, &work.tokens, &work.layout, self.shard())?,
        };
        let (x, balance) = self.body.run_with_balance(&self.params, x, &work.layout, self.shard())?;
        let x = if self.stage.last { self.body.norm(&self.params, x)? } else { x };
        Ok((x, balance))
    }

    /// A part of this model with a shape and parameters of its own; settings of training stay.
    ///
    /// # Errors
    /// Parameters that the shape asks for and the set lacks.
    pub fn reshaped(&self, config: ModelConfig, params: ParamSet, stage: Stage) -> Result<Self> {
        let part = Self::part(config, params, &self.device, stage)?;
        let Self { gradient_checkpointing, temperature, dropout, products, .. } = *self;
        let (shard, originals) = (self.shard.clone(), self.originals.clone());
        Ok(Self { shard, gradient_checkpointing, temperature, dropout, products, originals, ..part })
    }

    /// The same model on other parameters of the same names.
    #[must_use]
    pub fn on(&self, params: ParamSet) -> Self {
        Self { params, ..self.clone() }
    }

    /// The same model for a pass of training: dropout drops, as in the last
    /// [`begin_step`](Policy::begin_step).
    #[must_use]
    pub fn in_training(&self) -> Self {
        Self { dropout: DropoutKey { training: true, ..self.dropout }, ..self.clone() }
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
    pub fn body(&self) -> &Decoder {
        &self.body
    }

    /// The language-model head's parameter `[vocab, hidden]`; the embedding where they are tied.
    ///
    /// # Errors
    /// [`Error::Head`] where the model has a scalar head instead.
    pub fn language_head(&self) -> Result<ParamId> {
        match self.head()? {
            Head::Language(id) => Ok(id),
            Head::Score(_) => Err(Error::Head { field: "logits", head: LANGUAGE_HEAD }),
        }
    }

    pub(super) fn head(&self) -> Result<Head> {
        self.head.ok_or_else(|| Error::Invalid("this stage of the model has no head".into()))
    }

    /// A head's matrix as a product takes it.
    pub(super) fn head_matrix(&self, id: ParamId) -> Tensor<2> {
        let matrix = self.params.matrix(id);
        match self.products {
            Some(dtype) => matrix.cast(dtype),
            None => matrix,
        }
    }

    /// Hidden states whose logits are divided by the temperature: they are linear in it, but for those that
    /// [`CausalLm::cap`] bounds.
    pub(super) fn tempered(&self, hidden: Tensor<2>) -> Tensor<2> {
        match self.temperature.filter(|_| self.config.logit_softcap.is_none()) {
            Some(temperature) => hidden / temperature,
            None => hidden,
        }
    }

    /// What bounds the logits, with the temperature in it.
    pub(super) fn cap(&self) -> Option<LogitCap> {
        let temperature = self.temperature.unwrap_or(1.0);
        self.config.logit_softcap.map(|inner| LogitCap { inner, outer: inner / temperature })
    }

    /// What the loss on an uneven use of experts is multiplied by; none outside of training.
    pub(super) fn balance_loss(&self) -> Option<f32> {
        let weight = self.config.experts.as_ref().and_then(|experts| experts.balance_loss);
        weight.filter(|&weight| self.dropout.training && weight > 0.0)
    }

    /// The same model with its parameters as autodiff leaves.
    #[must_use]
    pub fn tracked(&self) -> Self {
        Self { params: self.params.tracked(), ..self.clone() }
    }
}

/// The standard deviation of a fresh model's matrices.
const DEVIATION: f64 = 0.02;

/// Normal values.
fn normal(shape: &[usize], key: &[u64], deviation: f64) -> Vec<f32> {
    let len = shape.iter().product::<usize>();
    let rng = Rng::new(key);
    (0..len as u64).into_par_iter().map(|i| (rng.normal(i) * deviation) as f32).collect()
}

impl Policy for CausalLm {
    fn forward(&self, batch: &Batch, needs: Needs) -> Result<Forward> {
        let mut work = self.work(batch)?;
        let weight = self.balance_loss();
        work.layout.balance = weight.is_some();
        if !self.shard.splits_stream() && weight.is_none() {
            work.layout.kept = work.rows.keep(self.head()?, needs, work.tokens.len());
        }
        let (hidden, balance) = self.through_with_balance(&work, None)?;
        let mut out = self.read(hidden, &work, batch, needs)?;
        let uneven = balance.as_ref().and_then(Balance::loss);
        out.balance_loss = uneven.zip(weight).map(|(loss, weight)| loss * weight);
        Ok(out)
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
        let training = self.in_training();
        if self.gradient_checkpointing {
            layerwise::accumulate(&training, micro, needs, loss)
        } else {
            accumulate_in_turn(&training, micro, needs, loss)
        }
    }
}
