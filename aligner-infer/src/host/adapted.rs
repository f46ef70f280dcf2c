//! What an adapter adds to a linear's rows, beside the base's weights: nothing is merged.

use aligner_core::model::Linear;
use aligner_core::ops::rows::{Product, products};

use super::{Pass, Rows};

impl Pass<'_> {
    /// Whether a linear's rows are multiplied by gains of their own.
    pub(super) fn has_gain(&self, layer: Linear) -> bool {
        layer.lora.is_some_and(|lora| lora.magnitude.is_some())
            || self.adapters.has_gains(layer.weight.index())
    }

    /// The bias, where it comes with the base's product; after the gains else.
    pub(super) fn early_bias(&self, layer: Linear) -> Option<&[f32]> {
        self.weights.bias(layer).filter(|_| !self.has_gain(layer))
    }

    /// Adds `scale (x A^T) B^T` to what `out` holds, the base's product, and multiplies by the gains. A model with an
    /// adapter of its own has no others.
    pub(super) fn adapt(&mut self, x: &Rows, layer: Linear, out: &mut Rows) {
        let Some(lora) = layer.lora else { return self.adapt_named(x, layer, out) };
        let weights = self.weights;
        let (a, b) = (weights.matrix(lora.a), weights.matrix(lora.b));
        let mut narrow = self.rows(x.count, a.shape()[0]);
        let into_narrow = Product { weight: a, bias: None, out: narrow.values_mut(), add: false };
        products(x.values(), x.count, [into_narrow]);
        narrow.values_mut().iter_mut().for_each(|value| *value *= lora.scale);
        let added = Product { weight: b, bias: None, out: out.values_mut(), add: true };
        products(narrow.values(), x.count, [added]);
        self.recycle(narrow);
        let Some(gains) = weights.gain(lora).filter(|_| lora.magnitude.is_some()) else { return };
        for row in out.values_mut().chunks_exact_mut(gains.len().max(1)) {
            row.iter_mut().zip(gains).for_each(|(value, gain)| *value *= gain);
            if let Some(bias) = weights.bias(layer) {
                row.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
            }
        }
    }

    /// A block's last linear with gains, which must not fall on the residual stream.
    pub(super) fn exit_with_gain(&mut self, mut residual: Rows, x: Rows, layer: Linear) -> Rows {
        let weights = self.weights;
        let mut out = self.rows(x.count, residual.columns);
        let base =
            Product { weight: weights.matrix(layer.weight), bias: None, out: out.values_mut(), add: false };
        products(x.values(), x.count, [base]);
        self.adapt(&x, layer, &mut out);
        residual.values_mut().iter_mut().zip(out.values()).for_each(|(held, value)| *held += value);
        self.recycle(x);
        self.recycle(out);
        residual
    }
}
