//! The forward pass of the engine: the model's own code on host slices, keys and values in pages.

mod adapted;
mod experts;
mod named;
mod saved;

use aligner_core::Result;
use aligner_core::model::{Exec, Linear, Mixture, ModelConfig, Norm};
use aligner_core::ops::rows::{
    PagedKv, Product, Span, activate_rows, gate_rows, open_rows, page_elements, paged_attention, products,
    rotate_rows, softcap_rows, write_kv,
};
use aligner_core::ops::{Activation, AttentionShape};

use crate::accelerator::DeviceStore;
use crate::adapters::Adapters;
use crate::pages::Page;
use crate::weights::Weights;
use aligner_core::ops::rows::PAGE;

/// Keys and values of all layers, where the weights are.
#[derive(Debug)]
pub(crate) enum Store {
    Host(HostStore),
    Device(DeviceStore),
}

impl Store {
    /// Room for `pages` pages.
    pub(crate) fn new(weights: &Weights, pages: usize) -> Self {
        let config = weights.model.config();
        let on_device = weights.on_device().map(|own| DeviceStore::new(own, config, pages));
        on_device.map_or_else(|| Self::Host(HostStore::new(config, pages)), Self::Device)
    }

    /// Bytes of a page in all layers.
    pub(crate) fn page_bytes(config: &ModelConfig) -> usize {
        page_elements(config.attention_shape()) * 2 * size_of::<f32>() * config.num_layers
    }

    /// Copies a page over another.
    pub(crate) fn copy(&mut self, from: Page, to: Page) {
        match self {
            Self::Host(store) => store.copy(from, to),
            Self::Device(store) => store.copy(from, to),
        }
    }
}

/// Keys and values of all layers in host memory.
#[derive(Debug)]
pub(crate) struct HostStore {
    layers: Vec<[Vec<f32>; 2]>,
    shape: AttentionShape,
}

impl HostStore {
    /// Room for `pages` pages; memory is touched as they are written.
    fn new(config: &ModelConfig, pages: usize) -> Self {
        let shape = config.attention_shape();
        let elements = pages * page_elements(shape);
        let layer = || [vec![0.0; elements], vec![0.0; elements]];
        Self { layers: (0..config.num_layers).map(|_| layer()).collect(), shape }
    }

    fn copy(&mut self, from: Page, to: Page) {
        let len = page_elements(self.shape);
        for data in self.layers.iter_mut().flatten() {
            data.copy_within(from as usize * len..(from as usize + 1) * len, to as usize * len);
        }
    }
}

/// Rows of some sequences, packed for one pass through the model.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub(crate) tokens: Vec<u32>,
    pub(crate) positions: Vec<usize>,
    pub(crate) spans: Vec<Span>,
    pub(crate) table: Vec<Page>,
    /// The rows whose logits are asked for, ascending.
    pub(crate) wanted: Vec<usize>,
    /// The adapter of each row.
    pub(crate) owners: Vec<Option<usize>>,
}

impl Batch {
    pub(crate) fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.spans.clear();
        self.table.clear();
        self.wanted.clear();
        self.owners.clear();
    }

    /// Adds `tokens`, the first at `position`, of a sequence with these pages and this adapter; the logits of
    /// the last `wanted` of them are asked for.
    pub(crate) fn push(
        &mut self,
        tokens: impl Iterator<Item = u32>,
        position: usize,
        pages: &[Page],
        wanted: usize,
        adapter: Option<usize>,
    ) {
        let first = self.tokens.len();
        self.tokens.extend(tokens);
        let rows = first..self.tokens.len();
        let (start, end) = (self.table.len(), position + rows.len());
        self.table.extend_from_slice(&pages[..end.div_ceil(PAGE)]);
        self.positions.extend(position..end);
        self.wanted.extend(rows.end - wanted..rows.end);
        self.owners.resize(rows.end, adapter);
        self.spans.push(Span { rows, position, pages: start..self.table.len() });
    }
}

/// Buffers that a pass leaves to the next one.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    idle: Vec<Vec<f32>>,
    /// Cosines and sines of each of the decoder's frequencies.
    angles: Vec<[Vec<f32>; 2]>,
    logits: Vec<f32>,
}

