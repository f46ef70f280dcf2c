//! The forward pass of the engine on an accelerator: the model's own code on its kernels, keys and values in
//! pages in its memory. Only drawn tokens come back to the host, or the logits of the requests whose settings
//! its sampler does not know.

mod experts;

use std::collections::HashSet;

use aligner_core::model::{CausalLm, Exec, Linear, Mixture, ModelConfig, Norm, NormKind};
pub(crate) use aligner_core::ops::cube::Accelerator;
use aligner_core::ops::cube::{
    Buffer, DrawSettings, KvPages, Matrix, Product, Qkv, RowNorm, Tiles, activate_rows, copy_range,
    draw_rows, gate_rows, gather_rows, norm_rows, open_rows, paged_attention, part_of_rows, products,
    rotate_and_write, scale_and_add, softcap_rows,
};
use aligner_core::ops::rows::{PAGE, PackedKind, page_elements};
use aligner_core::ops::{Activation, AttentionShape};
use aligner_core::{Device, Drawn, Error, Param, ParamId, Policy as _, Result, Sampling};

use crate::config::{EngineDevice, copied};
use crate::host::Batch;
use crate::pages::Page;
use crate::weights::Weights;

/// The accelerator that an engine runs on; none where it runs on the host.
///
/// # Errors
/// One that this build or this machine lacks.
pub(crate) fn choose(device: EngineDevice, parameters: &Device) -> Result<Option<Accelerator>> {
    match device {
        EngineDevice::Parameters => Ok(Accelerator::of_device(parameters)),
        EngineDevice::Host => Ok(None),
        EngineDevice::Cuda(index) => Accelerator::cuda(index).map(Some),
        EngineDevice::CubeCpu => Accelerator::cpu().map(Some),
    }
}

/// One version of a model's weights in an accelerator's memory.
#[derive(Debug)]
pub(crate) struct DeviceWeights {
    device: Accelerator,
    /// Each parameter in f32; absent where a smaller copy is all that is read.
    values: Vec<Option<Buffer<f32>>>,
    /// bf16 copies of the matrices, where they are asked for.
    packed: Vec<Option<Matrix>>,
}

impl DeviceWeights {
    /// The parameters by handle where they lie on the accelerator, else copied there.
    ///
    /// # Errors
    /// Copies of another kind than bf16.
    pub(crate) fn new(device: &Accelerator, model: &CausalLm, packed: Option<PackedKind>) -> Result<Self> {
        if let Some(kind) = packed.filter(|&kind| kind != PackedKind::Bf16) {
            let message = format!("{kind:?} copies are for the CPU; on an accelerator, bf16 or none");
            return Err(Error::setting("packed", message));
        }
        let embedding = model.body().embedding_id()?;
        let copied: HashSet<String> = copied(model.config()).map(|spec| spec.name).collect();
        let (mut values, mut matrices) = (Vec::new(), Vec::new());
        for (at, param) in model.params().iter().enumerate() {
            // Rows of the embedding are read in f32.
            let is_embedding = at == embedding.index();
            let shape = packed.and(matrix_shape(param)).filter(|_| copied.contains(&param.name));
            let copy = shape.map(|shape| device.bf16_matrix(&param.value, shape));
            let whole = copy.is_none() || is_embedding;
            values.push(whole.then(|| device.parameter(&param.value)).transpose()?);
            matrices.push(copy);
        }
        Ok(Self { device: device.clone(), values, packed: matrices })
    }

    /// Bytes of the copies.
    pub(crate) fn packed_bytes(&self) -> usize {
        self.packed.iter().flatten().map(Matrix::bytes).sum()
    }

    fn vector(&self, id: ParamId) -> Result<&Buffer<f32>> {
        let value = self.values.get(id.index()).and_then(Option::as_ref);
        value.ok_or_else(|| Error::Invalid(format!("parameter {} has no f32 values", id.index())))
    }

    fn matrix(&self, weights: &Weights, id: ParamId) -> Result<Matrix> {
        if let Some(Some(packed)) = self.packed.get(id.index()) {
            return Ok(packed.clone());
        }
        let param = weights.model.params().get(id);
        let shape = matrix_shape(param);
        let shape = shape.ok_or_else(|| Error::shape(&param.name, "[out, in]", &param.shape))?;
        Ok(Matrix::F32(self.vector(id)?.clone(), shape))
    }
}

