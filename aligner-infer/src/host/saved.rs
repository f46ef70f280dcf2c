//! Modules that adapters have in full, in place of the base's: embeddings, norms and the head of their own requests' rows.

use aligner_core::model::{Norm, NormKind};
use aligner_core::ops::rows::{F32, Product, RowNorm, Weight, norm_rows, products};
use aligner_core::{Error, ParamId, Result};

use super::{Pass, Rows};

impl Pass<'_> {
    /// A parameter for rows of an adapter: its own, or the base's.
    fn parameter(&self, owner: Option<usize>, id: ParamId) -> &[f32] {
        owner.and_then(|owner| self.adapters.saved(owner, id)).unwrap_or_else(|| self.weights.vector(id))
    }

    /// The batch's rows of the embedding.
    pub(super) fn embed(&mut self) -> Result<Rows> {
        let body = self.weights.model.body();
        let (table, positions) = (body.embedding_id()?, body.positions_id());
        let hidden = self.weights.model.config().hidden_size;
        let mut x = self.rows(self.batch.tokens.len(), hidden);
        let scale = body.embedding_scale();
        let rows = x.values_mut().chunks_exact_mut(hidden).zip(&self.batch.tokens);
        let places = self.batch.positions.iter().zip(&self.batch.owners);
        for ((x, &token), (&position, &owner)) in rows.zip(places) {
            let table = self.parameter(owner, table);
            let start = token as usize * hidden;
            let row = table.get(start..start + hidden);
            x.copy_from_slice(row.ok_or_else(|| {
                Error::Invalid(format!(
                    "token {token} is outside of the vocabulary of {}",
                    table.len() / hidden
                ))
            })?);
            if let Some(scale) = scale {
                for x in x.iter_mut() {
                    *x *= scale;
                }
            }
            if let Some(positions) = positions {
                // The engine has checked that no request is longer than the context.
                let row = &self.parameter(owner, positions)[position * hidden..][..hidden];
                x.iter_mut().zip(row).for_each(|(x, position)| *x += position);
            }
        }
        Ok(x)
    }

    /// The norm of each row, or of each part of a row that is as long as the norm's weight, in rows of
    /// another buffer.
    pub(super) fn normed(&mut self, x: &Rows, norm: Norm) -> Rows {
        let mut out = self.rows(x.count, x.columns);
        norm_rows(x.values(), self.row_norm(None, norm), norm.epsilon, out.values_mut());
        let own = self.adapters.saving(&[norm.weight, norm.bias.unwrap_or(norm.weight)]);
        if own.is_empty() {
            return out;
        }
        let owners = self.owners(x.count);
        for adapter in own {
            let rows: Vec<usize> = (0..x.count).filter(|&row| owners[row] == Some(adapter)).collect();
            if rows.is_empty() {
                continue;
            }
            let gathered = self.gathered(x, &rows);
            let mut normed = self.rows(rows.len(), x.columns);
            let kind = self.row_norm(Some(adapter), norm);
            norm_rows(gathered.values(), kind, norm.epsilon, normed.values_mut());
            scatter(normed.values(), &rows, out.values_mut());
            self.recycle(gathered);
            self.recycle(normed);
        }
        out
    }

    fn row_norm(&self, owner: Option<usize>, norm: Norm) -> RowNorm<'_> {
        let weight = self.parameter(owner, norm.weight);
        match (norm.kind, norm.bias) {
            (NormKind::Layer, Some(bias)) => RowNorm::Layer(weight, self.parameter(owner, bias)),
            (NormKind::RmsPlusOne, _) => RowNorm::Rms(weight, 1.0),
            _ => RowNorm::Rms(weight, 0.0),
        }
    }

    /// Logits of the wanted rows, `[wanted, hidden]` to `[wanted, vocab]`: each head's of its own rows.
    pub(super) fn logits(&mut self, x: &Rows, out: &mut [f32]) {
        let (weights, adapters, head) = (self.weights, self.adapters, self.weights.head_id());
        let own = adapters.saving(&[head]);
        if own.is_empty() {
            return products(
                x.values(),
                x.count,
                [Product { weight: weights.head(), bias: None, out, add: false }],
            );
        }
        let own_of = |owner: Option<usize>| owner.filter(|owner| own.contains(owner));
        let owners: Vec<Option<usize>> = self.owners(x.count).into_iter().map(own_of).collect();
        for owner in own.iter().copied().map(Some).chain([None]) {
            let rows: Vec<usize> = (0..x.count).filter(|&row| owners[row] == owner).collect();
            let weight = match owner.and_then(|owner| adapters.saved(owner, head)) {
                Some(own) => Weight::F32(F32::new(own, own.len() / x.columns.max(1), x.columns)),
                None => weights.head(),
            };
            self.head_logits(x, weight, &rows, out);
        }
    }

    fn head_logits(&mut self, x: &Rows, weight: Weight<'_>, rows: &[usize], out: &mut [f32]) {
        if rows.len() == x.count {
            products(x.values(), x.count, [Product { weight, bias: None, out, add: false }]);
        } else if !rows.is_empty() {
            let gathered = self.gathered(x, rows);
            let mut own = self.rows(rows.len(), weight.shape()[0]);
            let product = Product { weight, bias: None, out: own.values_mut(), add: false };
            products(gathered.values(), rows.len(), [product]);
            scatter(own.values(), rows, out);
            self.recycle(gathered);
            self.recycle(own);
        }
    }

    /// Some rows, one after the other.
    pub(super) fn gathered(&mut self, x: &Rows, rows: &[usize]) -> Rows {
        let mut own = self.rows(rows.len(), x.columns);
        for (own, &row) in own.values_mut().chunks_exact_mut(x.columns.max(1)).zip(rows) {
            own.copy_from_slice(&x.values()[row * x.columns..][..x.columns]);
        }
        own
    }
}

/// Puts values, rows one after the other, to their places among others.
pub(super) fn scatter(values: &[f32], rows: &[usize], out: &mut [f32]) {
    let columns = (values.len() / rows.len().max(1)).max(1);
    for (own, &row) in values.chunks_exact(columns).zip(rows) {
        out[row * columns..][..columns].copy_from_slice(own);
    }
}
