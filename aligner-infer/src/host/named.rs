//! What the adapters that requests name add to a linear's rows: each to its own requests' rows, which are brought
//! together for its products. A row's sums have the same order alone and in company.

use aligner_core::model::Linear;
use aligner_core::ops::rows::{Product, products};

use super::saved::scatter;
use super::{Pass, Rows};
use crate::adapters::Addition;

impl Pass<'_> {
    /// The adapter of each of `count` rows: of all of the batch's, or of those whose logits are asked for.
    pub(super) fn owners(&self, count: usize) -> Vec<Option<usize>> {
        let batch = self.batch;
        if count == batch.owners.len() {
            return batch.owners.clone();
        }
        batch.wanted.iter().map(|&row| batch.owners[row]).collect()
    }

    /// Adds `scale (x A^T) B^T` to the rows in `out` whose adapter has an addition to the linear, and multiplies by
    /// gains; then adds the bias to all rows, where gains hold it back.
    pub(super) fn adapt_named(&mut self, x: &Rows, layer: Linear, out: &mut Rows) {
        let (adapters, weight) = (self.adapters, layer.weight.index());
        let mut adding = adapters.of_weight(weight).peekable();
        if adding.peek().is_none() {
            return;
        }
        let owners = self.owners(x.count);
        for (adapter, addition) in adding {
            let own: Vec<usize> = (0..x.count).filter(|&row| owners[row] == Some(adapter)).collect();
            if own.len() == x.count {
                self.add(x, addition, out);
            } else if !own.is_empty() {
                let (gathered, mut sums) = (self.gathered(x, &own), self.gathered(out, &own));
                self.add(&gathered, addition, &mut sums);
                scatter(sums.values(), &own, out.values_mut());
                self.recycle(gathered);
                self.recycle(sums);
            }
        }
        if let Some(bias) = self.weights.bias(layer).filter(|_| adapters.has_gains(weight)) {
            for row in out.values_mut().chunks_exact_mut(bias.len().max(1)) {
                row.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
            }
        }
    }

    fn add(&mut self, x: &Rows, addition: &Addition, out: &mut Rows) {
        let mut narrow = self.rows(x.count, addition.rank);
        let a = Product { weight: addition.a(), bias: None, out: narrow.values_mut(), add: false };
        products(x.values(), x.count, [a]);
        narrow.values_mut().iter_mut().for_each(|value| *value *= addition.scale);
        let b = Product { weight: addition.b(), bias: None, out: out.values_mut(), add: true };
        products(narrow.values(), x.count, [b]);
        self.recycle(narrow);
        let Some(gains) = &addition.gains else { return };
        for row in out.values_mut().chunks_exact_mut(gains.len().max(1)) {
            row.iter_mut().zip(gains).for_each(|(value, gain)| *value *= gain);
        }
    }
}