fn matrix_shape(param: &Param) -> Option<[usize; 2]> {
    param.shape.as_slice().try_into().ok()
}

/// Keys and values of all layers in an accelerator's memory.
#[derive(Debug)]
pub(crate) struct DeviceStore {
    device: Accelerator,
    layers: Vec<KvPages>,
    shape: AttentionShape,
}

impl DeviceStore {
    /// Room for `pages` pages.
    pub(crate) fn new(weights: &DeviceWeights, config: &ModelConfig, pages: usize) -> Self {
        let (device, shape) = (weights.device.clone(), config.attention_shape());
        let layers = (0..config.num_layers).map(|_| KvPages::new(&device, pages, shape)).collect();
        Self { device, layers, shape }
    }

    /// Copies a page over another.
    pub(crate) fn copy(&mut self, from: Page, to: Page) {
        let len = page_elements(self.shape);
        for data in self.layers.iter().flat_map(|pages| [&pages.keys, &pages.values]) {
            copy_range(&self.device, data, from as usize * len, to as usize * len, len)
                .expect("both are pages of this cache");
        }
    }
}

/// Logits of a batch's wanted rows in an accelerator's memory, `[wanted, vocab]`.
#[derive(Debug)]
pub(crate) struct DeviceLogits {
    device: Accelerator,
    values: Buffer<f32>,
}

/// Whether the accelerator's sampler draws for these settings.
pub(crate) fn draws(sampling: &Sampling) -> bool {
    sampling.repetition_penalty == 1.0
        && sampling.presence_penalty == 0.0
        && sampling.frequency_penalty == 0.0
        && sampling.logit_bias.is_empty()
        && sampling.allowed.is_none()
        && (sampling.min_tokens == 0 || sampling.stop_tokens.is_empty())
        && sampling.typical_p >= 1.0
        && sampling.top_logprobs == 0
}

impl DeviceLogits {
    /// A copy in host memory.
    ///
    /// # Errors
    /// A failure of the device.
    pub(crate) fn read(&self) -> Result<Vec<f32>> {
        self.device.read(&self.values)
    }

    /// A token for each row that has settings and a draw in [0, 1); none too where a row's logits are not
    /// finite.
    ///
    /// # Errors
    /// A failure of the device.
    pub(crate) fn draw(&self, rows: &[Option<(&Sampling, f64)>]) -> Result<Vec<Option<Drawn>>> {
        if rows.iter().all(Option::is_none) {
            return Ok(vec![None; rows.len()]);
        }
        let settings = |row: &Option<(&Sampling, f64)>| {
            // A greedy draw for a row that nobody asks about.
            let greedy = DrawSettings { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, uniform: 0.0 };
            row.map_or(greedy, |(sampling, uniform)| DrawSettings {
                temperature: sampling.temperature,
                top_k: sampling.top_k,
                top_p: sampling.top_p,
                min_p: sampling.min_p,
                uniform,
            })
        };
        let settings: Vec<DrawSettings> = rows.iter().map(settings).collect();
        let draws = draw_rows(&self.device, &self.values, &settings)?;
        let drawn = |(draw, row): (Option<aligner_core::ops::cube::Draw>, &Option<_>)| {
            let draw = draw.filter(|_| row.is_some())?;
            Some(Drawn { token: draw.token, logp: draw.logp, raw_logp: draw.raw_logp, top: Vec::new() })
        };
        Ok(draws.into_iter().zip(rows).map(drawn).collect())
    }
}