impl Buffers {
    /// The largest idle buffer that is large enough, or the largest of all, grown.
    fn take(&mut self, len: usize) -> Vec<f32> {
        let fits = |(_, buffer): &(usize, &Vec<f32>)| buffer.len() >= len;
        let all = || self.idle.iter().enumerate();
        let best = all().filter(fits).min_by_key(|(_, buffer)| buffer.len());
        let best = best.or_else(|| all().max_by_key(|(_, buffer)| buffer.len())).map(|(at, _)| at);
        let mut buffer = best.map(|at| self.idle.swap_remove(at)).unwrap_or_default();
        if buffer.len() < len {
            buffer.resize(len, 0.0);
        }
        buffer
    }
}

/// Runs a batch; returns the logits of the wanted rows, `[wanted, vocab]`.
pub(crate) fn forward<'a>(
    weights: &Weights,
    adapters: &Adapters,
    store: &mut HostStore,
    batch: &Batch,
    buffers: &'a mut Buffers,
) -> Result<&'a [f32]> {
    let body = weights.model.body();
    buffers.angles.resize_with(body.frequencies().len(), Default::default);
    for (frequencies, [cos, sin]) in body.frequencies().iter().zip(&mut buffers.angles) {
        cos.clear();
        sin.clear();
        for &position in &batch.positions {
            let angles = frequencies.iter().map(|frequency| position as f32 * frequency);
            cos.extend(angles.clone().map(f32::cos));
            sin.extend(angles.map(f32::sin));
        }
    }
    let mut pass = Pass { weights, adapters, store, batch, buffers, kept: None };
    let mut x = pass.embed()?;
    for index in body.layers() {
        x = body.layer(&mut pass, index, x)?;
    }
    let normed = pass.norm(x, body.last_norm()?)?;
    let (rows, vocab) = (batch.wanted.len(), weights.head().shape()[0]);
    let mut logits = std::mem::take(&mut pass.buffers.logits);
    if logits.len() < rows * vocab {
        logits.resize(rows * vocab, 0.0);
    }
    pass.logits(&normed, &mut logits[..rows * vocab]);
    if let Some(cap) = weights.model.config().logit_softcap {
        softcap_rows(&mut logits[..rows * vocab], cap);
    }
    pass.recycle(normed);
    buffers.logits = logits;
    Ok(&buffers.logits[..rows * vocab])
}

/// Activations `[rows, columns]` at the front of a buffer.
pub(crate) struct Rows {
    data: Vec<f32>,
    count: usize,
    columns: usize,
}

impl Rows {
    fn values(&self) -> &[f32] {
        &self.data[..self.count * self.columns]
    }

    fn values_mut(&mut self) -> &mut [f32] {
        &mut self.data[..self.count * self.columns]
    }
}

struct Pass<'a> {
    weights: &'a Weights,
    adapters: &'a Adapters,
    store: &'a mut HostStore,
    batch: &'a Batch,
    buffers: &'a mut Buffers,
    /// The rows that are left once the last layer has attended.
    kept: Option<&'a [usize]>,
}

impl Pass<'_> {
    fn rows(&mut self, rows: usize, columns: usize) -> Rows {
        Rows { data: self.buffers.take(rows * columns), count: rows, columns }
    }

    fn recycle(&mut self, rows: Rows) {
        self.buffers.idle.push(rows.data);
    }

    /// So many columns of each row, from `first` on.
    fn part(&mut self, x: &Rows, first: usize, columns: usize) -> Rows {
        let mut out = self.rows(x.count, columns);
        let rows = out.values_mut().chunks_exact_mut(columns.max(1));
        for (out, x) in rows.zip(x.values().chunks_exact(x.columns.max(1))) {
            out.copy_from_slice(&x[first..first + columns]);
        }
        out
    }

    /// The rows at `kept`, moved to the front.
    fn gather(x: &mut Rows, kept: &[usize]) {
        for (to, &from) in kept.iter().enumerate() {
            x.data.copy_within(from * x.columns..(from + 1) * x.columns, to * x.columns);
        }
        x.count = kept.len();
    }
}