/// Runs a batch.
///
/// # Errors
/// A token outside of the vocabulary, pages that are not there.
pub(crate) fn forward(
    weights: &Weights,
    own: &DeviceWeights,
    store: &DeviceStore,
    batch: &Batch,
) -> Result<DeviceLogits> {
    let (body, config, device) = (weights.model.body(), weights.model.config(), &own.device);
    if let Some(token) = batch.tokens.iter().find(|&&token| token as usize >= config.vocab_size) {
        let message = format!("token {token} is outside of the vocabulary of {}", config.vocab_size);
        return Err(Error::Invalid(message));
    }
    let angles = |frequencies: &Vec<f32>| {
        let all = || {
            let of = |&position: &usize| frequencies.iter().map(move |f| position as f32 * f);
            batch.positions.iter().flat_map(of)
        };
        device.upload(&all().map(f32::cos).chain(all().map(f32::sin)).collect::<Vec<f32>>())
    };
    let mut ropes: Vec<_> = body.frequencies().iter().map(angles).collect();
    if ropes.is_empty() {
        // Heads that are not rotated turn by nothing.
        ropes.push(angles(&vec![0.0; config.head_dim / 2]));
    }
    let slots = batch.spans.iter().flat_map(|span| {
        let positions = span.position..span.position + span.rows.len();
        positions.map(|position| {
            batch.table[span.pages.start + position / PAGE] * PAGE as u32 + (position % PAGE) as u32
        })
    });
    let wanted: Vec<u32> = batch.wanted.iter().map(|&row| row as u32).collect();
    let mut pass = Pass {
        weights,
        own,
        store,
        ropes,
        rope: 0,
        slots: device.upload(&slots.collect::<Vec<u32>>()),
        tiles: Tiles::new(device, (&batch.spans, &batch.table), config.attention_shape())?,
        wanted: device.upload(&wanted),
        behind: false,
    };
    let table = own.vector(body.embedding_id()?)?;
    let mut x = gather_rows(device, table, config.hidden_size, &device.upload(&batch.tokens))?;
    if let Some(scale) = body.embedding_scale() {
        x = scale_and_add(device, &x, scale, None)?;
    }
    if let Some(positions) = body.positions_id() {
        let of_rows: Vec<u32> = batch.positions.iter().map(|&position| position as u32).collect();
        let table = own.vector(positions)?;
        let rows = gather_rows(device, table, config.hidden_size, &device.upload(&of_rows))?;
        x = scale_and_add(device, &x, 1.0, Some(&rows))?;
    }
    for index in body.layers() {
        x = body.layer(&mut pass, index, x)?;
    }
    let normed = pass.norm(x, body.last_norm()?)?;
    let head = Linear { weight: weights.head_id(), bias: None, lora: None };
    let [mut values] = pass.products(&normed, [head], None)?;
    if let Some(cap) = config.logit_softcap {
        values = softcap_rows(device, &values, cap);
    }
    Ok(DeviceLogits { device: device.clone(), values })
}

struct Pass<'a> {
    weights: &'a Weights,
    own: &'a DeviceWeights,
    store: &'a DeviceStore,
    /// Cosines, then sines, of each row, at each of the decoder's frequencies.
    ropes: Vec<Buffer<f32>>,
    /// Which of them the layer rotates by.
    rope: usize,
    /// Where each row's keys and values go.
    slots: Buffer<u32>,
    tiles: Tiles,
    /// The rows that are left once the last layer has attended.
    wanted: Buffer<u32>,
    /// Whether the residual stream still has all rows while what is added to it has the wanted ones.
    behind: bool,
}

impl Pass<'_> {
    /// Linears of the same input, each added to `add_to` where it is there.
    fn products<const N: usize>(
        &self,
        x: &Buffer<f32>,
        layers: [Linear; N],
        add_to: Option<&Buffer<f32>>,
    ) -> Result<[Buffer<f32>; N]> {
        let weights = layers.iter().map(|layer| self.own.matrix(self.weights, layer.weight));
        let weights = weights.collect::<Result<Vec<_>>>()?;
        let mut group = Vec::with_capacity(N);
        for (layer, weight) in layers.iter().zip(&weights) {
            let bias = layer.bias.map(|bias| self.own.vector(bias)).transpose()?;
            group.push(Product { weight, bias, add_to });
        }
        let out = products(&self.own.device, x, &group)?;
        Ok(out.try_into().expect("one output for each layer"))
    }

    fn normed(&self, x: &Buffer<f32>, norm: Norm) -> Result<Buffer<f32>> {
        let weight = self.own.vector(norm.weight)?;
        let kind = match (norm.kind, norm.bias) {
            (NormKind::Layer, Some(bias)) => RowNorm::Layer(weight, self.own.vector(bias)?),
            (NormKind::RmsPlusOne, _) => RowNorm::Rms(weight, 1.0),
            _ => RowNorm::Rms(weight, 0.0),
        };
        norm_rows(&self.own.device, x, kind, norm.epsilon)
    }

    fn gather(&self, x: &Buffer<f32>, columns: usize) -> Result<Buffer<f32>> {
        gather_rows(&self.own.device, x, columns, &self.wanted)
    }
}

impl Exec for Pass<'_> {
    type Rows = Buffer<f32>;

    fn enter(&mut self, x: &Buffer<f32>, norm: Option<Norm>) -> Result<Buffer<f32>> {
        norm.map_or_else(|| Ok(x.clone()), |norm| self.normed(x, norm))
    }

    fn norm(&mut self, x: Buffer<f32>, norm: Norm) -> Result<Buffer<f32>> {
        self.normed(&x, norm)
    }

    fn linears<const N: usize>(&mut self, x: Buffer<f32>, layers: [Linear; N]) -> Result<[Buffer<f32>; N]> {
        self.products(&x, layers, None)
    }

    fn split<const N: usize>(&mut self, x: Buffer<f32>, columns: [usize; N]) -> Result<[Buffer<f32>; N]> {
        let all = columns.iter().sum();
        let mut parts = Vec::with_capacity(N);
        let mut first = 0;
        for count in columns {
            parts.push(part_of_rows(&self.own.device, &x, all, first, count)?);
            first += count;
        }
        Ok(parts.try_into().expect("one part for each count"))
    }

    /// Nothing yet: [`Self::attend`] rotates as it writes the keys.
    fn rotate(&mut self, x: Buffer<f32>, rope: usize) -> Result<Buffer<f32>> {
        self.rope = rope;
        Ok(x)
    }

    fn attend(
        &mut self,
        layer: usize,
        [q, k, v]: [Buffer<f32>; 3],
        shape: AttentionShape,
    ) -> Result<Buffer<f32>> {
        let (device, pages) = (&self.own.device, &self.store.layers[layer]);
        let qkv = Qkv { q: &q, k: &k, v: &v };
        let q = rotate_and_write(device, qkv, &self.ropes[self.rope], &self.slots, pages, shape)?;
        let out = paged_attention(device, &q, pages, &self.tiles, shape)?;
        if layer + 1 < self.store.layers.len() {
            return Ok(out);
        }
        self.behind = true;
        self.gather(&out, shape.heads * shape.head_dim)
    }

    fn gate(&mut self, gate: Buffer<f32>, up: Buffer<f32>, activation: Activation) -> Result<Buffer<f32>> {
        gate_rows(&self.own.device, &gate, &up, activation)
    }

    fn activate(&mut self, x: Buffer<f32>, activation: Activation) -> Result<Buffer<f32>> {
        Ok(activate_rows(&self.own.device, &x, activation))
    }

    fn mix(&mut self, residual: Buffer<f32>, x: &Buffer<f32>, mixture: &Mixture) -> Result<Buffer<f32>> {
        self.mix_experts(residual, x, mixture)
    }

    fn open(&mut self, x: Buffer<f32>, opening: Buffer<f32>) -> Result<Buffer<f32>> {
        open_rows(&self.own.device, &x, &opening)
    }

    fn exit(
        &mut self,
        mut residual: Buffer<f32>,
        x: Buffer<f32>,
        layer: Linear,
        after: Option<Norm>,
    ) -> Result<Buffer<f32>> {
        if std::mem::take(&mut self.behind) {
            residual = self.gather(&residual, self.weights.model.config().hidden_size)?;
        }
        let Some(after) = after else {
            let [out] = self.products(&x, [layer], Some(&residual))?;
            return Ok(out);
        };
        let [out] = self.products(&x, [layer], None)?;
        scale_and_add(&self.own.device, &self.normed(&out, after)?, 1.0, Some(&residual))
    }
}