impl Exec for Pass<'_> {
    type Rows = Rows;

    fn enter(&mut self, x: &Rows, norm: Option<Norm>) -> Result<Rows> {
        Ok(match norm {
            Some(norm) => self.normed(x, norm),
            None => self.part(x, 0, x.columns),
        })
    }

    fn norm(&mut self, x: Rows, norm: Norm) -> Result<Rows> {
        let out = self.normed(&x, norm);
        self.recycle(x);
        Ok(out)
    }

    fn linears<const N: usize>(&mut self, x: Rows, layers: [Linear; N]) -> Result<[Rows; N]> {
        let mut outs = layers.map(|layer| self.rows(x.count, self.weights.matrix(layer.weight).shape()[0]));
        let mut next = outs.iter_mut();
        let group = layers.map(|layer| Product {
            weight: self.weights.matrix(layer.weight),
            bias: self.early_bias(layer),
            out: next.next().map_or(&mut [], Rows::values_mut),
            add: false,
        });
        products(x.values(), x.count, group);
        for (layer, out) in layers.into_iter().zip(&mut outs) {
            self.adapt(&x, layer, out);
        }
        self.recycle(x);
        Ok(outs)
    }

    fn split<const N: usize>(&mut self, x: Rows, columns: [usize; N]) -> Result<[Rows; N]> {
        let mut first = 0;
        let parts = columns.map(|count| {
            first += count;
            self.part(&x, first - count, count)
        });
        self.recycle(x);
        Ok(parts)
    }

    fn rotate(&mut self, mut x: Rows, rope: usize) -> Result<Rows> {
        let columns = x.columns;
        let [cos, sin] = &self.buffers.angles[rope];
        rotate_rows(x.values_mut(), columns, cos, sin);
        Ok(x)
    }

    fn attend(&mut self, layer: usize, [q, k, v]: [Rows; 3], shape: AttentionShape) -> Result<Rows> {
        let [keys, values] = &mut self.store.layers[layer];
        let width = k.columns;
        for span in &self.batch.spans {
            for (position, row) in (span.position..).zip(span.rows.clone()) {
                let page = self.batch.table[span.pages.start + position / PAGE];
                let row = row * width..(row + 1) * width;
                let (k, v) = (&k.values()[row.clone()], &v.values()[row]);
                write_kv(keys, values, (page, position % PAGE), k, v, shape);
            }
        }
        self.recycle(k);
        self.recycle(v);
        let mut out = self.rows(q.count, q.columns);
        let [keys, values] = &self.store.layers[layer];
        let spans = (self.batch.spans.as_slice(), self.batch.table.as_slice());
        paged_attention(q.values(), PagedKv { keys, values }, spans, shape, out.values_mut());
        self.recycle(q);
        if layer + 1 == self.store.layers.len() {
            self.kept = Some(&self.batch.wanted);
            Self::gather(&mut out, &self.batch.wanted);
        }
        Ok(out)
    }

    fn gate(&mut self, mut gate: Rows, up: Rows, activation: Activation) -> Result<Rows> {
        gate_rows(gate.values_mut(), up.values(), activation);
        self.recycle(up);
        Ok(gate)
    }

    fn activate(&mut self, mut x: Rows, activation: Activation) -> Result<Rows> {
        activate_rows(x.values_mut(), activation);
        Ok(x)
    }

    fn mix(&mut self, residual: Rows, x: &Rows, mixture: &Mixture) -> Result<Rows> {
        self.mix_experts(residual, x, mixture)
    }

    fn open(&mut self, mut x: Rows, opening: Rows) -> Result<Rows> {
        open_rows(x.values_mut(), opening.values());
        self.recycle(opening);
        Ok(x)
    }

    fn exit(&mut self, mut residual: Rows, x: Rows, layer: Linear, after: Option<Norm>) -> Result<Rows> {
        if let Some(kept) = self.kept.take() {
            Self::gather(&mut residual, kept);
        }
        if let Some(after) = after {
            let [out] = self.linears(x, [layer])?;
            let normed = self.norm(out, after)?;
            residual.values_mut().iter_mut().zip(normed.values()).for_each(|(held, value)| *held += value);
            self.recycle(normed);
            return Ok(residual);
        }
        if self.has_gain(layer) {
            return Ok(self.exit_with_gain(residual, x, layer));
        }
        let (weight, bias) = (self.weights.matrix(layer.weight), self.weights.bias(layer));
        let rows = x.count;
        products(x.values(), rows, [Product { weight, bias, out: residual.values_mut(), add: true }]);
        self.adapt(&x, layer, &mut residual);
        self.recycle(x);
        Ok(residual)
    }
}
